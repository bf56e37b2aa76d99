"""Blueprints of folds: which residues are helix, strand or loop, and a sketch of the elements in space.

The sketch is a target for the CA atoms of helices and strands; `folding` finds torsions that approach it. Loops are left to
the optimiser. Hydrogen bonds between strands follow from the layout of the sheet: in a strand that runs up, a residue whose
side chain points to the viewer has its N-H and C=O on the right (L amino acids). If either direction or side is reversed,
they are on the left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.rng import Draws

HELIX_RISE, HELIX_TURN, HELIX_RADIUS = 1.5, np.deg2rad(100.0), 2.3
STRAND_RISE, STRAND_SPACING, STRAND_PLEAT = 3.35, 4.8, 0.9
HELIX_SPACING = 9.6
SHEET_TO_HELIX = 10.0
BETWEEN_HELICES = 4  # residues of a loop between helices, or between a helix and a strand
HAIRPIN = 4  # residues of a loop between neighbouring antiparallel strands
SHORT = 48
"""Chains of fewer residues have fewer elements of a fold."""


@dataclass(frozen=True)
class Blueprint:
    """A fold of R residues.

    `structure`: R letters, H (helix), E (strand) or L (loop). `sketch`: targets of the CA atoms in Å, NaN in loops; V variants
    with different phases and tilts of the helices. `hydrogen_bonds`: pairs (residue of N, residue of O).
    """

    fold: str
    structure: str
    sketch: Float64[np.ndarray, "V R 3"]
    hydrogen_bonds: Int64[np.ndarray, "K 2"]

    def is_a(self, letter: str) -> np.ndarray:
        """bool [R]: where the secondary structure is `letter`."""
        return np.array([s == letter for s in self.structure])

    def elements(self) -> list[tuple[int, int]]:
        """[start, stop) of each helix and strand, in order."""
        return [match.span() for match in re.finditer("H+|E+", self.structure)]


@dataclass(frozen=True)
class _Strand:
    start: int
    length: int
    column: int
    direction: int
    offset: int = 0

    def residue(self, row: int) -> int | None:
        """The residue at this row of the sheet, None beyond the strand's ends."""
        step = row - self.offset if self.direction > 0 else self.offset + self.length - 1 - row
        return self.start + step if 0 <= step < self.length else None


def make_blueprint(fold: str, length: int, variants: int, draws: Draws) -> Blueprint:
    """A blueprint of `fold` (helix_bundle, beta_meander or alpha_beta) for `length` residues."""
    return {"helix_bundle": _helix_bundle, "beta_meander": _beta_meander, "alpha_beta": _alpha_beta}[fold](
        length, variants, draws
    )


def _helix_bundle(length: int, variants: int, draws: Draws) -> Blueprint:
    """Up-and-down bundle of three helices: of four if three would be longer than 22 residues, of two in short chains."""
    count = 2 if length < SHORT else 3 if length <= 80 else 4
    structure, elements = _lay_out(["H"] * count, [BETWEEN_HELICES] * (count - 1), length)
    turn = 1 if draws.at("turn").uniform(1)[0] < 0.5 else -1
    radius = HELIX_SPACING / (2 * np.sin(np.pi / count))
    sketch = np.full((variants, length, 3), np.nan)
    for n, (start, stop) in enumerate(elements):
        around = turn * 2 * np.pi * n / count
        out = np.array([np.cos(around), np.sin(around), 0.0])
        # All helices tilt the same way: the left-handed supercoil of natural bundles, 20° between neighbours.
        tilt = np.deg2rad(-10.0)
        axis = np.array([-np.sin(around) * np.sin(tilt), np.cos(around) * np.sin(tilt), np.cos(tilt)]) * (-1) ** n
        phase = 2 * np.pi * draws.at("phase", n).uniform(variants)
        sketch[:, start:stop] = _helix(stop - start, radius * out, axis, phase)
    return Blueprint("helix_bundle", structure, sketch, _helix_bonds(elements))


