"""The bar that the doctor names before a training: what copies of the nearest training chains score on held-out chains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evodsp.data.doctor.examination import Examiner
from evodsp.data.similarity.nearest import Bar, bar
from evodsp.data.similarity.sequences import Letters
from evodsp.printing import counted

MOST_COPIED = 200
"""Chains of a set for which training chains are copied: of more, that many are drawn by the seed."""
COPYING = {
    "chain": (
        "A model has learnt more than its training structures if it exceeds this. The nearest training chain has the highest "
        "alignment score (BLOSUM62, gaps 11 and 1, free at the ends). Its CA atoms are put on the residues that the alignment "
        "pairs. Identity is that of the paired residues, coverage their share of the chain."
    ),
    "complex": (
        "A model has learnt more than its training structures if it exceeds this. The nearest training complex has as many "
        "chains in as many copies and the highest sum of the alignment scores of its chains (BLOSUM62, gaps 11 and 1, free "
        "at the ends). Its CA atoms are put on the residues that the alignments pair. Identity is that of the paired residues, "
        "coverage their share of all residues. evodsp score --complexes true --baseline nearest says the DockQ of copies."
    ),
}
"""How copies are made, by what is copied."""


@dataclass(frozen=True)
class Copied:
    """What copies score on a set of chains."""

    kind: str
    """The name of the set: validation or test."""
    readable: int
    """Chains of the set that can be read."""
    bar: Bar
    """Of these chains, or of `MOST_COPIED` of them."""
    unit: str = "chain"
    """What is copied."""

    @property
    def line(self) -> str:
        """A line for a terminal."""
        found, said = self.bar, f"{self.kind}: copying the nearest training {self.unit} scores"
        tried = len(found.copies) + len(found.without)
        number = (
            f"{tried:,} of {counted(self.readable, self.unit)}, drawn by --seed"
            if tried < self.readable
            else counted(tried, self.unit)
        )
        without = ""
        if found.without:
            key, reason = next(iter(found.without.items()))
            without = f"; {len(found.without):,} have no copy, such as {key}: {reason}"
        if not found.copies:
            return f"{said} nothing ({number}{without})"
        interface = found.interface_lddt_ca
        between = "" if interface is None else f" and interface lDDT-CA {interface:.3f}"
        return f"{said} lDDT-CA {found.lddt_ca:.3f}{between}, at {found.identity:.0%} identity ({number}{without})"

    def as_json(self) -> dict[str, Any]:
        found = self.bar
        means = (found.lddt_ca, found.identity) if found.copies else (None, None)
        head = {"set": self.kind, "chains": self.readable, "lddt_ca": means[0], "identity": means[1]}
        interface = found.interface_lddt_ca
        return {**head, **({} if interface is None else {"interface_lddt_ca": interface}), **asdict(found)}


def copied(
    kind: str,
    keys: list[str],
    letters: Letters,
    training: Sequence[str],
    examiner: Examiner,
    seed: int,
    workers: int,
) -> Copied:
    """What copies of training keys score on `keys`, which can be read. `letters`: the sequences of all of them."""
    drawn = set(random.Random(seed).sample(keys, MOST_COPIED)) if len(keys) > MOST_COPIED else set(keys)
    targets = {key: letters[key] for key in keys if key in drawn}
    known = {key: letters[key] for key in training}
    read = examiner.store.assembly_of
    made = bar(f"{kind} {examiner.unit}", targets, known, read, read, workers)
    return Copied(kind, len(keys), made, examiner.unit)
