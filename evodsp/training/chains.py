"""The chains that a run trains on and scores, and the folders or stores that hold them.

Both are opened and looked up before anything is built. A run of a model of complexes has entries in place of chains: each
stands for the chains of its assembly.

`ChainDataModule` gives their batches to Lightning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from evodsp.config import ArrangementName, FeatureConfig, parse_latest_date
from evodsp.data.index.data_index import DataIndex
from evodsp.data.records import COMPLEXES
from evodsp.data.samples.dataset import AddedEntries, MadeHere, SampleDataset, SampleMaker, SamplePool, first_look
from evodsp.data.samples.raw_features import HOST
from evodsp.data.samples.selection import (
    DISTILLED,
    ChainChoice,
    ChainDraws,
    DistillationSet,
    KnownChains,
    MixedDraws,
    Presence,
    Selected,
    Selection,
    chain_list,
    exclusion,
    open_predictions,
    select,
)
from evodsp.data.similarity.nearest import Compared, Exclusion
from evodsp.data.similarity.sequences import sequences
from evodsp.data.sources.chain_files import ChainFiles, Lacking, Store
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.opening import KIND_OF, ComplexFiles, Records, Unit, open_files, open_store
from evodsp.data.sources.structures import KeptStructures, StructureFolder
from evodsp.data.templates.source import TemplateChains, TemplateSource, listed_chains
from evodsp.errors import UserError, memory_size
from evodsp.features.batch import with_features
from evodsp.launch.consensus import long_from_first, on_every
from evodsp.losses.permutation import ENTITIES
from evodsp.parallel.group import Group
from evodsp.printing import counted
from evodsp.rng import Draws
from evodsp.training.config import DataConfig, DistillationConfig
from evodsp.training.gradients import Batching
from evodsp.training.loader import EpochSampler, Quarantine, TrainingLoader, WholeChainLoader, failures_of
from evodsp.training.trainer import tell_first
from evodsp.training.world import World

MOST_CHAINS_READ = 64
"""Up to this many chains are read completely before training starts; of more, only the files' presence is checked."""


CHAINS_FOR_RESOLUTION = 16
"""If there are more chains and no index, this many structures are read, to estimate how many have no resolution."""


@dataclass(frozen=True)
class ChainNames:
    """The chains of each stage, by their names, and what is known of them: what rank 0 tells the others."""

    train: list[str]
    validation: list[str]
    test: list[str]
    weights: Float64[np.ndarray, " n"] | None = None
    """Relative frequencies with which training chains are drawn; None: all are equal."""
    distilled: list[str] = field(default_factory=list)
    """Chains of the self-distillation set, their names beginning with `DISTILLED`."""
    distilled_weights: Float64[np.ndarray, " m"] | None = None
    """Relative frequencies of these chains, as `weights`."""
    missing: dict[str, Lacking] = field(default_factory=dict)
    """Chains that are left out of training or of the self-distillation set, each with the file that it lacks."""
    resolutions: Float64[np.ndarray, " k"] = field(default_factory=lambda: np.zeros(0))
    """Resolutions of the training chains, or of those whose resolution is known before the first step: in Å, 0 if the structure
    has none."""


@dataclass(frozen=True)
class Chains(ChainNames):
    """The chains of each stage and the open store."""

    store: Records = field(kw_only=True)
    templates: TemplateSource | None = None
    """The source of templates; None if samples have none."""
    distillation: DistillationSet | None = None
    """The self-distillation set; None if there is none."""

    def notes(self, listed_in: Path) -> list[str]:
        """Warnings before training starts, one a line. `listed_in`: the file that lists `missing`."""
        notes = []
        for kind, are_distilled, left in (("training", False, self.train), ("distillation", True, self.distilled)):
            missing = [lacking for key, lacking in self.missing.items() if key.startswith(DISTILLED) == are_distilled]
            if missing:
                lacking = ", ".join(f"{count:,} without {what}" for what, count in sorted(Counter(missing).items()))
                total = len(missing) + len(left)
                notes.append(
                    f"{len(missing):,} of {total:,} {kind} chains are left out: {lacking}; {listed_in} lists them"
                )
        stores: list[Store] = [self.store, *([] if self.distillation is None else [self.distillation.source])]
        for store in stores:
            if store.index is not None and (stale := store.stale_sources()):
                notes.append(
                    f"{store.index.path} is older than {', '.join(stale)}; make it again: {store.index.command}"
                )
        return notes


