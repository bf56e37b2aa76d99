"""One-letter codes of the monomers that structure files name: amino acids and their modified forms.

The table is AlphaFold2's (`evodsp/geometry/tables/monomer_letters.csv` names its source), because published alignments and
searches were made with it: pyroglutamate (PCA) is E, D-amino acids are their L form, selenocysteine (SEC) is A.
"""

from __future__ import annotations

from evodsp.geometry.residues import read_table

MONOMER_LETTERS: dict[str, str] = {
    name: row["letter"] for row in read_table("monomer_letters.csv") for name in row["names"].split()
}
"""Letter of each monomer's name (upper case) that has one."""


def monomer_letter(name: str) -> str:
    """One-letter code of a monomer's name; X for a name that is not in the table."""
    return MONOMER_LETTERS.get(name, "X")
