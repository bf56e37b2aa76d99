"""The jobs of a run, one for each record and model: what is read and checked before a model runs, and the seeds that remain.

Rank 0 reads; all ranks call these functions together and get the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evodsp.config import FeatureConfig, KernelsConfig
from evodsp.errors import UserError
from evodsp.files import check_output_folder
from evodsp.inference.attempts import AttemptNotes
from evodsp.inference.batch_table import BESIDE_TABLE, TABLE
from evodsp.inference.config import FileSettings, PassSettings, PredictConfig, SizeSettings, TemplateSettings
from evodsp.inference.devices import check_pair_fits, device_of, memory_errors
from evodsp.inference.earlier_results import EarlierResult, find_earlier, result_settings
from evodsp.inference.failures import FAILURES, RecordFailure, none_usable
from evodsp.inference.models import (
    NamedModel,
    check_target_fits_ranks,
    feature_config,
    find_models,
    with_template_row,
)
from evodsp.inference.pages.batch_page import BESIDE, INDEX
from evodsp.inference.relaxation import check_openmm
from evodsp.inference.run_log import LOG
from evodsp.inference.search import SEARCHED, with_searched
from evodsp.inference.target_msas import MSAS, TargetMsa
from evodsp.inference.target_templates import Templates, find_templates, takes_no_templates, template_source
from evodsp.inference.targets import Target, find_targets
from evodsp.launch.consensus import from_first, on_first
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.group import Group
from evodsp.planner.prediction import pair_share
from evodsp.weights.by_name import PUBLISHED, fetch_weights
from evodsp.weights.checkpoint import load_config, load_features, load_model

_OURS = (INDEX, BESIDE, TABLE, BESIDE_TABLE, FAILURES, LOG, SEARCHED)
"""Names of files and folders that a run itself writes into its output."""


@dataclass(frozen=True)
class Job:
    """One target, with everything that its prediction needs besides the alignments and the model."""

    target: Target
    model: NamedModel
    templates: Templates
    """The templates in use."""
    templates_lines: tuple[str, ...]
    templates_seconds: float
    """Seconds spent on finding the templates."""
    settings: dict[str, Any]
    """The settings that its files depend on."""
    stored: EarlierResult | None
    """The result of an earlier run with the same settings."""
    seeds: list[int]
    """The seeds that have to be predicted."""
    kept: bool
    """Whether all files are there already."""

    def read(self) -> TargetMsa:
        """The target's alignments, as the model takes them. Raises UserError if one is broken or of another sequence."""
        return MSAS[self.model.arrangement].read(self.target)


@dataclass(frozen=True)
class PredictionRun:
    """What is predicted, by which models, with which sizes and limits, and what is written: the settings, read and checked."""

    targets: list[Target]
    failures: list[RecordFailure]
    """The records that are no targets."""
    models: list[NamedModel]
    raw: bool
    """Whether the models' raw weights are used, not their average."""
    preset: str | None
    """The model that another program's parameters belong to."""
    templates: TemplateSettings
    sizes: SizeSettings
    passes: PassSettings
    kernels: KernelsConfig
    device: torch.device
    seeds: list[int]
    files: FileSettings
    try_anyway: bool
    """Whether a target runs also where the estimate says that it does not fit."""
    notes: AttemptNotes
    """The records that ended earlier runs."""


@dataclass(frozen=True)
class ModelWork:
    """The jobs of one model, which rank 0 reads and checks before the model runs."""

    jobs: list[Job]
    failures: list[RecordFailure]
    """The targets that cannot be predicted."""
    features: FeatureConfig
    model: AlphaFold | None
    """None if every result exists already."""


def check_launch(config: PredictConfig) -> None:
    """Raise UserError if an input is missing or no target can be spread over `parallel.sequence` ranks.

    For the process that starts the ranks: many processes that all end with the same mistake would load the machine for nothing.
    """
    run, failures = read_run(config), list[RecordFailure]()
    for model in run.models:
        features = feature_config(run.sizes, model.trained)
        check = partial(_check_size, config.parallel.sequence, features, model)
        if not all(_failure(target.query.name, partial(check, target)) for target in run.targets):
            return
        # slower: finds out which results exist already and are kept
        jobs, more = _jobs(model, run, features, check)
        if jobs:
            return
        failures += more
    raise none_usable([*run.failures, *failures])


def _failure(name: str, check: Callable[[], object]) -> list[RecordFailure]:
    """The failure of the record `name` if `check` raises UserError, else none."""
    try:
        check()
    except UserError as error:
        return [RecordFailure(name, str(error))]
    return []


def read_run(config: PredictConfig) -> PredictionRun:
    """What `config` asks for. Raises UserError if one of the files or folders is missing or wrong."""
    targets, failures = find_targets(config.sources, config.alignments, config.complex, config.pairing)
    check_output_folder(config.output)
    if config.relax != "none":
        check_openmm()
    models = [_with_sizes(model, config.preset) for model in find_models(_model_files(config))]
    for model in models:
        feature_config(config.sizes, model.trained)  # checks the sizes
    failures += [failure for target in targets for failure in _failure(target.query.name, partial(_check_name, target))]
    targets = [target for target in targets if target.query.name not in _OURS]
    if config.msa_server is not None:
        searched = with_searched(targets, config.output, config.msa_server, config.msa_server_limits, config.retry)
        targets, failures = searched[0], failures + searched[1]
    return PredictionRun(
        targets,
        failures,
        models,
        config.raw,
        config.preset,
        config.template_settings,
        config.sizes,
        config.passes,
        config.kernels,
        device_of(config.device),
        config.seed_numbers,
        config.files,
        config.try_anyway,
        AttemptNotes(config.output, config.memory_options),
    )


