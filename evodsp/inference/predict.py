"""Predict structures from sequences, alignments and a checkpoint. A model is loaded once for all targets and seeds.

All inputs and settings are checked before the model runs and before anything is written. A record that cannot be predicted is
named, and the others go on (`evodsp.inference.results`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.files import holder, lock, remove_partial, whole_folder
from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import device_of, memory_errors
from evodsp.inference.groups import Groups, share
from evodsp.inference.jobs import (
    EarlierResult,
    Job,
    NamedModel,
    PredictionRun,
    copy_files,
    find_earlier,
    prepare,
    read_run,
    sizes_line,
)
from evodsp.inference.pages.target_page import INDEX, write_batch_page, write_target_page
from evodsp.inference.prediction import write_plots
from evodsp.inference.relaxation import NOT_RELAXED, missing_relaxations, relax_prediction
from evodsp.inference.results import (
    FAILURES,
    REPORT,
    TIMINGS,
    Outcome,
    PredictionResult,
    RecordFailure,
    Report,
    none_usable,
    page_problem,
    write_batch_table,
    write_failures,
    write_json,
    write_results,
)
from evodsp.inference.seeds import Finished, PassRunner, layer_dtype, predict_seeds
from evodsp.launch.consensus import all_of, check_same, from_first, long_from_first, on_first
from evodsp.model.kernels.operators import choose, summary
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.printing import counted, duration, show

_DETAILED = 4
"""Most records of which the log has each step. Of more, it has a line each."""


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
    group, but RankOutOfMemoryError on a single one. A record that ended earlier runs is left out (`evodsp.inference.devices`).
    """
    device_of(config.device)  # a rank without this device says so
    everyone = group if groups is None else groups.everyone
    check_same("settings", repr(config), everyone)
    run = long_from_first(lambda: read_run(config), everyone)
    if run.targets:
        for failure in run.failures:
            report(f"failed: {failure.reason}")
    with ExitStack() as held:
        if run.targets:
            names = {target.query.name for target in run.targets}
            on_first(lambda: held.enter_context(_alone(run.files.output, names, report)), everyone)
        return _predict_targets(run, report, group, groups)


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


def _predict_targets(run: PredictionRun, report: Report, group: Group | None, groups: Groups | None) -> Outcome:
    """Predict the targets with all models, and write what is about all of them."""
    everyone = group if groups is None else groups.everyone
    output, failures = run.files.output, list(run.failures)
    names = {target.query.name for target in run.targets}  # other runs may be writing other records here
    from_first(partial(remove_partial, output, names), everyone)
    results: dict[str, PredictionResult] = {}
    # One model after the other: one is in memory, and each is loaded once. The files are complete for the models so far.
    for number, model in enumerate(run.models):
        if model.name is not None:
            report(f"model {model.name}, {number + 1} of {len(run.models)}: {model.path}")
        if number > 0 and groups is not None:
            groups = groups.again()
        done = {*results, *(failure.name for failure in failures if failure.some_written)}
        for found in _predict_with(model, run, done, report, group, groups):
            if isinstance(found, PredictionResult):
                kept = found.kept and (found.name not in results or results[found.name].kept)
                results[found.name] = replace(found, kept=kept)
            else:
                failures.append(found if model.name is None else replace(found, reason=f"{model.name}: {found.reason}"))
    complete = [results[name] for target in run.targets if (name := target.query.name) in results]
    if not complete and not any(failure.some_written for failure in failures):
        raise none_usable(failures)
    from_first(lambda: write_failures(output, failures), everyone)
    outdated = {failure.name for failure in failures if not failure.some_written} - results.keys()
    make = partial(_write_index, output, failures, outdated, report)
    if problem := from_first(partial(page_problem, str(output / INDEX), make), everyone):
        report(problem)
    outcome = Outcome(complete, failures)
    if len(run.targets) > _DETAILED:  # their own lines are far above
        for failure in failures:
            report(f"failed: {failure.reason}")
    report(outcome.line + (f"; reasons in {output / FAILURES}" if failures else ""))
    return outcome