def find_chains(
    config: DataConfig,
    quarantined: Container[str] = frozenset(),
    group: Group | None = None,
    arrangement: ArrangementName = "monomer",
) -> Chains:
    """Open the store and look every chain up. Training chains that lack files are left out, provided that some remain.

    `quarantined`: chains that a run which resumes is known to leave out; they are not read in advance. `group`: all ranks, of
    which the first looks the chains up and tells the others; None for one process. `arrangement`: that of the model; the
    samples of a multimer are complexes.
    Raises UserError for the first file or name that is missing otherwise.
    """
    opened = on_every(lambda: open_samples(config, arrangement), group)
    found = long_from_first(lambda: _look_up(config, quarantined, *opened), group)
    return Chains(**vars(found), store=opened[0], templates=opened[1], distillation=opened[2])


def open_samples(
    config: DataConfig, arrangement: ArrangementName = "monomer"
) -> tuple[Records, TemplateSource | None, DistillationSet | None]:
    """The sources of samples for a model of this arrangement: a store, templates, and the self-distillation set. None:
    samples have none. Raises UserError that names the setting."""
    unit = Unit(KIND_OF[arrangement], config.assembly, config.pairing)
    store: Records
    if config.store is None:
        store, templates = _files(config, unit)
    else:
        store, templates = _built_store(config, config.store, unit)
        if config.index is not None and unit.kind == COMPLEXES:
            DataIndex(config.index, COMPLEXES).check_assembly(unit.assembly)
    return store, templates, open_distillation(config, templates, unit)


def _look_up(
    config: DataConfig,
    quarantined: Container[str],
    store: Records,
    templates: TemplateSource | None,
    predicted: DistillationSet | None,
) -> ChainNames:
    presence = Presence(store)
    validation = chain_list(config.validation_chains) if config.validation_chains is not None else []
    test = chain_list(config.test_chains) if config.test_chains is not None else validation
    if not presence.keys:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another data.alignment_dir")
    held_out = dict.fromkeys([*validation, *test])
    listed = presence.training(None if config.train_chains is None else chain_list(config.train_chains), held_out)
    if not listed:
        raise UserError(
            "data.train_chains is null, which takes all chains but validation and test chains, and there are no others; name "
            "the training chains, or fewer of those"
        )
    if config.train_chains is None and (without := len(presence.keys) - len(listed)):
        tell_first(
            f"data.train_chains is null: {without:,} of {len(presence.keys):,} are validation or test chains and left out"
        )
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    present = [key for key in listed if key not in missing]
    for name, keys in (("train", [] if present else listed), ("validation", validation), ("test", test)):
        for key in keys:
            if (lacking := presence.lacks(key)) is not None:
                raise UserError(f"data.{name}_chains: {store.absence(key, lacking)}")
    excluded = exclusion(config.exclude_like, config.exclude_identity, Compared(store, config.chain_data_cache))
    rules = _rules(config, "data", excluded)
    train = _selected(present, rules, store, "training")
    distinct = dict.fromkeys([*train.keys, *validation, *test])
    read: dict[str, float] = {}
    if len(distinct) <= MOST_CHAINS_READ:
        for key in (key for key in distinct if key not in quarantined):
            read[key], found = first_look(store, key, templates)
            for line in found:
                tell_first(f"templates of {line}")
    distilled = Selected([], None, {})
    if predicted is not None:
        distilled, absent = _look_up_distilled(config.distillation, predicted, excluded, held_out)
        missing |= {DISTILLED + key: what for key, what in absent.items()}
    names = [DISTILLED + key for key in distilled.keys]
    resolutions = _resolutions([key for key in train.keys if key not in quarantined], store, train.known, read)
    return ChainNames(train.keys, validation, test, train.weights, names, distilled.weights, missing, resolutions)


