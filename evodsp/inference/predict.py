"""Predict structures from sequences, alignments and a checkpoint. A model is loaded once for all targets and seeds.

All inputs and settings are checked before the model runs and before anything is written. A record that cannot be predicted is
named, and the others go on (`evodsp.inference.failures`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.files import remove_partial, whole_folder
from evodsp.inference.attempts import AttemptNotes
from evodsp.inference.batch_table import write_batch_table
from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import device_of, memory_errors
from evodsp.inference.earlier_results import EarlierResult, copy_files, find_earlier
from evodsp.inference.failures import FAILURES, Outcome, RecordFailure, none_usable, page_problem, write_failures
from evodsp.inference.groups import Groups, share
from evodsp.inference.jobs import Job, RunInputs, prepare, read_inputs_and_models
from evodsp.inference.models import NamedModel, sizes_line
from evodsp.inference.pages.batch_page import INDEX, write_batch_page
from evodsp.inference.pages.target_page import write_target_page
from evodsp.inference.passes import PassRunner, layer_dtype
from evodsp.inference.plot_files import write_plots
from evodsp.inference.relaxation import missing_relaxations, relax_prediction
from evodsp.inference.results import REPORT, TIMINGS, PredictionResult, write_json, write_results
from evodsp.inference.run_log import Report
from evodsp.inference.seeds import Finished, predict_seeds
from evodsp.launch.consensus import all_of, check_same, from_first, long_from_first, on_first
from evodsp.lock import holder, lock
from evodsp.model.kernels.registry import choose, summary
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.printing import counted, show


def predict(config: PredictConfig, report: Report = show, group: Group | None = None) -> list[PredictionResult]:
    """The results of `predict_records`. Raises UserError if there is none."""
    outcome = predict_records(config, report, group)
    if not outcome.results:
        raise none_usable(outcome.failures)
    return outcome.results


def predict_records(
    config: PredictConfig,
    report: Report = show,
    group: Group | None = None,
    groups: Groups | None = None,
) -> Outcome:
    """Predict every record of the inputs; the results are in their order.

    `report` gets one line per stage, one per record that fails, and a last one that counts them. The records that failed are
    listed in `<output>/failures.json`. Raises UserError if no record can be predicted: then nothing has been written. If that
    is known from the inputs, no model has run.
    A target's folder appears only when its files are complete. The folder of a long chain holds the first seeds at first.

    `group`: the ranks that share each structure. `groups`: several such groups, which share the records. All ranks call this
    function with the same `config`. Rank 0 of all checks the inputs; then the first rank of each group reads the alignments of
    its records and writes their files, and the other ranks need no access to them. A UserError is raised on every rank of a
    group, but RankOutOfMemoryError on a single one. A record that ended earlier runs is left out (`evodsp.inference.attempts`).
    """
    device = device_of(config.device)
    everyone = group if groups is None else groups.everyone
    check_same("settings", repr(config), everyone)
    inputs = long_from_first(lambda: read_inputs_and_models(config), everyone)
    failures = list(inputs.failures)
    if inputs.targets:
        for failure in failures:
            report(f"failed: {failure.reason}")
    with ExitStack() as held:
        if inputs.targets:
            names = {target.query.name for target in inputs.targets}
            on_first(lambda: held.enter_context(_alone(config.output, names, report)), everyone)
        return _predict_targets(inputs, failures, config, device, report, group, groups)


@contextmanager
def _alone(output: Path, names: Collection[str], report: Report) -> Iterator[None]:
    """Hold the lock of these records in the output folder: two runs would remove each other's unfinished files. A run of other
    records goes on beside this one, and is named. Folders that were made for the lock and hold nothing else are removed."""
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    same = output / f".predict-{hashlib.sha256(repr(sorted(names)).encode()).hexdigest()[:16]}.lock"
    try:
        with lock(same, output, "predicts the same records there"):
            for other in sorted(output.glob(".predict-*.lock")):
                if other != same and (by := holder(other)) is not None:
                    report(f"{by} predicts into {output} too; its records must be others")
            yield
    finally:
        for folder in created:
            with suppress(OSError):  # it is used
                folder.rmdir()


def _predict_targets(
    inputs: RunInputs,
    failures: list[RecordFailure],
    config: PredictConfig,
    device: torch.device,
    report: Report,
    group: Group | None,
    groups: Groups | None,
) -> Outcome:
    """Predict the targets with all models, and write what is about all of them. `failures`: those of the inputs."""
    everyone = group if groups is None else groups.everyone
    names = {target.query.name for target in inputs.targets}  # other runs may be writing other records here
    from_first(partial(remove_partial, config.output, names), everyone)
    results: dict[str, PredictionResult] = {}
    # One model after the other: one is in memory, and each is loaded once. The files are complete for the models so far.
    for number, (model, trained) in enumerate(inputs.models):
        if model.name is not None:
            report(f"model {model.name}, {number + 1} of {len(inputs.models)}: {model.path}")
        if number > 0:  # what is there now is the first model's
            config, groups = replace(config, overwrite=False), None if groups is None else groups.again()
        for found in _predict_with(model, trained, inputs, config, device, report, group, groups):
            if isinstance(found, PredictionResult):
                kept = found.kept and (found.name not in results or results[found.name].kept)
                results[found.name] = replace(found, kept=kept)
            else:
                failures.append(found if model.name is None else replace(found, reason=f"{model.name}: {found.reason}"))
    complete = [results[name] for target in inputs.targets if (name := target.query.name) in results]
    if not complete and not any(failure.some_written for failure in failures):
        raise none_usable(failures)
    from_first(lambda: write_failures(config.output, failures), everyone)
    make = partial(_write_index, config.output, failures, report)
    if problem := from_first(partial(page_problem, str(config.output / INDEX), make), everyone):
        report(problem)
    outcome = Outcome(complete, failures)
    report(outcome.line + (f"; reasons in {config.output / FAILURES}" if failures else ""))
    return outcome


def _predict_with(
    named: NamedModel,
    trained: FeatureConfig,
    inputs: RunInputs,
    config: PredictConfig,
    device: torch.device,
    report: Report,
    group: Group | None,
    groups: Groups | None,
) -> list[PredictionResult | RecordFailure]:
    """Predict every target with one model. `trained`: the feature sizes of its checkpoint."""
    everyone = group if groups is None else groups.everyone
    work = prepare(named, trained, inputs, config, device, everyone, ranks=1 if group is None else group.size)
    if not work.jobs:
        return [*work.failures]
    model, features, runner = work.model, work.features, None
    if model is not None:
        model = model.to(device).eval()
        if group is not None:
            use_exchange(model, ShardedExchange(group), config.plan)
        kernels, choices = choose(
            config.kernels,
            device,
            layer_dtype(config.passes),
            gradients=False,
            on_all_ranks=lambda value: all_of(value, everyone),
        )
        use_kernels(model, kernels)
        for line in summary(choices, device):
            report(line)
        runner = PassRunner(model, config.passes)

    report(sizes_line(features, trained, config.ensembles))
    for failure in work.failures:
        report(f"failed: {failure.reason}")

    def run(number: int, say: Report) -> PredictionResult | RecordFailure:
        place = f"[{number + 1}/{len(work.jobs)}]"
        return _predict_job(work.jobs[number], place, say, runner, config, features, group)

    try:
        if groups is None:
            return [*work.failures, *(run(number, report) for number in range(len(work.jobs)))]
        report(f"{groups.count} groups of ranks take {counted(len(work.jobs), 'record')}, the longest first")
        return [*work.failures, *share([len(job.target.query) for job in work.jobs], run, report, groups)]
    finally:
        if runner is not None:
            runner.free()  # before the next model is loaded


def _predict_job(
    job: Job,
    place: str,
    report: Report,
    runner: PassRunner | None,
    config: PredictConfig,
    features: FeatureConfig,
    group: Group | None,
) -> PredictionResult | RecordFailure:
    """Predict one record, unless its results are kept, and report the outcome. `place`: its number among all records, for the
    log."""
    chains = f"{counted(len(job.target.chains), 'chain')}, " if job.target.chains else ""
    report(f"{place} {job.target.query.name}: {chains}{counted(len(job.target.query), 'residue')}")
    for note in job.target.notes:
        report(f"  {note}")
    if job.stored is not None and job.kept:
        result = replace(job.stored.result, format=config.format)
        if _relax(result, config, report, group):
            _make_page(job, result, report, group)
        _plot(job, result, config, report, group)
        folder = config.output / result.name
        report(f"  kept: {folder} is complete and has the same inputs (--overwrite predicts again)")
        return result
    with _notes(config).noted(job.target.query.name, group) as left_out:
        found = left_out or _predict_target(job, runner, config, features, report, group)
    if isinstance(found, RecordFailure):
        report(f"  failed: {found.reason}")
    return found


def _predict_target(
    job: Job,
    runner: PassRunner | None,
    config: PredictConfig,
    features: FeatureConfig,
    report: Report,
    group: Group | None,
) -> PredictionResult | RecordFailure:
    """Predict the seeds of one target that are missing, and write its files. All ranks return the same.

    Raises UserError if the output cannot be written, and RankOutOfMemoryError on a rank of several that has no memory left.
    """
    if job.stored is not None:
        earlier = len(job.stored.result.mean_plddt)
        what = f"{counted(earlier, 'seed')} of an earlier run" if job.model is None else _already(earlier)
        report(f"  {what} kept")
    pieces: Iterable[Finished | RecordFailure] = [Finished({}, {})]  # without a seed to predict, a format is missing
    if job.seeds:
        assert runner is not None
        pieces = predict_seeds(job, runner, features, config.try_anyway, report, group)
    result: PredictionResult | None = None
    failure: RecordFailure | None = None
    for piece in pieces:
        if isinstance(piece, RecordFailure):
            failure = piece
            break
        if result is not None:  # the folder holds this run's first seeds, and the next ones are added
            job = replace(job, stored=from_first(partial(_stored, job, config), group))
        start = time.perf_counter()
        written = from_first(partial(_write, job, piece, config), group)
        if isinstance(written, RecordFailure):
            return written
        result = written
        best = result.mean_plddt[result.best]
        seconds = time.perf_counter() - start
        report(f"  wrote {result.folder}, {seconds:.1f} s; best: {result.structure().name}, pLDDT {best:.1f}")
    if result is None:
        assert failure is not None, "something is written, or a seed has failed"
        return failure
    _relax(result, config, report, group)
    _make_page(job, result, report, group)
    _plot(job, result, config, report, group)
    if failure is None:
        return result
    before = f"finished before: {counted(len(result.mean_plddt), 'prediction')}, in {result.folder}"
    return replace(failure, reason=f"{failure.reason}; {before}", some_written=True)


def _notes(config: PredictConfig) -> AttemptNotes:
    return AttemptNotes(config.output, config.memory_options)


def _already(number: int) -> str:
    return f"{counted(number, 'prediction')} already there"


def _stored(job: Job, config: PredictConfig) -> EarlierResult | None:
    """The results that a job's folder holds now."""
    return find_earlier(config.output / job.target.query.name, job.settings, overwrite=False, model=job.model)


