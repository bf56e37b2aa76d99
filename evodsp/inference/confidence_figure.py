"""The confidence of a prediction as a matplotlib figure. This module imports matplotlib, so it is imported late."""

from __future__ import annotations

import io

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from evodsp.inference.plots import draw_plddt
from evodsp.inference.residue_charts import PAE_COLOURS


class ConfidenceFigure(Figure):
    """A figure that a notebook shows without pyplot, and so with any backend."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=80, facecolor="white")
        return file.getvalue()


def confidence_figure(
    plddt: Float[np.ndarray, " R"], pae: Float[np.ndarray, "R R"] | None, highest: float, title: str
) -> Figure:
    """pLDDT (0..100) along the sequence; and beside it the aligned errors (Å, up to `highest`), if there are any."""
    figure = ConfidenceFigure(figsize=(10.0, 4.0) if pae is not None else (7.0, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    if pae is None:
        draw_plddt(figure.subplots(), plddt)
    else:
        curve, errors = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
        draw_plddt(curve, plddt)
        length = len(plddt)
        colours = LinearSegmentedColormap.from_list("pae", [tuple(c / 255 for c in colour) for colour in PAE_COLOURS])
        extent = (0.5, length + 0.5, length + 0.5, 0.5)
        image = errors.imshow(pae, cmap=colours, vmin=0.0, vmax=highest, extent=extent, interpolation="nearest")
        errors.set(xlabel="scored residue", ylabel="aligned residue", title="Predicted aligned error")
        figure.colorbar(image, ax=errors, label="error (Å)", shrink=0.9)
    figure.suptitle(title, fontsize=12)
    return figure
