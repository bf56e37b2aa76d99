"""Pages and charts: points where their values are, readable axes, nothing outside of the picture, no text as markup."""

from __future__ import annotations

import json
import math
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jinja2
import numpy as np
import pytest

import evodsp
from evodsp.inference.pages.residue_charts import strip
from evodsp.report.page import Level, Page, Series, histogram, lines, mark, picture, render, stacked, timeline
from evodsp.report.run_command import page
from evodsp.report.runs import read_runs
from tests.builders.browser import NEEDS_CHROMIUM, cut
from tests.builders.hostile import EVIL, SHOWN
from tests.builders.run_folder import make_run, write_bar


def drawing(series: list[Series], scale: str = "auto") -> ElementTree.Element:
    return ElementTree.fromstring(lines(series, "step", "loss", scale))


def path(svg: ElementTree.Element, number: int = 0) -> list[tuple[float, float]]:
    """Points of a line of the picture."""
    found = [one for one in svg if one.tag == "polyline"][number]
    points = (found.get("points") or "").split()
    return [(float(x), float(y)) for x, y in (point.split(",") for point in points)]


def test_a_line_goes_through_its_points() -> None:
    """Catches a picture upside down, an axis that starts elsewhere, and two series of different scales."""
    svg = drawing([Series("a", [0, 5, 10], [0.0, 2.0, 4.0]), Series("b", [10], [1.0], 1)])
    (x0, y0), (x1, y1), (x2, y2) = path(svg)
    assert x0 < x1 < x2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y0 > y1 > y2  # SVG's y grows downwards
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert path(svg, 1) == [(x2, pytest.approx(y0 + (y2 - y0) / 4, abs=0.1))]
    ticks = {one.text: float(one.get("y") or 0) for one in svg if one.tag == "text" and one.get("text-anchor") == "end"}
    assert ticks["0"] == pytest.approx(y0 + 4, abs=0.1)
    assert ticks["4"] == pytest.approx(y2 + 4, abs=0.1)


def test_the_axes_are_named() -> None:
    """Catches a chart whose axis has no name, and a name that runs over its numbers because it is not turned."""
    chart = ElementTree.fromstring(histogram([0.0, 1.0, 2.0], [3, 4], "rows", "chains"))
    named = {one.text: one for one in chart if one.tag == "text"}
    assert "rows" in named
    assert "rotate(-90)" in named["chains"].get("transform", "")


def test_intervals_lie_at_their_times() -> None:
    """Catches an interval of a time line drawn left of the picture, and lanes of different scales."""
    lanes = {"device": [(1.0, 2.0, "a"), (3.0, 5.0, "b")], "link": [(2.0, 3.0, "c")]}
    bars = [one for one in ElementTree.fromstring(timeline(lanes, "block")) if one.tag == "rect"]
    found = [(float(bar.get("x") or 0), float(bar.get("width") or 0)) for bar in bars]
    assert found == [pytest.approx(one, abs=0.1) for one in ((60, 212.5), (485, 425), (272.5, 212.5))]


@pytest.mark.parametrize("value", [0.5, 4.0, 9.0, -1.0])
def test_a_level_lies_at_its_value(value: float) -> None:
    """Catches a line at another height than the values beside it, and a line or a name outside of the picture."""
    level, series = Level("copying", value), Series("a", [0, 1, 2], [0.0, 4.0, value])
    for drawn in ([series], [Series("a", [0, 1], [0.0, 4.0])]):
        svg = ElementTree.fromstring(lines(drawn, "step", "loss", "linear", [level]))
        (line,) = (one for one in svg if one.get("class") == "level")
        height = float(line.get("y1") or 0)
        assert line.get("y1") == line.get("y2")
        assert drawn != [series] or height == pytest.approx(path(svg)[2][1], abs=0.1)
        (name,) = (one for one in svg if one.text == f"··· copying: {value:.3f}")
        assert 25 <= height <= 200
        top = min(y for _, y in [*path(svg), (0.0, height)])
        assert 10 <= float(name.get("y") or 0) <= top - 8, "the name covers the curve, or its own line"