def _with_sizes(model: NamedModel, preset: str | None) -> NamedModel:
    """The model with what its file says about it."""
    arrangement = load_config(model.path, preset).arrangement
    return replace(model, arrangement=arrangement, trained=load_features(model.path, preset))


def _check_name(target: Target) -> None:
    if (name := target.query.name) in _OURS:
        raise UserError(f"the name '{name}' is that of a file or folder of evodsp's own in --output; rename the record")


def _model_files(config: PredictConfig) -> list[Path]:
    """The files of the models. Parameters given by name are fetched first."""
    address = config.weights_url or PUBLISHED
    fetched = fetch_weights(config.weights_names, config.weights_folder, address, hours=config.weights_hours)
    return config.checkpoints + fetched


def prepare(named: NamedModel, run: PredictionRun, done: Collection[str], group: Group | None, ranks: int) -> ModelWork:
    """Check the jobs of one model and read its checkpoint, on rank 0.

    `done`: the records that this run has written results of. `ranks`: the number that shares a structure. Rank 0 answers the
    others after each target, because thousands of targets take longer than ranks may wait for one another.
    """
    features = feature_config(run.sizes, named.trained)
    jobs, failures = _jobs(named, run, features, partial(_check, features, ranks, named), done, group)
    model = None
    if any(job.seeds for job in jobs):
        model = from_first(lambda: load_model(named.path, run.raw, run.preset), group)
        if run.templates.folder is not None and not model.config.templates.enabled:
            raise takes_no_templates(run.templates.folder, named.path)
        features = with_template_row(features, model.config.templates.enabled)
        share = partial(pair_share, channels=model.config.channels.pair, ranks=ranks, half=run.passes.half)
        jobs, more = from_first(lambda: _that_fit(jobs, share, run.device), group)
        failures += more
    return ModelWork(jobs, failures, features, model)


def _check(features: FeatureConfig, ranks: int, model: NamedModel, target: Target) -> None:
    """Raise UserError if a target's alignments cannot be read, or the model or the ranks do not take it."""
    _check_size(ranks, features, model, target)
    with memory_errors(target.query.name, len(target.query), torch.device("cpu")):
        MSAS[model.arrangement].read(target)


def _check_size(ranks: int, features: FeatureConfig, model: NamedModel, target: Target) -> None:
    """Raise UserError if a target has several chains, and the model does not; or if it is too short for the ranks."""
    MSAS[model.arrangement].check(target, model.path)
    check_target_fits_ranks(ranks, features, target)


def _that_fit(
    jobs: list[Job], share: Callable[[int], int], device: torch.device
) -> tuple[list[Job], list[RecordFailure]]:
    """The jobs whose pair representation the device can hold, and the failures of the others.

    `share`: the bytes of a rank's pair representation for a number of residues.
    """
    failures = []
    for job in jobs:
        if job.seeds:
            query = job.target.query
            failures += _failure(
                query.name, partial(check_pair_fits, query.name, len(query), share(len(query)), device)
            )
    lost = {failure.name for failure in failures}
    return [job for job in jobs if job.target.query.name not in lost], failures


def _jobs(
    model: NamedModel,
    run: PredictionRun,
    features: FeatureConfig,
    check: Callable[[Target], None],
    done: Collection[str] = (),
    group: Group | None = None,
) -> tuple[list[Job], list[RecordFailure]]:
    """One job per target, with its templates and its earlier result; and a failure for each target that cannot be predicted.

    `check` raises UserError for such a target; a target without a seed to predict is not checked. `done`: see `prepare`.
    """
    sources = on_first(lambda: [template_source(run.templates, features, model.path)], group)

    def job(target: Target) -> Job:
        assert sources is not None, "only rank 0 reads"
        (source,) = sources
        start, name, files = time.perf_counter(), target.query.name, run.files
        templates, lines = find_templates(source, target, features.max_templates)
        seconds = time.perf_counter() - start
        settings = result_settings(run.passes, run.raw, features, target, model, templates)
        stored = find_earlier(files.output / name, settings, model.name, files.overwrite and name not in done)
        missing = run.seeds if stored is None else stored.missing(run.seeds, files.save)
        if missing:
            check(target)
        kept = stored is not None and not missing and stored.has_all(files.format, files.pae_in_cif)
        return Job(target, model, templates, lines, seconds, settings, stored, missing, kept)

    def job_or_failure(target: Target) -> Job | RecordFailure:
        try:
            return job(target)
        except UserError as error:
            return RecordFailure(target.query.name, str(error))

    found = [from_first(partial(job_or_failure, target), group) for target in run.targets]
    return [item for item in found if isinstance(item, Job)], [
        item for item in found if isinstance(item, RecordFailure)
    ]
