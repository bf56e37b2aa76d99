"""The jobs of a run, one for each record and model: what is read and checked before a model runs, and the seeds that
remain.

Rank 0 reads; all ranks call these functions together and get the same.

The models of a prediction: one checkpoint, or several whose predictions are ranked together; their names and feature sizes.

A model's name begins the names of its files. It is the checkpoint's file name, with the folders above it as far as they are
needed to tell models apart: runs/a/checkpoints/best.ckpt and runs/b/checkpoints/best.ckpt are a_best and b_best.

Results of earlier runs in a target's folder: seeds that need no model, structures to write in another format, a user's
files.

Structures are stored with 0.001 Å and pLDDT with 0.01, in mmCIF as in PDB: so a format is written from a file of the other
one, and holds the same numbers as if it had been written at once.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evodsp.config import ArrangementName, FeatureConfig, KernelsConfig
from evodsp.data.samples.raw_features import check_config
from evodsp.errors import UserError
from evodsp.files import check_output_folder
from evodsp.inference.config import (
    FileSettings,
    PassSettings,
    PredictConfig,
    SaveSettings,
    SizeSettings,
    TemplateSettings,
)
from evodsp.inference.devices import AttemptNotes, check_pair_fits, device_of, memory_errors
from evodsp.inference.pages.target_page import BESIDE, INDEX
from evodsp.inference.relaxation import check_openmm
from evodsp.inference.representations import is_saved
from evodsp.inference.result_checks import read_object
from evodsp.inference.results import (
    BESIDE_TABLE,
    FAILURES,
    LOG,
    OURS,
    RANKING,
    REPORT,
    TABLE,
    Format,
    Key,
    PredictionResult,
    RecordFailure,
    holds_pae,
    none_usable,
    read_aligned_error,
    read_structure,
    read_timings,
    read_with_ranking,
    stem,
)
from evodsp.inference.search import SEARCHED, with_searched
from evodsp.inference.structure_files import Origin, structure_text
from evodsp.inference.target_msas import (
    MSAS,
    TargetMsa,
    Templates,
    find_templates,
    takes_no_templates,
    template_digest,
    template_names,
    template_source,
)
from evodsp.inference.targets import Target, content_digest, find_targets, fingerprint
from evodsp.launch.consensus import from_first, on_first
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.group import Group
from evodsp.search.server import MsaServer
from evodsp.weights.by_name import PUBLISHED, fetch_weights
from evodsp.weights.checkpoint import load_model, load_sizes
from evodsp.weights.parameter_file import CONFIG, is_pretrained, located, parameter_file

SIZES = ("recycles", "msa_clusters", "extra_msa")
"""Options whose default is the value used in training."""

_SUFFIXES = (".ckpt", ".npz", ".pt")
_OF_DEEPSPEED = ("latest", "checkpoint", "*mp_rank_*")
_TELLS_NOTHING = "checkpoints"
"""The folder of checkpoints within the folder of every run."""


@dataclass(frozen=True)
class NamedModel:
    """A checkpoint."""

    path: Path
    name: str | None
    """None if the run has one model; file names then have no model prefix."""
    digest: str
    """The fingerprint of its file."""
    arrangement: ArrangementName = "monomer"
    """The arrangement of its parts (`ModelConfig.arrangement`)."""
    trained: FeatureConfig = field(default_factory=FeatureConfig)
    """The feature sizes of its checkpoint."""
    takes_templates: bool = False
    """Whether it reads templates, and was trained with some."""


def find_models(given: Sequence[Path]) -> list[NamedModel]:
    """The models of `--checkpoint` and `--weights`: files, or folders of them, or names of the Hugging Face hub.

    Of several files with the same content only the first is taken: a run's last.ckpt is often its best one too.
    Raises UserError if a file is missing or given twice.
    """
    paths = [path for place in given for path in _files(place)]
    if repeated := [path for path in paths if paths.count(path) > 1]:
        raise UserError(f"{repeated[0]} is given as --checkpoint more than once; give it once")
    different: dict[str, Path] = {}
    local = {path: located(path) for path in paths}
    for path, place in local.items():
        if not place.exists():
            raise UserError(f"{path}: no such checkpoint; check --checkpoint")
        different.setdefault(_content(place), path)
    names = _names(list(different.values()))
    return [
        NamedModel(
            local[path], name if len(names) > 1 else None, fingerprint((parameter_file(local[path]).name, content))
        )
        for (content, path), name in zip(different.items(), names, strict=True)
    ]


def _content(path: Path) -> str:
    """A fingerprint of a model's content: of its file, and where its sizes are in another one, of that too."""
    content = content_digest(parameter_file(path))
    return fingerprint((content, content_digest(path / CONFIG))) if is_pretrained(path) else content


