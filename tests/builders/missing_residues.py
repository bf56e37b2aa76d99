"""A chain of a lab's refinement: a PDB file without SEQRES and without some of the residues, and the alignment of all of them.

The whole chain has twelve residues along x, 3.8 Å each.
"""

from __future__ import annotations

from pathlib import Path

from evodsp.data.sources.chain_files import ChainFiles
from tests.builders.backbone import chain, pdb_text

WHOLE = "GSMKWADEFHIK"
NAMES = ("GLY", "SER", "MET", "LYS", "TRP", "ALA", "ASP", "GLU", "PHE", "HIS", "ILE", "LYS")
SEEN = (1, 2, 3, 4, 7, 8, 9)
"""The loop AD and both ends are missing."""


def write(folder: Path, seen: tuple[int, ...] = SEEN, row: str = WHOLE, header: str = "") -> ChainFiles:
    """A store of one chain, x, with the residues `seen` and an alignment whose first row is `row`."""
    (folder / "a").mkdir(parents=True)
    (folder / "x.pdb").write_text(pdb_text([chain(NAMES)[place] for place in seen], header))
    (folder / "a" / "x.a3m").write_text(f">101\n{row}\n>hit\n{row[:-1]}-\n")
    return ChainFiles(folder / "a", folder)
