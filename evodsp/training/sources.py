"""Opens what the chains of a run are read from: folders of files, a feature store, templates, predicted structures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evodsp.data.chain_list import chain_list
from evodsp.data.distillation import PredictedStore
from evodsp.data.feature_store import BuiltStore
from evodsp.data.index import ChainIndex
from evodsp.data.sampling import DISTILLED
from evodsp.data.store import FeatureStore
from evodsp.data.structures import StructureFolder
from evodsp.data.templates.dates import parse_latest_date
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError
from evodsp.training.config import DataConfig, DistillationConfig
from evodsp.training.progress import report


def open_source(config: DataConfig) -> tuple[FeatureStore | BuiltStore, TemplateSource | None]:
    """Where chains and their templates come from; no templates if samples have none.

    Raises UserError that names the setting.
    """
    return _files(config) if config.store is None else _built_store(config, config.store)


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
    index = None if config.index is None else ChainIndex(config.index)
    templates = _template_source(config, index)
    return FeatureStore(Path(config.alignment_dir), Path(config.structure_dir), index), templates


def _template_source(config: DataConfig, index: ChainIndex | None) -> TemplateSource | None:
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
    source = TemplateSource.open(folder, parse_latest_date("data.max_template_date", latest), obsolete)
    return source if obsolete is not None or index is None else replace(source, obsolete=index.obsolete)


def distillation_set(config: DistillationConfig) -> PredictedStore | None:
    """The self-distillation set; None if the settings name none. Raises UserError for a folder that is missing."""
    if config.alignment_dir is None or config.structure_dir is None:
        return None
    for name, path in (("alignment_dir", config.alignment_dir), ("structure_dir", config.structure_dir)):
        if not Path(path).is_dir():
            raise UserError(
                f"data.distillation.{name} is {path}, which is not a folder; give the folder, or leave it out"
            )
    store = FeatureStore(config.alignment_dir, config.structure_dir)
    return PredictedStore(store, StructureFolder(config.structure_dir), config.min_plddt, config.max_msa_rows)


def distilled_chains(config: DistillationConfig, predicted: PredictedStore) -> list[str]:
    """The chains of the self-distillation set; those without a structure are counted and left out."""
    store = predicted.store
    listed = store.keys() if config.chains is None else chain_list(config.chains)
    found = [key for key in listed if store.has_structure(key)]
    if not found:
        raise UserError(f"data.distillation: none of {len(listed)} chains has a structure in {config.structure_dir}")
    if len(found) < len(listed):
        report(
            f"{len(found)} of {len(listed)} distillation chains; left out: {len(listed) - len(found)} without structure"
        )
    return [DISTILLED + key for key in found]
