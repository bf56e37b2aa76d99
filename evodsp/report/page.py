"""A self-contained HTML page: title, key figures, notes, tables and charts. Its markup is in `templates/`.

Charts are inline SVG. Their colours come from the page, so that they follow a light or dark screen. matplotlib would write
SVG too, with fixed colours and a few hundred kilobytes a page.

A curve of many points is noise with a trend in it. Above `_MOST_POINTS` points a line is the mean of neighbouring points,
and a faint band behind it reaches from their lowest to their highest value.

jinja2 puts values into the templates of pages and charts, and every text among these is escaped. Only what a template of
ours has made (`markupsafe.Markup`) is markup; any other text is shown as it is, and cannot act.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from textwrap import wrap
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evodsp.printing import printable
from evodsp.version import __version__


def render(template: str, **values: Any) -> Markup:
    """The markup that a template, named by its path below `evodsp/`, makes of the values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("evodsp", ""),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


COLOURS = 8
"""Series that have a colour of their own; the page says which. Further ones repeat them."""
_WIDTH = 400
"""Near the width of a column of the page, and of a telephone: text is there as high as the page's own."""
_DIGIT = 7.7
"""Width of a digit in a chart's text, in pixels: that of a wide font, so that no label is cut."""
_LETTER = 7.0
"""Mean width of a letter in a name, in pixels."""
_DASHED, _DOTS = "5 4", "···"
_TEXT = 13
"""Height of a line of text, in pixels of the picture."""
_MOST_POINTS = 80
_LOG_FROM = 20.0
"""The ratio of the largest to the smallest value from which `scale` "auto" is logarithmic."""


@dataclass(frozen=True)
class Mark:
    """An element of a picture: a rectangle, a line, a text."""

    tag: str
    attributes: Mapping[str, Any]
    tip: str = ""
    """The text that a pointer over it shows."""
    text: str = ""


def mark(tag: str, tip: str = "", text: str = "", **attributes: Any) -> Mark:
    """A mark. In names of attributes, _ stands for -, and `kind` is the class. None is left out; fractions have one digit."""
    named = {"class" if name == "kind" else name.replace("_", "-"): value for name, value in attributes.items()}
    return Mark(tag, {name: f"{v:.1f}" if isinstance(v, float) else v for name, v in named.items()}, tip, text)


def picture(width: int, height: int, label: str, marks: Iterable[Mark], /, **attributes: Any) -> Markup:
    """An SVG of marks. `label` says what it shows to those who do not see it."""
    named = mark("svg", **attributes).attributes
    values = {"width": width, "height": height, "label": label, "marks": list(marks), "attributes": named}
    return render("report/templates/chart.svg.j2", **values)


@dataclass(frozen=True)
class Frame:
    """The place of a plot in its picture."""

    width: int
    height: int
    left: int
    right: int
    """Pixels between the plot and the picture's edge, as `bottom`."""
    top: int
    bottom: int

    @property
    def base(self) -> int:
        """The place of the lower end."""
        return self.height - self.bottom

    @property
    def end(self) -> int:
        """The place of the right end."""
        return self.width - self.right

    def y_tick(self, y: float | int, text: str) -> Mark:
        return mark("text", x=self.left - 6, y=y, text_anchor="end", text=text)

    def x_tick(self, x: float | int, text: str) -> Mark:
        return mark("text", x=x, y=self.base + 16, text_anchor="middle", text=text)

    def rule(self, y: float | int) -> Mark:
        """A line across the plot."""
        return mark("line", kind="axis", x1=self.left, y1=y, x2=self.end, y2=y)

    def x_label(self, text: str) -> Mark:
        middle = f"{(self.left + self.end) / 2:.0f}"
        return mark("text", x=middle, y=self.height - 6, text_anchor="middle", text=text)

    def y_label(self, text: str) -> Mark:
        turned = f"translate(12 {(self.top + self.base) / 2:.0f}) rotate(-90)"
        return mark("text", transform=turned, text_anchor="middle", text=text)

    def picture(self, label: str, marks: Iterable[Mark], **attributes: Any) -> Markup:
        return picture(self.width, self.height, label, marks, **attributes)