def _files(path: Path) -> list[Path]:
    """The checkpoints in a folder; or `path` itself, if it is a file, or a folder that is one model."""
    if not path.is_dir() or is_pretrained(path) or any(any(path.glob(pattern)) for pattern in _OF_DEEPSPEED):
        return [path]
    if found := sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES):
        return found
    inside, best = path / _TELLS_NOTHING, path / _TELLS_NOTHING / "best.ckpt"
    instead = (
        f"give {best if best.is_file() else inside}" if inside.is_dir() else "give a file, or a folder of such files"
    )
    raise UserError(f"{path}: --checkpoint is a folder without a checkpoint ({', '.join(_SUFFIXES)}); {instead}")


def _names(paths: Sequence[Path]) -> list[str]:
    """Names that differ, each as short as possible with as many folders as all others."""
    parts = [[*(part for part in path.absolute().parts[1:-1] if part != _TELLS_NOTHING), path.stem] for path in paths]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = [re.sub(r"[^A-Za-z0-9.-]+", "_", "_".join(part[-length:])).strip("_.-") for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"--checkpoint: '{paths[0]}' and another one have names that files cannot tell apart; rename one")


def feature_config(sizes: SizeSettings, trained: FeatureConfig) -> FeatureConfig:
    """The checkpoint's feature sizes without cropping, with the options that the user gave in their place."""
    given = {name: value for name in SIZES if (value := getattr(sizes, name)) is not None}
    features = replace(trained, crop_size=None, uniform_recycling=False, **given)
    check_config(features)
    return features


def with_template_row(features: FeatureConfig, takes_templates: bool) -> FeatureConfig:
    """`features` with at least one template if the model reads templates: it needs the features' arrays, even if the sizes
    allow no template. The added one is always absent."""
    if features.max_templates or not takes_templates:
        return features
    return replace(features, max_templates=1, msa_clusters=features.msa_clusters + 1)


def check_target_fits_ranks(ranks: int, features: FeatureConfig, target: Target) -> None:
    """Raise UserError if there are more ranks than residues or MSA rows of `target`."""
    check_ranks(ranks, len(target.query), features.msa_clusters - features.max_templates, f"{target.query.name}: ")


def check_ranks(ranks: int, residues: int, rows: int, before: str = "") -> None:
    """Raise UserError if there are more ranks than residues or MSA rows: each rank needs one of both.

    `before`: the beginning of the message.
    """
    if ranks > min(rows, residues):
        raise UserError(
            f"{before}--parallel.sequence is {ranks}, but with {residues} residues and {rows} rows of the clustered MSA it "
            f"can be at most {min(rows, residues)}; lower it"
        )


def sizes_line(features: FeatureConfig, trained: FeatureConfig, ensembles: int) -> str:
    """The log's line of sizes, for example 'sizes: recycles 1 (default 3), msa_clusters 512, extra_msa 5120'."""
    sizes = []
    for name in SIZES:
        used, default = getattr(features, name), getattr(trained, name)
        sizes.append(f"{name} {used}" if used == default else f"{name} {used} (default {default})")
    if ensembles > 1:
        sizes.append(f"ensembles {ensembles}")
    return f"sizes: {', '.join(sizes)}"


NUMERICS: Mapping[ArrangementName, int] = {"monomer": 1, "multimer": 2}
"""Raised when a version of evodsp computes other numbers from the same inputs, beyond rounding: its results do not mix. 2:
residue types of a complex are those of its sequences, where an alignment has X."""


