"""Charts as inline SVG. Colours come from the page (`evodsp.report.page`), so that they follow a light or dark screen.

matplotlib would write SVG too, with fixed colours, a few hundred kilobytes a page, and it is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Sequence

from evodsp.reading.quoting import escape_html

_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 26, 12, 40


def histogram(edges: Sequence[float], counts: Sequence[int], x_label: str, y_label: str) -> str:
    """Bars of `counts` between neighbouring `edges`, one more than counts. A bar's tooltip has its range and count."""
    if len(edges) != len(counts) + 1 or not counts:
        raise ValueError(f"{len(edges)} edges for {len(counts)} bars")
    most = max(1, *counts)
    step = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    plot_height = _HEIGHT - _TOP - _BOTTOM
    bars = []
    for place, count in enumerate(counts):
        height = plot_height * count / most
        tip = f"{_number(edges[place])} to {_number(edges[place + 1])}: {count:,}"
        bars.append(
            f'<rect class="bar" x="{_LEFT + place * step + 0.5:.1f}" y="{_TOP + plot_height - height:.1f}" '
            f'width="{max(step - 1, 0.5):.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    every = max(1, len(counts) // 5)
    ticks = "".join(
        f'<text x="{_LEFT + place * step:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_number(edges[place])}</text>'
        for place in range(0, len(edges), every)
    )
    base, half = _TOP + plot_height, _TOP + plot_height / 2
    middle = f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2:.0f}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape_html(y_label)} by {escape_html(x_label)}">'
        f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _RIGHT}" y2="{base}"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 5}" text-anchor="end">{most:,}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
        f'{"".join(bars)}{ticks}<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape_html(x_label)}</text>'
        f'<text transform="translate(12 {half:.0f}) rotate(-90)" text-anchor="middle">{escape_html(y_label)}</text>'
        "</svg>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
