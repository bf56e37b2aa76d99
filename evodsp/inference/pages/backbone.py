"""The backbone on the page of a prediction: its peptide bonds, and the side from which a structure shows most of itself.

Shapes: R residues, N points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64

from evodsp.geometry.residues import ATOM_TYPES, CA
from evodsp.inference.structure_files import PredictedStructure
from evodsp.losses.violation import LONGEST_PEPTIDE_BOND

_C, _N = ATOM_TYPES.index("C"), ATOM_TYPES.index("N")
_TRACED = 0.1
"""The share of long bonds above which a chain is drawn as a line: a ribbon follows the planes of peptides, and crumples."""


@dataclass(frozen=True)
class PeptideBonds:
    """The peptide bonds of a structure, between neighbours of a chain that both have atoms."""

    count: int
    long: int
    """Bonds that are longer than AlphaFold2 tolerates, `LONGEST_PEPTIDE_BOND`."""
    chains: int
    """Chains of the structure."""
    traced: tuple[str, ...]
    """Names of the chains that are drawn as a line through their CA atoms."""

    @property
    def note(self) -> str:
        """What a reader of the 3D view is to know; empty if no bond is too long."""
        if not self.long:
            return ""
        verb, them = ("is", "it") if self.long == 1 else ("are", "them")
        drawn = f"the ribbon is drawn through {them}"
        if self.traced:
            which = "the chain" if self.chains == 1 else f"{len(self.traced):,} of {self.chains:,} chains"
            drawn = f"{which} {'is' if len(self.traced) == 1 else 'are'} drawn as a line through the CA atoms"
        return (
            f"{self.long:,} of {self.count:,} peptide bonds {verb} longer than {LONGEST_PEPTIDE_BOND:.2f} Å, "
            f"which AlphaFold2 counts as a violation: {drawn}."
        )


def peptide_bonds(structure: PredictedStructure) -> PeptideBonds:
    """Measure the peptide bonds of a structure, C to the next N."""
    count, long, traced = 0, 0, []
    for chain in structure.chains:
        positions, there = structure.positions[chain.residues], structure.mask[chain.residues] > 0.5
        bonded = there[:-1, _C] & there[1:, _N]
        lengths = np.linalg.norm(positions[1:, _N] - positions[:-1, _C], axis=-1)[bonded]
        found = int((lengths > LONGEST_PEPTIDE_BOND).sum())
        count, long = count + len(lengths), long + found
        if found > _TRACED * len(lengths):
            traced.append(chain.name)
    return PeptideBonds(count, long, len(structure.chains), tuple(traced))


def principal_axes(points: Float[np.ndarray, "N 3"]) -> Float64[np.ndarray, "3 3"]:
    """The axes of centred points as rows, the one along which they reach farthest first: a rotation."""
    _, _, axes = np.linalg.svd(points.astype(np.float64), full_matrices=True)
    # An axis has no direction of its own: the largest component is made positive, so that all machines draw the same picture.
    axes *= np.sign(axes[np.arange(3), np.abs(axes).argmax(1)])[:, None]
    axes[2] *= np.linalg.det(axes)  # no mirror image
    return axes


@dataclass(frozen=True)
class View:
    """How the 3D view begins: the longest axis of the structure from left to right, the shortest towards the reader."""

    centre: Float64[np.ndarray, " 3"]
    """The middle of the box, Å."""
    axes: Float64[np.ndarray, "3 3"]
    """The axes of the screen as rows: right, up, towards the reader."""

    @property
    def quaternion(self) -> Sequence[float]:
        """The rotation onto the screen's axes as a unit quaternion (x, y, z, w), w at least 0."""
        # q is the eigenvector of the largest eigenvalue of a matrix of the rotation's entries, whichever angle it turns by.
        r = self.axes
        turn = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
        matrix = np.zeros((4, 4))
        matrix[:3, :3] = r + r.T - np.trace(r) * np.eye(3)
        matrix[:3, 3] = matrix[3, :3] = turn
        matrix[3, 3] = np.trace(r)
        found = np.linalg.eigh(matrix)[1][:, -1]
        return (found if found[3] >= 0 else -found).tolist()


def view_of(structure: PredictedStructure) -> View:
    """The view along the shortest of the principal axes of the CA atoms, or of all atoms if there is no CA."""
    there = structure.mask > 0.5
    points = structure.positions[there[:, CA], CA].astype(np.float64)
    points = points if len(points) else structure.positions[there].astype(np.float64)
    axes = principal_axes(points - points.mean(0))
    seen = points @ axes.T
    return View((seen.min(0) + seen.max(0)) / 2 @ axes, axes)
