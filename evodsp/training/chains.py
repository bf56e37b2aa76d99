"""Which chains a run trains on and scores, looked up on disk before anything is built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evodsp.data.samples.dataset import load_record
from evodsp.data.samples.distillation import DistillationSet
from evodsp.data.samples.sampling import DISTILLED
from evodsp.data.samples.selection import Lacking, Presence, Selected, Selection, chain_list, select
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError, nearest
from evodsp.launch.consensus import from_first, on_every
from evodsp.parallel.group import Group
from evodsp.training.config import DataConfig, DistillationConfig
from evodsp.training.progress import report
from evodsp.training.sources import open_distillation, open_source

MOST_CHAINS_READ = 64
"""Up to this many chains are read completely before training starts; of more, only the files' presence is checked."""
CHAINS_FOR_RESOLUTION = 16
"""Of more, without an index, this many structures are read, to say how many have no resolution."""


@dataclass(frozen=True)
class Chains:
    """The open store and the chains of each stage."""

    store: ChainFiles | FeatureStore
    templates: TemplateSource | None
    train: list[str]
    validation: list[str]
    test: list[str]
    weights: Float64[np.ndarray, " n"] | None = None
    """How often each training chain is drawn, in any unit; None: equally often."""
    distillation: DistillationSet | None = None
    distilled: list[str] = field(default_factory=list)
    """Chains of the self-distillation set, their names beginning with `DISTILLED`."""
    distilled_weights: Float64[np.ndarray, " m"] | None = None
    """How often each of them is drawn, as `weights`."""
    missing: dict[str, Lacking] = field(default_factory=dict)
    """Training chains that are left out, those of the self-distillation set too, and what they lack."""
    resolutions: Float64[np.ndarray, " k"] = field(default_factory=lambda: np.zeros(0))
    """Of the training chains, or of those of which it is known before the first step: in Å, 0 if the structure has none."""

    def notes(self, listed_in: Path) -> list[str]:
        """What the user should know before training starts, a line each. `listed_in`: the file that lists `missing`."""
        notes = []
        for kind, are_distilled, left in (("training", False, self.train), ("distillation", True, self.distilled)):
            missing = [lacking for key, lacking in self.missing.items() if key.startswith(DISTILLED) == are_distilled]
            if missing:
                lacking = ", ".join(f"{count:,} without {what}" for what, count in sorted(Counter(missing).items()))
                total = len(missing) + len(left)
                notes.append(
                    f"{len(missing):,} of {total:,} {kind} chains are left out: {lacking}; {listed_in} lists them"
                )
        stores = [self.store, *([] if self.distillation is None else [self.distillation.store])]
        for store in stores:
            if isinstance(store, ChainFiles) and store.index is not None and (stale := store.stale_sources()):
                notes.append(
                    f"{store.index.path} is older than {', '.join(stale)}; make it again: {store.index.command}"
                )
        return notes


@dataclass(frozen=True)
class _Found:
    """What looking the chains up gives; see `Chains`."""

    train: list[str]
    validation: list[str]
    test: list[str]
    weights: Float64[np.ndarray, " n"] | None
    distilled: list[str]
    distilled_weights: Float64[np.ndarray, " m"] | None
    missing: dict[str, Lacking]
    resolutions: Float64[np.ndarray, " k"]


def find_chains(config: DataConfig, quarantined: Container[str] = frozenset(), group: Group | None = None) -> Chains:
    """Open the store and look every chain up. Training chains that lack files are left out, provided that some remain.

    `quarantined`: chains that a run which resumes is known to leave out; they are not read in advance. `group`: all ranks, of
    which the first looks the chains up and tells the others; None for one process.
    Raises UserError for the first file or name that is missing otherwise.
    """
    store, templates, predicted = on_every(lambda: _open(config), group)
    found = from_first(lambda: _look_up(config, quarantined, store, templates, predicted), group)
    names, distilled = (found.train, found.validation, found.test), (found.distilled, found.distilled_weights)
    return Chains(store, templates, *names, found.weights, predicted, *distilled, found.missing, found.resolutions)


def _open(config: DataConfig) -> tuple[ChainFiles | FeatureStore, TemplateSource | None, DistillationSet | None]:
    store, templates = open_source(config)
    return store, templates, open_distillation(config, templates)