def _resolutions(
    keys: list[str], store: Store, known: KnownChains | None, read: dict[str, float]
) -> Float64[np.ndarray, " k"]:
    """Resolutions in Å, 0 for none: of the chains whose facts are known, or that were `read`; if there are none, of a few
    chains that are read now."""
    if read:
        return np.array([read[key] for key in keys if key in read])
    table = known.table if known is not None else None
    if table is None and store.index is not None:
        table = store.index.table
    if table is not None:
        rows = np.array([row for row in table.rows_of(keys, store.name_of) if row is not None], np.int64)
        found = table.resolutions[rows].astype(np.float64)
        return found[~np.isnan(found)]
    for key in keys[:: max(1, math.ceil(len(keys) / CHAINS_FOR_RESOLUTION))]:
        with suppress(UserError):  # said when a sample is made of it
            read[key] = store.facts(key).resolution
    return np.array(list(read.values()))


def _look_up_distilled(
    config: DistillationConfig, predicted: DistillationSet, excluded: Exclusion | None, held_out: Iterable[str]
) -> tuple[Selected, dict[str, Lacking]]:
    """The chains of the self-distillation set that are drawn, and those that lack something."""
    presence = Presence(predicted.source)
    listed = presence.training(None if config.chains is None else chain_list(config.chains), held_out)
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    if len(missing) == len(listed):
        where = config.store or f"{config.alignment_dir} and {config.structure_dir}"
        raise UserError(
            f"data.distillation: none of {counted(len(listed), 'chain')} has alignments and a structure in {where}"
        )
    present = [key for key in listed if key not in missing]
    if excluded is not None:
        excluded = replace(excluded, comparison=Compared(predicted.source, config.chain_data_cache))
    rules = _rules(config, "data.distillation", excluded)
    return _selected(present, rules, predicted.source, "distillation"), missing


def _rules(config: DataConfig | DistillationConfig, where: str, excluded: Exclusion | None) -> Selection:
    return Selection(
        where, config.chain_data_cache, config.index, config.filters, type(config)().filters, config.sampling, excluded
    )


def unapplied_filters(config: DataConfig, places: Mapping[str, str]) -> list[str]:
    """A line for each set of chains whose filters are given, but not applied. `places`: the settings that the user wrote, and
    where (`OneLineErrors.places`)."""
    parts = ((config, "data"), (config.distillation, "data.distillation"))
    lines = (_rules(part, where, None).unapplied(places) for part, where in parts)
    return [line for line in lines if line is not None]


def _selected(keys: list[str], rules: Selection, store: Store, kind: str) -> Selected:
    """The chains that pass the filters. Prints how many are left out, and why. Raises UserError if none is left."""
    found = select(keys, rules, store)
    line = found.line(kind)
    if not found.keys:
        names = f"{rules.where}.filters" if found.known is not None else "data.exclude_like"
        raise UserError(f"{names}: {line}; change the filters or the chains")
    if line:
        tell_first(line)
    return found


def _built_store(config: DataConfig, address: str, unit: Unit) -> tuple[FeatureStore, TemplateSource | None]:
    """The feature store at `address`, and its templates if samples have any. Raises UserError that names the setting."""
    held = "data.store holds the templates that it was built with; leave {} out"
    _refuse(config, ("template_structure_dir", "obsolete", "template_chains"), held)
    latest = parse_latest_date("data.max_template_date", config.max_template_date)
    store = open_store(address, unit)
    if store.min_plddt is not None:
        raise UserError(
            f"data.store is {address}, which holds predictions (built with --min_plddt {store.min_plddt:g}); give it as "
            "data.distillation.store"
        )
    templates = store.template_source(latest)
    if latest is not None and templates is None:
        raise UserError(
            f"data.max_template_date is {latest}, but {address} was built without templates; build it with "
            "--template_structure_dir, or leave max_template_date out"
        )
    return store, templates if config.train.max_templates or config.validation.max_templates else None


