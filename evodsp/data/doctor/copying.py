"""The bar that the doctor names before a training: what copies of the nearest training chains score on held-out chains."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evodsp.data.similarity.nearest import Bar, Structures, bar

MOST_COPIED = 200
"""Chains of a set for which training chains are copied: of more, that many are drawn by the seed."""
COPYING = (
    "A model has learnt more than its training structures if it exceeds this. The nearest training chain has the highest "
    "alignment score (BLOSUM62, gaps 11 and 1, free at the ends). Its CA atoms are put on the residues that the alignment "
    "pairs. Identity is that of the paired residues, coverage their share of the chain."
)


@dataclass(frozen=True)
class Copied:
    """What copies score on a set of chains."""

    kind: str
    """The name of the set: validation or test."""
    readable: int
    """Chains of the set that can be read."""
    bar: Bar
    """Of these chains, or of `MOST_COPIED` of them."""

    @property
    def line(self) -> str:
        """A line for a terminal."""
        found, said = self.bar, f"{self.kind}: copying the nearest training chain scores"
        tried = len(found.copies) + len(found.without)
        number = (
            f"{tried:,} of {self.readable:,} chains, drawn by --seed" if tried < self.readable else f"{tried:,} chains"
        )
        without = ""
        if found.without:
            key, reason = next(iter(found.without.items()))
            without = f"; {len(found.without):,} have no copy, such as {key}: {reason}"
        if not found.copies:
            return f"{said} nothing ({number}{without})"
        return f"{said} lDDT-CA {found.lddt_ca:.3f}, at {found.identity:.0%} identity ({number}{without})"

    def as_json(self) -> dict[str, Any]:
        found = self.bar
        means = (found.lddt_ca, found.identity) if found.copies else (None, None)
        head = {"set": self.kind, "chains": self.readable, "lddt_ca": means[0], "identity": means[1]}
        return {**head, **asdict(found)}


def copied(
    kind: str,
    keys: list[str],
    letters: Mapping[str, str],
    training: Sequence[str],
    store: Structures,
    seed: int,
    workers: int,
) -> Copied:
    """What copies of training chains score on the chains `keys`, which can be read. `letters`: the sequences of all of them."""
    drawn = set(random.Random(seed).sample(keys, MOST_COPIED)) if len(keys) > MOST_COPIED else set(keys)
    targets = {key: letters[key] for key in keys if key in drawn}
    return Copied(kind, len(keys), bar(kind, targets, {key: letters[key] for key in training}, store, store, workers))
