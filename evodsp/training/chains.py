"""Which chains a run trains on and scores, looked up on disk before anything is built."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from lightning.pytorch.utilities import rank_zero_only

from evodsp.data.chain_cache import read_chain_cache
from evodsp.data.chain_list import chain_list
from evodsp.data.dataset import load_record
from evodsp.data.distillation import PredictedStore
from evodsp.data.feature_store import BuiltStore
from evodsp.data.sampling import DISTILLED, left_out_by_filters, sampling_weights
from evodsp.data.store import FeatureStore
from evodsp.data.structures import StructureFolder
from evodsp.data.templates.dates import parse_latest_date
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError, nearest
from evodsp.training.config import DataConfig, DistillationConfig

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


def find_chains(config: DataConfig, quarantined: Container[str] = frozenset()) -> Chains:
    """Open the store and look every chain up. Raises UserError for the first file or name that is missing.

    `quarantined`: chains that a run which resumes is known to leave out; they are not read in advance.
    """
    store, templates = _files(config) if config.store is None else _built_store(config, config.store)
    known = list(store.keys())
    train = chain_list(config.train_chains) if config.train_chains is not None else known
    validation = chain_list(config.validation_chains) if config.validation_chains is not None else []
    test = chain_list(config.test_chains) if config.test_chains is not None else validation
    if not train:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another data.alignment_dir")
    for name, keys in (("train", train), ("validation", validation), ("test", test)):
        for key in keys:
            _check_chain(key, known, store, f"data.{name}_chains")
    train, weights = weighted_chains(train, config)
    distinct = dict.fromkeys([*train, *validation, *test])
    if len(distinct) <= MOST_CHAINS_READ:
        for key in (key for key in distinct if key not in quarantined):
            record = load_record(store, key, templates)
            if record.templates is not None:
                _report(f"templates of {record.templates.log_line}")
    return Chains(store, templates, train, validation, test, weights, *_distillation(config.distillation))


def _distillation(config: DistillationConfig) -> tuple[PredictedStore | None, list[str]]:
    """The self-distillation set and its chains; chains without a structure are counted and left out."""
    if config.alignment_dir is None or config.structure_dir is None:
        return None, []
    for name, path in (("alignment_dir", config.alignment_dir), ("structure_dir", config.structure_dir)):
        if not Path(path).is_dir():
            raise UserError(
                f"data.distillation.{name} is {path}, which is not a folder; give the folder, or leave it out"
            )
    store = FeatureStore(config.alignment_dir, config.structure_dir)
    predicted = PredictedStore(store, StructureFolder(config.structure_dir), config.min_plddt, config.max_msa_rows)
    listed = store.keys() if config.chains is None else chain_list(config.chains)
    found = [key for key in listed if store.has_structure(key)]
    if not found:
        raise UserError(f"data.distillation: none of {len(listed)} chains has a structure in {config.structure_dir}")
    if len(found) < len(listed):
        _report(
            f"{len(found)} of {len(listed)} distillation chains; left out: {len(listed) - len(found)} without structure"
        )
    return predicted, [DISTILLED + key for key in found]


def weighted_chains(keys: list[str], config: DataConfig) -> tuple[list[str], Float64[np.ndarray, " n"] | None]:
    """The training chains that pass the filters, and their weights; None for equal ones. Prints how many are left out, and why.

    Raises UserError if none is left.
    """
    if config.chain_data_cache is None:
        return keys, None
    table = read_chain_cache(config.chain_data_cache)
    row_of = {key: row for row, key in enumerate(table.keys)}
    reasons = left_out_by_filters(table, config.filters)
    kept, counts = [], dict.fromkeys([f"not in {config.chain_data_cache}", *reasons], 0)
    for key in keys:
        row = row_of.get(key)
        if row is None:
            counts[f"not in {config.chain_data_cache}"] += 1
        elif (why := next((reason for reason, rows in reasons.items() if rows[row]), None)) is not None:
            counts[why] += 1
        else:
            kept.append(key)
    said = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if not kept:
        raise UserError(
            f"data.filters leaves out all {len(keys)} training chains ({said}); change the filters or the chains"
        )
    if said:
        _report(f"{len(kept)} of {len(keys)} training chains; left out: {said}")
    if config.sampling == "uniform":
        return kept, None
    return kept, sampling_weights(table)[[row_of[key] for key in kept]]


def _built_store(config: DataConfig, address: str) -> tuple[BuiltStore, TemplateSource | None]:
    """The feature store at `address`, and its templates if samples have any. Raises UserError that names the setting."""
    for name in ("template_structure_dir", "obsolete"):
        if (value := getattr(config, name)) is not None:
            raise UserError(
                f"data.{name} is {value}, but data.store holds the templates that it was built with; leave {name} out"
            )
    latest = parse_latest_date("data.max_template_date", config.max_template_date)
    store = BuiltStore(address)
    templates = store.template_source(latest)
    if latest is not None and templates is None:
        raise UserError(
            f"data.max_template_date is {latest}, but {address} was built without templates; build it with "
            "--template_structure_dir, or leave max_template_date out"
        )
    return store, templates if config.train.max_templates or config.validation.max_templates else None


def _files(config: DataConfig) -> tuple[FeatureStore, TemplateSource | None]:
    """The folders of files, and where templates come from. Raises UserError that names the setting."""
    for name, content in (
        ("alignment_dir", "alignments, one sub-folder per chain"),
        ("structure_dir", "structures, <pdbid>.cif"),
    ):
        path = Path(getattr(config, name))
        if not path.is_dir():
            what = "a file" if path.exists() else "no folder"
            raise UserError(f"data.{name} is {path}, which is {what}; give the folder of {content}")
    return FeatureStore(Path(config.alignment_dir), Path(config.structure_dir)), _template_source(config)


def _template_source(config: DataConfig) -> TemplateSource | None:
    """Where templates come from; None if the settings name no folder of them. Raises UserError that names the setting."""
    folder, latest, obsolete = config.template_structure_dir, config.max_template_date, config.obsolete
    if folder is None:
        for name, value in (("max_template_date", latest), ("obsolete", obsolete)):
            if value is not None:
                raise UserError(
                    f"data.{name} is {value}, but data.template_structure_dir is null; give it, or leave {name} out"
                )
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
    return TemplateSource.open(folder, parse_latest_date("data.max_template_date", latest), obsolete)


@rank_zero_only
def _report(line: str) -> None:
    print(line, file=sys.stderr)


def _check_chain(key: str, known: list[str], store: FeatureStore | BuiltStore, source: str) -> None:
    if isinstance(store, BuiltStore):
        if key not in store:
            raise UserError(
                f"{source}: no chain '{key}' in {store.address}; leave it out or build the store with it."
                f"{nearest(key, known)}"
            )
        return
    if key not in known:
        raise UserError(
            f"{source}: no alignments of chain '{key}' in {store.alignment_dir}; add its folder "
            f"or leave the chain out.{nearest(key, known)}"
        )
    if not store.has_structure(key):
        raise UserError(
            f"{source}: no structure of chain '{key}' in {store.structure_dir}; add it or leave the chain out"
        )
