"""Pages and charts."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from evodsp.report.page import Page, histogram


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
