"""What `gpu.py` measured, as a table, a text and the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from evodsp.errors import UserError
from evodsp.files import output_errors, write_text
from scripts.benchmarks.tables import write_csv

from .methods import METHODS, method_named
from .part import Row
from .plots import COLOURS, GIB, MODELS, legend, panels

COLUMNS = ("table", "place", "model", "time", "batch", "sequence", "data", "ranks", "method", "status", "reason")


def report(folder: Path) -> str:
    """Write results.csv, results.txt and a PNG for each experiment; return the text. Raises UserError without any result."""
    rows = [_row(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    if not rows:
        raise UserError(f"--output {folder}: has no results; run scripts/paper/gpu.sh first")
    rows.sort(
        key=lambda row: (row["table"], row["model"], row["time"], row["ranks"], list(METHODS).index(row["method"]))
    )
    text = as_text(rows)
    with output_errors(folder):
        write_csv(folder / "results.csv", rows)
        write_text(folder / "results.txt", text)
        for table in sorted({row["table"] for row in rows}):
            found = [row for row in rows if row["table"] == table]
            quantity = "milliseconds" if table == "figure8" else "tflops_per_gpu"
            figure(found, quantity).savefig(folder / f"{table}.png", dpi=100)
            if table == "table7" and any(row["allocated_gib"] for row in found):
                figure(found, "allocated_gib").savefig(folder / "table7_memory.png", dpi=100)
    return text


def _row(result: dict[str, Any]) -> Row:
    """A line of the table from a case's JSON file."""
    values = result | result["workload"]
    row: Row = {name: values.get(name, "") for name in COLUMNS}
    ok = result["status"] == "ok"
    row["milliseconds"] = round(1000 * median(result["seconds"]), 3) if ok else ""
    for name, digits in (("tokens_per_second", 0), ("tflops_per_gpu", 3)):
        row[name] = round(result[name], digits) if ok else ""
    allocated, reserved = result.get("allocated_bytes"), result.get("reserved_bytes")
    row["allocated_gib"] = round(allocated / GIB, 2) if allocated else ""
    row["cached_gib"] = round((reserved - allocated) / GIB, 2) if allocated and reserved else ""
    return row | {"device": result.get("device", ""), "date": result["date"]}


def as_text(rows: Sequence[Row]) -> str:
    """The table, and what stopped the cases without numbers."""
    lines = [
        f"{'':8}{'model':6}{'time':>5}{'batch':>6}{'ranks':>6}{'mesh':>7}  {'method':18}"
        f"{'ms':>10}{'tokens/s':>12}{'TFLOP/s a GPU':>15}{'allocated GiB':>15}{'cached GiB':>12}"
    ]
    for row in rows:
        start = (
            f"{row['table']:8}{row['model']:6}{row['time']:>5}{row['batch']:>6}{row['ranks']:>6}"
            f"{row['sequence']:>4} x{row['data']:>2}  {method_named(row['method']).title:18}"
        )
        if row["status"] == "x":
            lines.append(f"{start}{'x':>10}  {row['reason']}")
        else:
            lines.append(
                f"{start}{row['milliseconds']:>10}{row['tokens_per_second']:>12.0f}{row['tflops_per_gpu']:>15}"
                f"{row['allocated_gib']:>15}{row['cached_gib']:>12}"
            )
    return "\n".join(lines) + "\n"


def figure(rows: Sequence[Row], quantity: str) -> Any:
    """Bars by model, place and number of GPUs, as in the paper's figures; 'x' where there is no number."""
    groups = list(dict.fromkeys((row["model"], row["place"]) for row in rows))
    drawing, axes = panels(len(groups), (4.5 * len(groups), 4))
    for panel, (model, place) in zip(axes[0], groups, strict=True):
        mine = [row for row in rows if (row["model"], row["place"]) == (model, place)]
        places = sorted({(row["ranks"], row["time"]) for row in mine})
        for number, method in enumerate(METHODS):
            for row in (row for row in mine if row["method"] == method):
                x = places.index((row["ranks"], row["time"])) + ((number - 3) * 0.16 if number else 0)
                if row[quantity] == "":
                    panel.text(x, 0, "x", ha="center", va="bottom", color=COLOURS[method])
                    continue
                panel.bar(x, row[quantity], 0.15, color=COLOURS[method])
                if quantity == "allocated_gib" and row["cached_gib"] != "":
                    panel.bar(x, row["cached_gib"], 0.15, bottom=row[quantity], color=COLOURS[method], alpha=0.4)
            panel.bar(0, 0, color=COLOURS[method], label=method_named(method).title)
        panel.set_xticks(range(len(places)), [f"{ranks} GPU{'s' * (ranks > 1)}\nT = {time}" for ranks, time in places])
        panel.set_ylabel(TITLES[quantity])
        panel.set_title(f"{MODELS.get(model, model)} {place}", fontsize=10, loc="left")
    legend(drawing, axes[0][0], len(METHODS) if len(groups) > 2 else len(METHODS) // 2)
    return drawing


TITLES = {
    "milliseconds": "ms",
    "tflops_per_gpu": "TFLOP/s per GPU",
    "allocated_gib": "GiB allocated (pale: cached) per GPU",
}
