"""A self-contained HTML page: title, key figures, notes, tables and charts. Its markup is in `templates/`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from evodsp.report.charts import COLOURS
from evodsp.report.rendering import render
from evodsp.version import __version__

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
        """Charts (`evodsp.report.charts`) side by side, by their titles."""
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
