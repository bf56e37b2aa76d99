"""The page of `evodsp selftest --scaling`: every part's rows as tables, and charts of what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from evodsp.report.page import Page, Series, lines

Row = Mapping[str, Any]

_CHARTS = {
    "speed": (("between", "ranks"), "collective", "bytes", ("GB/s",)),
    "scaling": (("residues",), "how", "ranks", ("ms", "planned ms")),
}
"""By part: a chart for each value of the first columns, a line for each of the next one, x, and y; a second y is dashed."""


def page(report: Mapping[str, Any]) -> Page:
    """The page of a report, finished or not."""
    parts: Mapping[str, Any] = report["parts"]
    states = [part["state"] for part in parts.values()]
    made = Page(f"evodsp on {report['ranks']} ranks", f"evodsp {report['evodsp']}, begun {report['begun']}")
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    made.verdict(f"{len(states)} parts: {text}", set(states) == {"ok"})
    rows = [
        (name, one["state"], f"{one.get('seconds', 0):.0f}", "; ".join(one["problems"])) for name, one in parts.items()
    ]
    made.table(("part", "result", "seconds", "problems"), rows, {"seconds"})
    for name, part in parts.items():
        if part["rows"]:
            made.heading(name)
        if name in _CHARTS:
            per, by, x, (y, *planned) = _CHARTS[name]
            drawn = [row for row in part["rows"] if y in row]
            made.charts({title: _chart(own, by, x, (y, *planned)) for title, own in _grouped(drawn, per).items()})
            made.legend(list(_grouped(drawn, (by,))))
        for columns, own in _grouped_by_columns(part["rows"]).items():
            numbers = [column for column in columns if not isinstance(own[0][column], str | bool)]
            made.table(columns, ([_cell(row[column]) for column in columns] for row in own), numbers)
    return made


def _chart(rows: Sequence[Row], by: str, x: str, ys: Sequence[str]) -> Markup:
    """Lines of the first of `ys`, and dashed ones of the second."""
    powers = x == "bytes"
    series = [
        Series(
            name, [math.log2(row[x]) if powers else row[x] for row in own], [row[y] for row in own], colour, number > 0
        )
        for number, y in enumerate(ys)
        for colour, (name, own) in enumerate(_grouped(sorted(rows, key=lambda row: row[x]), (by,)).items())
    ]
    dashed = f" (dashed: {ys[1]})" if len(ys) > 1 else ""
    return lines(series, f"log2 of {x}" if powers else x, ys[0] + dashed)


def _cell(value: object) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """Rows by what these columns say."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        named = (f"{row[key]:,} {key}" if isinstance(row[key], int) else str(row[key]) for key in keys)
        groups.setdefault(", ".join(named), []).append(row)
    return groups


def _grouped_by_columns(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows that have the same columns are one table."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tables.setdefault(tuple(row), []).append(row)
    return tables
