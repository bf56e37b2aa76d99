"""Predict structures from sequences, alignments and a checkpoint. One model is loaded for all targets and seeds.

All inputs and settings are checked before the model runs and before anything is written. A record that cannot be predicted is
named, and the others go on (`evodsp.inference.failures`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from evodsp.config import FeatureConfig
from evodsp.data.dataset import collate, prediction_sample
from evodsp.data.records import Alignment
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.inference.batch_page import write_batch_page
from evodsp.inference.block_progress import block_progress
from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import check_pair_fits, device_of, memory_entries, working_memory
from evodsp.inference.failures import FAILURES, Failure, Outcome, memory_errors, none_usable, write_failures
from evodsp.inference.groups import Groups
from evodsp.inference.passes import SeedRun, layer_dtype, run_passes, structure_of
from evodsp.inference.provenance import check_target_fits_ranks, feature_config, result_settings, seeds, sizes_line
from evodsp.inference.results import TIMINGS, PredictionResult, write_json, write_results
from evodsp.inference.stored import Stored, copy_files, find_stored
from evodsp.inference.target_page import write_target_page
from evodsp.inference.target_templates import find_templates, takes_no_templates, template_source
from evodsp.inference.targets import Target, digest, find_targets
from evodsp.inference.writers import PredictedStructure
from evodsp.launch.consensus import all_of, check_same, from_first, on_first, tensors_from_first
from evodsp.model.alphafold import AlphaFold
from evodsp.model.in_place import use_memory
from evodsp.model.kernels.registry import choose, summary
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.output import check_output_folder
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.weights.checkpoint import load_features, load_model
from evodsp.weights.deepspeed import parameter_file

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Job:
    """One target, with everything that its prediction needs besides the alignments and the model."""

    target: Target
    templates: TemplateFeatures
    """The templates in use, best first."""
    templates_line: str
    templates_seconds: float
    """Seconds spent on finding the templates."""
    settings: dict[str, Any]
    """The settings that its files depend on."""
    stored: Stored | None
    """The result of an earlier run with the same settings."""
    seeds: list[int]
    """The seeds that have to be predicted."""
    kept: bool
    """Whether all files are there already."""


@dataclass(frozen=True)
class _Work:
    """What rank 0 reads and checks before the model runs."""

    jobs: list[_Job]
    failures: list[Failure]
    """The records that cannot be predicted."""
    features: FeatureConfig
    trained: FeatureConfig
    """The checkpoint's feature sizes."""
    model: AlphaFold | None
    """None if every result exists already."""


class _OneRankFailed(UserError):
    """A rank has left a pass, and the others wait for it in a collective: the run cannot go on with the next record."""


def predict(config: PredictConfig, report: Report = print, group: Group | None = None) -> list[PredictionResult]:
    """The results of `predict_records`. Raises UserError if there is none."""
    return predict_records(config, report, group).results


def predict_records(
    config: PredictConfig, report: Report = print, group: Group | None = None, groups: Groups | None = None
) -> Outcome:
    """Predict every record of the inputs; the results are in their order.

    `report` gets one line per stage, one per record that fails, and a last one that counts them. The records that failed are
    listed in <output>/failures.json. Raises UserError if no record can be predicted: then nothing has been written. If that
    is known from the inputs, no model has run.
    A target's folder appears only when it is complete.

    `group`: the ranks that share each structure. `groups`: several such groups, which share the records. All ranks call this
    function with the same `config`. Rank 0 of all checks the inputs; then the first rank of each group reads the alignments of
    its records and writes their files, and the other ranks need no access to them. A UserError is raised on every rank of a
    group.
    """
    device = device_of(config.device)
    everyone = group if groups is None else groups.everyone
    check_same("settings", repr(config), everyone)
    work = _prepare(config, device, everyone, ranks=1 if group is None else group.size)
    model, features = work.model, work.features
    if model is not None:
        model = model.to(device).eval()
        if group is not None:
            use_exchange(model, ShardedExchange(group), config.plan)
        kernels, choices = choose(
            config.kernels,
            device,
            layer_dtype(config),
            gradients=False,
            on_all_ranks=lambda value: all_of(value, everyone),
        )
        use_kernels(model, kernels)
        use_memory(model, working_memory(config.working_memory, device))
        for line in summary(choices, device):
            report(line)

    report(sizes_line(features, work.trained, config.ensembles))
    failures = list(work.failures)
    for failure in failures:
        report(f"failed: {failure.reason}")
    run = partial(_predict_job, model=model, config=config, features=features, group=group, total=len(work.jobs))
    if groups is None:
        found = [run(job, number, report) for number, job in enumerate(work.jobs, start=1)]
    else:
        found = _in_groups(work.jobs, run, report, groups)
    failures += [result for result in found if isinstance(result, Failure)]
    complete = [result for result in found if isinstance(result, PredictionResult)]
    if not complete:
        raise none_usable(failures)
    from_first(lambda: write_failures(config.output, failures), everyone)
    index = from_first(lambda: write_batch_page(config.output, failures), everyone)
    report(f"to look at: {index}")
    outcome = Outcome(complete, failures)
    report(outcome.line + (f"; reasons in {config.output / FAILURES}" if failures else ""))
    return outcome


