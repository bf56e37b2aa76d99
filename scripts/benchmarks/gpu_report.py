"""The tables of gpu.md, from the rows that the parts measured (`gpu.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from .gpu_rows import Part, Row

_MOST_KERNELS = 16
"""Kernels of a stage that the report lists; gpu.csv has them all."""


def report(rows: Sequence[Row], parts: Sequence[Part], facts: dict[str, str]) -> list[str]:
    """The lines of gpu.md: a table a part."""
    lines = ["# Measured on one GPU", "", *(f"- {name}: {value}" for name, value in facts.items())]
    for part in parts:
        own = [row for row in rows if row.part == part.name]
        if own:
            table = {"checks": _worst, "profile": _kernels}.get(part.name, _by_case)
            lines += ["", f"## {part.title}", "", *table(own)]
    return lines


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [list(heads), ["---"] * len(heads), *([cell.replace("|", "/") for cell in row] for row in body)]
    return ["|" + "|".join(row) + "|" for row in rows]


def _value(row: Row) -> str:
    return (row.note or "yes") if row.value is None else f"{row.value:.4g}"


def _head(row: Row) -> str:
    return f"{row.quantity}, {row.unit}" if row.unit else row.quantity


def _by_case(rows: Sequence[Row]) -> list[str]:
    """A line a case, a column a quantity."""
    quantities = list(dict.fromkeys(_head(row) for row in rows))
    cases: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row.case}: {row.of}" if row.of else row.case
        cases.setdefault((name, row.backend, row.precision), {})[_head(row)] = _value(row)
    body = [[*key, *(cells.get(quantity, "") for quantity in quantities)] for key, cells in cases.items()]
    return _table(["case", "backend", "precision", *quantities], body)


def _worst(rows: Sequence[Row]) -> list[str]:
    """The lines of each operator's worst error over all sizes, of what failed, and of what is absent."""
    errors: dict[tuple[str, str], dict[str, float]] = {}
    passed = 0
    others = []
    for row in rows:
        if row.quantity == "error" and row.value is not None:
            cells = errors.setdefault((row.case.rpartition(": ")[2], row.backend), {})
            cells[row.precision] = max(row.value, cells.get(row.precision, 0.0))
        elif row.quantity == "self-check":
            passed += 1
        else:
            others.append([row.case, row.backend, row.precision, row.quantity, _value(row)])
    precisions = sorted({row.precision for row in rows if row.quantity == "error"})
    body = [[*key, *(f"{cells[p]:.1e}" if p in cells else "" for p in precisions)] for key, cells in errors.items()]
    lines = _table(["operator", "backend", *(f"worst error, {p}" for p in precisions)], body)
    lines += ["", f"{passed} self-checks passed."]
    return lines + (["", *_table(["case", "backend", "precision", "what", "why"], others)] if others else [])


def _kernels(rows: Sequence[Row]) -> list[str]:
    """The kernels that take longest, of each case and stage."""
    body, listed = [], dict[tuple[str, str], int]()
    for row in rows:
        key = (row.case, row.quantity)
        listed[key] = listed.get(key, -1) + (row.of != "" or row.value is None)
        if listed[key] <= _MOST_KERNELS:
            body.append([row.case, row.quantity, row.of[:60], _value(row), row.note if row.value is not None else ""])
    return _table(["case", "stage", "kernel", "us", "of it"], body)