def _predict_with(
    named: NamedModel,
    run: PredictionRun,
    done: Collection[str],
    report: Report,
    group: Group | None,
    groups: Groups | None,
) -> list[PredictionResult | RecordFailure]:
    """Predict every target with one model. `done`: the records that this run has written results of."""
    everyone = group if groups is None else groups.everyone
    work = prepare(named, run, done, everyone, ranks=1 if group is None else group.size)
    if not work.jobs:
        return [*work.failures]
    model, features, runner = work.model, work.features, None
    if model is not None:
        model = model.to(run.device).eval()
        if group is not None:
            use_exchange(model, ShardedExchange(group), run.passes.plan)
        kernels, choices = choose(
            run.kernels,
            run.device,
            layer_dtype(run.passes),
            gradients=False,
            on_all_ranks=lambda value: all_of(value, everyone),
        )
        use_kernels(model, kernels)
        for line in summary(choices, run.device):
            report(line)
        runner = PassRunner(model, run.passes)

    report(sizes_line(features, named.trained, run.passes.ensembles))
    for failure in work.failures:
        report(f"failed: {failure.reason}")

    total, begun = len(work.jobs), time.perf_counter()
    alone = [job.target.query.name for job in work.jobs if job.target.is_alone]
    if total > _DETAILED and alone:
        such = ", ".join(alone[:_DETAILED]) + (", …" if alone[_DETAILED:] else "")
        report(
            f"{counted(len(alone), 'record')} without alignments ({such}): predicted from the sequence alone, which is much "
            "less accurate"
        )
    costs = [0 if job.kept else len(job.target.query) ** 2 for job in work.jobs]

    def predict_one(number: int, say: Report, taken: Sequence[int]) -> PredictionResult | RecordFailure:
        place, job, start = f"[{number + 1}/{total}]", work.jobs[number], time.perf_counter()
        if total <= _DETAILED:
            return _predict_job(job, run, features, runner, place, say, say, group)
        named = f"{place} {job.target.query.name}: "
        found = _predict_job(job, run, features, runner, place, lambda line: say(named + line.strip()), _unsaid, group)
        done, now = sum(costs[one] for one in taken), time.perf_counter()
        left = (now - begun) * (sum(costs) - done) / max(done, 1)
        if isinstance(found, PredictionResult):
            what = "kept" if found.kept else f"pLDDT {found.mean_plddt[found.best]:.1f}, {now - start:.1f} s"
            size = counted(len(job.target.query), "residue")
            say(named + "; ".join([f"{size}, {what}", f"{duration(left)} left", *job.target.notes_of_many]))
        return found

    try:
        if groups is None:
            numbers = range(total)
            return [*work.failures, *(predict_one(number, report, numbers[: number + 1]) for number in numbers)]
        report(f"{groups.count} groups of ranks take {counted(len(work.jobs), 'record')}, the longest first")
        return [*work.failures, *share([len(job.target.query) for job in work.jobs], predict_one, report, groups)]
    finally:
        if runner is not None:
            runner.free()  # before the next model is loaded


def _unsaid(line: str) -> None:
    """Drops lines that a log of many records leaves out."""


def _predict_job(
    job: Job,
    run: PredictionRun,
    features: FeatureConfig,
    runner: PassRunner | None,
    place: str,
    report: Report,
    detail: Report,
    group: Group | None,
) -> PredictionResult | RecordFailure:
    """Predict one record, unless its results are kept, and report the outcome. `place`: its number among all records, for the
    log. `detail`: takes the lines that say nothing but that all goes well."""
    name = job.target.query.name
    chains = f"{counted(len(job.target.chains), 'chain')}, " if job.target.chains else ""
    detail(f"{place} {name}: {chains}{counted(len(job.target.query), 'residue')}")
    for note in job.target.notes:
        detail(f"  {note}")
    if job.stored is not None and job.kept:
        result = replace(job.stored.result, format=run.files.format)
        _add_beside(job, result, run, report, detail, group, page=False)
        folder = run.files.output / name
        detail(f"  kept: {folder} is complete and has the same inputs (--overwrite predicts again)")
        return result
    with run.notes.noted(name, group) as left_out:
        found = left_out or _predict_target(job, run, features, runner, report, detail, group)
    if isinstance(found, RecordFailure):
        report(f"  failed: {found.reason}")
    return found