def test_long_names_of_levels_are_read_whole() -> None:
    """Catches a name that begins left of the picture, a word that is lost, and names of equal levels on one another."""
    names = [f"{run}: copying the nearest training chain (1 of 3 chains)" for run in ("first", "second")]
    for value in (0.2, 0.5, 1.0):
        levels = [Level(name, value, colour) for colour, name in enumerate(names)]
        svg = ElementTree.fromstring(lines([Series("a", [0, 1], [0.0, 1.0])], "step", "loss", "linear", levels))
        rows = [one for one in svg if one.tag == "text" and one.get("x") == "386"]
        assert " ".join(one.text or "" for one in rows) == " ".join(f"··· {name}: {value:.3f}" for name in names)
        assert all(7 * len(one.text or "") <= 386 for one in rows)
        heights = [float(one.get("y") or 0) for one in rows]
        assert all(low - high >= 12 for high, low in zip(sorted(heights), sorted(heights)[1:], strict=False))
        assert min(heights) >= 10


def test_values_that_differ_much_have_a_logarithmic_axis() -> None:
    """Catches a learning rate that is a flat line after its warm-up, and a logarithm of zero."""
    y = [1e-5, 1e-4, 1e-3]
    heights = [height for _, height in path(drawing([Series("a", [0, 1, 2], y)]))]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    heights = [height for _, height in path(drawing([Series("a", [0, 1, 2], y)], scale="linear"))]
    assert heights[0] - heights[1] < (heights[1] - heights[2]) / 5
    assert path(drawing([Series("a", [0, 1], [0.0, 1.0])]))


def test_many_points_become_a_mean_and_a_band() -> None:
    """Catches a page of megabytes, and a spike that disappears in a mean."""
    y = [1.0] * 1000
    y[506] = 9.0
    svg = drawing([Series("a", list(range(1000)), y)], scale="linear")
    assert len(path(svg)) <= 100
    (band,) = (one for one in svg if one.tag == "polygon")
    corners = [float(point.split(",")[1]) for point in (band.get("points") or "").split()]
    lowest_line = max(height for _, height in path(svg))
    assert lowest_line - min(corners) > 150  # the spike reaches from the bottom to the top
    assert not [one for one in drawing([Series("a", [0, 1], [1.0, 2.0])]) if one.tag == "polygon"]


@pytest.mark.parametrize("y", [[3.0, 3.0], [0.0, 0.0], [-1e-12, 1e12], [1e-30, 2e-30], [math.nan, 2.0]])
def test_any_finite_values_can_be_drawn(y: list[float]) -> None:
    """Catches a division by the range of a constant curve, and NaN in the picture."""
    text = lines([Series("a", [0, 1], y)], "step", "loss")
    numbers = [float(value) for value in re.findall(r'c?[xy]\d?="(-?[\d.]+)"', text)]
    assert "nan" not in text
    assert all(0 <= value <= 460 for value in numbers)


def test_series_that_cannot_be_drawn_are_errors() -> None:
    with pytest.raises(ValueError, match="no finite point"):
        lines([Series("a", [0], [math.nan])], "step", "loss")
    with pytest.raises(ValueError, match="zip"):
        lines([Series("a", [0, 1], [1.0])], "step", "loss")


def test_names_are_escaped() -> None:
    assert "<i>" not in lines([Series("<i>", [0], [1.0])], "<i>", "<i>")


