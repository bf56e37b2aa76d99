"""`evodsp report`: the learning curves of one or several runs on one page, with the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from evodsp.files import write_text
from evodsp.printing import counted, duration, show, tell
from evodsp.report.page import Level, Page, Series, lines
from evodsp.report.runs import ReportConfig, Run, differing, read_runs

_Columns = dict[str, tuple[str | None, str | None]]
"""Titles of charts, with the columns of training and of validation."""
_Drawn = dict[str, tuple[str, list[Series]]]
"""Titles of charts, with the column whose bar belongs to them and their lines."""

_FIRST: _Columns = {
    "Loss": ("train/loss", "val/loss"),
    "lDDT-CA": ("train/lddt_ca", "val/lddt_ca"),
    "RMSD (Å)": (None, "val/rmsd"),
    "TM-score": (None, "val/tm_score"),
    "pLDDT minus 100 x lDDT-CA": (None, "val/plddt_too_high"),
    "Gradient norm": ("train/gradient_norm", None),
    "Learning rate": ("train/lr", None),
    "Samples a second": ("train/samples_per_second", None),
    "Waiting for samples (% of the time)": ("train/waiting_percent", None),
    "Waiting for other ranks (% of a step)": ("train/communication_percent", None),
    "Model FLOPs utilisation (%)": ("train/mfu_percent", None),
    "Memory of a rank (GiB)": ("train/memory_gib", None),
    "Clipped gradients (share)": ("train/clipped_fraction", None),
}
"""Charts that come first: a solid line for training, a dashed one for validation."""
_LINEAR = {"lDDT-CA", "TM-score", "Clipped gradients (share)", *(title for title in _FIRST if "%" in title)}
_NO_TERMS = {
    "train/recycles": "Recycling iterations",
    "train/residues": "Residues of a sample",
    "train/residues_per_second": "Residues a second",
}
"""Columns of training that are no terms of the loss, and the titles of their charts, which come last."""
_CHAIN = "val/lddt_ca/"


def run(config: ReportConfig, words: list[str]) -> int:
    """Write the page and return the exit code. `words`: the command line (not needed here)."""
    runs = read_runs(config.runs)
    write_text(config.output, page(runs).html())
    for one in runs:
        cells = zip(_headings(runs), _cells(one, runs), strict=True)
        show("   ".join(f"{name} {value}" for name, value in cells))
        if one.overlap:
            tell(f"evodsp: warning: {one.name}: {one.overlap}")
    show(f"report: {config.output}")
    return 0


def page(runs: Sequence[Run]) -> Page:
    """The page of the runs."""
    names = [one.name for one in runs]
    made = Page("Training" if len(runs) > 1 else f"Training {names[0]}", ", ".join(names) if len(runs) > 1 else "")
    headings = _headings(runs)
    made.table(headings, [_cells(one, runs) for one in runs], numbers=set(headings) - {"run", _BEST})
    if len(runs) > 1:
        made.legend(names)
    resumed = " Thin lines down: the run was resumed." if any(one.resumes for one in runs) else ""
    made.note(
        "Solid lines: training. Dashed lines: validation. A band shows the lowest and the highest value where a point stands "
        f"for several.{resumed}"
    )
    for one in filter(lambda one: one.overlap, runs):
        made.verdict(f"{f'{one.name}: ' if len(runs) > 1 else ''}{one.overlap}.", good=False)
    pace = [Series(one.name, *one.pace(), colour) for colour, one in enumerate(runs)]
    first, constant = _charts(runs, _series(runs, _FIRST) | {"Seconds a step": ("", pace)})
    made.charts(first)
    shown = {column for pair in _FIRST.values() for column in pair} | {"train/step_seconds"}
    columns = sorted({column for one in runs for column in one.columns} - shown)
    others = [column for column in columns if column in _NO_TERMS]
    terms: _Columns = {
        column.removeprefix("train/"): (column, None)
        for column in columns
        if column.startswith("train/") and column not in others
    }
    chains: _Columns = {column.removeprefix(_CHAIN): (None, column) for column in columns if column.startswith(_CHAIN)}
    rest: _Columns = {column: (None, column) for column in columns if not column.startswith(("train/", _CHAIN))}
    rest |= {_NO_TERMS[column]: (column, None) for column in others}
    for heading, group in (("Loss terms", terms), ("lDDT-CA of validation chains", chains), ("More", rest)):
        drawn, flat = _charts(runs, _series(runs, group))
        constant |= flat
        if drawn:
            made.heading(heading)
            made.charts(drawn)
    if constant:
        made.note(f"Constant, and not drawn: {'; '.join(f'{title} {value:g}' for title, value in constant.items())}.")
    if len(runs) > 1:
        made.heading("Settings that differ")
        different = differing(runs)
        if different:
            made.table(["setting", *names], [[name, *values] for name, values in sorted(different.items())])
        else:
            made.note("None.")
        for one in runs:
            if not one.settings:
                made.note(f"{one.name} has no config.yaml: its settings are not known.")
    elif runs[0].settings:
        settings = sorted(runs[0].settings.items())
        made.folded(f"{counted(len(settings), 'setting')}", ["setting", "value"], settings)
    return made


_BEST = "best lDDT-CA (validation)"
_HEADINGS = ("run", "steps", "time", "last loss", _BEST, "rows that are not finite")


_COPYING = "copying the nearest training chain (lDDT-CA)"


def _headings(runs: Sequence[Run]) -> list[str]:
    """Headings of the table of runs; the last one only if a run knows the bar."""
    return [*_HEADINGS, *([_COPYING] if any(one.baseline for one in runs) else [])]


def _cells(one: Run, runs: Sequence[Run]) -> list[str]:
    copying = "none" if one.baseline is None else f"{one.baseline.lddt_ca:.3f}"
    best = one.best("val/lddt_ca")
    seconds = one.last("seconds")
    bad = sum(not all(math.isfinite(float(cell)) for cell in row.values()) for row in one.rows.values())
    return [
        one.name,
        f"{max(one.rows) + 1:,}",
        "" if math.isnan(seconds) else duration(seconds),
        f"{one.last('train/loss'):.4g}" if one.points("train/loss")[1] else "none",
        "none" if best is None else f"{best[1]:.3f} at step {best[0] + 1:,}",
        f"{bad:,}",
        *([copying] if any(run.baseline for run in runs) else []),
    ]


def _series(runs: Sequence[Run], columns: _Columns) -> _Drawn:
    """The lines of each title, and the column whose bar belongs to them."""
    return {
        title: (
            validation or "",
            [
                Series(
                    f"{one.name}{', validation' if dashed and training else ''}", *one.points(column), colour, dashed
                )
                for colour, one in enumerate(runs)
                for column, dashed in ((training, False), (validation, True))
                if column is not None
            ],
        )
        for title, (training, validation) in columns.items()
    }


def _charts(runs: Sequence[Run], drawn: _Drawn) -> tuple[dict[str, Markup], dict[str, float]]:
    """A chart for each title that has finite values; of the titles whose values are all equal, the value instead of a chart.

    A single value is no constant, and what is compared with a bar is drawn.
    """
    charts: dict[str, Markup] = {}
    constant: dict[str, float] = {}
    levels = _levels(runs)
    several = len(runs) > 1
    moments = [
        Level(f"{one.name}: resumed at step {step + 1:,}", step, colour if several else None)
        for colour, one in enumerate(runs)
        for step in one.resumes
    ]
    for title, (column, series) in drawn.items():
        bars = levels.get(column, [])
        values = [value for one in series for value in one.y if math.isfinite(value)]
        if not bars and len(values) > 1 and len(set(values)) == 1:
            constant[title] = values[0]
        elif values:
            scale = "linear" if bars or title in _LINEAR else "auto"
            charts[title] = lines(series, "step", title, scale, bars, moments)
    return charts, constant


def _levels(runs: Sequence[Run]) -> dict[str, list[Level]]:
    """The bars of the runs by column of validation: of the mean, and of each chain. Equal bars of several runs are one."""
    found: dict[str, list[Level]] = {}
    for colour, one in enumerate(runs):
        if one.baseline is not None:
            found.setdefault("val/lddt_ca", []).append(Level(one.baseline.name, one.baseline.lddt_ca, colour))
            if (interface := one.baseline.interface_lddt_ca) is not None:
                found.setdefault("val/interface_lddt_ca", []).append(Level(one.baseline.name, interface, colour))
            for chain, (nearest, lddt) in one.baseline.copies.items():
                found.setdefault(f"{_CHAIN}{chain}", []).append(Level(f"copying {nearest}", lddt, colour))
    for column, levels in found.items():
        if len({(level.name, round(level.value, 3)) for level in levels}) == 1:
            found[column] = [replace(levels[0], colour=None)]
        else:
            found[column] = [replace(level, name=f"{runs[level.colour or 0].name}: {level.name}") for level in levels]
    return found