def _predict_target(
    job: Job,
    run: PredictionRun,
    features: FeatureConfig,
    runner: PassRunner | None,
    report: Report,
    detail: Report,
    group: Group | None,
) -> PredictionResult | RecordFailure:
    """Predict the seeds of one target that are missing, and write its files. All ranks return the same.

    Raises UserError if the output cannot be written, and RankOutOfMemoryError on a rank of several that has no memory left.
    """
    if job.stored is not None:
        earlier = len(job.stored.result.mean_plddt)
        alone, several = (
            f"{counted(earlier, 'seed')} of an earlier run",
            f"{counted(earlier, 'prediction')} already there",
        )
        detail(f"  {alone if job.model.name is None else several} kept")
    pieces: Iterable[Finished | RecordFailure] = [Finished({}, {})]  # without a seed to predict, a format is missing
    if job.seeds:
        assert runner is not None
        pieces = predict_seeds(job, runner, features, run.try_anyway, report, detail, group, run.files.save)
    result: PredictionResult | None = None
    failure: RecordFailure | None = None
    for piece in pieces:
        if isinstance(piece, RecordFailure):
            failure = piece
            break
        if result is not None:  # the folder holds this run's first seeds, and the next ones are added
            job = replace(job, stored=from_first(partial(_stored, job, run.files.output), group))
        start = time.perf_counter()
        written = from_first(partial(_write, job, piece, run), group)
        if isinstance(written, RecordFailure):
            return written
        result = written
        best = result.mean_plddt[result.best]
        seconds = time.perf_counter() - start
        detail(f"  wrote {result.folder}, {seconds:.1f} s; best: {result.structure().name}, pLDDT {best:.1f}")
    if result is None:
        assert failure is not None, "something is written, or a seed has failed"
        return replace(failure, some_written=job.stored is not None)
    _add_beside(job, result, run, report, detail, group, page=True)
    if failure is None:
        return result
    before = f"finished before: {counted(len(result.mean_plddt), 'prediction')}, in {result.folder}"
    return replace(failure, reason=f"{failure.reason}; {before}", some_written=True)


def _stored(job: Job, output: Path) -> EarlierResult | None:
    """The results that a job's folder holds now."""
    return find_earlier(output / job.target.query.name, job.settings, job.model.name)


def _write(job: Job, finished: Finished, run: PredictionRun) -> PredictionResult | RecordFailure:
    """Write a target's folder. Raises UserError if that is impossible; a structure that no file can hold is a RecordFailure."""
    query, files = job.target.query, run.files
    folder = files.output / query.name
    start = time.perf_counter()
    try:
        with memory_errors(query.name, len(query), torch.device("cpu")), whole_folder(folder) as new:
            stored = job.stored
            copy_files(folder, new, stored)
            if stored is not None:
                stored.write_format(new, files.format, files.pae_in_cif)
            result = write_results(
                new,
                finished.structures,
                files.format,
                job.settings,
                query.name,
                stored.ranking if stored else (),
                job.model.name,
                stored.models if stored else {},
                files.pae_in_cif,
                files.save,
            )
            if timings := finished.timings:
                timings = timings if stored is None else stored.with_timings(timings)
                write_json(new / TIMINGS, {**timings, "writing_seconds": round(time.perf_counter() - start, 3)})
        run.notes.note_progress(query.name)
    except UserError as error:
        return RecordFailure(query.name, str(error))
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error
    return replace(result, folder=folder)


def _add_beside(
    job: Job,
    result: PredictionResult,
    run: PredictionRun,
    report: Report,
    detail: Report,
    group: Group | None,
    page: bool,
) -> None:
    """Relax the predictions that the run relaxes, and write the page and the pictures, where they are missing. What cannot be
    written is reported. `page`: whether the page is new anyway."""
    relax = run.files.relax
    keys = [] if relax == "none" else from_first(lambda: missing_relaxations(result, relax), group)
    for key in keys:
        line = long_from_first(partial(relax_prediction, result, key, run.device), group)
        (report if line.startswith(NOT_RELAXED) else detail)(f"  {line}")
    writers: dict[str, Callable[[], None]] = {}
    if page or keys:
        writers[str(result.folder / REPORT)] = lambda: write_target_page(result.folder, job.read().alignments)
    if run.files.plots:
        writers[f"{result.folder}: pictures"] = lambda: write_plots(result, lambda: job.read().alignments)
    for what, write in writers.items():
        if problem := from_first(partial(page_problem, what, write), group):
            report(f"  {problem}")


def _write_index(output: Path, failures: list[RecordFailure], outdated: Collection[str], report: Report) -> None:
    write_batch_table(output, outdated)
    report(f"to look at: {write_batch_page(output, failures, outdated)}")