@pytest.mark.parametrize(
    ("x", "y"), [([9, 199], [0.0001, 0.004]), ([0, 100_000], [-1e-9, 3e-9]), ([1, 2], [1e4, 9e4]), ([0, 1], [0.0, 0.0])]
)
def test_no_label_is_cut(x: list[int], y: list[float]) -> None:
    """Catches labels that begin left of the picture, or end right of it: a digit of 12 px is up to 7.7 px wide."""
    svg = drawing([Series("a", x, y)])
    shares = {"start": 0.0, "middle": 0.5, "end": 1.0}
    texts = [one for one in svg if one.tag == "text"]
    assert len(texts) > 4
    for one in texts:
        width = 7.7 * len(one.text or "")
        left = float(one.get("x") or 0) - width * shares[one.get("text-anchor") or "start"]
        assert left >= 0, one.text
        assert left + width <= 460, one.text


def test_whole_numbers_have_whole_ticks() -> None:
    """Catches a plan for 1.2 ranks, and two ticks of the same name."""
    for x, expected in (([1, 2], ["1", "2"]), ([0.0, 0.5], ["0", "0.1", "0.2", "0.3", "0.4", "0.5"])):
        svg = drawing([Series("a", x, [1.0, 2.0])])
        assert [one.text for one in svg if one.get("text-anchor") == "middle"] == [*expected, "step"]


def test_bars_have_their_values_where_there_is_room() -> None:
    """Catches bars without a number, a number on a narrower part, a sum inside of the bar, and a limit elsewhere."""
    parts = {"weights": [0.5, 0.25], "activations": [70.0, 3.0]}
    svg = ElementTree.fromstring(stacked(["128 x 1", "64 x 2"], parts, Level("usable", 40.0)))
    bars = [one for one in svg if one.tag == "rect"]
    texts = {one.text or "": one for one in svg if one.tag == "text"}
    assert [one.text for one in svg if one.get("class") == "inside"] == ["70.0"]
    assert [bar[0].text for bar in bars] == [
        "weights: 0.50",
        "activations: 70.00",
        "weights: 0.25",
        "activations: 3.00",
    ]
    ends = [float(bar.get("x") or 0) + float(bar.get("width") or 0) for bar in bars]
    assert float(bars[1].get("x") or 0) == pytest.approx(ends[0], abs=0.1)
    for end, total in ((ends[1], "70.5"), (ends[3], "3.2")):
        assert end < float(texts[total].get("x") or 0)
    begin, width = float(bars[0].get("x") or 0), float((svg.get("viewBox") or "").split()[2])
    (line,) = (one for one in svg if one.get("class") == "level")
    assert float(line.get("x1") or 0) - begin == pytest.approx((ends[1] - begin) * 40 / 70.5, abs=0.2)
    shares = {"start": 0.0, "middle": 0.5, "end": 1.0}
    for text, one in texts.items():
        left = float(one.get("x") or 0) - 7 * len(text) * shares[one.get("text-anchor") or "start"]
        assert 0 <= left <= left + 7 * len(text) <= width, text
    assert "usable: 40.0" in texts
    near = ElementTree.fromstring(stacked(["1"], {"weights": [90.0]}, Level("usable", 1.0)))
    (name,) = (one for one in near if one.text == "usable: 1.0")
    assert name.get("text-anchor") == "start", "it would begin left of the picture"


