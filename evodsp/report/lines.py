"""Line charts as inline SVG: one line a series, for curves of one or several runs.

A curve of many points is noise with a trend in it. Above `_MOST_POINTS` points the line is the mean of neighbouring points, and
a faint band behind it reaches from their lowest to their highest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evodsp.reading.quoting import escape_html

COLOURS = 8
"""Series that have a colour of their own; the page (`evodsp.report.page`) says which. Further ones repeat them."""
_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40
_MOST_POINTS = 80
_LOG_FROM = 20.0
"""The ratio of the largest to the smallest value from which `scale` "auto" is logarithmic."""


@dataclass(frozen=True)
class Series:
    """Points of one line, in the order of x. Points that are not finite interrupt no line: they are left out and counted."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float]
    colour: int = 0
    """Number of the colour: a run keeps its colour in all charts."""
    dashed: bool = False


@dataclass(frozen=True)
class _Point:
    x: float
    mean: float
    low: float
    high: float


def lines(series: Sequence[Series], x_label: str, y_label: str, scale: str = "auto") -> str:
    """A chart of the series. Its title, which the page writes above it, is `y_label`, so that the axis needs none.

    `scale` of y: linear, log, or auto (log if all values are positive and differ much).

    Raises ValueError if no series has a finite point, or if one has not as many x as y.
    """
    drawn = [(one, _thinned(one)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        raise ValueError("no finite point to draw")
    values = [value for _, points in drawn for point in points for value in (point.low, point.high)]
    log = scale == "log" or (scale == "auto" and min(values) > 0 and max(values) / min(values) >= _LOG_FROM)
    ends = [point.x for _, points in drawn for point in points]
    across = _Axis(min(ends), max(ends), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(values), max(values), _HEIGHT - _BOTTOM, _TOP, log)
    parts = [_grid(across, up)]
    parts += [_band(one, points, across, up) for one, points in drawn]
    parts += [_line(one, points, across, up) for one, points in drawn]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    name = f"{y_label} by {x_label}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape_html(name)}">{"".join(parts)}'
        f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape_html(x_label)}</text></svg>'
    )


def _thinned(series: Series) -> list[_Point]:
    """At most `_MOST_POINTS` points of a series, of its finite ones."""
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    parts = min(len(pairs), _MOST_POINTS)
    points = []
    for part in range(parts):
        some = pairs[part * len(pairs) // parts : (part + 1) * len(pairs) // parts]
        heights = [y for _, y in some]
        points.append(
            _Point(
                math.fsum(x for x, _ in some) / len(some), math.fsum(heights) / len(some), min(heights), max(heights)
            )
        )
    return points


class _Axis:
    """Maps values to places between `start` and `end` of the picture, and knows round values between them."""

    def __init__(self, low: float, high: float, start: int, end: int, log: bool = False) -> None:
        self._start, self._end, self._log = start, end, log
        low, high = self._in(low), self._in(high)
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # one value: a line in the middle
            room = 0.5 if log else max(abs(low) * 0.1, 1e-9)
            low, high = low - room, high + room
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        share = (self._in(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """About five round values."""
        if self._log:
            found = [
                factor * 10.0**power
                for power in range(math.floor(self._low), math.ceil(self._high) + 1)
                for factor in (1, 2, 5)
                if self._low <= power + math.log10(factor) <= self._high
            ]
            if len(found) >= 2:
                return found if len(found) <= 7 else found[:: math.ceil(len(found) / 7)]
        low, high = self._out(self._low), self._out(self._high)
        rough = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
        return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def _in(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def _out(self, value: float) -> float:
        return 10.0**value if self._log else value


def _grid(across: _Axis, up: _Axis) -> str:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(f'<line class="axis" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in across.ticks():
        text = (
            f'<text x="{across(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(value)}</text>'
        )
        parts.append(text)
    return "".join(parts)


def _band(series: Series, points: Sequence[_Point], across: _Axis, up: _Axis) -> str:
    if all(point.low == point.high for point in points):
        return ""
    upper = [f"{across(point.x):.1f},{up(point.high):.1f}" for point in points]
    lower = [f"{across(point.x):.1f},{up(point.low):.1f}" for point in reversed(points)]
    return f'<polygon class="band s{series.colour % COLOURS}" points="{" ".join([*upper, *lower])}"/>'


def _line(series: Series, points: Sequence[_Point], across: _Axis, up: _Axis) -> str:
    """The line and, for a reader's pointer, the values at its points."""
    kind = f"s{series.colour % COLOURS}"
    path = " ".join(f"{across(point.x):.1f},{up(point.mean):.1f}" for point in points)
    dots = "".join(
        f'<circle class="{"dot" if len(points) < 16 else "spot"} {kind}" cx="{across(point.x):.1f}" cy="{up(point.mean):.1f}" '
        f'r="3"><title>{escape_html(series.name)}: {_number(point.mean)} at {_number(point.x)}</title></circle>'
        for point in points
    )
    dashed = ' stroke-dasharray="5 4"' if series.dashed else ""
    return f'<polyline class="line {kind}"{dashed} points="{path}"/>{dots}'


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:.3g}"
