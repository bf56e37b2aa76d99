"""Opens what the chains of a run are read from: folders of files, a feature store, templates, predicted structures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.samples.distillation import DistillationSet, open_predictions
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.templates.dates import parse_latest_date
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError
from evodsp.training.config import DataConfig


def open_source(config: DataConfig) -> tuple[ChainFiles | FeatureStore, TemplateSource | None]:
    """Where chains and their templates come from; no templates if samples have none.

    Raises UserError that names the setting.
    """
    return _files(config) if config.store is None else _built_store(config, config.store)


def _built_store(config: DataConfig, address: str) -> tuple[FeatureStore, TemplateSource | None]:
    """The feature store at `address`, and its templates if samples have any. Raises UserError that names the setting."""
    for name in ("template_structure_dir", "obsolete"):
        if (value := getattr(config, name)) is not None:
            raise UserError(
                f"data.{name} is {value}, but data.store holds the templates that it was built with; leave {name} out"
            )
    latest = parse_latest_date("data.max_template_date", config.max_template_date)
    store = FeatureStore(address)
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


def _files(config: DataConfig) -> tuple[ChainFiles, TemplateSource | None]:
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
    return ChainFiles(Path(config.alignment_dir), Path(config.structure_dir), index), templates


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


def open_distillation(data: DataConfig, templates: TemplateSource | None) -> DistillationSet | None:
    """The self-distillation set; None if the settings name none. `templates`: those of the other chains.

    Raises UserError that names the setting.
    """
    config = data.distillation
    places = config.alignment_dir, config.structure_dir, config.index, config.store
    if (source := open_predictions(*places, config.min_plddt)) is None:
        return None
    if isinstance(source, FeatureStore):
        latest = parse_latest_date("data.max_template_date", data.max_template_date)
        own = None if templates is None else source.template_source(latest)
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
