"""`evodsp data doctor`: examine a data set, and report it on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from evodsp.data.chain_list import chain_list
from evodsp.data.doctor import Diagnosis, diagnose, filter_reasons
from evodsp.data.doctor_config import DoctorConfig
from evodsp.data.index import ChainIndex
from evodsp.data.store import FeatureStore
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.output import check_output_folder
from evodsp.report.charts import histogram
from evodsp.report.page import Page
from evodsp.run_config_file import read_run_config

_SHOWN = 50
"""Bad or missing chains listed on the page; the JSON file lists all."""
_DEFAULT_EPOCH = 1000


@dataclass(frozen=True)
class _Data:
    """What a run would read."""

    alignment_dir: str
    structure_dir: str
    index: str | None
    training: list[str] | None
    validation: list[str]
    samples_per_epoch: int


def run(settings: DoctorConfig, words: list[str]) -> int:
    """Examine and report; 0 if training can start, 1 if not."""
    check_output_folder(settings.output)
    data = _data(settings)
    store = FeatureStore(data.alignment_dir, data.structure_dir, None if data.index is None else ChainIndex(data.index))
    if store.index is not None:
        store.index.check()
    found = diagnose(
        store, data.training, data.validation, settings.sample, settings.seed, settings.workers, settings.max_bad
    )
    summary = _summary(found, data.samples_per_epoch)
    with whole_file(settings.output / "doctor.json") as partial:
        partial.write_text(json.dumps(_as_json(found, summary), indent=1) + "\n", encoding="utf-8")
    with whole_file(settings.output / "doctor.html") as partial:
        partial.write_text(_page(found, summary, data).html(), encoding="utf-8")
    _print(found, summary, settings.output / "doctor.html")
    return 1 if found.obstacles else 0


def _data(settings: DoctorConfig) -> _Data:
    block = _block(settings.config)
    roots = {name: getattr(settings, name) or block.get(name) for name in ("alignment_dir", "structure_dir")}
    for name, root in roots.items():
        if root is None:
            raise UserError(f"the data to examine has no {name}; give --{name}, or --config with data.{name}")
    training = settings.chains or block.get("train_chains")
    validation = block.get("validation_chains")
    return _Data(
        str(roots["alignment_dir"]),
        str(roots["structure_dir"]),
        settings.index or block.get("index"),
        None if training is None else chain_list(training),
        [] if validation is None else chain_list(validation),
        int(block.get("samples_per_epoch") or _DEFAULT_EPOCH),
    )


def _block(config: Path | None) -> dict[str, Any]:
    """The `data` block of a config file of `evodsp fit`; empty without a file."""
    block = read_run_config(config).get("data", {})
    if not isinstance(block, dict) or (config is not None and not block):
        raise UserError(f"--config {config}: has no block 'data'; give a config of 'evodsp fit'")
    return block


def _summary(found: Diagnosis, samples_per_epoch: int) -> dict[str, str]:
    depths = [chain.depth for chain in found.examined if chain.state == "good"]
    lengths = found.table.lengths[found.table.lengths > 0]
    usable = len(found.training)
    return {
        "training chains that can be used": f"{usable:,} of {usable + len(found.missing):,}",
        "chains read": f"{len(found.examined):,}, {len(found.bad):,} bad",
        "structures without alignments": f"{len(found.unaligned):,}",
        "residues, median": f"{np.median(lengths):,.0f}" if len(lengths) else "unknown",
        "different sequences in the MSA, median": f"{np.median(depths):,.0f}" if depths else "unknown",
        "draws of a chain in an epoch": f"{samples_per_epoch / usable:.3g}" if usable else "none",
        "size of a feature store, about": _bytes(found.store_bytes()),
        f"time to build it on {found.workers} cores, about": _duration(found.store_seconds()),
    }


def _bytes(number: int) -> str:
    unit, size = next(
        ((unit, size) for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if number >= size), ("kB", 1e3)
    )
    return f"{number / size:,.3g} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def _bad_rows(found: Diagnosis) -> list[tuple[str, str, str]]:
    """(chain, what, reason) of everything that is wrong with a single chain; validation first."""
    return [
        *((key, "validation chain missing", f"no {lacking}") for key, lacking in found.missing_validation.items()),
        *(
            (chain.key, f"validation chain {chain.state}", chain.reason)
            for chain in found.validated
            if chain.state != "good"
        ),
        *((chain.key, chain.state, chain.reason) for chain in found.bad),
        *((key, "missing", f"no {lacking}") for key, lacking in found.missing.items()),
    ]


def _as_json(found: Diagnosis, summary: dict[str, str]) -> dict[str, Any]:
    return {
        "can_start": not found.obstacles,
        "obstacles": found.obstacles,
        "summary": summary,
        "counts": found.counts(),
        "filters": {reason: int(mask.sum()) for reason, mask in filter_reasons(found.table).items()},
        "stale": found.stale,
        "chains": [{"chain": key, "state": state, "reason": reason} for key, state, reason in _bad_rows(found)],
        "unreadable_headers": found.unreadable_headers,
        "structures_without_alignments": found.unaligned,
    }


def _page(found: Diagnosis, summary: dict[str, str], data: _Data) -> Page:
    page = Page("Data for training", f"{data.alignment_dir}, {data.structure_dir}, {data.index or 'no index'}")
    page.verdict(
        "Training can start." if not found.obstacles else f"Training cannot start: {'; '.join(found.obstacles)}.",
        not found.obstacles,
    )
    page.figures(summary)
    for source in found.stale:
        page.note(f"The index is older than {source}: make it again with evodsp data index.")
    page.heading("Chains")
    page.table(["what", "chains"], found.counts().items())
    page.heading("Filters")
    known = "all training chains (index)" if data.index else "the training chains that were read"
    page.note(f"What AlphaFold2 leaves out or weights down, among {len(found.table):,} chains: {known}.")
    page.table(
        ["reason", "chains"], [(reason, int(mask.sum())) for reason, mask in filter_reasons(found.table).items()]
    )
    page.heading("Distributions")
    page.charts(_charts(found))
    rows = _bad_rows(found)
    page.heading("Chains with problems")
    if len(rows) > _SHOWN:
        page.note(f"The first {_SHOWN} of {len(rows):,}; doctor.json lists all.")
    page.table(["chain", "state", "reason"], rows[:_SHOWN]) if rows else page.note("None.")
    if found.unaligned:
        page.heading("Structures without alignments")
        more = f", and {len(found.unaligned) - _SHOWN:,} more in doctor.json" if len(found.unaligned) > _SHOWN else ""
        page.note(f"{', '.join(found.unaligned[:_SHOWN])}{more}")
    return page


def _charts(found: Diagnosis) -> dict[str, str]:
    table = found.table
    depths = np.array([chain.depth for chain in found.examined if chain.state == "good"])
    columns = {
        "Lengths": (table.lengths[table.lengths > 0], "residues"),
        "Depths of the MSA (chains read)": (depths, "different sequences"),
        "Resolutions": (table.resolutions[table.resolutions > 0], "Å"),
    }
    charts = {}
    for title, (values, unit) in columns.items():
        if len(values):
            counts, edges = np.histogram(values, bins=min(30, max(10, len(values) // 5)))
            charts[title] = histogram(edges.tolist(), counts.tolist(), unit, "chains")
    return charts


def _print(found: Diagnosis, summary: dict[str, str], page: Path) -> None:
    console = Console()
    figures = Table(box=None, show_header=False)
    for name, value in summary.items():
        figures.add_row(name, value)
    for name, count in found.counts().items():
        if count and name != "read":
            figures.add_row(f"chains {name}", f"{count:,}")
    for reason, mask in filter_reasons(found.table).items():
        if mask.any():
            figures.add_row(reason, f"{int(mask.sum()):,} of {len(found.table):,} chains")
    console.print(figures)
    for key, state, reason in _bad_rows(found)[:5]:
        console.print(f"{key}: {state}: {reason}", markup=False, highlight=False, soft_wrap=True)
    for source in found.stale:
        console.print(f"the index is older than {source}", markup=False, highlight=False, soft_wrap=True)
    verdict = "training can start" if not found.obstacles else f"training cannot start: {'; '.join(found.obstacles)}"
    console.print(f"{verdict}; report: {page}", markup=False, highlight=False, soft_wrap=True)
