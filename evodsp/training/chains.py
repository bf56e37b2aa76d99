"""Which chains a run trains on and scores, looked up on disk before anything is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evodsp.data.chain_list import chain_list
from evodsp.data.dataset import load_record
from evodsp.data.distillation import PredictedStore
from evodsp.data.feature_store import BuiltStore
from evodsp.data.presence import Lacking, Presence
from evodsp.data.store import FeatureStore
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError, nearest
from evodsp.launch.consensus import from_first, on_every
from evodsp.parallel.group import Group
from evodsp.training.chain_weights import weighted_chains
from evodsp.training.config import DataConfig
from evodsp.training.progress import report
from evodsp.training.sources import distillation_set, distilled_chains, open_source

MOST_CHAINS_READ = 64
"""Up to this many chains are read completely before training starts; of more, only the files' presence is checked."""


@dataclass(frozen=True)
class Chains:
    """The open store and the chains of each stage."""

    store: FeatureStore | BuiltStore
    templates: TemplateSource | None
    train: list[str]
    validation: list[str]
    test: list[str]
    weights: Float64[np.ndarray, " n"] | None = None
    """How often each training chain is drawn, in any unit; None: equally often."""
    distillation: PredictedStore | None = None
    distilled: list[str] = field(default_factory=list)
    """Chains of the self-distillation set, their names beginning with `DISTILLED`."""
    missing: dict[str, Lacking] = field(default_factory=dict)
    """Training chains that are left out, and what they lack."""

    def notes(self, listed_in: Path) -> list[str]:
        """What the user should know before training starts, a line each. `listed_in`: the file that lists `missing`."""
        notes = []
        if self.missing:
            counts = Counter(self.missing.values())
            lacking = ", ".join(f"{count:,} without {what}" for what, count in sorted(counts.items()))
            total = len(self.missing) + len(self.train)
            notes.append(
                f"{len(self.missing):,} of {total:,} training chains are left out: {lacking}; {listed_in} lists them"
            )
        if (
            isinstance(self.store, FeatureStore)
            and self.store.index is not None
            and self.store.structure_dir is not None
        ):
            index = self.store.index
            now_at = {"alignment_dir": self.store.alignment_dir, "structure_dir": self.store.structure_dir}
            if stale := index.stale_sources(now_at):
                notes.append(f"{index.path} is older than {', '.join(stale)}; make it again: {index.command}")
        return notes


@dataclass(frozen=True)
class _Found:
    """What looking the chains up gives; see `Chains`."""

    train: list[str]
    validation: list[str]
    test: list[str]
    weights: Float64[np.ndarray, " n"] | None
    distilled: list[str]
    missing: dict[str, Lacking]


def find_chains(config: DataConfig, quarantined: Container[str] = frozenset(), group: Group | None = None) -> Chains:
    """Open the store and look every chain up. Training chains that lack files are left out, provided that some remain.

    `quarantined`: chains that a run which resumes is known to leave out; they are not read in advance. `group`: all ranks, of
    which the first looks the chains up and tells the others; None for one process.
    Raises UserError for the first file or name that is missing otherwise.
    """
    (store, templates), predicted = on_every(
        lambda: (open_source(config), distillation_set(config.distillation)), group
    )
    found = from_first(lambda: _look_up(config, quarantined, store, templates, predicted), group)
    names = found.train, found.validation, found.test
    return Chains(store, templates, *names, found.weights, predicted, found.distilled, found.missing)


def _look_up(
    config: DataConfig,
    quarantined: Container[str],
    store: FeatureStore | BuiltStore,
    templates: TemplateSource | None,
    predicted: PredictedStore | None,
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
    train, weights = weighted_chains(present, config)
    distinct = dict.fromkeys([*train, *validation, *test])
    if len(distinct) <= MOST_CHAINS_READ:
        for key in (key for key in distinct if key not in quarantined):
            record = load_record(store, key, templates)
            if record.templates is not None:
                report(f"templates of {record.templates.log_line}")
    distilled = [] if predicted is None else distilled_chains(config.distillation, predicted)
    return _Found(train, validation, test, weights, distilled, missing)


def _check_chain(key: str, presence: Presence, store: FeatureStore | BuiltStore, source: str) -> None:
    """Raise UserError, with the nearest name, if the chain is not in the store, or lacks alignments or its structure."""
    lacking = presence.lacks(key)
    if lacking is None:
        return
    if isinstance(store, BuiltStore):
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