def _files(config: DataConfig, unit: Unit) -> tuple[ChainFiles | ComplexFiles, TemplateSource | None]:
    """The folders of files, and the source of templates. Raises UserError that names the setting."""
    _check_folders(config)
    files = open_files(config.alignment_dir, config.structure_dir, config.index, unit)
    # Chains of a complex that share a sequence have alignments once, so the structures tell the sequences of those listed.
    known = files if isinstance(files, ChainFiles) else StructureFolder(config.structure_dir)
    return files, _template_source(config, known, files.index)


def _check_folders(config: DataConfig) -> None:
    """Raise UserError unless both folders are there."""
    for name, content in (
        ("alignment_dir", "alignments, one sub-folder per chain"),
        ("structure_dir", "structures, <pdbid>.cif"),
    ):
        path = Path(getattr(config, name))
        if not path.is_dir():
            what = "a file" if path.exists() else "no folder"
            raise UserError(f"data.{name} is {path}, which is {what}; give the folder of {content}")


def _refuse(config: DataConfig, names: Iterable[str], why: str) -> None:
    """Raise UserError if one of these settings is given. `why`: the reason and the remedy, with {} for the setting's name."""
    for name in names:
        if (value := getattr(config, name)) is not None:
            raise UserError(f"data.{name} is {value}, but {why.format(name)}")


def _template_source(
    config: DataConfig, files: ChainFiles | StructureFolder, index: DataIndex | None = None
) -> TemplateSource | None:
    """The source of templates; None if the settings name none. `files`: knows the sequences of chains. Raises UserError that
    names the setting."""
    folder, latest, obsolete = config.template_structure_dir, config.max_template_date, config.obsolete
    if config.template_chains is not None:
        return _template_chains(config, files)
    if config.template_max_identity != DataConfig.template_max_identity:
        raise UserError(
            f"data.template_max_identity is {config.template_max_identity}, but data.template_chains is null; give the "
            "chains, or leave template_max_identity out"
        )
    if folder is None:
        missing = "data.template_structure_dir is null; give it, or leave {} out"
        _refuse(config, ("max_template_date", "obsolete"), missing)
        return None
    if not (config.train.max_templates or config.validation.max_templates):
        raise UserError(
            f"data.template_structure_dir is {folder}, but data.train.max_templates and data.validation.max_templates are 0; "
            "set them (AlphaFold2: 4), or leave the folder out"
        )
    if not Path(folder).is_dir():
        raise UserError(
            f"data.template_structure_dir is {folder}, which is not a folder; give the one that holds <pdbid>.cif"
        )
    if obsolete is not None and not Path(obsolete).is_file():
        raise UserError(
            f"data.obsolete is {obsolete}, which is not a file; download the PDB's obsolete.dat, or leave it out"
        )
    source = TemplateSource.open(folder, parse_latest_date("data.max_template_date", latest), obsolete)
    return source if obsolete is not None or index is None else replace(source, obsolete=index.obsolete)