def _write(job: Job, finished: Finished, config: PredictConfig) -> PredictionResult | RecordFailure:
    """Write a target's folder. Raises UserError if that is impossible; a structure that no file can hold is a RecordFailure."""
    query = job.target.query
    folder = config.output / query.name
    start = time.perf_counter()
    try:
        with memory_errors(query.name, len(query), torch.device("cpu")), whole_folder(folder) as new:
            stored = job.stored
            copy_files(folder, new, stored)
            if stored is not None:
                stored.write_format(new, config.format, config.pae_in_cif)
            result = write_results(
                new,
                finished.structures,
                config.format,
                job.settings,
                query.name,
                stored.ranking if stored else (),
                job.model,
                stored.models if stored else {},
                config.pae_in_cif,
            )
            if timings := finished.timings:
                timings = timings if stored is None else stored.with_timings(timings)
                write_json(new / TIMINGS, {**timings, "writing_seconds": round(time.perf_counter() - start, 3)})
        _notes(config).note_progress(query.name)
    except UserError as error:
        return RecordFailure(query.name, str(error))
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error
    return replace(result, folder=folder)


def _relax(result: PredictionResult, config: PredictConfig, report: Report, group: Group | None) -> bool:
    """Relax the predictions that `config` names and that have not been relaxed. Returns whether there was one."""
    keys = from_first(lambda: missing_relaxations(result, config.relax), group)
    for key in keys:
        report(f"  {long_from_first(partial(relax_prediction, result, key, device_of(config.device)), group)}")
    return bool(keys)


def _make_page(job: Job, result: PredictionResult, report: Report, group: Group | None) -> None:
    """Write a target's page; report one that cannot be written."""

    def make() -> None:
        write_target_page(result.folder, job.read().alignments)

    if problem := from_first(lambda: page_problem(str(result.folder / REPORT), make), group):
        report(f"  {problem}")


def _plot(job: Job, result: PredictionResult, config: PredictConfig, report: Report, group: Group | None) -> None:
    """Draw the pictures that are asked for and missing; report a picture that cannot be written."""
    if not config.plots:
        return

    def make() -> None:
        write_plots(result, lambda: job.read().alignments)

    if problem := from_first(lambda: page_problem(f"{result.folder}: pictures", make), group):
        report(f"  {problem}")


def _write_index(output: Path, failures: list[RecordFailure], report: Report) -> None:
    write_batch_table(output)
    report(f"to look at: {write_batch_page(output, failures)}")