def histogram(edges: Sequence[float], counts: Sequence[int], x_label: str, y_label: str) -> Markup:
    """Bars of `counts` between neighbouring `edges`, one more than counts. A bar's tooltip has its range and count."""
    if len(edges) != len(counts) + 1 or not counts:
        raise ValueError(f"{len(edges)} edges for {len(counts)} bars")
    frame = Frame(_WIDTH, 200, left=52, right=26, top=12, bottom=40)
    most, step, plot = max(1, *counts), (frame.end - frame.left) / len(counts), frame.base - frame.top
    marks = [frame.rule(frame.base), frame.y_tick(frame.top + 5, f"{most:,}"), frame.y_tick(frame.base, "0")]
    for place, count in enumerate(counts):
        height = plot * count / most
        x, y, width = frame.left + place * step + 0.5, frame.base - height, max(step - 1, 0.5)
        tip = f"{_rounded(edges[place])} to {_rounded(edges[place + 1])}: {count:,}"
        marks.append(mark("rect", tip, kind="bar", x=x, y=y, width=width, height=height))
    for place in range(0, len(edges), max(1, len(counts) // 5)):
        marks.append(frame.x_tick(frame.left + place * step, _rounded(edges[place])))
    return frame.picture(f"{y_label} by {x_label}", [*marks, frame.x_label(x_label), frame.y_label(y_label)])


def stacked(labels: Sequence[str], parts: Mapping[str, Sequence[float]], limit: Level | None = None) -> Markup:
    """A bar from left to right for each label, made of `parts`, and its sum behind it. A part has its value inside where there
    is room, and always as its tooltip. `limit`: a dotted line down, and its name with the value.

    Raises ValueError if a part has not one value for each label, or a negative one.
    """
    if any(len(values) != len(labels) or min(values, default=0) < 0 for values in parts.values()):
        raise ValueError("each part needs one value of at least 0 for each label")
    totals = [sum(values[n] for values in parts.values()) for n in range(len(labels))]
    sums = [f"{total:.1f}" for total in totals]
    left, right = (math.ceil(max(map(len, texts), default=0) * _DIGIT) + 12 for texts in (labels, sums))
    top, row, thick = 24, 30, 20
    frame = Frame(_WIDTH, top + row * len(labels), left, right, top, bottom=0)
    scale = (frame.end - frame.left) / max(*totals, 0 if limit is None else limit.value, 1e-9)
    marks = []
    for n, label in enumerate(labels):
        x, y = float(frame.left), frame.top + row * n + 5
        marks.append(frame.y_tick(y + 14, label))
        for colour, (part, values) in enumerate(parts.items()):
            width, text = scale * values[n], f"{values[n]:.1f}"
            tip = f"{part}: {values[n]:.2f}"
            marks.append(mark("rect", tip, kind=f"dot s{colour % COLOURS}", x=x, y=y, width=width, height=thick))
            if len(text) * _DIGIT + 6 <= width:
                marks.append(mark("text", kind="inside", x=x + width / 2, y=y + 14, text_anchor="middle", text=text))
            x += width
        marks.append(mark("text", x=x + 6, y=y + 14, text=sums[n]))
    if limit is not None:
        x, text = frame.left + scale * limit.value, f"{limit.name}: {limit.value:.1f}"
        marks.append(mark("line", text, kind="level", x1=x, y1=frame.top - 6, x2=x, y2=frame.base))
        begins = len(text) * _LETTER > x  # no room to its left
        marks.append(mark("text", x=x, y=frame.top - 10, text_anchor="start" if begins else "end", text=text))
    return frame.picture("stacked bars", marks)


def timeline(lanes: Mapping[str, Sequence[tuple[float, float, str]]], label: str) -> Markup:
    """Intervals in lanes, one below the other: begin and end in seconds, and what it is. Empty is where nothing happens."""
    frame = Frame(920, 120, left=60, right=10, top=14, bottom=22)
    drawn = [one for intervals in lanes.values() for one in intervals]
    begin, end = min((one[0] for one in drawn), default=0.0), max((one[1] for one in drawn), default=1e-6)
    scale, thick = (frame.end - frame.left) / (end - begin), 30
    bars, names = [], []
    for colour, (name, intervals) in enumerate(lanes.items()):
        y = frame.top + 42 * colour
        for first, last, what in intervals:
            x, width = frame.left + (first - begin) * scale, max((last - first) * scale, 0.5)
            tip = f"{what}: {(last - first) * 1e6:.0f} us"
            bars.append(mark("rect", tip, kind=f"dot s{colour}", x=x, y=y, width=width, height=thick))
        names.append(mark("text", x=frame.left - 8, y=y + thick / 2 + 4, text_anchor="end", text=name))
    ends = [mark("text", x=frame.left, y=frame.height - 8, text="0")]
    microseconds = f"{(end - begin) * 1e6:,.0f}"
    ends.append(mark("text", x=frame.end, y=frame.height - 8, text_anchor="end", text=microseconds))
    return frame.picture(label, [*bars, *names, *ends])


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
class Level:
    """A value that a chart marks: of y a dotted line across, and above the plot its name with the value; of x a line down."""

    name: str
    value: float | int
    colour: int | None = None
    """Number of the colour; None for that of text."""


@dataclass(frozen=True)
class _Point:
    x: float
    mean: float
    low: float
    high: float


def lines(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    scale: str = "auto",
    levels: Sequence[Level] = (),
    moments: Sequence[Level] = (),
) -> Markup:
    """A chart of the series. Its title, which the page writes above it, is `y_label`, so that the axis needs none.

    `scale` of y: linear, zero (linear from 0), log, or auto (log if all values are positive and differ much). `levels`: finite
    values to compare the series with. `moments`: places of x, with their names as tooltips; those beside the series are left
    out.

    Raises ValueError if no series has a finite point, or if one has not as many x as y.
    """
    drawn = [(one, _thinned(one)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        raise ValueError("no finite point to draw")
    values = [value for _, points in drawn for point in points for value in (point.low, point.high)]
    values += [level.value for level in levels] + [0.0] * (scale == "zero")
    log = scale == "log" or (scale == "auto" and min(values) > 0 and max(values) / min(values) >= _LOG_FROM)
    ends = [point.x for _, points in drawn for point in points]
    # Names of levels stand above the plot, where no curve can be; a long one takes several rows.
    names = [row for level in levels for row in wrap(f"{_DOTS} {_named(level)}", int((_WIDTH - 60) / _LETTER))]
    room = _TEXT * len(names)
    frame = Frame(_WIDTH, 220 + room, left=46, right=14, top=12 + room, bottom=40)
    up = _Axis(min(values), max(values), frame.base, frame.top, log)
    heights = {_short(value): up(value) for value in up.ticks()}
    room = math.ceil(max(map(len, heights), default=0) * _DIGIT)
    frame = replace(frame, left=max(frame.left, room + 8), right=max(frame.right, len(_short(max(ends))) * 4))
    across = _Axis(min(ends), max(ends), frame.left, frame.end)
    whole = all(value == int(value) for one, _ in drawn for value in one.x if math.isfinite(value))
    marks = [part for text, y in heights.items() for part in (frame.rule(y), frame.y_tick(y + 4, text))]
    marks += [frame.x_tick(across(value), _short(value)) for value in across.ticks(whole)]
    for one in (moment for moment in moments if min(ends) <= moment.value <= max(ends)):
        x, kind = across(float(one.value)), _coloured("moment", one.colour)
        marks.append(mark("line", one.name, kind=kind, x1=x, y1=frame.top, x2=x, y2=frame.base))
    marks += [band for one, points in drawn for band in _band(one, points, across, up)]
    marks += [part for one, points in drawn for part in _line(one, points, across, up)]
    marks += _levels(levels, frame, up)
    for number, row in enumerate(names):
        marks.append(mark("text", x=frame.end, y=_TEXT * (number + 1), text_anchor="end", text=row))
    return frame.picture(f"{y_label} by {x_label}", [*marks, frame.x_label(x_label)])


def scatter(groups: Mapping[str, Sequence[tuple[str, float, float]]], x_label: str, y_label: str) -> Markup:
    """Dots (name, x, y) on two equal axes, and the line of equal values. Groups have the colours of their order.

    Raises ValueError without a dot.
    """
    values = [value for dots in groups.values() for _, x, y in dots for value in (x, y)]
    frame = Frame(_WIDTH, 360, left=52, right=14, top=12, bottom=40)
    across, up = (_Axis(min(values), max(values), *ends) for ends in ((frame.left, frame.end), (frame.base, frame.top)))
    marks = [part for one in up.ticks() for part in (frame.rule(up(one)), frame.y_tick(up(one) + 4, _short(one)))]
    marks += [frame.x_tick(across(one), _short(one)) for one in across.ticks()]
    marks.append(mark("line", kind="level", x1=frame.left, y1=frame.base, x2=frame.end, y2=frame.top))
    for colour, dots in enumerate(groups.values()):
        for name, x, y in dots:
            tip = f"{name}: {_short(x)} {x_label}, {_short(y)} {y_label}"
            marks.append(mark("circle", kind=f"dot s{colour % COLOURS}", cx=across(x), cy=up(y), r=4, tip=tip))
    return frame.picture(f"{y_label} by {x_label}", [*marks, frame.x_label(x_label), frame.y_label(y_label)])


def _levels(levels: Sequence[Level], frame: Frame, up: _Axis) -> Iterator[Mark]:
    """The lines across."""
    for level in levels:
        y, kind = up(level.value), _coloured("level", level.colour)
        yield mark("line", _named(level), kind=kind, x1=frame.left, y1=y, x2=frame.end, y2=y)


def _named(level: Level) -> str:
    return f"{level.name}: {level.value:.3f}"


def _coloured(kind: str, colour: int | None) -> str:
    """The class of a mark that has the colour of text, or one of the series'."""
    return kind if colour is None else f"{kind} s{colour % COLOURS}"


def _thinned(series: Series) -> list[_Point]:
    """Downsample the finite points of a series to at most `_MOST_POINTS`."""
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    parts = min(len(pairs), _MOST_POINTS)
    points = []
    for part in range(parts):
        some = pairs[part * len(pairs) // parts : (part + 1) * len(pairs) // parts]
        heights = [y for _, y in some]
        x, mean = math.fsum(x for x, _ in some) / len(some), math.fsum(heights) / len(some)
        points.append(_Point(x, mean, min(heights), max(heights)))
    return points


class _Axis:
    """Maps values to places between `start` and `end` of the picture, and knows round values between them."""

    def __init__(self, low: float, high: float, start: int, end: int, log: bool = False) -> None:
        self._start, self._end, self._log = start, end, log
        low, high = self._in(low), self._in(high)
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # one value: a line in the middle
            room = 0.5 if log else abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        share = (self._in(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self, whole: bool = False) -> list[float]:
        """About five round values, with `whole` whole numbers."""
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
        step = max(step, 1.0) if whole else step
        return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def _in(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def _out(self, value: float) -> float:
        return 10.0**value if self._log else value


def path(points: Iterable[tuple[float, float]]) -> str:
    """Places as a polyline or a polygon takes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _band(series: Series, points: Sequence[_Point], across: _Axis, up: _Axis) -> Iterator[Mark]:
    if any(point.low != point.high for point in points):
        upper = [(across(point.x), up(point.high)) for point in points]
        lower = [(across(point.x), up(point.low)) for point in reversed(points)]
        yield mark("polygon", kind=f"band s{series.colour % COLOURS}", points=path([*upper, *lower]))


def _line(series: Series, points: Sequence[_Point], across: _Axis, up: _Axis) -> Iterator[Mark]:
    """The line and, for a reader's pointer, the values at its points."""
    kind, dashes = f"s{series.colour % COLOURS}", _DASHED if series.dashed else None
    places = [(across(point.x), up(point.mean)) for point in points]
    yield mark("polyline", kind=f"line {kind}", stroke_dasharray=dashes, points=path(places))
    for point, (x, y) in zip(points, places, strict=True):
        tip = f"{series.name}: {_short(point.mean)} at {_short(point.x)}"
        yield mark("circle", kind=f"{'dot' if len(points) < 16 else 'spot'} {kind}", cx=x, cy=y, r=3, tip=tip)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:.3g}"


OURS = '<meta name="generator" content="evodsp">'
"""In the head of every page that evodsp writes."""


class Page:
    """Collects the parts of a page in their order. Every text is escaped."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._subtitle = title, subtitle
        self._parts: list[tuple[str, dict[str, Any]]] = []
        self._styles: list[Markup] = []

    def verdict(self, text: str, good: bool) -> None:
        """The result in one sentence."""
        self._add("verdict", text=text, good=good)

    def figures(self, figures: Mapping[str, str]) -> None:
        """Key figures: what each is, and its value."""
        self._add("figures", figures=figures)

    def folded(self, text: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table that a click on its heading opens."""
        self._add("folded", text=text, headings=headings, rows=rows, numeric=[False] * len(headings))

    def heading(self, text: str) -> None:
        self._add("heading", text=text)

    def note(self, text: str) -> None:
        self._add("note", text=text)

    def table(
        self, headings: Sequence[str], rows: Iterable[Sequence[str | int]], numbers: Collection[str] = ()
    ) -> None:
        """A table. Integers are written with separators. Their columns, and those headed by one of `numbers`, are aligned right
        and not broken."""
        listed = [list(row) for row in rows]
        numeric = [
            heading in numbers or (bool(listed) and isinstance(listed[0][column], int))
            for column, heading in enumerate(headings)
        ]
        texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in listed]
        self._add("table", headings=headings, rows=texts, numeric=numeric)

    def charts(self, charts: Mapping[str, Markup]) -> None:
        """Charts side by side, by their titles."""
        self._add("charts", charts=charts)

    def wide_chart(self, title: str, svg: Markup) -> None:
        """A chart as wide as the page."""
        self._add("wide_chart", title=title, svg=svg)

    def legend(self, names: Sequence[str]) -> None:
        """Add the names of the line charts' colours, in the order of their numbers."""
        self._add("legend", names=names, colours=COLOURS)

    def template(self, name: str, **values: Any) -> None:
        """A part with a template of its own, named by its path below `evodsp/`."""
        self._add("markup", made=render(name, **values))

    def style(self, css: str) -> None:
        """More rules of ours for the page's style sheet."""
        self._styles.append(Markup(css))

    def data(self, name: str, value: object) -> None:
        """JSON for scripts, in an element with the id `name`. No text in it can end the element."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        self._add("data", name=name, json=Markup(text))

    def script(self, javascript: str) -> None:
        """A script of ours, or of a third party. Raises ValueError if its text would end its element."""
        if "</script" in javascript.lower():
            raise ValueError("the script contains the end tag of its own element")
        self._add("script", javascript=Markup(javascript))

    def html(self) -> str:
        """The whole page."""
        made = render(
            "report/templates/page.html.j2",
            title=self._title,
            subtitle=self._subtitle,
            parts=self._parts,
            styles=self._styles,
            colours=COLOURS,
            ours=Markup(OURS),
            version=__version__,
        )
        return str(made)

    def _add(self, kind: str, **values: Any) -> None:
        self._parts.append((kind, values))