def _beta_meander(length: int, variants: int, draws: Draws) -> Blueprint:
    """Antiparallel strands, each beside the previous one, on a cylinder with the twist of natural sheets."""
    count = max(3 if length < SHORT else 4, round(length / 11.5))
    structure, elements = _lay_out(["E"] * count, [HAIRPIN] * (count - 1), length, equal=True)
    turn = 1 if draws.at("turn").uniform(1)[0] < 0.5 else -1
    strands = [_Strand(start, stop - start, turn * n, (-1) ** n) for n, (start, stop) in enumerate(elements)]
    radius, slant = 10.0, np.deg2rad(38.0)
    sketch = np.full((length, 3), np.nan)
    for strand in strands:
        row, along, side = _strand_rows(strand)
        across = (strand.column - turn * (count - 1) / 2) * STRAND_SPACING
        angle = (along * np.sin(slant) + across * np.cos(slant)) / radius
        height = along * np.cos(slant) - across * np.sin(slant)
        distance = radius + STRAND_PLEAT * side
        sketch[row] = np.stack([distance * np.sin(angle), height, distance * np.cos(angle)], -1)
    return Blueprint("beta_meander", structure, np.repeat(sketch[None], variants, 0), _sheet_bonds(strands))


def _alpha_beta(length: int, variants: int, draws: Draws) -> Blueprint:
    """Hairpins joined by helices that pack on one side of a mixed sheet (with 56 residues the fold of protein G).

    Hairpins are added on the left and on the right in turn, so that every strand-helix-strand crossing is right-handed. Short
    chains are one hairpin and one helix.
    """
    helices = 1 if length <= 84 else 2
    kinds = ["E", "E"] + ["H", "E", "E"] * helices
    loops = [HAIRPIN] + [BETWEEN_HELICES, BETWEEN_HELICES, HAIRPIN] * helices
    if length < SHORT:
        kinds, loops = kinds[:3], loops[:2]
    structure, elements = _lay_out(kinds, loops, length, equal=True)
    columns = {0: 0, 1: 1}  # of each strand
    for hairpin in range(1, kinds.count("E") // 2):
        edge = min(columns.values()) - 2 if hairpin % 2 else max(columns.values()) + 1
        columns |= {2 * hairpin: edge, 2 * hairpin + 1: edge + 1}
    middle = (min(columns.values()) + max(columns.values())) / 2
    ranges = [e for e, kind in zip(elements, kinds, strict=True) if kind == "E"]
    strands = [_Strand(a, b - a, columns[n], (-1) ** n) for n, (a, b) in enumerate(ranges)]
    twist = np.deg2rad(-20.0) / STRAND_SPACING
    sketch = np.full((variants, length, 3), np.nan)
    for strand in strands:
        row, along, side = _strand_rows(strand)
        x = (strand.column - middle) * STRAND_SPACING
        direction = np.array([0.0, np.cos(twist * x), np.sin(twist * x)])
        normal = np.array([0.0, -np.sin(twist * x), np.cos(twist * x)])
        sketch[:, row] = np.array([x, 0, 0]) + along[:, None] * direction + STRAND_PLEAT * side[:, None] * normal
    for n, (start, stop) in enumerate(e for e, kind in zip(elements, kinds, strict=True) if kind == "H"):
        # Helix n follows strand 2n + 1 and is antiparallel to it.
        across = 0.0 if helices == 1 else (-1 if n == 0 else 1) * HELIX_SPACING / 2
        lean = np.deg2rad(80.0 * (draws.at("lean", n).uniform(variants) - 0.5))
        axis = -strands[2 * n + 1].direction * np.stack([np.sin(lean), np.cos(lean), np.zeros(variants)], -1)
        phase = 2 * np.pi * draws.at("phase", n).uniform(variants)
        sketch[:, start:stop] = _helix(stop - start, np.array([across, 0, SHEET_TO_HELIX]), axis, phase)
    helix_ranges = [e for e, kind in zip(elements, kinds, strict=True) if kind == "H"]
    bonds = np.concatenate([_sheet_bonds(strands), _helix_bonds(helix_ranges)])
    return Blueprint("alpha_beta", structure, sketch, bonds)


def _lay_out(kinds: list[str], loops: list[int], length: int, equal: bool = False) -> tuple[str, list[tuple[int, int]]]:
    """The secondary structure string and the [start, stop) of each element.

    A helix has 2.1 times the residues of a strand. Left-over residues go to the elements in turn, or, with `equal`, to the
    loops beside helices and to the tails.
    """
    weight = np.array([2.1 if kind == "H" else 1.0 for kind in kinds])
    free = length - sum(loops) - 2
    sizes = [int(size) for size in np.floor(weight / weight.sum() * free)]
    spare = free - sum(sizes)
    if not equal:
        sizes = [size + (n < spare) for n, size in enumerate(sizes)]
        spare = 0
    else:
        beside = [n for n in range(len(loops)) if "H" in kinds[n : n + 2]][:spare]
        loops = [loop + (n in beside) for n, loop in enumerate(loops)]
        spare -= len(beside)
    position = 1 + spare // 2
    structure, elements = "L" * position, []
    for kind, size, loop in zip(kinds, sizes, [*loops, length], strict=True):
        elements.append((position, position + size))
        structure += kind * size + "L" * loop
        position += size + loop
    return structure[:length], elements


def _helix(residues: int, centre: np.ndarray, axis: np.ndarray, phase: np.ndarray) -> Float64[np.ndarray, "V r 3"]:
    """CA atoms of right-handed helices around `axis` ([3] or [V, 3]), centred at `centre`."""
    axis = np.broadcast_to(axis / np.linalg.norm(axis, axis=-1, keepdims=True), (len(phase), 3))
    first = np.cross(axis, np.where(np.abs(axis[:, :1]) < 0.9, [[1.0, 0, 0]], [[0, 1.0, 0]]))
    first = first / np.linalg.norm(first, axis=-1, keepdims=True)
    second = np.cross(axis, first)
    n = np.arange(residues) - (residues - 1) / 2
    angle = (n * HELIX_TURN)[None, :, None] + phase[:, None, None]
    ring = np.cos(angle) * first[:, None] + np.sin(angle) * second[:, None]
    return centre + axis[:, None] * (n * HELIX_RISE)[None, :, None] + HELIX_RADIUS * ring


def _strand_rows(strand: _Strand) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Residues of a strand from the bottom row up, their heights in Å from the middle of the sheet, their sides (+1, -1)."""
    rows = np.arange(strand.length)
    residues = strand.start + (rows if strand.direction > 0 else rows[::-1])
    return residues, (rows - (strand.length - 1) / 2) * STRAND_RISE, (-1.0) ** rows


def _sheet_bonds(strands: list[_Strand]) -> Int64[np.ndarray, "K 2"]:
    """N-O pairs between strands in neighbouring columns (rows are aligned: all strands of a sheet have the same length)."""
    by_column = {s.column: s for s in strands}
    bonds: list[tuple[int | None, int | None]] = []
    for left in strands:
        right = by_column.get(left.column + 1)
        if right is None:
            continue
        for row in range(left.length):
            points_right = left.direction * (-1) ** row
            i, j = left.residue(row), right.residue(row)
            if left.direction != right.direction:
                if points_right > 0:
                    bonds += [(i, j), (j, i)]
            elif points_right > 0:  # parallel: a residue bonds to both neighbours of the residue beside it
                before, after = right.residue(row - right.direction), right.residue(row + right.direction)
                bonds += [(i, before), (after, i)]
    return np.array([b for b in bonds if None not in b], dtype=np.int64).reshape(-1, 2)


def _helix_bonds(elements: list[tuple[int, int]]) -> Int64[np.ndarray, "K 2"]:
    """Bonds N(i + 4)-O(i) of alpha helices."""
    return np.array([(n + 4, n) for start, stop in elements for n in range(start, stop - 4)], dtype=np.int64)
