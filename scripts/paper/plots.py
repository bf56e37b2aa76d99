"""Part `plots`: the paper's figures, drawn from the tables of a results folder. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from evodsp.errors import UserError

from . import timing
from .counting import CLAIMS
from .memory import CAPACITY, GIB
from .methods import method_named
from .part import Tables
from .rounds import Spread

COLOURS = {
    "one_device": "#7f7f7f",
    "dsp": "#d62728",
    "ulysses": "#1f77b4",
    "megatron_sp": "#2ca02c",
    "megatron_tp": "#9467bd",
    "ring": "#ff7f0e",
}
MARKERS = {"dsp": "o", "ulysses": "s", "megatron_sp": "^", "megatron_tp": "v", "ring": "D"}
TOP = 100
"""GiB at which the memory figure ends."""
MODELS = {"720m": "720M", "3b": "3B"}


def draw(tables: Tables, folder: Path) -> list[Path]:
    """Draw every figure whose tables are there, and return the files. Raises UserError without matplotlib."""
    figures: dict[str, tuple[str, Callable[[Tables], Any]]] = {
        "volumes": ("volumes", volumes_figure),
        "memory": ("memory_weak", memory_figure),
        "time": ("time_steps", time_figure),
    }
    drawn = []
    for name, (table, figure) in figures.items():
        if tables.get(table):
            drawn.append(folder / f"{name}.png")
            figure(tables).savefig(drawn[-1], dpi=100)
    return drawn


def panels(columns: int, size: tuple[float, float], rows: int = 1) -> tuple[Any, Any]:
    """A figure without a window, and its panels as rows and columns. Raises UserError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib, which is not installed; run: pip install 'evodsp[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, axes


def _ranks_axis(panel: Any, ranks: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ranks), [str(n) for n in ranks])
    panel.minorticks_off()
    panel.set_xlabel("ranks N")


def legend(figure: Any, panel: Any, columns: int) -> None:
    """Put the legend of one panel below the figure."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def volumes_figure(tables: Tables) -> Any:
    """Table 3 against N: the forward pass beside the paper's formulas, and all of training."""
    figure, [[forward, training]] = panels(2, (10, 4.6))
    first = tables["volumes"][0]
    rows = [row for row in tables["volumes"] if (row["model"], row["tokens"]) == (first["model"], first["tokens"])]
    ranks = sorted({row["ranks"] for row in rows})
    for panel, column, title in (
        (forward, "forward_m", "forward pass (black: the paper's table 3)"),
        (training, "training_m", "training: forward, backward, recomputation"),
    ):
        for method in CLAIMS:
            counted = [row for row in rows if row["method"] == method and not row["refused"]]
            panel.plot(
                [row["ranks"] for row in counted],
                [float(Fraction(str(row[column]))) for row in counted],
                label=method_named(method).title,
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=8 if method != "megatron_tp" else 5,
                markerfacecolor="none" if method == "megatron_sp" else COLOURS[method],
            )
            if panel is forward:
                claimed = [float(CLAIMS[method].volume(n)) for n in ranks]
                panel.plot(ranks, claimed, color="black", linewidth=0.8, linestyle=":", zorder=3)
        panel.set_yscale("log", base=2)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_ylabel("volume per layer and rank, in M")
        panel.grid(alpha=0.25)
        panel.yaxis.set_major_formatter(lambda value, _: str(Fraction(value).limit_denominator(64)))
        _ranks_axis(panel, ranks)
    legend(figure, forward, 5)
    return figure


def memory_figure(tables: Tables) -> Any:
    """Figure 9: memory at the sizes of weak scaling."""
    rows = tables["memory_weak"]
    groups = list(dict.fromkeys((row["model"], row["time"]) for row in rows))
    figure, axes = panels(2, (10, 3.5 * ((len(groups) + 1) // 2)), rows=(len(groups) + 1) // 2)
    for panel, (model, time) in zip(axes.flat, groups, strict=False):
        mine = [row for row in rows if (row["model"], row["time"]) == (model, time)]
        ranks = sorted({row["ranks"] for row in mine})
        for number, method in enumerate(("one_device", *CLAIMS)):
            panel.bar(0, 0, color=COLOURS[method], label=method_named(method).title)
            for row in (row for row in mine if row["method"] == method):
                x = ranks.index(row["ranks"]) + ((number - 3) * 0.16 if number else 0)
                if row["refused"]:
                    panel.text(x, 0, "x", ha="center", va="bottom", color=COLOURS[method])
                    continue
                peak, states = row["peak_bytes"] / GIB, row["states_bytes"] / GIB
                panel.bar(x, peak, 0.15, color=COLOURS[method])
                panel.bar(x, states, 0.15, bottom=peak, color=COLOURS[method], alpha=0.4)
                if peak + states > TOP:
                    panel.text(x, TOP - 2, f"{peak + states:.0f}", ha="center", va="top", rotation=90, color="white")
        panel.set_ylim(0, TOP)
        panel.axhline(CAPACITY / GIB, color="black", linewidth=0.8, linestyle="--")
        panel.set_title(f"{MODELS.get(model, model)}, {time} x 4096 tokens a sample", fontsize=10, loc="left")
        panel.set_xticks(range(len(ranks)), [f"{n} rank{'s' * (n > 1)}" for n in ranks])
        panel.set_ylabel("GiB per rank")
    legend(figure, axes[0][0], 6)
    figure.suptitle(
        "solid: activations at their peak; pale: weights, gradients, optimizer; dashed: an H100; white: height of a cut bar",
        fontsize=10,
    )
    return figure


def time_figure(tables: Tables) -> Any:
    """Times of methods over DSP's, with quartiles: a training step, and the collectives of a layer alone."""
    figure, [axes] = panels(2, (10, 4.2))
    for panel, name, title in (
        (axes[0], "time_steps", "training step"),
        (axes[1], "time_collectives", "collectives of a layer, forward, alone"),
    ):
        rows = tables[name]
        ranks = sorted({row["ranks"] for row in rows})
        for number, method in enumerate(CLAIMS):
            for place, n in enumerate(ranks):
                found = Spread.of(timing.ratios(rows, n, method))
                x = place + (number - 2) * 0.16
                around = [[found.median - found.low], [found.high - found.median]]
                label = method_named(method).title if place == 0 else None
                panel.bar(x, found.median, 0.15, yerr=around, color=COLOURS[method], capsize=3, label=label)
                panel.text(x, found.high, f"{found.median:.2f}", ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(ranks)), [f"{n} rank{'s' * (n > 1)}" for n in ranks])
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_ylabel("time over DSP's")
        panel.set_title(title, fontsize=10, loc="left")
    legend(figure, axes[0], 5)
    return figure