@dataclass(frozen=True)
class EarlierResult:
    """A complete result of an earlier run with the same inputs and settings."""

    result: PredictionResult
    content: Mapping[str, Any]
    """ranking.json."""
    timings: Mapping[str, Any]
    """timings.json."""
    model: str | None
    """Name of this run's model among several; None if it is the only one."""

    @property
    def ranking(self) -> Sequence[Mapping[str, Any]]:
        """The entries of ranking.json."""
        return self.content["ranking"]

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of all models in the folder, if there are several."""
        return self.content.get("models", {})

    def missing(self, seeds: Sequence[int], save: SaveSettings | None = None) -> list[int]:
        """The seeds among `seeds` that have to be predicted, also those whose arrays are to be saved, but are not there."""
        folder = self.result.folder
        there = {
            entry["seed"]
            for key, entry in self._entries.items()
            if entry.get("model") == self.model and is_saved(folder, entry, stem(key), save)
        }
        return [seed for seed in seeds if seed not in there]

    def has_all(self, file_format: Format, pae: bool = False) -> bool:
        """Whether all structures are there in this format, and the page (which earlier versions did not write).

        `pae`: whether ModelCIF files have to hold the aligned errors.
        """
        return not self.without(file_format, pae) and (self.result.folder / REPORT).is_file()

    def without(self, file_format: Format, pae: bool = False) -> list[Key]:
        """The predictions that have no structure in this format, or none with aligned errors where it has to hold them."""
        files = {key: self.result.folder / f"{stem(key)}.{file_format}" for key in self._entries}
        return [
            key
            for key, file in files.items()
            if not file.is_file() or (pae and "ptm" in self._entries[key] and not holds_pae(file))
        ]

    @property
    def _entries(self) -> dict[Key, Mapping[str, Any]]:
        return dict(zip(self.result.mean_plddt, self.ranking, strict=True))

    def write_format(self, folder: Path, file_format: Format, pae: bool = False) -> None:
        """Write the structures that lack this format into `folder`. Raises UserError if the format cannot hold them."""
        for key in self.without(file_format, pae):
            entry = self._entries[key]
            made_with = self.models[entry["model"]] if "model" in entry else self.content["settings"]
            structure = read_structure(self.result, key)
            if pae and "ptm" in entry:
                structure = replace(structure, aligned_error=read_aligned_error(self.result.folder, key, entry["ptm"]))
            text = structure_text(structure, file_format, Origin.of(entry, made_with), pae)
            (folder / f"{stem(key)}.{file_format}").write_text(text, encoding="utf-8")

    def with_timings(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """timings.json after a run that added seeds, whose entries are `more`: times of both, the other numbers of that run."""
        sums = {name: round(self.timings[name] + more[name], 3) for name in ("features_seconds", "model_seconds")}
        again = {(entry.get("model"), entry["seed"]) for entry in more["seeds"]}
        kept = [entry for entry in self.timings["seeds"] if (entry.get("model"), entry["seed"]) not in again]
        return {**more, **sums, "seeds": [*kept, *more["seeds"]]}


_INPUTS = {"numerics", "sequence", "alignments"}
"""The settings in which all models of a folder are equal."""


def find_earlier(
    folder: Path, settings: Mapping[str, Any], model: str | None, overwrite: bool = False
) -> EarlierResult | None:
    """The result that `folder` already holds, or None if everything has to be predicted.

    `model`: the name of the model in this run, if it has several; one that has no results there yet joins the others. Raises
    UserError if `folder` holds results of other settings, or an incomplete one (unless `overwrite`).
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, but the results need a folder of this name; move it or choose another --output"
        )
    if overwrite or not any(map(_ours(folder), (path.name for path in folder.iterdir()))):
        return None
    result, content = read_with_ranking(folder)
    models: Mapping[str, Mapping[str, Any]] = content.get("models", {})
    if models and model is None:
        raise _other_run(folder, f"several models ({', '.join(models)}), and this run has one")
    if model is not None and not models:
        raise _other_run(folder, "one model, and this run has several")
    made_with: Mapping[str, Any] = content.get("settings", {})
    known = set(settings)
    if model is not None:
        made_with = models.get(model) or next(iter(models.values()))
        known &= known if model in models else _INPUTS
    if differing := [key for key in settings if key in known and made_with.get(key) != settings[key]]:
        key = differing[0]
        raise _other_run(folder, f"another run ({key}: {made_with.get(key)} there, {settings[key]} now)")
    return EarlierResult(result, content, {"seeds": [], **read_timings(folder)}, model)


def _other_run(folder: Path, of: str) -> UserError:
    return UserError(f"{folder}: holds results of {of}; choose another --output, or replace them with --overwrite")


def copy_files(folder: Path, into: Path, stored: EarlierResult | None) -> None:
    """Copy the user's own files of a target's folder into its successor, and the files of the earlier predictions `stored`."""
    if not folder.is_dir():
        return
    ours = _ours(folder)
    for path in folder.iterdir():
        if stored is None and ours(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, into / path.name, symlinks=True)
        else:
            shutil.copy2(path, into / path.name, follow_symlinks=False)


def _ours(folder: Path) -> Callable[[str], bool]:
    """Whether predict has written the file of this name into `folder`; all others are the user's."""
    models: list[str] = []
    with suppress(UserError):
        models = list(read_object(folder / RANKING).get("models", {}))
    return lambda name: any(OURS.fullmatch(name.removeprefix(before)) for before in ("", *(f"{m}_" for m in models)))


