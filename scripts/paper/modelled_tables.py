"""What the part `modelled` says beside the paper's section 5: tables of the docs page, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import gpu_report
from .counting import CLAIMS
from .methods import method_named
from .modelled import speedup
from .part import Row, Tables

END_TO_END, STRONG, WEAK = "table4", "table6", "table7"


def draw(tables: Tables, folder: Path) -> list[Path]:
    """Figures 5 to 7 with calculated times."""
    drawn = []
    for table in (END_TO_END, STRONG, WEAK):
        rows = [row for row in tables.get("modelled", ()) if row["table"] == table]
        if rows:
            drawn.append(folder / f"modelled_{table}.png")
            figure = gpu_report.figure(rows, "tflops_per_gpu")
            figure.suptitle("calculated by evodsp's planner, not measured", fontsize=10)
            figure.savefig(drawn[-1], dpi=100)
    return drawn


def end_to_end(tables: Tables) -> tuple[list[str], list[list[Any]]]:
    """Figure 5: header and lines."""
    rows = [row for row in tables["modelled"] if row["table"] == END_TO_END]
    methods = [method for method in CLAIMS if any(row["method"] == method for row in rows)]
    lines = []
    for model, time in dict.fromkeys((row["model"], row["time"]) for row in rows):
        mine = {row["method"]: row for row in rows if (row["model"], row["time"]) == (model, time)}
        lines.append([f"{model.upper()}, {time / 256:g}M", *(_rate(mine.get(method)) for method in methods)])
    return ["TFLOP/s a GPU (exposed)", *(method_named(method).title for method in methods)], lines


def claims(tables: Tables) -> tuple[list[str], list[list[str]]]:
    """Sentences of section 5 with the calculated numbers beside them."""
    rows = tables["modelled"]

    def faster(table: str, *others: str, place: str | None = None) -> str:
        where = {"table": table} | ({} if place is None else {"place": place})
        ratios = [ratio for other in others for ratio in speedup(rows, other, **where)]
        return f"{min(ratios) - 1:.0%} to {max(ratios) - 1:.0%}" if max(ratios) < 3 else f"up to {max(ratios):.1f}x"

    def drop(method: str) -> str:
        lost = []
        for model in ("720m", "3b"):
            found = _rates(rows, table=END_TO_END, model=model, method=method)
            lost.append(1 - found[-1] / found[0])
        return f"{min(lost):.0%}, {max(lost):.0%}"

    def kept(table: str, **where: Any) -> list[float]:
        return _rates(rows, table=table, **where)

    weak = kept(WEAK, model="3b", place="inter-node", method="dsp")
    strong_720m = kept(STRONG, model="720m", place="intra-node", method="dsp")
    strong_3b = kept(STRONG, model="3b", place="intra-node", method="dsp")
    one = {model: kept(STRONG, model=model, place="intra-node", method="one_device")[0] for model in ("720m", "3b")}
    most = "more than 80.7%"
    lines = [
        ["figure 5: faster than Ulysses by", "32% to 75%", faster(END_TO_END, "ulysses")],
        ["figure 5: faster than the others", "up to 10x", faster(END_TO_END, "megatron_sp", "ring")],
        ["figure 5: FLOP/s lost from the shortest to the longest sequence, DSP", "at most 23%", drop("dsp")],
        ["the same, Ulysses", "at least 40%", drop("ulysses")],
        ["the same, Megatron-SP", "at least 40%", drop("megatron_sp")],
        ["figure 6, weak scaling: faster than Ulysses inside a node by", most, faster(WEAK, "ulysses", place="intra-node")],
        ["the same between nodes", most, faster(WEAK, "ulysses", place="inter-node")],
        ["the same, than Megatron-SP inside a node", most, faster(WEAK, "megatron_sp", place="intra-node")],
        ["figure 6: throughput a GPU lost from 8 to 64 GPUs", "15%", f"{1 - weak[-1] / weak[0]:.0%}"],
        ["figure 7, strong scaling: 720M on 8 GPUs, of linear", "linear", f"{strong_720m[-1] / one['720m']:.0%}"],
        ["figure 7: 3B on 4 GPUs, of linear", "linear", f"{strong_3b[-2] / one['3b']:.0%}"],
    ]  # fmt: skip
    return ["section 5 says of DSP", "paper", "calculated"], lines


def alone(tables: Tables) -> tuple[list[str], list[list[Any]]]:
    """Table 9: the collectives of one layer, and what the paper's times would mean."""
    rows = tables["modelled_alone"]
    sizes = list(dict.fromkeys((row["model"], row["ranks"]) for row in rows))
    lines = []
    for method in CLAIMS:
        mine = {(row["model"], row["ranks"]): row for row in rows if row["method"] == method}
        paper = mine[sizes[0]]["paper_ms"]
        cells = [f"{mine[size]['milliseconds']:.1f}" for size in sizes]
        rate = f"{mine[sizes[0]]['paper_gbps']:g}" if paper else "–"
        lines.append([method_named(method).title, *cells, paper or "–", rate])
    header = [f"{model.upper()}, N = {ranks}, ms" for model, ranks in sizes]
    first = f"{sizes[0][0].upper()}, N = {sizes[0][1]}"
    return ["collectives of a layer, 8M tokens", *header, "paper, ms", f"paper's GB/s if {first}"], lines


def _rate(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row['tflops_per_gpu']:.0f} ({row['exposed_share']:.0%})" if row["status"] == "ok" else "x"


def _rates(rows: Sequence[Row], **where: Any) -> list[float]:
    """TFLOP/s a GPU of the bars that have one, from the smallest case to the largest."""
    found = [row for row in rows if row["status"] == "ok" and all(row[name] == value for name, value in where.items())]
    return [row["tflops_per_gpu"] for row in sorted(found, key=lambda row: (row["time"], row["ranks"]))]
