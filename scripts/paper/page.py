"""The tables of the docs page "The paper, measured", from the results' CSV files, so that the page cannot differ from them.

A table of the page stands between `<!-- table: NAME -->` and `<!-- end -->`. `reproduce.py` writes what is between them, and a
test compares it with the committed results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from evodsp.errors import UserError

from . import modelled_tables, timing
from .counting import CLAIMS
from .memory import GIB
from .methods import method_named
from .part import Tables
from .rounds import Spread

MARKED = re.compile(r"(<!-- table: (\w+) -->)(.*?)(\n<!-- end -->)", re.DOTALL)


def updated(page: str, tables: Tables) -> str:
    """The page with all of its tables written anew. Raises UserError for a table that there is not."""

    def write(match: re.Match[str]) -> str:
        if match[2] not in WRITERS:
            raise UserError(f"docs/paper.md: there is no table '{match[2]}'; use one of {', '.join(WRITERS)}")
        return f"{match[1]}\n{WRITERS[match[2]](tables)}{match[4]}"

    return MARKED.sub(write, page)


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def volumes(tables: Tables) -> str:
    """Tables 3 and 9 at N = 8; the counts at other N and sizes differ only by N."""
    rows = []
    for method, claim in CLAIMS.items():
        [row, *_] = [row for row in tables["volumes"] if (row["method"], row["ranks"]) == (method, 8)]
        formula = f"{claim.times_m}M/N" if claim.over_n else f"{claim.times_m}M"
        phases = [f"{row[f'{phase}_m']}" for phase in ("forward", "backward", "recompute", "training")]
        calls = f"{row['forward_calls']}"
        paper = {"megatron_sp": "4 pairs", "ring": "–"}.get(method, sum(claim.collectives.values()))
        rows.append([method_named(method).title, f"{formula} = {row['paper_forward_m']}", *phases, paper, calls])
    header = [
        "method",
        "paper, forward",
        "counted, forward",
        "backward",
        "recomputed",
        "training",
        "paper, collectives",
        "counted",
    ]
    return markdown(header, rows)


def smallest(tables: Tables) -> str:
    """Table 4: the paper's sequence-parallel sizes, and the smallest ones that fit here."""
    rows = tables["memory_smallest"]
    sizes = list(dict.fromkeys((row["model"], row["tokens"]) for row in rows))
    lines = []
    for model, tokens in sizes:
        cells = []
        for method in CLAIMS:
            [row] = [r for r in rows if (r["model"], r["tokens"], r["method"]) == (model, tokens, method)]
            mine = f"**{row['ranks']}** ({row['bytes'] / GIB:.0f} GiB)" if isinstance(row["ranks"], int) else "**x**"
            cells.append(f"{row['paper_ranks'] or '–'} / {mine}")
        lines.append([f"{model.upper()}, {tokens / 2**20:g}M", *cells])
    return markdown(["model, tokens", *(method_named(method).title for method in CLAIMS)], lines)


def layer(tables: Tables) -> str:
    """What one layer keeps, in M."""
    rows = tables["memory_layer"]
    ranks = sorted({row["ranks"] for row in rows})
    lines = []
    for method in CLAIMS:
        found = {row["ranks"]: row["saved_m"] for row in rows if row["method"] == method}
        lines.append([method_named(method).title, *(f"{found[n]:.2f}" for n in ranks)])
    return markdown(["kept by one layer, in M", *(f"N = {n}" for n in ranks)], lines)


def times(tables: Tables) -> str:
    """Times over DSP's: a step, and collectives alone."""
    lines = []
    for method in CLAIMS:
        cells = []
        for name in ("time_steps", "time_collectives"):
            rows = tables[name]
            for ranks in sorted({row["ranks"] for row in rows}):
                found = Spread.of(timing.ratios(rows, ranks, method))
                cells.append(f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})")
        paper = timing.TABLE_9_MS.get(method)
        cells.append(f"{paper / timing.TABLE_9_MS['dsp']:.1f}" if paper else "–")
        lines.append([method_named(method).title, *cells])
    ranks = sorted({row["ranks"] for row in tables["time_steps"]})
    header = [f"{what}, N = {n}" for what in ("training step", "collectives alone") for n in ranks]
    return markdown(["time over DSP's", *header, "the paper's collectives, table 9"], lines)


def runs(tables: Tables) -> str:
    """When and how each part was measured."""
    names = ("counts", "memory", "time", "scaling", "modelled")
    made = {row["part"]: row for row in tables["runs"]}
    lines = [
        [f"`{name}`", row["date"], f"{row['seconds']} s", f"{row['load_before']}, {row['load_after']}", row["torch"]]
        for name in names
        if (row := made.get(name))
    ]
    return markdown(["part", "measured", "took", "load before, after", "PyTorch"], lines)


WRITERS: dict[str, Callable[[Tables], str]] = {
    "volumes": volumes,
    "smallest": smallest,
    "layer": layer,
    "times": times,
    "modelled_end_to_end": lambda tables: markdown(*modelled_tables.end_to_end(tables)),
    "modelled_claims": lambda tables: markdown(*modelled_tables.claims(tables)),
    "modelled_alone": lambda tables: markdown(*modelled_tables.alone(tables)),
    "runs": runs,
}
"""The writer of each table, by the table's name on the page."""
