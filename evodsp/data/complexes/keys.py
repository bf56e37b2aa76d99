"""Keys of rows: rows of different chains are paired where their keys are equal."""

from __future__ import annotations

import re
from collections.abc import Callable

RowKey = Callable[[str], str]
"""From the name of a row to its key; '' for a row that is paired with none."""

_UNIPROT = re.compile(
    r"(?:sp|tr)\|"
    r"[A-Za-z0-9]{6,10}(?:_\d)?\|"  # accession, and the number of an isoform
    r"[A-Za-z0-9]+_([A-Za-z0-9]{1,5})(?:_\d+)?"  # entry name: a protein, then a species; small BFD appends a number
)


def entry_of_row(name: str) -> str:
    """The entry of a row with the name of a chain: 1ao7 of `1ao7_A`; '' of other names."""
    return (name.split(maxsplit=1) or [""])[0].rpartition("_")[0]


def uniprot_species(name: str) -> str:
    """The species of a UniProt name, such as BOVIN of `sp|P61823|RNAS1_BOVIN/1-150`; '' if the name is none of UniProt's.

    Only the first word counts, up to a slash. The names that are recognised are those of AlphaFold-Multimer's code.
    """
    found = _UNIPROT.fullmatch((name.split(maxsplit=1) or [""])[0].partition("/")[0])
    return found[1] if found else ""
