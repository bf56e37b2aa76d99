"""Search programs of this machine: jackhmmer, hhblits and mmseqs, with the settings that AlphaFold2 and ColabFold search with.

Each writes one alignment of a sequence, named after the database as OpenFold names them: uniref90_hits.sto, bfd_hits.a3m.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.printing import counted
from evodsp.search.config import Program
from evodsp.search.searcher import Found, NoAnswerError, Say, Searcher

_Commands = list[list[str]]


@dataclass(frozen=True)
class _Kind:
    suffix: str
    """Suffix of the alignment's file."""
    commands: Callable[[str, Path, Path, int], _Commands]
    """The command lines without the program's name: of the database, the folder with query.fasta, the result, the threads."""
    is_there: Callable[[Path], bool]
    """Whether a database of this path exists."""
    install: str


def _jackhmmer(database: str, folder: Path, result: Path, threads: int) -> _Commands:
    """One iteration, hits with E <= 1e-4, as AlphaFold2 (supplement 1.2.2) searches UniRef90 and MGnify."""
    filters = ["--F1", "0.0005", "--F2", "0.00005", "--F3", "0.0000005"]
    limits = ["-E", "0.0001", "--incE", "0.0001", "-N", "1", "--cpu", str(threads)]
    return [["-o", "/dev/null", "-A", str(result), "--noali", *filters, *limits, str(folder / "query.fasta"), database]]


def _hhblits(database: str, folder: Path, result: Path, threads: int) -> _Commands:
    """Three iterations, E <= 1e-3, as AlphaFold2 searches BFD and UniClust30."""
    limits = ["-n", "3", "-e", "0.001", "-maxseq", "1000000", "-realign_max", "100000", "-maxfilt", "100000"]
    limits += ["-min_prefilter_hits", "1000", "-cpu", str(threads)]
    files = ["-i", str(folder / "query.fasta"), "-d", database, "-oa3m", str(result), "-o", "/dev/null"]
    return [[*files, *limits, "-v", "1"]]


def _mmseqs(database: str, folder: Path, result: Path, threads: int) -> _Commands:
    """Three iterations at ColabFold's sensitivity; its expansion by cluster members needs databases of its own."""
    query, hits, msa = (str(folder / name) for name in ("query", "hits", "msa"))
    shared = ["--threads", str(threads), "-v", "1"]
    limits = ["-s", "8", "-e", "0.1", "--num-iterations", "3", "--max-seqs", "10000", "-a"]
    return [
        ["createdb", str(folder / "query.fasta"), query, "-v", "1"],
        ["search", query, database, hits, str(folder / "work"), *limits, *shared],
        ["result2msa", query, database, hits, msa, "--msa-format-mode", "5", *shared],
        ["unpackdb", msa, str(folder), "--unpack-suffix", ".a3m", "--unpack-name-mode", "0", *shared],
    ]


_KINDS: dict[Program, _Kind] = {
    "jackhmmer": _Kind(".sto", _jackhmmer, Path.is_file, "HMMER"),
    "hhblits": _Kind(".a3m", _hhblits, lambda path: Path(f"{path}_cs219.ffdata").is_file(), "HH-suite"),
    "mmseqs": _Kind(".a3m", _mmseqs, lambda path: Path(f"{path}.dbtype").is_file(), "MMseqs2"),
}


class LocalProgram(Searcher):
    """One program with one database."""

    def __init__(self, program: Program, database: Path, threads: int) -> None:
        """Raises UserError if the program is not installed or the database does not exist."""
        kind = _KINDS[program]
        if shutil.which(program) is None:
            raise UserError(f"--program {program}: not found on PATH; install {kind.install}, or use --msa_server")
        if not kind.is_there(database):
            what = {"jackhmmer": "a FASTA file", "hhblits": "<path>_cs219.ffdata and so on", "mmseqs": "<path>.dbtype"}
            raise UserError(f"--database {database}: no database of {program} there ({what[program]}); check the path")
        self._program, self._kind, self._database, self._threads = program, kind, database, threads

    def announcement(self, sequences: int) -> str:
        what = counted(sequences, "sequence")
        threads = counted(self._threads, "thread")
        return f"{what} will be searched in {self._database} by {self._program} with {threads}"

    @property
    def origin(self) -> dict[str, Any]:
        return {"program": self._program, "database": str(self._database)}

    def search(self, sequences: Sequence[str], say: Say) -> list[Found]:
        return [self._search(letters) for letters in sequences]

    def _search(self, letters: str) -> Found:
        name = f"{self._database.name.split('.')[0]}_hits{self._kind.suffix}"
        with tempfile.TemporaryDirectory(prefix="evodsp_search_") as place:
            folder, result = Path(place), Path(place) / "0.a3m"
            (folder / "query.fasta").write_text(f">query\n{letters}\n")
            for words in self._kind.commands(str(self._database), folder, result, self._threads):
                self._run([self._program, *words])
            content = result.read_bytes() if result.is_file() else b""
        if not content.strip(b"\0 \n"):
            # Nothing is like it: the alignment is the sequence itself.
            name, content = name.replace(".sto", ".a3m"), f">query\n{letters}\n".encode()
        return Found({name: content.replace(b"\0", b"")})

    def _run(self, words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            last = f": {said[-1].strip()}" if said else ""
            kind = NoAnswerError if done.returncode < 0 else UserError
            raise kind(f"{' '.join(words[:2])} ended with exit code {done.returncode}{last}")
