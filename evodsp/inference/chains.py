"""The chains of a predicted structure: their names and their residues, in the order in which they were given."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MOST_CHAINS = 702
"""As many as have names of one or two letters, A to ZZ."""
_PDB_NAMES = string.ascii_uppercase + string.ascii_lowercase + string.digits
MOST_IN_PDB = len(_PDB_NAMES)
"""PDB names a chain by one letter or digit."""


@dataclass(frozen=True)
class ChainSpan:
    """The place of a chain among the residues of all chains: from `start` up to `end`, from 0."""

    name: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def residues(self) -> slice:
        """The place as an index."""
        return slice(self.start, self.end)


def chain_name(number: int) -> str:
    """The name of a chain by its number from 0: A to Z, AA to AZ, BA and so on."""
    letters = string.ascii_uppercase
    return (chain_name(number // len(letters) - 1) if number >= len(letters) else "") + letters[number % len(letters)]


def pdb_chain_name(number: int) -> str:
    """The same for a PDB file, whose names have one character: A to Z, a to z, 0 to 9. `number`: below `MOST_IN_PDB`."""
    return _PDB_NAMES[number]


def spans_of(lengths: Sequence[int]) -> tuple[ChainSpan, ...]:
    """The chains of these lengths, one after another."""
    borders = pairwise(accumulate(lengths, initial=0))
    return tuple(ChainSpan(chain_name(number), start, end) for number, (start, end) in enumerate(borders))