def _template_chains(config: DataConfig, files: ChainFiles | StructureFolder) -> TemplateSource:
    """The source of templates that are chains of `structure_dir`. Raises UserError that names the setting."""
    assert config.template_chains is not None
    named = "data.template_chains names the templates; leave one of them out"
    _refuse(config, ("template_structure_dir", "max_template_date", "obsolete"), named)
    if not (config.train.max_templates or config.validation.max_templates):
        raise UserError(
            "data.template_chains is given, but data.train.max_templates and data.validation.max_templates are 0; "
            "set them (AlphaFold2: 4), or leave template_chains out"
        )
    structures = KeptStructures(config.structure_dir)
    listed = listed_chains(structures, chain_list(config.template_chains))
    present = [key for key in listed if structures.has_structure(key)]
    letters = sequences(files, present, listed, config.chain_data_cache, workers=1)
    known = {key: sequence for key, sequence in letters.items() if sequence}
    if not known:
        raise UserError(
            f"data.template_chains: none of {counted(len(listed), 'chain')} has a structure in {config.structure_dir}; check "
            "the names"
        )
    if len(known) < len(listed):
        tell_first(
            f"{len(listed) - len(known):,} of {len(listed):,} template chains have no structure, or no sequence that can be "
            "read, and are left out"
        )
    return TemplateSource(structures, chains=TemplateChains(known, config.template_max_identity))


def open_distillation(
    data: DataConfig,
    templates: TemplateSource | None,
    unit: Unit = Unit(),  # noqa: B008 (frozen)
) -> DistillationSet | None:
    """The self-distillation set; None if the settings name none. `templates`: the template source of the other chains.

    Raises UserError that names the setting.
    """
    config = data.distillation
    places = config.alignment_dir, config.structure_dir, config.index, config.store
    if (source := open_predictions(*places, config.min_plddt, unit)) is None:
        return None
    if isinstance(source, FeatureStore):
        latest = parse_latest_date("data.max_template_date", data.max_template_date)
        reads_hits = templates is not None and templates.reads_hits
        own = source.template_source(latest) if reads_hits else templates
        if templates is not None and own is None:
            raise UserError(
                f"data.distillation.store is {config.store}, which was built without templates; build it with "
                "--template_structure_dir, or set data.train.max_templates and data.validation.max_templates to 0"
            )
        return DistillationSet(source, config.max_msa_rows, own, config.assumed_resolution)
    if data.store is not None and templates is not None:
        raise UserError(
            f"data.distillation.alignment_dir is {config.alignment_dir}, but the templates of data.store are those of its own "
            "chains; build a store of the set too (evodsp data build --min_plddt), and give it as data.distillation.store"
        )
    return DistillationSet(source, config.max_msa_rows, templates, config.assumed_resolution)


_READ_BY_THE_HOST = {*HOST, "sample_index", ENTITIES}


