"""Charts along the sequence as SVG, and matrices as pictures. All charts have the same x axis, so that one cursor fits
all.

The script of the page (`pages/target.js`) moves the cursors; without it the charts are whole. Shapes: R residues, P rows.

Of alignments: the sequences at each residue, and the rows by their identity to the query. Of the backbone: its peptide
bonds, and the side from which a structure shows most of itself.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64, UInt8
from markupsafe import Markup
from PIL import Image

from evodsp.data.records import Alignment
from evodsp.geometry.residues import ATOM_TYPES, CA, GAP
from evodsp.inference.structure_files import ChainSpan, PredictedStructure
from evodsp.losses.violation import LONGEST_PEPTIDE_BOND
from evodsp.report.page import Frame, Mark, mark, path, picture

_MOST_ROWS = 400
"""Rows of a picture: more than a screen shows. Of larger alignments, rows at equal distances in their order are taken."""


@dataclass(frozen=True)
class Coverage:
    """The sequences of all alignments of a target together."""

    sequences: int
    counts: Int64[np.ndarray, " R"]
    """Sequences that have a letter at each residue."""
    rows: Float32[np.ndarray, "P R"]
    """Identity (0..1) of each row to the query where the row has a letter, nan elsewhere. The most similar row comes first."""


def coverage(alignments: Sequence[Alignment]) -> Coverage:
    """Coverage of the query. The identity of a row is the share of its letters that equal the query's."""
    # One alignment at a time: tens of thousands of rows are never copied together.
    counts = np.sum([_count(one) for one in alignments], axis=0)
    identities = np.concatenate([_identity(one) for one in alignments])
    order = np.argsort(-identities, kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(_MOST_ROWS, len(order))).round().astype(int)]
    starts = np.cumsum([0, *map(len, alignments)])
    alignment = np.searchsorted(starts, shown, side="right") - 1
    letters = np.stack([alignments[a].residues[row - starts[a]] for a, row in zip(alignment, shown, strict=True)])
    rows = np.where(letters == GAP, np.nan, identities[shown, None]).astype(np.float32)
    return Coverage(len(identities), counts, rows)


def _count(alignment: Alignment) -> Int64[np.ndarray, " R"]:
    return np.asarray(np.count_nonzero(alignment.residues != GAP, axis=0), np.int64)


def _identity(alignment: Alignment) -> Float32[np.ndarray, " N"]:
    present = alignment.residues != GAP
    same = (alignment.residues == alignment.residues[0]) & present
    return (same.sum(1) / np.maximum(present.sum(1), 1)).astype(np.float32)


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
        """Note for a reader of the 3D view; empty if no bond is too long."""
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
    """Start of the 3D view: the longest axis of the structure from left to right, the shortest towards the reader."""

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


FRAME = Frame(1000, 184, left=56, right=12, top=10, bottom=24)
"""The frame of every chart."""
BANDS = ((90, "#0053d6", "very high"), (70, "#65cbf3", "confident"), (50, "#ffdb13", "low"), (0, "#ff7d45", "very low"))
"""Lower edge of pLDDT, colour and name, as in the AlphaFold database."""
PAE_COLOURS = ((0, 68, 27), (49, 163, 84), (161, 217, 155), (247, 252, 245))
"""Colours from no error to the largest that the head knows, as in the AlphaFold database."""
_IDENTITY_COLOURS = ((178, 24, 43), (244, 165, 130), (146, 197, 222), (33, 102, 172))
"""Colours from no identity to all letters equal."""
_TRACE, _MARGIN = 360, 14
_NAME = 8.0
"""Half of the room of a letter in a chain's name, in pixels."""


def band_colour(plddt: float) -> str:
    """The colour of a pLDDT (0..100)."""
    return next(colour for lower, colour, _ in BANDS if plddt >= lower)


