"""One-letter codes of the monomers that structure files name: amino acids and their modified forms.

The table is AlphaFold2's (`evodsp/geometry/tables/monomer_letters.csv` names its source), because published alignments and
searches were made with it: pyroglutamate (PCA) is E, D-amino acids are their L form, selenocysteine (SEC) is A.
"""

from __future__ import annotations

import csv
from importlib import resources


def _read() -> dict[str, str]:
    table = resources.files("evodsp.geometry") / "tables" / "monomer_letters.csv"
    lines = (line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: row["letter"] for row in csv.DictReader(lines) for name in row["names"].split()}


MONOMER_LETTERS: dict[str, str] = _read()
"""Letter of each monomer's name (upper case) that has one."""


def monomer_letter(name: str) -> str:
    """One-letter code of a monomer's name; X for a name that is not in the table."""
    return MONOMER_LETTERS.get(name, "X")
