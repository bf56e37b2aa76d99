"""Pictures of scores. matplotlib is an optional dependency, imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from evodsp.errors import UserError
from evodsp.inference.score.calibration import Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FARTHEST = 22.0
"""Å; larger distances have the same colour. It is the distogram's last bin, and contacts are much shorter."""


def distance_figure(
    true_positions: Float[np.ndarray, "R 3"] | None,
    predicted_positions: Float[np.ndarray, "R 3"],
    plddt: Float[np.ndarray, " R"],
    path: Path,
    title: str = "",
    true_mask: Bool[np.ndarray, " R"] | None = None,
) -> None:
    """Draw CA-CA distances and the pLDDT curve into an image file; the suffix of `path` decides the format.

    With `true_positions` the map's upper triangle shows the experiment and the lower one the prediction, so a good prediction
    gives a symmetric picture. `true_mask` is False where the experiment has no CA; such residues stay white. Positions in Å,
    pLDDT 0..100. Raises UserError if matplotlib is not installed.
    """
    figure, (map_axes, curve_axes) = _figure()
    from evodsp.inference.confidence_figure import draw_plddt

    distances = _distances(predicted_positions)
    if true_positions is not None:
        true_distances = _distances(true_positions)
        if true_mask is not None:
            true_distances[~(true_mask[:, None] & true_mask[None, :])] = np.nan
        upper = np.triu(np.ones_like(distances, dtype=bool), k=1)
        distances = np.where(upper, true_distances, distances)
    _draw_map(figure, map_axes, distances, both=true_positions is not None)
    draw_plddt(curve_axes, plddt)
    if title:
        figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150, facecolor="white")


def calibration_figure(found: Mapping[str, Calibration], path: Path) -> None:
    """Draw pLDDT against lDDT-CA for each set of chains: residues as dots, the mean of each bin of 10 as a line.

    Raises UserError if matplotlib is not installed.
    """
    figure, axes = _figure(width=4.6 * max(len(found), 1) + 0.4, panels=[1.0] * max(len(found), 1))
    for (name, one), panel in zip(found.items(), axes, strict=False):
        panel.plot([0, 100], [0, 100], color="#808080", linewidth=1, linestyle="--", label="well calibrated")
        panel.scatter(one.plddt, one.lddt, s=5, alpha=0.25, color="#2f6fb0", linewidths=0, label="a residue")
        bins = list(one.bins())
        panel.plot([b.plddt for b in bins], [b.lddt for b in bins], "o-", color="#c2571a", label="mean of a bin")
        panel.set(
            xlabel="pLDDT (predicted)", ylabel="100 × lDDT-CA (true)", xlim=(0, 100), ylim=(0, 100), aspect="equal"
        )
        panel.set_title(f"{name}: {len(one.plddt):,} residues, off by {one.error:.0f} on average", fontsize=10)
        panel.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=150, facecolor="white")


def _figure(width: float = 10.0, panels: Sequence[float] = (1.0, 1.15)) -> tuple[Figure, Sequence[Axes]]:
    """`panels`: the relative widths of its parts, which lie side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib, which is not installed; run: pip install 'evodsp[plots]'") from error
    # Agg's canvas instead of pyplot: it needs no window system and has no global state.
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, len(panels), width_ratios=panels, squeeze=False)[0].tolist()


def _distances(positions: Float[np.ndarray, "R 3"]) -> Float[np.ndarray, "R R"]:
    return np.linalg.norm(positions[:, None] - positions[None, :], axis=-1)


def _draw_map(figure: Figure, axes: Axes, distances: Float[np.ndarray, "R R"], both: bool) -> None:
    length = len(distances)
    extent = (0.5, length + 0.5, length + 0.5, 0.5)
    image = axes.imshow(distances, cmap="viridis_r", vmin=0.0, vmax=_FARTHEST, extent=extent, interpolation="nearest")
    if both:
        axes.plot([0.5, length + 0.5], [0.5, length + 0.5], color="white", linewidth=1.5)
        label: dict[str, Any] = {
            "fontsize": 10,
            "bbox": {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 2.5},
        }
        true = "true (white: not resolved)" if np.isnan(distances).any() else "true"
        axes.text(0.97, 0.97, true, transform=axes.transAxes, ha="right", va="top", **label)
        axes.text(0.03, 0.03, "predicted", transform=axes.transAxes, ha="left", va="bottom", **label)
    axes.set(xlabel="residue", ylabel="residue", title="CA–CA distances")
    figure.colorbar(image, ax=axes, label="distance (Å)", extend="max", shrink=0.9)
