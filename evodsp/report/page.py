"""A self-contained HTML page: title, key figures, notes, tables and charts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from evodsp import __version__
from evodsp.reading.quoting import escape_html
from evodsp.report.lines import COLOURS

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --soft: #57606a; --line: #d0d7de; --panel: #f6f8fa;
  --bar: #2f6fb0; --good: #1a7f37; --bad: #b42318; --s0: #2f6fb0; --s1: #c2571a; --s2: #2a8a57; --s3: #8a4fb0; --s4: #a08000;
  --s5: #c03a73; --s6: #2591a3; --s7: #6b6f76; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --panel: #161b22; --bar: #6cb0f0; --good: #57c46b; --bad: #ff7b72; --s0: #6cb0f0; --s1: #f0995c; --s2: #62c98f;
  --s3: #c296e6; --s4: #d8bd4a; --s5: #f086b0; --s6: #63cbdc; --s7: #a8adb5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 24px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
.soft, svg text { color: var(--soft); fill: var(--soft); font-size: 12px; }
.good { color: var(--good); } .bad { color: var(--bad); } .verdict { font-weight: 600; font-size: 17px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 20px 0; }
.figure { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; }
.figure b { display: block; font-size: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); gap: 16px; }
.charts h3, .wide h3 { font-size: 14px; margin: 8px 0; } svg { width: 100%; height: auto; }
.bar { fill: var(--bar); } .axis { stroke: var(--line); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .band { opacity: 0.16; stroke: none; }
.spot { opacity: 0; } .spot:hover { opacity: 1; } .key { display: inline-block; width: 14px; height: 4px; margin-right: 6px;
  vertical-align: middle; border-radius: 2px; } .legend span.run { margin-right: 18px; white-space: nowrap; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
.number + :not(.number) { padding-left: 14px; min-width: 8em; }
td { overflow-wrap: anywhere; } td:first-child:not(.number) { min-width: 8em; }
.wide { overflow-x: auto; } .wide svg { min-width: 640px; }
"""
OURS = '<meta name="generator" content="evodsp">'
"""In the head of every page that evodsp writes."""
_COLOURS = "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} .band.s{n}, .dot.s{n}, .spot.s{n} {{ fill: var(--s{n}); }} "
    f".key.s{n} {{ background: var(--s{n}); }}\n"
    for n in range(COLOURS)
)


class Page:
    """Collects the parts of a page in their order. Every text is escaped."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._parts = (
            title,
            [f"<h1>{escape_html(title)}</h1>", f'<p class="soft">{escape_html(subtitle)}</p>'],
        )
        self._styles: list[str] = []

    def verdict(self, text: str, good: bool) -> None:
        """The result in one sentence."""
        self._parts.append(
            f'<p class="verdict {"good" if good else "bad"}">{"✓" if good else "✗"} {escape_html(text)}</p>'
        )

    def figures(self, figures: Mapping[str, str]) -> None:
        """Key figures: what each is, and its value."""
        tiles = (
            f'<div class="figure"><b>{escape_html(value)}</b><span class="soft">{escape_html(name)}</span></div>'
            for name, value in figures.items()
        )
        self._parts.append(f'<div class="figures">{"".join(tiles)}</div>')

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape_html(text)}</h2>")

    def note(self, text: str) -> None:
        self._parts.append(f'<p class="soft">{escape_html(text)}</p>')

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

        def line(tag: str, cells: Sequence[str | int]) -> str:
            texts = (escape_html(f"{cell:,}" if isinstance(cell, int) else cell) for cell in cells)
            kinds = (' class="number"' if is_number else "" for is_number in numeric)
            marked = (f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))
            return f"<tr>{''.join(marked)}</tr>"

        body = "".join(line("td", row) for row in listed)
        self._parts.append(f'<div class="scroll"><table>{line("th", headings)}{body}</table></div>')

    def charts(self, charts: Mapping[str, str]) -> None:
        """Charts (`evodsp.report.charts`) side by side, by their titles."""
        drawn = (f"<div><h3>{escape_html(title)}</h3>{svg}</div>" for title, svg in charts.items())
        self._parts.append(f'<div class="charts">{"".join(drawn)}</div>')

    def wide_chart(self, title: str, svg: str) -> None:
        """A chart as wide as the page."""
        self._parts.append(f'<div class="wide"><h3>{escape_html(title)}</h3>{svg}</div>')

    def legend(self, names: Sequence[str]) -> None:
        """What the colours of the line charts (`evodsp.report.lines`) mean, in the order of their numbers."""
        keys = (
            f'<span class="run"><span class="key s{place % COLOURS}"></span>{escape_html(name)}</span>'
            for place, name in enumerate(names)
        )
        self._parts.append(f'<p class="legend">{"".join(keys)}</p>')

    def markup(self, html: str) -> None:
        """A part that is HTML already: the caller has escaped every text in it."""
        self._parts.append(html)

    def style(self, css: str) -> None:
        """More rules for the page's style sheet."""
        self._styles.append(css)

    def data(self, name: str, value: object) -> None:
        """JSON for scripts, in an element with the id `name`. No text in it can end the element."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        self._parts.append(f'<script type="application/json" id="{escape_html(name)}">{text}</script>')

    def script(self, javascript: str) -> None:
        """A script of ours, or of a third party. Raises ValueError if its text would end its element."""
        if "</script" in javascript.lower():
            raise ValueError("the script contains the end tag of its own element")
        self._parts.append(f"<script>{javascript}</script>")

    def html(self) -> str:
        """The whole page."""
        foot = f'<p class="soft">evodsp {escape_html(__version__)}</p>'
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{OURS}'
        body = "\n".join([*self._parts, foot])
        head += f"<title>{escape_html(self._title)}</title><style>{_STYLE}{_COLOURS}{''.join(self._styles)}</style>"
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