def named_bands() -> list[tuple[str, str, str]]:
    """Colour, name and edge of each band, for a legend."""
    edges = [f"> {lower}" if lower else f"< {BANDS[-2][0]}" for lower, _, _ in BANDS]
    return [(colour, name, edge) for (_, colour, name), edge in zip(BANDS, edges, strict=True)]


def plddt_chart(plddt: Mapping[int, Float[np.ndarray, " R"]], shown: int, chains: Sequence[ChainSpan] = ()) -> Markup:
    """pLDDT along the sequence, a line for each seed; only the line of the seed `shown` is visible. `chains`: of a complex."""
    marks, top = [], 100.0
    for lower, colour, name in BANDS:
        y, height = _y(top / 100), _y(lower / 100) - _y(top / 100)
        shape = {"x": FRAME.left, "y": y, "width": FRAME.end - FRAME.left, "height": height}
        marks.append(mark("rect", name, **shape, fill=colour, opacity="0.22"))
        top = float(lower)
    marks += [_y_tick(value / 100, str(value)) for value in (0, 50, 70, 90, 100)]
    for seed, values in plddt.items():
        hidden = None if seed == shown else ""
        marks.append(mark("polyline", kind="plddt", data_seed=seed, points=_points(values, 100.0), hidden=hidden))
    return _chart("pLDDT by residue", marks, len(plddt[shown]), "pLDDT", chains)


def coverage_chart(found: Coverage, chains: Sequence[ChainSpan] = ()) -> Markup:
    """The rows of the alignments as a picture, the most similar one on top, and a line for the number of sequences. `chains`:
    of a complex."""
    image = mark(
        "image",
        href=picture_uri(np.nan_to_num(found.rows, nan=-1), _IDENTITY_COLOURS),
        x=FRAME.left,
        y=FRAME.top,
        width=FRAME.end - FRAME.left,
        height=FRAME.base - FRAME.top,
        preserveAspectRatio="none",
        style="image-rendering:pixelated",
    )
    line = mark("polyline", kind="count", points=_points(found.counts, float(found.sequences)))
    ticks = [_y_tick(share, f"{round(found.sequences * share):,}") for share in (0.0, 0.5, 1.0)]
    return _chart("sequences by residue", [image, *ticks, line], len(found.counts), "sequences", chains)


def strip(plddt: Float[np.ndarray, " R"], label: str, **attributes: Any) -> Markup:
    """The bands of pLDDT along the sequence as one coloured line."""
    colours = [band_colour(float(value)) for value in plddt]
    starts = [0, *(i for i in range(1, len(colours)) if colours[i] != colours[i - 1]), len(colours)]
    bars = [
        mark("rect", x=first, y=0, width=last - first, height=1, fill=colours[first])
        for first, last in pairwise(starts)
    ]
    stretched = {"preserveAspectRatio": "none", "shape_rendering": "crispEdges", **attributes}
    return picture(len(colours), 1, label, bars, **stretched)


def trace(
    ca: Float[np.ndarray, "R 3"],
    present: Float[np.ndarray, " R"],
    plddt: Float[np.ndarray, " R"],
    chains: Sequence[ChainSpan] = (),
) -> Markup:
    """A still picture of a backbone, for places where no script runs: the CA trace (Å), coloured by pLDDT (0..100) and seen
    along its shortest axis; near segments cover far ones. Residues without a CA (`present` at most 0.5) are gaps, and nothing
    links the `chains` of a complex.
    """
    there = present > 0.5
    centred = ca - ca[there].mean(0)
    x, y, depth = (centred @ principal_axes(centred[there]).T).T
    reach = max(float(np.abs(np.stack([x, y])[:, there]).max()), 1.0)
    scale = (_TRACE / 2 - _MARGIN) / reach
    points = np.stack([_TRACE / 2 + scale * x, _TRACE / 2 - scale * y], 1)
    last = {chain.end - 1 for chain in chains}
    links = [i for i in range(len(ca) - 1) if there[i] and there[i + 1] and i not in last]
    marks = []
    for i in sorted(links, key=lambda i: depth[i] + depth[i + 1]):
        place = dict(zip(("x1", "y1", "x2", "y2"), points[i : i + 2].ravel().tolist(), strict=True))
        marks.append(mark("line", **place, stroke="white", stroke_width=7))
        marks.append(mark("line", **place, stroke=band_colour(float(plddt[i] + plddt[i + 1]) / 2), stroke_width=4))
    alone = {"xmlns": "http://www.w3.org/2000/svg", "width": _TRACE, "height": _TRACE, "stroke_linecap": "round"}
    return picture(_TRACE, _TRACE, "CA trace, coloured by pLDDT", marks, **alone)