def _in_groups(
    jobs: list[_Job], run: Callable[[_Job, int, Report], PredictionResult | Failure], report: Report, groups: Groups
) -> list[PredictionResult | Failure]:
    """What becomes of all jobs, in their order. The longest are taken first, so that no group is left with one at the end.

    Rank 0 reports the lines of the other groups when a record is done.
    """
    longest_first = sorted(range(len(jobs)), key=lambda index: -len(jobs[index].target.query))
    report(f"{groups.count} groups of ranks take {_count(len(jobs), 'record')}, the longest first")
    is_first, found = groups.everyone.rank == 0, dict[int, PredictionResult | Failure]()

    def listen() -> None:
        for place, (number, lines, result) in groups.news():
            if number != groups.number:
                for line in (f"(group {number}) {lines[0]}", *lines[1:]):
                    report(line)
            found[longest_first[place]] = result

    for place in groups.places(len(jobs)):
        index, lines = longest_first[place], list[str]()
        result = run(jobs[index], index + 1, report if is_first else lines.append)
        groups.finish(place, (groups.number, lines, result))
        if is_first:
            listen()
    while not groups.finished(len(jobs)):
        if is_first:
            listen()
    if is_first:
        listen()
    return from_first(lambda: [found[index] for index in range(len(jobs))], groups.everyone)


def _predict_job(
    job: _Job,
    number: int,
    report: Report,
    model: AlphaFold | None,
    config: PredictConfig,
    features: FeatureConfig,
    group: Group | None,
    total: int,
) -> PredictionResult | Failure:
    """Predict one record of `total`, unless its results are kept, and report what became of it."""
    report(f"[{number}/{total}] {job.target.query.name}: {len(job.target.query)} residues")
    for note in job.target.notes:
        report(f"  {note}")
    if job.stored is not None and job.kept:
        result = replace(job.stored.result, format=config.format)
        folder = config.output / result.name
        report(f"  kept: {folder} is complete and has the same inputs (--overwrite predicts again)")
        return result
    found = _predict_target(job, model, config, features, report, group)
    if isinstance(found, Failure):
        report(f"  failed: {found.reason}")
    return found


def check_launch(config: PredictConfig) -> None:
    """Raise UserError if an input is missing or no target can be spread over `parallel.sequence` ranks.

    For the process that starts the ranks: many processes that all end with the same mistake would load the machine for nothing.
    """
    targets, failures, features, _ = _targets_and_sizes(config)
    check = partial(check_target_fits_ranks, config.parallel.sequence, features)
    if all(_failure(target.query.name, partial(check, target)) for target in targets):
        jobs, more = _jobs(
            config, features, targets, check
        )  # slower: finds out which results exist already and are kept
        if not jobs:
            raise none_usable([*failures, *more])


def _failure(name: str, check: Callable[[], object]) -> list[Failure]:
    """The failure of the record `name` if `check` raises UserError, else none."""
    try:
        check()
    except UserError as error:
        return [Failure(name, str(error))]
    return []


def _targets_and_sizes(config: PredictConfig) -> tuple[list[Target], list[Failure], FeatureConfig, FeatureConfig]:
    """The targets, the records that are none, the feature sizes, and the checkpoint's feature sizes."""
    targets, failures = find_targets(config.sources, config.alignments)
    check_output_folder(config.output)
    if not config.checkpoint.exists():
        raise UserError(f"{config.checkpoint}: no such checkpoint; check --checkpoint")
    trained = load_features(config.checkpoint, config.preset)
    return targets, failures, feature_config(config, trained), trained