class ChainDataModule(LightningDataModule):
    """Turns chains into batches, and gives every data rank its share of them."""

    def __init__(self, config: DataConfig, chains: Chains, seed: int = 0, world: World | None = None) -> None:
        """`world`: the ranks that share the samples; None for one process."""
        super().__init__()
        self.quarantine = Quarantine(config.max_quarantined)
        """The list of chains that are left out; it has no file yet."""
        self.quarantine_is_known = False
        """Whether `quarantine` is that of this run already, so that a checkpoint's copy does not replace it."""
        self.config, self.chains, self.seed = config, chains, seed
        self.world = world or World()
        self.added: AddedEntries | None = None
        """Entries of one's own, which a callback may set in its `setup` (docs/own_input.md)."""
        self._samples_taken = 0
        self._training: TrainingLoader | None = None
        self._makers: list[SampleMaker] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move all tensors but those that only the host reads, then share them with the ranks that read nothing."""
        kept = {name: value for name, value in batch.items() if name in _READ_BY_THE_HOST}
        moved = {name: value for name, value in batch.items() if name not in kept}
        moved = super().transfer_batch_to_device(moved, device, dataloader_idx)
        on_device, on_host = self.world.share(moved, kept, device)
        return {**on_device, **on_host}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make the MSA's features, on the device and in the precision of the run."""
        if self.trainer is None:
            raise RuntimeError("features are made in a run only")
        config = self.config.train if self.trainer.training else self.config.validation
        return self.trainer.precision_plugin.convert_input(with_features(batch, config))

    def train_dataloader(self) -> TrainingLoader:
        config, world = self.config, self.world
        step = Batching(
            world.data_ranks, config.batch_size, self.trainer.accumulate_grad_batches if self.trainer else 1
        )
        # `group`: all samples of one optimizer step run the same number of recycling iterations.
        samples = self._samples(self.chains.train, config.train, training=True, group=step.samples)
        batches = step.batches(config.samples_per_epoch)
        sampler = EpochSampler(config.batch_size, batches, world.data_rank, world.data_ranks)
        # Round down to a whole optimizer step: the gradients of an interrupted step are not saved.
        sampler.samples = self._samples_taken - self._samples_taken % step.samples
        maker, most = self._maker(samples, config.num_workers), memory_size("data.prefetch", config.prefetch)
        self._training = TrainingLoader(
            samples,
            sampler,
            maker,
            world.check_batches,
            self.quarantine,
            lambda size: ahead(config.num_workers, most, size),
            step.accumulate,
        )
        return self._training

    def val_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.validation)

    def test_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.test)

    def teardown(self, stage: str) -> None:
        """End the processes that make samples."""
        while self._makers:
            self._makers.pop().close()

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for samples."""
        return 0.0 if self._training is None else self._training.waited_s

    def state_dict(self) -> dict[str, Any]:
        """Lightning restores the state of its loaders only within an epoch; this one is restored between epochs as well."""
        samples = self._training.indices.samples if self._training else self._samples_taken
        return {"samples": samples, "quarantine": self.quarantine.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_taken = state_dict["samples"]
        if not self.quarantine_is_known:
            self.quarantine.restore(failures_of(state_dict.get("quarantine", [])))  # none before version 0.2

    def _samples(self, keys: list[str], config: FeatureConfig, training: bool, group: int = 1) -> SampleDataset:
        chains, draws = self.chains, Draws.root(self.seed).at("data")
        choice: ChainChoice = ChainDraws(draws, keys, chains.weights if training else None)
        if chains.distilled:
            distilled = ChainDraws(draws.at("distillation"), chains.distilled, chains.distilled_weights)
            choice = MixedDraws(draws, choice, distilled, self.config.distillation.fraction)
        # The processes that keep parsed chains: those that read for training, and one for validation.
        processes = max(1, self.config.num_workers) + 1
        memory = memory_size("data.cache", self.config.cache) // processes
        return SampleDataset(
            chains.store,
            keys,
            config,
            self.seed,
            training,
            batch_group=group,
            cache_bytes=memory,
            templates=chains.templates,
            choice=choice,
            distillation=chains.distillation,
            assumed_resolution=self.config.assumed_resolution,
            added=self.added,
        )

    def _whole_chains(self, keys: list[str]) -> Iterable[Any]:
        """One chain per batch, split among the data ranks; no batches if there are no chains.

        All shares have the same length, or ranks that are done would leave the others waiting: the first chains fill them up.
        """
        if not keys:
            return []
        rank, ranks = self.world.data_rank, self.world.data_ranks
        longest = math.ceil(len(keys) / ranks)
        share = [index % len(keys) for index in range(rank, longest * ranks, ranks)]
        samples = self._samples(keys, self.config.validation, training=False)
        maker = self._maker(samples, min(1, self.config.num_workers))
        # A bad validation chain does not end a training run; `evodsp validate` has nothing else to do.
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        return WholeChainLoader(samples, share, maker, self.world.check_batches, leave_out=fitting)

    def _maker(self, samples: SampleDataset, workers: int) -> SampleMaker | None:
        """The maker of this rank's samples; None if another rank of its sequence group reads them."""
        if not self.world.reads:
            return None
        self._makers.append(SamplePool(samples, workers, self.config.time_limit) if workers else MadeHere(samples))
        return self._makers[-1]


def ahead(workers: int, most_bytes: int, sample_bytes: int) -> int:
    """The number of samples to request ahead: as many as fit into `most_bytes`, at least 1 and at most 16 for each worker."""
    return min(16 * workers, max(workers, most_bytes // max(1, sample_bytes))) if sample_bytes else workers