def pae_uri(pae: Float[np.ndarray, "R R"], highest: float) -> str:
    """A matrix of aligned errors (Å) as a picture: dark is certain, white is `highest` or more."""
    return picture_uri(pae / highest, PAE_COLOURS)


def picture_uri(shares: Float[np.ndarray, "P R"], colours: tuple[tuple[int, int, int], ...]) -> str:
    """A PNG as a data URI; `shares` from 0 (first colour) to 1 (last), below 0 transparent."""
    clear = 255
    levels = np.where(shares < 0, clear, np.clip(shares, 0, 1) * (clear - 1)).round().astype(np.uint8)
    image = Image.fromarray(levels)
    image.putpalette(palette(colours).tobytes())  # makes it an image of mode P
    file = io.BytesIO()
    image.save(file, "PNG", transparency=clear, optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def palette(colours: tuple[tuple[int, int, int], ...]) -> UInt8[np.ndarray, "256 3"]:
    """256 colours between the given ones."""
    stops = np.array(colours, float)
    place = np.linspace(0, len(stops) - 1, 256)
    return np.stack([np.interp(place, range(len(stops)), stops[:, c]) for c in range(3)], 1).round().astype(np.uint8)


def _y(share: Any) -> Any:
    """The height at a share of the plot's, or of several."""
    return FRAME.base - (FRAME.base - FRAME.top) * share


def _points(values: np.ndarray, highest: float) -> str:
    x = FRAME.left + (np.arange(len(values)) + 0.5) * (FRAME.end - FRAME.left) / len(values)
    return path(zip(x, _y(np.asarray(values, float) / max(highest, 1)), strict=True))


def _y_tick(share: float, text: str) -> Mark:
    return FRAME.y_tick(_y(share) + 4, text)


def _chart(title: str, marks: Iterable[Mark], residues: int, y_label: str, chains: Sequence[ChainSpan] = ()) -> Markup:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if residues / s <= 16), 2000)
    width = (FRAME.end - FRAME.left) / residues
    ticks = _names_of_chains(chains, width)
    if not chains:
        numbers = [1, *range(max(step, 2), residues + 1, step)]
        ticks = [FRAME.x_tick(FRAME.left + (n - 0.5) * width, f"{n}") for n in numbers]
    cursor = mark("line", kind="cursor", y1=FRAME.top, y2=FRAME.base, hidden="")
    return FRAME.picture(title, [*marks, *ticks, FRAME.y_label(y_label), cursor], kind="along")


def _names_of_chains(chains: Sequence[ChainSpan], width: float) -> list[Mark]:
    """Borders between chains, and below each chain its name, where there is room. `width`: of a residue, in pixels."""
    marks: list[Mark] = []
    free = float(FRAME.left)
    for chain in chains:
        if chain.start:
            x = FRAME.left + chain.start * width
            marks.append(mark("line", kind="border", x1=x, x2=x, y1=FRAME.top, y2=FRAME.base))
        middle, room = FRAME.left + (chain.start + chain.end) / 2 * width, _NAME * len(chain.name)
        if middle - room >= free:
            marks.append(FRAME.x_tick(middle, chain.name))
            free = middle + room
    return marks
