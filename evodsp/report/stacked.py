"""Stacked bars as inline SVG, with a line for a limit. Colours come from the page, as in `evodsp.report.lines`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evodsp.reading.quoting import escape_html

_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40


def stacked(labels: Sequence[str], parts: Mapping[str, Sequence[float]], limit: float | None = None) -> str:
    """A bar for each label, made of `parts` from the bottom up. `limit`: a dashed line across.

    Raises ValueError if a part has not one value for each label, or a negative one.
    """
    if any(len(values) != len(labels) or min(values, default=0) < 0 for values in parts.values()):
        raise ValueError("each part needs one value of at least 0 for each label")
    totals = [sum(values[n] for values in parts.values()) for n in range(len(labels))]
    most = max(*totals, limit or 0, 1e-9) * 1.05
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(labels))
    plot = _HEIGHT - _TOP - _BOTTOM
    base = _TOP + plot
    bars = []
    for n, label in enumerate(labels):
        height = 0.0
        for colour, (part, values) in enumerate(parts.items()):
            own = plot * values[n] / most
            height += own
            bars.append(
                f'<rect class="dot s{colour}" x="{_LEFT + n * step + step * 0.15:.1f}" y="{base - height:.1f}" '
                f'width="{step * 0.7:.1f}" height="{own:.1f}"><title>{escape_html(part)}: {values[n]:.2f}</title></rect>'
            )
        bars.append(
            f'<text x="{_LEFT + (n + 0.5) * step:.1f}" y="{base + 15}" text-anchor="middle">{escape_html(label)}</text>'
        )
    line = ""
    if limit is not None:
        y = base - plot * limit / most
        line = (
            f'<line class="axis" stroke-dasharray="5 4" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{limit:.1f}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="stacked bars">'
        f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _RIGHT}" y2="{base}"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{most:.0f}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>{"".join(bars)}{line}</svg>'
    )