def result_settings(
    passes: PassSettings,
    raw: bool,
    features: FeatureConfig,
    target: Target,
    model: NamedModel,
    templates: Templates,
) -> dict[str, Any]:
    """Everything that the numbers of a seed depend on. An earlier result is kept only if every entry is equal.

    `raw`: whether the weights are the raw ones. `templates`: the templates in use.
    """
    return {
        "numerics": NUMERICS[model.arrangement],
        "sequence": target.sequence,
        "alignments": target.digest,
        "checkpoint": model.digest,
        "raw": raw,
        **{name: getattr(features, name) for name in SIZES},
        "ensembles": passes.ensembles,
        "stop_tolerance": passes.stop_tolerance or None,
        "templates": template_names(target, templates),
        "templates_digest": template_digest(templates),
        # None for the default: earlier versions, which had no other, wrote no entry.
        "precision": passes.precision if passes.half else None,
        "matmul_precision": None if passes.matmul_precision == "highest" else passes.matmul_precision,
        "dropout": passes.dropout or None,
        # Only where rows of different chains can be paired: the files of single chains have no entry.
        **({"pairing": target.pairing} if target.pairs else {}),
    }


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
    """Records, models, sizes, limits and outputs of a prediction: the settings, read and checked."""

    targets: list[Target]
    failures: list[RecordFailure]
    """The records that are no targets."""
    models: list[NamedModel]
    raw: bool
    """Whether the models' raw weights are used, not their average."""
    preset: str | None
    """The model that another program's parameters belong to."""
    layers: list[str]
    """The models' sub-layers whose classes may be imported."""
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
    """The run that `config` asks for. Raises UserError if one of the files or folders is missing or wrong."""
    targets, failures = find_targets(config.sources, config.alignments, config.complex, config.pairing)
    check_output_folder(config.output)
    if config.relax != "none":
        check_openmm()
    models = [_with_sizes(model, config.preset) for model in find_models(_model_files(config))]
    for model in models:
        feature_config(config.sizes, model.trained)  # checks the sizes
    if (config.templates or config.msa_server_templates) and not any(model.takes_templates for model in models):
        given = f"--templates {config.templates}" if config.templates else "--msa_server_templates true"
        raise takes_no_templates(given, models[0].path)
    failures += [failure for target in targets for failure in _failure(target.query.name, partial(_check_name, target))]
    targets = [target for target in targets if target.query.name not in _OURS]
    if config.msa_server is not None:
        server = MsaServer(config.msa_server, config.msa_server_limits, pairing=config.msa_server_pairing)
        searched = with_searched(targets, config.output, server, config.retry, config.msa_server_templates)
        targets, failures = searched[0], failures + searched[1]
    return PredictionRun(
        targets=targets,
        failures=failures,
        models=models,
        raw=config.raw,
        preset=config.preset,
        layers=config.layers,
        templates=config.template_settings,
        sizes=config.sizes,
        passes=config.passes,
        kernels=config.kernels,
        device=device_of(config.device),
        seeds=config.seed_numbers,
        files=config.files,
        try_anyway=config.try_anyway,
        notes=AttemptNotes(config.output, config.memory_options),
    )


def _with_sizes(model: NamedModel, preset: str | None) -> NamedModel:
    """The model with what its file says about it."""
    config, trained = load_sizes(model.path, preset)
    takes = config.templates.enabled and trained.max_templates > 0
    return replace(model, arrangement=config.arrangement, trained=trained, takes_templates=takes)


def _check_name(target: Target) -> None:
    if (name := target.query.name) in _OURS:
        raise UserError(f"the name '{name}' is that of a file or folder of evodsp's own in --output; rename the record")


def _model_files(config: PredictConfig) -> list[Path]:
    """The files of the models. Parameters given by name are fetched first."""
    if not config.weights_names:
        return config.checkpoints
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
        model = from_first(lambda: load_model(named.path, run.raw, run.preset, run.layers), group)
        features = with_template_row(features, model.config.templates.enabled)
        share = partial(model.config.pair_share, ranks=ranks, half=run.passes.half)
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
    sources = on_first(lambda: [template_source(run.templates) if model.takes_templates else None], group)

    def job(target: Target) -> Job:
        assert sources is not None, "only rank 0 reads"
        (source,) = sources
        start, name, files = time.perf_counter(), target.query.name, run.files
        templates, lines = find_templates(source, target, features.max_templates)
        seconds = time.perf_counter() - start
        settings = result_settings(run.passes, run.raw, features, target, model, templates)
        settings["templates_from"] = "server" if run.templates.of_server and model.takes_templates else None
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
