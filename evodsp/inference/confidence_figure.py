"""Figures of a prediction's confidence and of the alignments behind it. This module imports matplotlib, so it is imported
late."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from evodsp.inference.pages.coverage import Coverage
from evodsp.inference.pages.residue_charts import BANDS, PAE_COLOURS


class ConfidenceFigure(Figure):
    """A figure that a notebook shows without pyplot, and so with any backend."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80, facecolor="white")
        return file.getvalue()


def confidence_figure(
    plddt: Float[np.ndarray, " R"],
    pae: Float[np.ndarray, "R R"] | None,
    highest: float,
    contacts: Float[np.ndarray, "R R"] | None,
    title: str,
    borders: Sequence[int] = (),
) -> Figure:
    """pLDDT (0..100) along the sequence; beside it contact probabilities, and aligned errors (Å, up to `highest`), if known.

    `borders`: the first residue of each chain of a complex but the first one's, from 0.
    """
    squares = sum(one is not None for one in (contacts, pae))
    figure = ConfidenceFigure(figsize=(6.0 + 4.2 * squares, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    curve, *others = figure.subplots(1, 1 + squares, width_ratios=(1.25, *[1.0] * squares), squeeze=False)[0]
    draw_plddt(curve, plddt)
    panels = iter(others)
    if contacts is not None:
        image = _square(axes := next(panels), contacts, "Greys", 1.0)
        axes.set(xlabel="residue", ylabel="residue", title="Contacts by the distogram")
        figure.colorbar(image, ax=axes, label="probability of CB within 8 Å", shrink=0.9)
    if pae is not None:
        colours = LinearSegmentedColormap.from_list("pae", [tuple(c / 255 for c in colour) for colour in PAE_COLOURS])
        image = _square(axes := next(panels), pae, colours, highest)
        axes.set(xlabel="scored residue", ylabel="aligned residue", title="Predicted aligned error")
        figure.colorbar(image, ax=axes, label="error (Å)", shrink=0.9)
    for border in borders:
        for axes in (curve, *others):
            axes.axvline(border + 0.5, color="#202020", linewidth=0.8)
        for axes in others:
            axes.axhline(border + 0.5, color="#202020", linewidth=0.8)
    figure.suptitle(title, fontsize=12)
    return figure


def _square(axes: Axes, values: Float[np.ndarray, "R R"], colours: str | Colormap, highest: float) -> AxesImage:
    edge = len(values) + 0.5
    return axes.imshow(
        values, cmap=colours, vmin=0.0, vmax=highest, extent=(0.5, edge, edge, 0.5), interpolation="nearest"
    )


def coverage_figure(found: Coverage, title: str) -> Figure:
    """The rows of the alignments, the most similar to the query on top, and a line for the sequences that cover a residue."""
    figure = ConfidenceFigure(figsize=(8.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    length = len(found.counts)
    extent = (0.5, length + 0.5, 0.0, float(found.sequences))
    image = axes.imshow(
        found.rows, cmap="viridis", vmin=0.0, vmax=1.0, extent=extent, aspect="auto", interpolation="nearest"
    )
    axes.plot(np.arange(1, length + 1), found.counts, color="black", linewidth=1.2)
    axes.set(xlabel="residue", ylabel="sequences", xlim=extent[:2], ylim=extent[2:])
    axes.set_title("Alignment coverage (line: sequences with a residue here)", fontsize=10)
    figure.colorbar(image, ax=axes, label="identity to the query")
    figure.suptitle(title, fontsize=12)
    return figure


def draw_plddt(axes: Axes, plddt: Float[np.ndarray, " R"]) -> None:
    """The curve of pLDDT over the bands of the AlphaFold database."""
    residues = np.arange(1, len(plddt) + 1)
    top = 100.0
    for lower, colour, name in BANDS:
        axes.axhspan(lower, top, color=colour, alpha=0.22, linewidth=0)
        axes.text(1.015, (lower + top) / 2, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        top = lower
    axes.plot(residues, plddt, color="#202020", linewidth=1.4)
    axes.set(xlabel="residue", ylabel="pLDDT (0 to 100)", title=f"Predicted confidence, mean pLDDT {plddt.mean():.1f}")
    axes.set_xlim(1, max(len(plddt), 2))
    axes.set_ylim(0, 100)
