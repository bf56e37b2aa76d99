"""A still picture of a predicted backbone, for places where no script runs. Shapes: R residues."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from evodsp.inference.residue_charts import BANDS

_SIZE, _MARGIN = 360, 14


def trace_svg(ca: Float[np.ndarray, "R 3"], present: Float[np.ndarray, " R"], plddt: Float[np.ndarray, " R"]) -> str:
    """The CA trace (Å) as SVG, coloured by pLDDT (0..100) and seen along its shortest axis; near segments cover far ones.

    Residues without a CA (`present` at most 0.5) are gaps.
    """
    there = present > 0.5
    centred = ca - ca[there].mean(0)
    _, _, axes = np.linalg.svd(centred[there].astype(np.float64), full_matrices=True)
    # An axis has no direction of its own: the largest component is made positive, so that all machines draw the same picture.
    axes *= np.sign(axes[np.arange(3), np.abs(axes).argmax(1)])[:, None]
    axes[2] *= np.linalg.det(axes)  # no mirror image
    x, y, depth = (centred @ axes.T).T
    reach = max(float(np.abs(np.stack([x, y])[:, there]).max()), 1.0)
    scale = (_SIZE / 2 - _MARGIN) / reach
    points = np.stack([_SIZE / 2 + scale * x, _SIZE / 2 - scale * y], 1)
    links = [i for i in range(len(ca) - 1) if there[i] and there[i + 1]]
    links.sort(key=lambda i: depth[i] + depth[i + 1])
    lines = []
    for i in links:
        place = 'x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"'.format(*points[i], *points[i + 1])
        colour = next(colour for lower, colour, _ in BANDS if (plddt[i] + plddt[i + 1]) / 2 >= lower)
        lines.append(
            f'<line {place} stroke="white" stroke-width="7"/><line {place} stroke="{colour}" stroke-width="4"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE}" height="{_SIZE}" viewBox="0 0 {_SIZE} {_SIZE}" '
        f'role="img" aria-label="CA trace, coloured by pLDDT" stroke-linecap="round">{"".join(lines)}</svg>'
    )
