"""Pictures as SVG files: the charts of the pages, with their colours in the file. Shapes: R residues.

Calibration says how well a model's confidence tells how right it is: pLDDT against the lDDT-CA that it predicts, residue by
residue. Where a well calibrated model says pLDDT 80, lDDT-CA is 0.80 on average. The head learns this from training's own
predictions, so it says little about structures that are unlike those of the training; that is what this comparison shows.
Shapes: R residues of a structure, N of all structures together, both those with a CA in prediction and experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64
from markupsafe import Markup

from evodsp.inference.pages.residue_charts import (
    FRAME,
    PAE_COLOURS,
    Coverage,
    coverage_chart,
    named_bands,
    picture_uri,
    plddt_chart,
)
from evodsp.inference.structure_files import ChainSpan
from evodsp.report.page import Frame, Mark, mark, path, picture

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


_STYLE = (
    "text { font: 12px sans-serif; fill: #57606a; } text.title { font-size: 14px; fill: #1f2328; } "
    "text.label { fill: #1f2328; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; } "
    "polyline { fill: none; stroke: #1f2328; stroke-width: 1.5; } .axis, .border { stroke: #8c959f; fill: none; } "
    ".dots { fill: none; stroke: #2f6fb0; stroke-width: 3; stroke-linecap: round; opacity: 0.3; } "
    "polyline.mean { stroke: #c2571a; stroke-width: 2; }"
)
"""The colours of a light page."""
_TITLE, _LEGEND = 30, 22
"""Pixels above a picture, and above one of its panels."""
_SQUARE = Frame(490, 412, left=52, right=78, top=10, bottom=42)
_GREYS = ((255, 255, 255), (0, 0, 0))
_DISTANCE_COLOURS = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))
_FARTHEST = 22.0
"""Å; larger distances have the same colour. It is the distogram's last bin, and contacts are much shorter."""
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Figure(str):
    """The text of an SVG file, which a notebook shows as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class _Panel:
    title: str
    frame: Frame
    svg: Markup


def confidence_figure(
    plddt: Float[np.ndarray, " R"],
    pae: Float[np.ndarray, "R R"] | None,
    highest: float,
    contacts: Float[np.ndarray, "R R"] | None,
    title: str,
    chains: Sequence[ChainSpan] = (),
) -> Figure:
    """pLDDT (0..100) along the sequence; below it contact probabilities, and aligned errors (Å, up to `highest`), if known.

    `chains`: of a complex.
    """
    squares = []
    if contacts is not None:
        squares.append(_matrix("Contacts: CB within 8 Å, by the distogram", contacts, _GREYS, ("0", "1"), chains))
    if pae is not None:
        ends = ("0 Å", f"{highest:.0f} Å")
        squares.append(_matrix("Predicted aligned error", pae / highest, PAE_COLOURS, ends, chains))
    return _figure(title, [[_confidence(plddt, chains)], squares])


def coverage_figure(found: Coverage, title: str) -> Figure:
    """The rows of the alignments, the most similar to the query on top, and a line for the sequences that cover a residue."""
    legend = "Alignment coverage: rows by identity to the query (red 0, blue 1), line: sequences with a residue here"
    return _figure(title, [[_Panel(legend, FRAME, coverage_chart(found))]])


def distance_figure(
    true_positions: Float[np.ndarray, "R 3"] | None,
    predicted_positions: Float[np.ndarray, "R 3"],
    plddt: Float[np.ndarray, " R"],
    title: str = "",
    true_mask: Bool[np.ndarray, " R"] | None = None,
    chains: Sequence[ChainSpan] = (),
) -> Figure:
    """CA-CA distances, and the curve of pLDDT. `chains`: of a complex.

    With `true_positions` the map's upper triangle shows the experiment and the lower one the prediction, so a good prediction
    gives a symmetric picture. `true_mask` is False where the experiment has no CA; such residues stay white. Positions in Å,
    pLDDT 0..100.
    """
    shares, label = _distances(predicted_positions) / _FARTHEST, "CA-CA distances"
    if true_positions is not None:
        true = _distances(true_positions) / _FARTHEST
        if true_mask is not None:
            true[~(true_mask[:, None] & true_mask[None, :])] = np.nan
        shares = np.where(np.triu(np.ones(shares.shape, bool), k=1), true, shares)
        label += ": above true (white: not resolved), below predicted"
    clear = np.where(np.isnan(shares), -1.0, np.minimum(shares, 1.0))
    square = _matrix(label, clear, _DISTANCE_COLOURS, ("0 Å", f"{_FARTHEST:.0f} Å"), chains)
    return _figure(title, [[square], [_confidence(plddt, chains)]])


def calibration_figure(found: Mapping[str, Calibration]) -> Figure:
    """pLDDT against lDDT-CA for each set of chains: residues as dots, the mean of each bin of 10 as a line."""
    return _figure("pLDDT beside lDDT-CA", [[_calibration(name, one) for name, one in found.items()]])


def _confidence(plddt: Float[np.ndarray, " R"], chains: Sequence[ChainSpan] = ()) -> _Panel:
    bands = ", ".join(f"{name} {edge}" for _, name, edge in named_bands())
    title = f"pLDDT, mean {plddt.mean():.1f} ({bands})"
    return _Panel(title, FRAME, plddt_chart({0: plddt}, 0, chains))


def _matrix(
    title: str,
    shares: Float[np.ndarray, "R R"],
    colours: tuple[tuple[int, int, int], ...],
    ends: tuple[str, str],
    chains: Sequence[ChainSpan] = (),
) -> _Panel:
    """`shares` 0 to 1, below 0 for no colour, and a bar of the colours between the texts `ends`."""
    frame, count = _SQUARE, len(shares)
    size = frame.end - frame.left
    marks = [_image(picture_uri(shares, colours), frame.left, frame.top, size, size)]
    step = next((s for s in _STEPS if count / s <= 8), 2000)
    for number in [1, *range(max(step, 2), count + 1, step)]:
        at = (number - 0.5) * size / count
        marks += [frame.x_tick(frame.left + at, str(number)), frame.y_tick(frame.top + at + 4, str(number))]
    for chain in chains[1:]:
        at = chain.start * size / count
        marks.append(_line(frame.left, frame.top + at, frame.end, frame.top + at, "border"))
        marks.append(_line(frame.left + at, frame.top, frame.left + at, frame.base, "border"))
    bar = picture_uri(np.linspace(1, 0, 128)[:, None], colours)
    marks.append(_image(bar, frame.end + 14, frame.top, 14, size))
    marks += [mark("text", x=frame.end + 32, y=y, text=text)
              for y, text in ((frame.top + 10, ends[1]), (frame.base, ends[0]))]  # fmt: skip
    return _Panel(title, frame, frame.picture(title, [*marks, frame.x_label("residue"), frame.y_label("residue")]))


def _calibration(name: str, found: Calibration) -> _Panel:
    frame = _SQUARE
    scale = (frame.end - frame.left) / 100

    def places(plddt: Iterable[float], lddt: Iterable[float]) -> list[tuple[float, float]]:
        return [(frame.left + scale * x, frame.base - scale * y) for x, y in zip(plddt, lddt, strict=True)]

    dots = " ".join(f"M{x:.1f} {y:.1f}h0" for x, y in places(found.plddt, found.lddt))
    bins = list(found.bins())
    mean = places((one.plddt for one in bins), (one.lddt for one in bins))
    edges: dict[str, Any] = {
        "x": frame.left,
        "y": frame.top,
        "width": frame.end - frame.left,
        "height": frame.base - frame.top,
    }
    marks = [mark("rect", kind="axis", **edges), _line(frame.left, frame.base, frame.end, frame.top, "axis")]
    marks.append(mark("path", kind="dots", d=dots))
    marks.append(mark("polyline", kind="mean", points=path(mean)))
    for value in range(0, 101, 20):
        marks.append(frame.x_tick(frame.left + scale * value, str(value)))
        marks.append(frame.y_tick(frame.base - scale * value + 4, str(value)))
    labels = [frame.x_label("pLDDT (predicted)"), frame.y_label("100 × lDDT-CA (true)")]
    title = f"{name}: {len(found.plddt):,} residues, off by {found.error:.0f} on average"
    return _Panel(title, frame, frame.picture(title, [*marks, *labels]))


def _line(x1: float | int, y1: float | int, x2: float | int, y2: float | int, kind: str) -> Mark:
    return mark("line", kind=kind, x1=x1, y1=y1, x2=x2, y2=y2)


def _image(uri: str, x: int, y: int, width: int, height: int) -> Mark:
    shape: dict[str, Any] = {"x": x, "y": y, "width": width, "height": height}
    return mark("image", href=uri, **shape, preserveAspectRatio="none", style="image-rendering:pixelated")


def _figure(title: str, rows: Sequence[Sequence[_Panel]]) -> Figure:
    """Panels in rows, each below its title."""
    marks, top = [mark("text", kind="title", x=12, y=20, text=title)] if title else [], _TITLE if title else 0
    for row in rows:
        left = 0
        for panel in row:
            frame = panel.frame
            marks.append(mark("text", kind="label", x=left + frame.left, y=top + 15, text=panel.title))
            place: dict[str, Any] = {"x": left, "y": top + _LEGEND, "width": frame.width, "height": frame.height}
            marks.append(mark("svg", **place, text=panel.svg))
            left += frame.width
        top += max((_LEGEND + panel.frame.height for panel in row), default=0)
    width = max(sum(panel.frame.width for panel in row) for row in rows)
    back = [mark("style", text=_STYLE), mark("rect", width=width, height=top, fill="#ffffff")]
    alone = {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": top}
    return Figure(picture(width, top, title, [*back, *marks], **alone))


def _distances(positions: Float[np.ndarray, "R 3"]) -> Float[np.ndarray, "R R"]:
    return np.linalg.norm(positions[:, None] - positions[None, :], axis=-1)
