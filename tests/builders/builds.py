"""Folders of chains for `evodsp data build`, and a worker that some chains kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from evodsp.data.build import Part, build_part
from evodsp.data.config import BuildConfig
from evodsp.data.sources.chain_files import ChainFiles
from scripts.examples.synthetic.mmcif_writer import mmcif_text
from tests.builders.chains import AMINO_ACIDS, straight_chain

REVISION = "_pdbx_audit_revision_history.revision_date {}\n"


def letters_of(number: int) -> str:
    """A sequence of its own for each number."""
    return "".join(AMINO_ACIDS[(number + i * (number + 1)) % 20] for i in range(12 + number))


def write_chain(
    root: Path, key: str, letters: str, released: str = "2010-05-05", hits: str | None = None, second: str | None = None
) -> None:
    """The alignment folder and the structure of a chain. `hits`: its hmm_output.sto; `second`: a wrong query."""
    folder, structures = root / "alignments" / key, root / "mmcif_files"
    folder.mkdir(parents=True, exist_ok=True)
    structures.mkdir(exist_ok=True)
    rows = "".join(f">s{i}\n{letters[:i]}{AMINO_ACIDS[i].lower()}{letters[i:]}\n" for i in range(1, 6))
    (folder / "hits.a3m").write_text(f">{key}\n{second or letters}\n{rows}")
    if hits is not None:
        (folder / "hmm_output.sto").write_text(hits)
    write_structure(structures, key, letters, released)


def write_structure(folder: Path, key: str, letters: str, released: str) -> None:
    """A structure file with one chain and a release date."""
    text = mmcif_text([straight_chain(letters, key)])
    (folder / f"{key.split('_')[0]}.cif").write_text(text + REVISION.format(released))


def config(root: Path, output: Path, **changes: object) -> BuildConfig:
    """A build of a folder of chains, with two workers and two chains in each shard."""
    given: dict = {"workers": 2, "chains_per_shard": 2, **changes}
    return BuildConfig(root / "alignments", root / "mmcif_files", output, **given)


def content(store: Path) -> dict[str, bytes]:
    """Every file of a store with its bytes."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def build_with_deadly_chains(part: Part, deadly: dict[str, str]) -> int:
    """`build_part`, but reading a chain whose name begins with 9 kills the process."""
    read = ChainFiles.parsed

    def parsed(self: ChainFiles, key: str, with_hits: bool) -> object:
        if key.startswith("9"):
            assert multiprocessing.parent_process() is not None, "the command's own process reads chains"
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, key, with_hits)

    ChainFiles.parsed = parsed  # type: ignore[method-assign,assignment]  # in the worker only
    return build_part(part, deadly)


def die_at_once(part: Part, deadly: dict[str, str]) -> int:
    """A worker that ends before it reads a chain."""
    os._exit(1)