def _prepare(config: PredictConfig, device: torch.device, group: Group | None, ranks: int) -> _Work:
    """Check all inputs and read the checkpoint, on rank 0. `ranks`: how many share a structure.

    The ranks hear from it after each target: thousands of them take longer than ranks may wait for one another.
    """
    targets, failures, features, trained = from_first(lambda: _targets_and_sizes(config), group)
    jobs, more = _jobs(config, features, targets, partial(_check, features, ranks), group)
    failures += more
    model = None
    if any(job.seeds for job in jobs):
        model = from_first(lambda: load_model(config.checkpoint, config.raw, config.preset), group)
        if config.templates is not None and not model.config.templates.enabled:
            raise takes_no_templates(config)
        features = _with_template_row(features, model)
        needed = model.config.channels.pair * layer_dtype(config).itemsize / ranks
        jobs, more = from_first(lambda: _that_fit(jobs, needed, device), group)
        failures += more
    if not jobs:
        raise none_usable(failures)
    return _Work(jobs, failures, features, trained, model)


def _check(features: FeatureConfig, ranks: int, target: Target) -> None:
    """Raise UserError if a target's alignments cannot be read, or it is too short for the ranks."""
    target.read()
    check_target_fits_ranks(ranks, features, target)


def _that_fit(jobs: list[_Job], needed: float, device: torch.device) -> tuple[list[_Job], list[Failure]]:
    """The jobs whose pair representation the device can hold, and the others. `needed`: bytes of a pair of residues."""
    failures = []
    for job in jobs:
        if job.seeds:
            query = job.target.query
            failures += _failure(query.name, partial(check_pair_fits, query.name, len(query), needed, device))
    lost = {failure.name for failure in failures}
    return [job for job in jobs if job.target.query.name not in lost], failures


def _jobs(
    config: PredictConfig,
    features: FeatureConfig,
    targets: list[Target],
    check: Callable[[Target], None],
    group: Group | None = None,
) -> tuple[list[_Job], list[Failure]]:
    """One job per target, with its templates and its earlier result; and the targets that cannot be predicted.

    `check` raises UserError for a target that cannot; targets without a seed to predict are not checked.
    """
    read = on_first(lambda: (digest(parameter_file(config.checkpoint)), template_source(config, features)), group)

    def job(target: Target) -> _Job:
        assert read is not None, "only rank 0 reads"
        checkpoint, source = read
        start = time.perf_counter()
        templates, line = find_templates(source, target, features.max_templates)
        seconds = time.perf_counter() - start
        settings = result_settings(config, features, target, checkpoint, templates)
        stored = find_stored(config.output / target.query.name, settings, config.overwrite)
        wanted = seeds(config)
        missing = wanted if stored is None else stored.missing(wanted)
        if missing:
            check(target)
        kept = stored is not None and stored.has_all(wanted, config.format)
        return _Job(target, templates, line, seconds, settings, stored, missing, kept)

    def job_or_failure(target: Target) -> _Job | Failure:
        try:
            return job(target)
        except UserError as error:
            return Failure(target.query.name, str(error))

    found = [from_first(partial(job_or_failure, target), group) for target in targets]
    return [item for item in found if isinstance(item, _Job)], [item for item in found if isinstance(item, Failure)]


def _with_template_row(features: FeatureConfig, model: AlphaFold) -> FeatureConfig:
    """`features` with at least one template if the model reads templates: it needs the features' arrays, even if the sizes
    allow no template. The added template is always masked and changes nothing."""
    if features.max_templates or not model.config.templates.enabled:
        return features
    return replace(features, max_templates=1, msa_clusters=features.msa_clusters + 1)


def _predict_target(
    job: _Job,
    model: AlphaFold | None,
    config: PredictConfig,
    features: FeatureConfig,
    report: Report,
    group: Group | None,
) -> PredictionResult | Failure:
    """Predict the seeds of one target that are missing, and write its files. All ranks return the same.

    Raises UserError if the run cannot go on: the output cannot be written, or one of several ranks has left a pass.
    """
    structures: dict[int, PredictedStructure] = {}
    timings: dict[str, Any] = {}
    if job.stored is not None:
        earlier = job.stored.result
        report(f"  {_count(len(earlier.mean_plddt), 'seed')} of an earlier run kept")
    try:
        if job.seeds:
            assert model is not None
            structures, timings = _compute(job, model, config, features, report, group)
    except _OneRankFailed:
        raise
    except UserError as error:
        return Failure(job.target.query.name, str(error))
    start = time.perf_counter()
    result = from_first(lambda: _write(job, structures, timings, config), group)
    if isinstance(result, PredictionResult):
        best = result.mean_plddt[result.best]
        seconds = time.perf_counter() - start
        report(f"  wrote {result.folder}, {seconds:.1f} s; best: {result.structure().name}, pLDDT {best:.1f}")
    return result