def _look_up(
    config: DataConfig,
    quarantined: Container[str],
    store: ChainFiles | FeatureStore,
    templates: TemplateSource | None,
    predicted: DistillationSet | None,
) -> _Found:
    presence = Presence(store)
    listed = chain_list(config.train_chains) if config.train_chains is not None else presence.keys
    validation = chain_list(config.validation_chains) if config.validation_chains is not None else []
    test = chain_list(config.test_chains) if config.test_chains is not None else validation
    if not listed:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another data.alignment_dir")
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    present = [key for key in listed if key not in missing]
    for name, keys in (("train", [] if present else listed), ("validation", validation), ("test", test)):
        for key in keys:
            _check_chain(key, presence, store, f"data.{name}_chains")
    rules = _rules(config, "data")
    train = _selected(present, rules, "training")
    distinct = dict.fromkeys([*train.keys, *validation, *test])
    read: dict[str, float] = {}
    if len(distinct) <= MOST_CHAINS_READ:
        for key in (key for key in distinct if key not in quarantined):
            record = load_record(store, key, templates)
            read[key] = float(record.labels["resolution"])
            if record.templates is not None:
                report(f"templates of {record.templates.log_line}")
    distilled = Selected([], None, {})
    if predicted is not None:
        distilled, absent = _look_up_distilled(config.distillation, predicted)
        missing |= {DISTILLED + key: what for key, what in absent.items()}
    names = [DISTILLED + key for key in distilled.keys]
    resolutions = _resolutions([key for key in train.keys if key not in quarantined], store, rules, read)
    return _Found(train.keys, validation, test, train.weights, names, distilled.weights, missing, resolutions)


def _resolutions(
    keys: list[str], store: ChainFiles | FeatureStore, rules: Selection, read: dict[str, float]
) -> Float64[np.ndarray, " k"]:
    """The resolutions of the chains of which a cache, the index or a `read` structure says it; if none does, of a few that are
    read now. In Å, 0 for none."""
    if read:
        return np.array([read[key] for key in keys if key in read])
    table = rules.known[0] if rules.known is not None else None
    if table is None and isinstance(store, ChainFiles) and store.index is not None:
        table = store.index.table
    if table is not None:
        row_of = dict(zip(table.keys[:], range(len(table)), strict=True))
        rows = np.array([row for key in keys if (row := row_of.get(key)) is not None], np.int64)
        found = table.resolutions[rows].astype(np.float64)
        return found[~np.isnan(found)]
    for key in keys[:: max(1, math.ceil(len(keys) / CHAINS_FOR_RESOLUTION))]:
        with suppress(UserError):  # said when a sample is made of it
            chain = store.parsed(key, with_hits=False).chain if isinstance(store, FeatureStore) else store.chain(key)
            read[key] = chain.resolution or 0.0
    return np.array(list(read.values()))


def _look_up_distilled(config: DistillationConfig, predicted: DistillationSet) -> tuple[Selected, dict[str, Lacking]]:
    """The chains of the self-distillation set that are drawn, and those that lack something."""
    presence = Presence(predicted.store)
    listed = presence.keys if config.chains is None else chain_list(config.chains)
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    if len(missing) == len(listed):
        where = config.store or f"{config.alignment_dir} and {config.structure_dir}"
        raise UserError(f"data.distillation: none of {len(listed)} chains has alignments and a structure in {where}")
    present = [key for key in listed if key not in missing]
    return _selected(present, _rules(config, "data.distillation"), "distillation"), missing


def _rules(config: DataConfig | DistillationConfig, where: str) -> Selection:
    return Selection(where, config.chain_data_cache, config.index, config.filters, config.sampling)


def _selected(keys: list[str], rules: Selection, kind: str) -> Selected:
    """The chains that pass the filters. Prints how many are left out, and why. Raises UserError if none is left."""
    found = select(keys, rules)
    line = found.line(kind)
    if not found.keys:
        raise UserError(f"{rules.where}.filters: {line}; change the filters or the chains")
    if line:
        report(line)
    return found


def _check_chain(key: str, presence: Presence, store: ChainFiles | FeatureStore, source: str) -> None:
    """Raise UserError, with the nearest name, if the chain is not in the store, or lacks alignments or its structure."""
    lacking = presence.lacks(key)
    if lacking is None:
        return
    if isinstance(store, FeatureStore):
        raise UserError(
            f"{source}: no chain '{key}' in {store.address}; leave it out or build the store with it."
            f"{nearest(key, presence.keys)}"
        )
    if lacking == "alignments":
        raise UserError(
            f"{source}: no alignments of chain '{key}' in {store.alignment_dir}; add its folder "
            f"or leave the chain out.{nearest(key, presence.keys)}"
        )
    raise UserError(f"{source}: no structure of chain '{key}' in {store.structure_dir}; add it or leave the chain out")