def test_bars_that_cannot_be_drawn_are_errors() -> None:
    for values in ([1.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="one value of at least 0"):
            stacked(["a", "b"], {"weights": values})


def test_every_text_is_escaped() -> None:
    """Catches a chain's name or an error message that becomes markup."""
    bad = "<i>&\"'"
    page = Page(bad, bad)
    page.verdict(bad, good=False)
    page.figures({bad: bad})
    page.heading(bad)
    page.note(bad)
    page.table([bad, "n"], [(bad, 1234)])
    page.charts({bad: histogram([0.0, 1.0], [3], bad, bad)})
    html = page.html()
    assert "<i>" not in html
    assert html.count("&lt;i&gt;&amp;") == 15
    assert '<td class="number">1,234</td>' in html


def test_bars_are_as_high_as_their_counts() -> None:
    """Catches bars drawn downwards, of a wrong scale, or outside of the picture."""
    drawing = ElementTree.fromstring(histogram([0.0, 10.0, 20.0, 30.0], [1, 4, 0], "residues", "chains"))
    bars = [bar for bar in drawing if bar.get("class") == "bar"]
    heights = [float(bar.get("height", "")) for bar in bars]
    assert heights[0] == pytest.approx(heights[1] / 4)
    assert heights[2] == 0
    bottoms = {round(float(bar.get("y", "")) + float(bar.get("height", "")), 1) for bar in bars}
    assert len(bottoms) == 1
    width, height = map(float, (drawing.get("viewBox") or "").split()[2:])
    assert all(0 <= float(bar.get("x", "")) < width and 0 <= float(bar.get("y", "")) <= height for bar in bars)
    assert [bar[0].text for bar in bars] == ["0 to 10: 1", "10 to 20: 4", "20 to 30: 0"]
    with pytest.raises(ValueError, match="2 edges for 2 bars"):
        histogram([0.0, 1.0], [1, 2], "", "")


def test_no_line_ends_within_an_option() -> None:
    """Catches "--" at the end of a line, and an option that is no longer the command's text."""
    page = Page("A plan")
    page.verdict("take --parallel.sequence 2 <b>", good=True)
    page.note("plan with --cuda_graphs")
    html = page.html()
    assert 'take <span class="option">--parallel.sequence</span> 2 &lt;b&gt;</p>' in html
    assert 'plan with <span class="option">--cuda_graphs</span></p>' in html


def test_a_page_needs_no_network_and_follows_the_screen() -> None:
    """Catches a page that is blank without the network, or black on black."""
    html = Page("t").html()
    assert not re.search(r"https?:|<script|<link|@import", html)
    assert "prefers-color-scheme: dark" in html


def test_data_and_scripts_stay_in_their_elements() -> None:
    """Catches a text in the data that ends its element, or is another one when it is read back."""
    page = Page("A page")
    value = {"name": "</script><b>", "numbers": [1, 2.5]}
    page.data("it", value)
    found = re.findall(r'<script type="application/json" id="it">(.*?)</script>', page.html())
    assert [json.loads(text) for text in found] == [value]
    with pytest.raises(ValueError, match="end tag"):
        page.script("'</SCRIPT>'")


PACKAGE = Path(evodsp.__file__).parent
TEMPLATES = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.j2"))]
BAD = '"><script>alert(1)</script>\' onclick="x'


def test_text_in_the_place_of_markup_is_escaped() -> None:
    """Catches a template that trusts what it is given: a name that ends an attribute, and text where a chart should be."""
    page = Page("t")
    page.charts({BAD: picture(1, 1, BAD, [])})
    page.template("inference/pages/coverage.html.j2", chart=BAD)
    button = {"number": 0, "name": BAD, "mean_plddt": BAD}
    page.template("inference/pages/seeds.html.j2", buttons=[button])
    row = {"target": BAD, "page": BAD}
    page.template("inference/pages/targets.html.j2", columns={"target": True}, rows=[row], bands=[(BAD, BAD, BAD)])
    html = page.html()
    assert "<script" not in html
    assert not re.search(r'" onclick="', html)
    assert html.count("&lt;script&gt;") == 10


def test_a_picture_is_well_formed_whatever_it_names() -> None:
    """Catches labels, tips, texts and attributes that end their element, and control characters in any of them."""
    marks = [mark("rect", BAD, x=1.25, kind=BAD), mark("text", EVIL, EVIL, hidden=None)]
    svg = ElementTree.fromstring(picture(3, 2, BAD, marks, stroke_width=2))
    assert (svg.get("aria-label"), svg.get("stroke-width"), svg.get("viewBox")) == (BAD, "2", "0 0 3 2")
    rect, text = svg
    assert (rect.attrib, rect[0].text) == ({"class": BAD, "x": "1.2"}, BAD)
    assert (text.attrib, text[0].text, text[0].tail) == ({}, SHOWN, SHOWN)


def test_a_strip_has_a_piece_for_each_band() -> None:
    """Catches a colour of a neighbouring residue, a missing last piece, and an edge that belongs to the lower band."""
    svg = ElementTree.fromstring(strip(np.array([95.0, 90.0, 89.9, 10.0]), "x"))
    pieces = [(piece.get("x"), piece.get("width"), piece.get("fill")) for piece in svg]
    assert pieces == [("0", "2", "#0053d6"), ("2", "1", "#65cbf3"), ("3", "1", "#ff7d45")]


def test_no_template_and_no_module_trusts_a_text() -> None:
    """Catches a filter that switches escaping off, and markup that Python makes of its own."""
    assert len(TEMPLATES) > 8
    for name in TEMPLATES:
        assert not re.search(r"\|\s*safe|autoescape", (PACKAGE / name).read_text()), name
    makes = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "Markup(" in path.read_text()}
    assert makes == {"report/page.py"}