def _compute(
    job: _Job, model: AlphaFold, config: PredictConfig, features: FeatureConfig, report: Report, group: Group | None
) -> tuple[dict[int, PredictedStructure], dict[str, Any]]:
    """The structures by seed, and the entries of timings.json."""
    target, device = job.target, next(model.parameters()).device
    start = time.perf_counter()

    def read() -> list[Alignment]:
        with memory_errors(target.query.name, len(target.query), device):
            return target.read()

    alignments = on_first(read, group) or []
    reading = time.perf_counter() - start
    rows = sum(map(len, alignments))
    report(f"  read {_count(rows, 'sequence')} in {_count(len(alignments), 'alignment')}, {reading:.1f} s")
    if model.config.templates.enabled:
        report(f"  {job.templates_line}")

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    structures: dict[int, PredictedStructure] = {}
    runs: dict[int, SeedRun] = {}
    for seed in job.seeds:
        start = time.perf_counter()
        make = partial(_features, target, alignments, features, seed, job.templates, config.ensembles)
        batch = tensors_from_first(make, device, group)
        seconds = time.perf_counter() - start
        report(f"  seed {seed}: features, {seconds:.1f} s")
        most = (features.recycles + 1) * config.ensembles
        shown = block_progress(model, f"{target.query.name}, seed {seed}", most) if _is_rank_0() else nullcontext()
        with shown:
            structures[seed], passes, change = _predict_seed(target, batch, model, config, group)
        runs[seed] = SeedRun(seconds, passes, change)
        report(
            f"  seed {seed}: model, {runs[seed].model_line(features.recycles + 1)}; {structures[seed].confidence_line}"
        )

    features_seconds = job.templates_seconds + reading + sum(run.features for run in runs.values())
    timings = {
        "name": target.query.name,
        "residues": len(target.query),
        "alignment_rows": rows,
        "device": str(device),
        "features_seconds": round(features_seconds, 3),
        "model_seconds": round(sum(sum(run.passes) for run in runs.values()), 3),
    }
    each = {"seeds": [{"seed": seed, **run.timings} for seed, run in runs.items()], **memory_entries(device, group)}
    return structures, {**timings, **each}


def _write(
    job: _Job, structures: dict[int, PredictedStructure], timings: dict[str, Any], config: PredictConfig
) -> PredictionResult | Failure:
    """Write a target's folder. Raises UserError if that is impossible; a structure that no file can hold is a Failure."""
    folder = config.output / job.target.query.name
    start = time.perf_counter()
    try:
        with whole_folder(folder) as new:
            stored = job.stored
            copy_files(folder, new, with_ours=stored is not None)
            if stored is not None:
                stored.write_format(new, config.format)
            result = write_results(
                new, structures, config.format, job.settings, job.target.query.name, stored.ranking if stored else ()
            )
            if timings:
                timings = timings if stored is None else stored.with_timings(timings)
                write_json(new / TIMINGS, {**timings, "writing_seconds": round(time.perf_counter() - start, 3)})
            write_target_page(new, job.target.read())
    except UserError as error:
        return Failure(job.target.query.name, str(error))
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error
    return replace(result, folder=folder)


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _features(
    target: Target,
    alignments: list[Alignment],
    features: FeatureConfig,
    seed: int,
    templates: TemplateFeatures,
    ensembles: int,
) -> dict[str, torch.Tensor]:
    with memory_errors(target.query.name, len(target.query), torch.device("cpu")):
        return collate([prediction_sample(target.query, alignments, features, seed, templates, ensembles)])


def _predict_seed(
    target: Target, batch: dict[str, torch.Tensor], model: AlphaFold, config: PredictConfig, group: Group | None
) -> tuple[PredictedStructure, tuple[float, ...], float | None]:
    """The structure, the seconds of each pass, and the change of CA-CA distances in the last one (`SeedRun`)."""
    device = next(model.parameters()).device
    try:
        with memory_errors(target.query.name, len(target.query), device):
            output, passes = run_passes(model, batch, config)
    except UserError as error:
        if group is None:
            raise
        raise _OneRankFailed(f"{error}. Finished results are kept: the command goes on with this record") from error
    change = None if output.ca_change is None else float(output.ca_change[0])
    return structure_of(target, batch, output, model), passes, change
