"""The seeds of one target, one after another, and when to write what is finished.

A seed of a long chain may take hours. So finished seeds are handed over to be written before the next one begins, as soon as
they have taken `WRITE_EVERY_S` seconds. Ctrl-C costs no more than that and the seed that is running; a seed that fails ends its
record and costs none of those before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evodsp.config import FeatureConfig
from evodsp.data.records import columns_of, entities_of
from evodsp.data.samples.dataset import collate
from evodsp.errors import UserError
from evodsp.inference.config import SaveSettings
from evodsp.inference.devices import memory_entries, memory_errors
from evodsp.inference.estimate import check_needs
from evodsp.inference.failures import RecordFailure
from evodsp.inference.jobs import Job
from evodsp.inference.passes import PassRunner, SeedRun, block_progress, run_passes, structure_of
from evodsp.inference.representations import Collector
from evodsp.inference.run_log import Report
from evodsp.inference.structure_files import PredictedStructure
from evodsp.inference.target_msas import TargetMsa
from evodsp.inference.target_templates import Templates
from evodsp.inference.targets import Target
from evodsp.launch.consensus import from_first, on_first, tensors_from_first
from evodsp.model.heads import ModelOutput
from evodsp.parallel.group import Group

WRITE_EVERY_S = 30.0
"""Finished seeds are written at the latest when they have taken this long. Sooner, writing would cost short chains too much."""


@dataclass(frozen=True)
class Finished:
    """Seeds that are predicted, but not yet written."""

    structures: dict[int, PredictedStructure]
    """The structures by seed."""
    timings: dict[str, Any]
    """Entries of timings.json."""


def predict_seeds(
    job: Job,
    runner: PassRunner,
    features: FeatureConfig,
    try_anyway: bool,
    report: Report,
    group: Group | None,
    save: SaveSettings | None = None,
) -> Iterator[Finished | RecordFailure]:
    """Predict the seeds of `job`. Finished seeds come as soon as they are to be written. The failure of a seed comes last; no
    other seed is tried after it.

    `try_anyway`: whether a target runs also where the estimate says that it does not fit. `save`: the arrays that are kept.

    Raises RankOutOfMemoryError on a rank of several that has no memory left.
    """
    target, model, settings, device = job.target, runner.model, runner.settings, runner.device
    start = time.perf_counter()

    def read() -> TargetMsa:
        with memory_errors(target.query.name, len(target.query), device):
            return job.read()

    try:
        msa = on_first(read, group)
    except UserError as error:
        yield RecordFailure(target.query.name, str(error))
        return
    seconds_before = job.templates_seconds + time.perf_counter() - start
    rows = 0 if msa is None else sum(map(len, msa.alignments))  # the first rank alone reads, and writes the files
    report(f"  {'' if msa is None else msa.line}, {time.perf_counter() - start:.1f} s")
    if model.config.templates.enabled:
        for said in job.templates_lines:
            report(f"  {said}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    structures: dict[int, PredictedStructure] = {}
    runs: dict[int, SeedRun] = {}

    def finished() -> Finished:
        """The seeds that have been predicted since the last call."""
        nonlocal seconds_before
        named = {} if job.model.name is None else {"model": job.model.name}
        timings = {
            "name": target.query.name,
            "residues": len(target.query),
            "alignment_rows": rows,
            "device": str(device),
            "features_seconds": round(seconds_before + sum(run.features for run in runs.values()), 3),
            "model_seconds": round(sum(sum(run.passes) for run in runs.values()), 3),
            "seeds": [{**named, "seed": seed, **run.timings} for seed, run in runs.items()],
            **memory_entries(device, group),
        }
        found = Finished(dict(structures), timings)
        seconds_before = 0.0
        structures.clear()
        runs.clear()
        return found

    since = time.perf_counter()
    for seed in job.seeds:
        try:
            batch, seconds = _batch(job, msa, features, seed, settings.ensembles, device, report, group)
            batch, failed_before = runner.sized(batch), runner.given_up
            if seed == job.seeds[0]:
                ask = partial(check_needs, target.query.name, len(target.query), batch, model, settings, try_anyway)
                if line := from_first(ask, group):
                    report(f"  {line}")
            what = f"{target.query.name}, seed {seed}"
            shown = block_progress(model, what, features.recycles + 1, settings.ensembles)
            with shown if _is_rank_0() else nullcontext(_nothing) as ended:
                structure, passes, change = _predict_seed(target, batch, runner, ended, group, save)
        except UserError as error:
            if structures:
                yield finished()
            yield RecordFailure(target.query.name, str(error))
            return
        if runner.given_up != failed_before:
            report(f"  {runner.given_up}; passes are launched instead, which is slower")
        structures[seed], runs[seed] = structure, SeedRun(seconds, passes, change)
        report(f"  seed {seed}: model, {runs[seed].model_line(features.recycles + 1)}; {structure.confidence_line}")
        if seed == job.seeds[-1] or from_first(partial(_due, since), group):
            yield finished()
            since = time.perf_counter()


def _due(since: float) -> bool:
    """Whether seeds that began at `since` have taken so long that they are to be written."""
    return time.perf_counter() - since >= WRITE_EVERY_S


def _nothing() -> None:
    """The end of a pass that nobody watches."""


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _batch(
    job: Job,
    msa: TargetMsa | None,
    features: FeatureConfig,
    seed: int,
    ensembles: int,
    device: torch.device,
    report: Report,
    group: Group | None,
) -> tuple[dict[str, torch.Tensor], float]:
    """A seed's features, on every rank, and the seconds they took. Only the first rank of `group` has `msa`."""
    target = job.target
    start = time.perf_counter()
    make = partial(_features, target, msa, features, seed, job.templates, ensembles)
    with memory_errors(target.query.name, len(target.query), device, group):
        batch = tensors_from_first(make, device, group)
    seconds = time.perf_counter() - start
    report(f"  seed {seed}: features, {seconds:.1f} s")
    return batch, seconds


def _features(
    target: Target,
    msa: TargetMsa | None,
    features: FeatureConfig,
    seed: int,
    templates: Templates,
    ensembles: int,
) -> dict[str, torch.Tensor]:
    with memory_errors(target.query.name, len(target.query), torch.device("cpu")):
        assert msa is not None, "only the first rank makes features"
        return collate([msa.sample(features, seed, templates, ensembles)])


def _predict_seed(
    target: Target,
    batch: dict[str, torch.Tensor],
    runner: PassRunner,
    ended: Callable[[], None],
    group: Group | None,
    save: SaveSettings | None,
) -> tuple[PredictedStructure, tuple[float, ...], float | None]:
    """The structure, the seconds of each pass, and the change of CA-CA distances in the last one (`SeedRun`)."""
    columns = columns_of(entities_of([part.query for part in target.parts]))
    collector = None if save is None else Collector(save, runner.model, batch, columns)

    def pass_ended(output: ModelOutput) -> None:
        ended()
        if collector is not None:
            collector.add(output, is_last=False)

    with memory_errors(target.query.name, len(target.query), runner.device, group):
        output, passes = run_passes(runner, batch, pass_ended)
        if collector is not None:
            collector.add(output, is_last=True)
        structure = structure_of(target, batch, output, runner.model, {} if collector is None else collector.arrays)
    change = None if output.ca_change is None else float(output.ca_change[0])
    return structure, passes, change