def test_a_wheel_has_the_templates() -> None:
    """Catches a template in a folder that only a checkout has."""
    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "evodsp"
    ]
    packed = {path.relative_to(PACKAGE).as_posix() for pattern in listed for path in PACKAGE.glob(pattern)}
    assert {*TEMPLATES, "report/templates/page.css"} <= packed


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    """Catches a value of another name that would be an empty place on the page."""
    with pytest.raises(jinja2.UndefinedError, match="chart"):
        render("inference/pages/coverage.html.j2", charts="")


def every_part() -> Page:
    """Each kind of part, with long names and many columns, as plans have them."""
    made = Page("Plan for 512 x H100 SXM", "128 x 768, extra MSA 1024, 10,000,000,000 samples in batches of 128")
    made.verdict("take --parallel.sequence 8 --model.evoformer.checkpoint 4 --data.train.max_templates 4", good=True)
    made.figures({"GPU-hours": "28,160,173", "of a pass is exposed communication": "6%", "steps": "1,000,000,000"})
    made.table([f"column {n}" for n in range(11)], [["28,160,173"] * 11], [f"column {n}" for n in range(11)])
    meshes, x = [f"{512 >> n} x {1 << n}" for n in range(10)], [2**n for n in range(10)]
    memory = {part: [0.3 * 3**part] * 10 for part in range(6)}
    made.charts(
        {
            "Memory": stacked(
                meshes, {f"part {part}": values for part, values in memory.items()}, Level("usable", 73.6)
            ),
            "Efficiency": lines([Series("efficiency", x, [1 / n for n in x])], "ranks of a sample", "efficiency"),
            "Mean pLDDT": histogram(
                [5.0 * n for n in range(21)], [n * 1000 for n in range(20)], "mean pLDDT", "targets"
            ),
        }
    )
    made.legend([f"a_run_with_a_name_that_is_{n}_times_as_long_as_any" for n in range(3)])
    made.wide_chart(
        "Time line", timeline({"device": [(0.0, 1e-3, "compute")], "link": [(0.0, 5e-4, "all-to-all")]}, "block")
    )
    return made


@NEEDS_CHROMIUM
def test_nothing_is_cut_in_a_narrow_window(tmp_path: Path) -> None:
    """Catches a table without a box that scrolls, charts wider than the window, and labels that are cut or on one another."""
    runs = [make_run(tmp_path / f"a_run_with_a_name_that_is_{n}_times_as_long_as_any", seed=n) for n in (1, 2)]
    for chains, run in enumerate(runs, start=1):
        write_bar(run, 0.7484, chains)
    pages = {"report": page(read_runs(runs)), "parts": every_part()}
    assert not cut({name: one.html() for name, one in pages.items()}, 400, tmp_path)
