"""Two scores of the same structures: the mean of their differences, and how sure it is.

The 95 % confidence interval is Student's t interval of the paired differences, with the variance that is robust to clusters
(Liang & Zeger 1986). Structures whose sequences are nearly the same are no independent evidence: they are one family, and what
varies is the sum of a family's deviations. Where each structure is a family of its own, this is the textbook's paired t
interval. It is given from `FEWEST` families on. A bootstrap would need a generator and a number of draws, and its percentiles
are too narrow for the few structures that a laboratory has. The interval is about further structures like those of the list.

Shapes: n structures in G families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evodsp.data.similarity.sequences import Words, identity, plain

FEWEST = 3
"""Families from which an interval is given. Of two, it would be thirteen times as wide as their differences vary."""
ALIKE = 0.9
"""Identical residues, as a share of the shorter sequence, from which two structures are of one family."""
_SHARED = 0.3
"""Words of four residues that two sequences share at least, as a share, where their alignment is worth its time."""
_INSIDE = 0.95


@dataclass(frozen=True)
class Difference:
    """The second score of n structures less the first."""

    count: int
    families: int
    first: float
    """The mean."""
    second: float
    mean: float
    """Mean of the differences."""
    better: int
    """Structures whose second score is higher."""
    half: float | None
    """Half of the width of the confidence interval; None: there are too few families."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], families: Sequence[str]) -> Difference:
        """Of n pairs, n at least 1, and the name of the family of each."""
        first, second = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
        differences = [b - a for a, b in pairs]
        mean = math.fsum(differences) / len(pairs)
        sums: dict[str, float] = {}
        for family, difference in zip(families, differences, strict=True):
            sums[family] = sums.get(family, 0.0) + difference - mean
        half, groups = None, len(sums)
        if groups >= FEWEST:
            variance = groups / (groups - 1) * math.fsum(value**2 for value in sums.values()) / len(pairs) ** 2
            half = students_quantile(groups - 1) * math.sqrt(variance)
        return cls(len(pairs), groups, first, second, mean, sum(value > 0 for value in differences), half)

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is above or below 0, otherwise 0: no difference is shown."""
        if self.half is None or abs(self.mean) <= self.half:
            return 0
        return 1 if self.mean > 0 else -1

    @property
    def interval(self) -> str:
        """Both ends, or a dash."""
        return "–" if self.half is None else f"{self.mean - self.half:+.3f} to {self.mean + self.half:+.3f}"


def students_quantile(freedom: int) -> float:
    """The t that 95 % of Student's distribution lie within, on both sides together. `freedom`: its degrees, at least 1."""
    low, high = 1.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < _INSIDE else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The share of Student's distribution between -t and t (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def families_of(letters: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """First member of each structure's family, by the sequences of its chains. It is of the family of the first one
    before it to which it is at least `ALIKE`; the chains of a complex are compared together."""
    joined = {name: plain("".join(sorted(chains))) for name, chains in letters.items()}
    names, words = list(joined), Words(list(joined.values()))
    found: dict[str, str] = {}
    for number, name in enumerate(names):
        likely = np.flatnonzero(words.shares_with(joined[name])[:number] >= _SHARED)
        alike = (names[one] for one in likely if identity(joined[names[one]], joined[name]) >= ALIKE)
        found[name] = next((found[one] for one in alike), name)
    return found
