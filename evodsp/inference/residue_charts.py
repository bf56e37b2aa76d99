"""Charts along the sequence as SVG, and matrices as pictures. All charts have the same x axis, so that one cursor fits all.

The script of the page (`pages/target.js`) moves the cursors; without it the charts are whole. Shapes: R residues, P rows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from evodsp.inference.coverage import Coverage

WIDTH, LEFT, RIGHT = 1000, 56, 12
"""Of every chart, in units of its view box."""
_TOP, _PLOT = 10, 150
_BOTTOM = _TOP + _PLOT
BANDS = ((90, "#0053d6", "very high"), (70, "#65cbf3", "confident"), (50, "#ffdb13", "low"), (0, "#ff7d45", "very low"))
"""Lower edge of pLDDT, colour and name, as in the AlphaFold database."""
PAE_COLOURS = ((0, 68, 27), (49, 163, 84), (161, 217, 155), (247, 252, 245))
"""From no error to the largest that the head knows, as in the AlphaFold database."""
_IDENTITY_COLOURS = ((178, 24, 43), (244, 165, 130), (146, 197, 222), (33, 102, 172))
"""From no identity to all letters equal."""


def plddt_chart(plddt: Mapping[int, Float[np.ndarray, " R"]], shown: int) -> str:
    """pLDDT along the sequence, a line for each seed; only that of the seed `shown` is visible."""
    residues = len(plddt[shown])
    bands, top = [], 100.0
    for lower, colour, name in BANDS:
        y, height = _BOTTOM - _PLOT * top / 100, _PLOT * (top - lower) / 100
        bands.append(
            f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height:.1f}" fill="{colour}" '
            f'opacity="0.22"><title>{name}</title></rect>'
        )
        top = float(lower)
    lines = "".join(
        f'<polyline class="plddt" data-seed="{seed}" points="{_points(values, 100.0)}"{"" if seed == shown else " hidden"}/>'
        for seed, values in plddt.items()
    )
    ticks = "".join(_y_tick(value / 100, str(value)) for value in (0, 50, 70, 90, 100))
    return _chart("pLDDT by residue", "".join(bands) + ticks + lines, residues, "pLDDT")


def coverage_chart(found: Coverage) -> str:
    """The rows of the alignments as a picture, the most similar one on top, and a line for the number of sequences."""
    picture = picture_uri(np.nan_to_num(found.rows, nan=-1), _IDENTITY_COLOURS)
    image = (
        f'<image href="{picture}" x="{LEFT}" y="{_TOP}" width="{WIDTH - LEFT - RIGHT}" height="{_PLOT}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )
    line = f'<polyline class="count" points="{_points(found.counts, float(found.sequences))}"/>'
    ticks = "".join(_y_tick(share, f"{round(found.sequences * share):,}") for share in (0.0, 0.5, 1.0))
    return _chart("sequences by residue", image + ticks + line, len(found.counts), "sequences")


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


def _points(values: np.ndarray, highest: float) -> str:
    x = LEFT + (np.arange(len(values)) + 0.5) * (WIDTH - LEFT - RIGHT) / len(values)
    y = _BOTTOM - _PLOT * np.asarray(values, float) / max(highest, 1)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _y_tick(share: float, text: str) -> str:
    return f'<text x="{LEFT - 6}" y="{_BOTTOM - _PLOT * share + 4:.1f}" text-anchor="end">{text}</text>'


def _chart(title: str, inside: str, residues: int, y_label: str) -> str:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if residues / s <= 16), 2000)
    width = (WIDTH - LEFT - RIGHT) / residues
    numbers = [1, *range(max(step, 2), residues + 1, step)]
    ticks = "".join(
        f'<text x="{LEFT + (n - 0.5) * width:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{n}</text>' for n in numbers
    )
    middle = _TOP + _PLOT / 2
    return (
        f'<svg class="along" viewBox="0 0 {WIDTH} {_BOTTOM + 24}" role="img" aria-label="{title}">{inside}{ticks}'
        f'<text transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{y_label}</text>'
        f'<line class="cursor" y1="{_TOP}" y2="{_BOTTOM}" hidden/></svg>'
    )
