"""The jobs of a run, one for each record and model: what is read and checked before a model runs, and the seeds that remain.

Rank 0 reads; all ranks call these functions together and get the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evodsp.config import ArrangementName, FeatureConfig
from evodsp.errors import UserError
from evodsp.inference.batch_table import BESIDE_TABLE, TABLE
from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import check_pair_fits, memory_errors
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
from evodsp.inference.target_msas import TargetMsa
from evodsp.inference.target_readers import READERS
from evodsp.inference.target_templates import Templates, find_templates, takes_no_templates, template_source
from evodsp.inference.targets import Target, find_targets
from evodsp.launch.consensus import from_first, on_first
from evodsp.model.alphafold import AlphaFold
from evodsp.output import check_output_folder
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
    model: str | None
    """Name of the model in the target's folder; None if it is the only one."""
    arrangement: ArrangementName
    """The arrangement of the model."""

    def read(self) -> TargetMsa:
        """The target's alignments, as the model takes them. Raises UserError if one is broken or of another sequence."""
        return READERS[self.arrangement].read(self.target)


@dataclass(frozen=True)
class RunInputs:
    """The records and models that a user gives."""

    targets: list[Target]
    failures: list[RecordFailure]
    """The records that are no targets."""
    models: list[tuple[NamedModel, FeatureConfig]]
    """The models, each with the feature sizes of its checkpoint."""


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
    inputs, failures = read_inputs_and_models(config), list[RecordFailure]()
    for model, trained in inputs.models:
        features = feature_config(config.sizes, trained)
        check = partial(_check_size, config.parallel.sequence, features, model)
        if not all(_failure(target.query.name, partial(check, target)) for target in inputs.targets):
            return
        # slower: finds out which results exist already and are kept
        jobs, more = _jobs(model, inputs, config, features, check)
        if jobs:
            return
        failures += more
    raise none_usable([*inputs.failures, *failures])


def _failure(name: str, check: Callable[[], object]) -> list[RecordFailure]:
    """The failure of the record `name` if `check` raises UserError, else none."""
    try:
        check()
    except UserError as error:
        return [RecordFailure(name, str(error))]
    return []


def read_inputs_and_models(config: PredictConfig) -> RunInputs:
    """The records and the models. Raises UserError if one of the files or folders is missing or wrong."""
    targets, failures = find_targets(config.sources, config.alignments, config.complex, config.pairing)
    check_output_folder(config.output)
    if config.relax != "none":
        check_openmm()
    models = [
        (
            replace(model, arrangement=load_config(model.path, config.preset).arrangement),
            load_features(model.path, config.preset),
        )
        for model in find_models(_model_files(config))
    ]
    for _, trained in models:
        feature_config(config.sizes, trained)  # checks the sizes
    failures += [failure for target in targets for failure in _failure(target.query.name, partial(_check_name, target))]
    targets = [target for target in targets if target.query.name not in _OURS]
    targets, unfound = with_searched(targets, config.output, config.msa_server, config.msa_server_limits, config.retry)
    return RunInputs(targets, [*failures, *unfound], models)


def _check_name(target: Target) -> None:
    if (name := target.query.name) in _OURS:
        raise UserError(f"the name '{name}' is that of a file or folder of evodsp's own in --output; rename the record")


def _model_files(config: PredictConfig) -> list[Path]:
    """The files of the models. Parameters given by name are fetched first."""
    address = config.weights_url or PUBLISHED
    fetched = fetch_weights(config.weights_names, config.weights_folder, address, hours=config.weights_hours)
    return config.checkpoints + fetched


def prepare(
    named: NamedModel,
    trained: FeatureConfig,
    inputs: RunInputs,
    config: PredictConfig,
    device: torch.device,
    group: Group | None,
    ranks: int,
) -> ModelWork:
    """Check the jobs of one model and read its checkpoint, on rank 0. `ranks`: the number that shares a structure.

    Rank 0 answers the others after each target, because thousands of targets take longer than ranks may wait for one another.
    """
    features = feature_config(config.sizes, trained)
    jobs, failures = _jobs(named, inputs, config, features, partial(_check, features, ranks, named), group)
    model = None
    if any(job.seeds for job in jobs):
        model = from_first(lambda: load_model(named.path, config.raw, config.preset), group)
        if config.templates is not None and not model.config.templates.enabled:
            raise takes_no_templates(config.templates, named.path)
        features = with_template_row(features, model.config.templates.enabled)
        channels, half = model.config.channels.pair, config.passes.half
        share = partial(pair_share, channels=channels, ranks=ranks, half=half)
        jobs, more = from_first(lambda: _that_fit(jobs, share, device), group)
        failures += more
    return ModelWork(jobs, failures, features, model)


def _check(features: FeatureConfig, ranks: int, model: NamedModel, target: Target) -> None:
    """Raise UserError if a target's alignments cannot be read, or the model or the ranks do not take it."""
    _check_size(ranks, features, model, target)
    with memory_errors(target.query.name, len(target.query), torch.device("cpu")):
        READERS[model.arrangement].read(target)


def _check_size(ranks: int, features: FeatureConfig, model: NamedModel, target: Target) -> None:
    """Raise UserError if a target has several chains, and the model does not; or if it is too short for the ranks."""
    READERS[model.arrangement].check(target, model.path)
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
    inputs: RunInputs,
    config: PredictConfig,
    features: FeatureConfig,
    check: Callable[[Target], None],
    group: Group | None = None,
) -> tuple[list[Job], list[RecordFailure]]:
    """One job per target, with its templates and its earlier result; and a failure for each target that cannot be predicted.

    `check` raises UserError for such a target; a target without a seed to predict is not checked.
    """
    sources = on_first(lambda: [template_source(config.template_settings, features, model.path)], group)
    names = {other.digest: other.name for other, _ in inputs.models if other.name is not None}

    def job(target: Target) -> Job:
        assert sources is not None, "only rank 0 reads"
        (source,) = sources
        start = time.perf_counter()
        templates, lines = find_templates(source, target, features.max_templates)
        seconds = time.perf_counter() - start
        settings = result_settings(
            config.passes, config.raw, features, target, model.digest, templates, model.arrangement
        )
        stored = find_earlier(config.output / target.query.name, settings, config.overwrite, model.name, names)
        wanted = config.seed_numbers
        missing = wanted if stored is None else stored.missing(wanted)
        if missing:
            check(target)
        kept = stored is not None and stored.has_all(wanted, config.format, config.pae_in_cif)
        called = model.name if stored is None else stored.model
        return Job(target, templates, lines, seconds, settings, stored, missing, kept, called, model.arrangement)

    def job_or_failure(target: Target) -> Job | RecordFailure:
        try:
            return job(target)
        except UserError as error:
            return RecordFailure(target.query.name, str(error))

    found = [from_first(partial(job_or_failure, target), group) for target in inputs.targets]
    return [item for item in found if isinstance(item, Job)], [
        item for item in found if isinstance(item, RecordFailure)
    ]
