"""How well a model's confidence says how right it is: pLDDT against the lDDT-CA that it predicts, residue by residue.

Where a well calibrated model says pLDDT 80, lDDT-CA is 0.80 on average. The head learns this from training's own predictions,
so it says little about structures that are unlike those of the training; that is what this comparison shows. Shapes: R residues
of a structure, N of all structures together, both those with a CA in prediction and experiment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

_WIDTH = 10
"""Points of pLDDT in a bin."""


@dataclass(frozen=True)
class Bin:
    """The residues whose pLDDT lies between `lower` and `lower` + 10."""

    lower: int
    residues: int
    plddt: float
    """Mean, 0..100."""
    lddt: float
    """Mean of lDDT-CA, in the same points, 0..100."""


@dataclass(frozen=True)
class Calibration:
    """pLDDT and lDDT-CA of a set of chains or complexes, both 0..100."""

    plddt: Float[np.ndarray, " N"]
    lddt: Float[np.ndarray, " N"]
    structure: Int64[np.ndarray, " N"]
    """The number of each residue's structure."""

    @classmethod
    def of(cls, structures: Sequence[tuple[np.ndarray, np.ndarray]]) -> Calibration:
        """Calibration from each structure's pLDDT and lDDT-CA, both [R] with its own R."""
        numbers = np.repeat(np.arange(len(structures)), [len(plddt) for plddt, _ in structures])
        plddt, lddt = (np.concatenate(values).astype(np.float64) for values in zip(*structures, strict=True))
        return cls(plddt, lddt, numbers)

    @property
    def too_high(self) -> float:
        """Points by which pLDDT exceeds lDDT-CA on average; negative: it falls short."""
        return float((self.plddt - self.lddt).mean())

    @property
    def error(self) -> float:
        """Mean difference of a bin's pLDDT and lDDT-CA, in points, weighted with its residues (expected calibration error)."""
        return sum(one.residues * abs(one.plddt - one.lddt) for one in self.bins()) / len(self.plddt)

    def bins(self) -> Iterator[Bin]:
        """The bins that have residues, lowest first."""
        number = np.minimum(self.plddt // _WIDTH, 100 // _WIDTH - 1).astype(int)
        for place in np.unique(number).tolist():
            inside = number == place
            yield Bin(
                place * _WIDTH, int(inside.sum()), float(self.plddt[inside].mean()), float(self.lddt[inside].mean())
            )

    def line(self, name: str) -> str:
        """A line for a terminal that begins with the name of the set."""
        side = "too high" if self.too_high >= 0 else "too low"
        said = f"pLDDT {self.plddt.mean():.1f}, true lDDT-CA {self.lddt.mean():.1f}: {abs(self.too_high):.1f} {side}"
        found = [f"{_correlation(self.plddt, self.lddt)} over {len(self.plddt):,} residues"]
        if (structures := int(self.structure.max()) + 1) > 2:
            means = [
                [values[self.structure == number].mean() for number in range(structures)]
                for values in (self.plddt, self.lddt)
            ]
            found.append(f"{_correlation(*map(np.array, means))} over {structures} structures")
        return f"{name}: {said}; Spearman's correlation {', '.join(found)}"


def _correlation(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> str:
    """Spearman's, because only the order of residues is to be trusted; a dash where one of the two does not vary."""
    if len(a) < 2 or min(a.std(), b.std()) < 1e-9:
        return "–"
    return f"{np.corrcoef(_ranks(a), _ranks(b))[0, 1]:.2f}"


def _ranks(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The place of each value among all; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
