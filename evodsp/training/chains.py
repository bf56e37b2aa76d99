"""Which chains a run trains on and scores, looked up on disk before anything is built."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from evodsp.data.dataset import load_record
from evodsp.data.store import FeatureStore
from evodsp.data.templates.dates import parse_latest_date
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError, nearest
from evodsp.training.config import DataConfig

MOST_CHAINS_READ = 64
"""Up to this many chains are read completely before training starts; of more, only the files' presence is checked."""


@dataclass(frozen=True)
class Chains:
    """The open feature store and the chains of each stage."""

    store: FeatureStore
    templates: TemplateSource | None
    train: list[str]
    validation: list[str]
    test: list[str]


def find_chains(config: DataConfig) -> Chains:
    """Open the feature store and look every chain up. Raises UserError for the first file or name that is missing."""
    for name, content in (
        ("alignment_dir", "alignments, one sub-folder per chain"),
        ("structure_dir", "structures, <pdbid>.cif"),
    ):
        path = Path(getattr(config, name))
        if not path.is_dir():
            what = "a file" if path.exists() else "no folder"
            raise UserError(f"data.{name} is {path}, which is {what}; give the folder of {content}")
    templates = _template_source(config)
    store = FeatureStore(Path(config.alignment_dir), Path(config.structure_dir))
    known = list(store.keys())
    train = chain_list(config.train_chains) if config.train_chains is not None else known
    validation = chain_list(config.validation_chains) if config.validation_chains is not None else []
    test = chain_list(config.test_chains) if config.test_chains is not None else validation
    if not train:
        raise UserError(f"{config.alignment_dir}: no chains with alignments in it; give another data.alignment_dir")
    for name, keys in (("train", train), ("validation", validation), ("test", test)):
        for key in keys:
            _check_chain(key, known, store, f"data.{name}_chains")
    distinct = dict.fromkeys([*train, *validation, *test])
    if len(distinct) <= MOST_CHAINS_READ:
        for key in distinct:
            record = load_record(store, key, templates)
            if record.templates is not None:
                _report(f"templates of {record.templates.log_line}")
    return Chains(store, templates, train, validation, test)


def chain_list(chains: str | list[str]) -> list[str]:
    """The names in a list of chains: the list itself, or a text file with one name per line ('#' begins a comment).

    Raises UserError if the file is missing or empty, or if a name is listed twice.
    """
    source, names = "the list of chains", chains
    if isinstance(chains, str):
        source, path = chains, Path(chains)
        if path.is_dir():
            raise UserError(
                f"{chains}: is a folder, but a list of chains is a file with one name per line; give the file, "
                "or a list [102m_A, ...]"
            )
        if not path.is_file():
            raise UserError(
                f"{chains}: no such file of chain names; write one name per line, or give a list [102m_A, ...]"
            )
        names = [name for line in path.read_text().splitlines() if (name := line.partition("#")[0].strip())]
    if not names:
        raise UserError(f"{source}: no chain names in it; write one per line")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"{source}: '{twice[0]}' is listed more than once; remove the repetition")
    return list(names)


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


def _check_chain(key: str, known: list[str], store: FeatureStore, source: str) -> None:
    if key not in known:
        raise UserError(
            f"{source}: no alignments of chain '{key}' in {store.alignment_dir}; add its folder "
            f"or leave the chain out.{nearest(key, known)}"
        )
    if not store.has_structure(key):
        raise UserError(
            f"{source}: no structure of chain '{key}' in {store.structure_dir}; add it or leave the chain out"
        )
