"""Templates: what is not markup of ours stays text, in elements, in attributes and in pictures."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jinja2
import numpy as np
import pytest

import evodsp
from evodsp.inference.pages.residue_charts import strip
from evodsp.report.page import Page, mark, picture, render
from tests.builders.hostile import EVIL, SHOWN

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
