"""Draws the intervals of `trace.py`: one rank's compute above, its collectives below.

The thick bar of a collective lasts from its launch to its end and carries its number within the block. The thin line ends where
the rank begins to wait; if the thick bar ends first, the communication is fully hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace import Interval

COLOURS = {
    "row_attention": "#4e79a7", "column_attention": "#a0cbe8", "outer_product_mean": "#76b7b2",
    "triangle_outgoing": "#f28e2b", "triangle_incoming": "#ffbe7d", "attention_starting": "#59a14f",
    "attention_ending": "#8cd17d", "transition": "#d7f0d0",
    "switch m": "#333333", "switch m back": "#666666", "switch z": "#999999",
}  # fmt: skip
"""By sub-layer. A collective has the colour of the sub-layer that launches it."""


def draw(found: Sequence[Interval], path: Path, title: str) -> None:
    """Draw the forward pass above the backward pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(20, 8), layout="constrained")
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        _panel(panel, [x for x in found if x.direction == direction])
        panel.set_title(f"{direction} pass, {title}", loc="left", fontsize=10)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="red", hatch="////"))
    labels = [*COLOURS, "waiting for a collective"]
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _panel(panel: Any, found: Sequence[Interval]) -> None:
    ends: list[float] = []  # end of the last collective in each lane
    for x in sorted(found, key=lambda x: x.start):
        width = x.end - x.start
        if x.what == "compute":
            panel.barh(0, width, left=x.start, height=0.8, color=COLOURS[x.name.rpartition(" ")[0]])
        elif x.what == "await":
            panel.barh(0, width, left=x.start, height=0.8, facecolor="none", edgecolor="red", hatch="////", linewidth=0)
        else:
            place, layer = x.name.rpartition(" ")[0].split(" ", 1)
            lane = next((number for number, end in enumerate(ends) if end <= x.start), len(ends))
            ends[lane : lane + 1] = [max(x.end, x.awaited)]
            height = -1.2 - lane
            panel.barh(height, max(0, x.awaited - x.start), left=x.start, height=0.15, color=COLOURS[layer])
            panel.barh(height, width, left=x.start, height=0.6, color=COLOURS[layer])
            panel.annotate(place, (x.start, height + 0.32), fontsize=8, ha="left", va="bottom")
    panel.set_yticks([0, *(-1.2 - lane for lane in range(len(ends)))])
    panel.set_yticklabels(["compute", *("collectives" for _ in ends)])
    panel.set_xlabel("ms")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
