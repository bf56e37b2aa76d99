"""Local search programs: stand-ins on PATH, and the real ones where they are installed."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.layout import read_alignment_dir
from evodsp.errors import UserError
from evodsp.search.programs import LocalProgram, Program
from evodsp.search.searcher import search
from tests.builders.pages import ROOT

RECORD = ProteinSequence("one", "MKTAYIAKQRGSHWLVEDNCF")
_STO = "# STOCKHOLM 1.0\\n\\nquery MKTAYIAKQRGSHWLVEDNCF\\nx M-TAYIAKQRGSHWLVEDNCF\\n//\\n"
_A3M = ">query\\nMKTAYIAKQRGSHWLVEDNCF\\n>x\\nMKTAYIAKQRGSHWLVEDNC-\\n"
_WRITES = {
    "jackhmmer": f'while [ "$1" != -A ]; do shift; done; printf "{_STO}" > "$2"',
    "hhblits": f'while [ "$1" != -oa3m ]; do shift; done; printf "{_A3M}" > "$2"',
    "mmseqs": f'if [ "$1" = unpackdb ]; then printf "{_A3M}\\0" > "$3/0.a3m"; fi',
}
_DATABASES = {"jackhmmer": "small.fasta", "hhblits": "small_cs219.ffdata", "mmseqs": "small.dbtype"}


def stand_in(program: str, folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that notes its arguments, before all others on PATH; the path of its database."""
    file = folder / "bin" / program
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(folder))}/arguments\n{body}\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
    (folder / _DATABASES[program]).touch()
    return folder / ("small.fasta" if program == "jackhmmer" else "small")


@pytest.mark.parametrize("program", list(_WRITES))
def test_what_a_program_finds_is_kept(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a result under a name that is not read, threads that are not passed on, and temporary files that stay."""
    database = stand_in(program, tmp_path, _WRITES[program], monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    searcher = LocalProgram(program, database, threads=3)
    said: list[str] = []
    assert list(search([RECORD], tmp_path / "kept", searcher, said.append)) == [("one", None)]
    (found,) = read_alignment_dir(tmp_path / "kept" / "one", RECORD)
    assert len(found.names) == 2
    assert Path(found.source).name.startswith("small_hits")
    assert json.loads((tmp_path / "kept" / "one" / "search.json").read_text())["database"] == str(database)
    assert said == [f"1 sequence will be searched in {database} by {program} with 3 threads"]
    assert " 3" in (tmp_path / "arguments").read_text()
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize("program", list(_WRITES))
def test_nothing_found_is_an_alignment_of_one(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a protein without relatives that counts as a failure, and is searched again by every run."""
    searcher = LocalProgram(program, stand_in(program, tmp_path, "exit 0", monkeypatch), threads=1)
    assert list(search([RECORD], tmp_path / "kept", searcher, lambda line: None)) == [("one", None)]
    (found,) = read_alignment_dir(tmp_path / "kept" / "one", RECORD)
    assert len(found.names) == 1


def test_a_program_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failure without its reason, and half an alignment that is kept."""
    body = "echo Error: no memory >&2; exit 3"
    searcher = LocalProgram("hhblits", stand_in("hhblits", tmp_path, body, monkeypatch), threads=1)
    ((name, error),) = search([RECORD], tmp_path / "kept", searcher, lambda line: None)
    assert name == "one"
    assert str(error) == "one: hhblits -i ended with exit code 3: Error: no memory"
    assert not (tmp_path / "kept").exists()


def test_what_is_not_there_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search that begins without its program or its database."""
    database = stand_in("jackhmmer", tmp_path, "", monkeypatch)
    with pytest.raises(UserError, match="no database of jackhmmer there"):
        LocalProgram("jackhmmer", tmp_path / "nowhere.fasta", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--program jackhmmer: not found on PATH; install HMMER"):
        LocalProgram("jackhmmer", database, 1)


@pytest.mark.parametrize("program", ["jackhmmer", "mmseqs"])
def test_the_real_program(program: Program, tmp_path: Path) -> None:
    """Catches options that the program does not know, and alignments that cannot be read. Where it is installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    text = (ROOT / "data" / "alignments" / "s005_A" / "bfd_uniclust_hits.a3m").read_text()
    rows = ["".join(c for c in part.split("\n", 1)[1] if c.isalpha()).upper() for part in text.split(">")[1:]]
    fasta = tmp_path / "small.fasta"
    fasta.write_text("".join(f">s{number}\n{row}\n" for number, row in enumerate(rows)))
    database = fasta
    if program == "mmseqs":
        database = tmp_path / "small"
        subprocess.run(["mmseqs", "createdb", str(fasta), str(database), "-v", "1"], check=True)
    query = ProteinSequence("one", rows[0])
    found = list(search([query], tmp_path / "kept", LocalProgram(program, database, 1), lambda line: None))
    assert found == [("one", None)]
    (alignment,) = read_alignment_dir(tmp_path / "kept" / "one", query)
    assert len(alignment.names) > len(rows) // 2
