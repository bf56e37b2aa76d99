"""The data that a run would read, by the `data` block of a config of `evodsp fit` and the options of `evodsp data doctor`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

from evodsp.config import (
    FILTERS_OF_PREDICTIONS,
    PRESETS,
    ArrangementName,
    FilterConfig,
    LossConfig,
    ModelConfig,
    Sampling,
    check_exclusion,
    check_selection,
)
from evodsp.data.complexes.pairing import RULES
from evodsp.data.doctor.config import DoctorConfig
from evodsp.data.doctor.diagnosis import DataSet
from evodsp.data.doctor.examination import Examiner
from evodsp.data.records import COMPLEXES
from evodsp.data.samples.distillation import open_predictions
from evodsp.data.samples.selection import CountedStructures, Selection, chain_list, exclusion
from evodsp.data.similarity.exclusion import Exclusion
from evodsp.data.sources.opening import KIND_OF, Records, Unit, open_files, open_store
from evodsp.errors import UserError
from evodsp.packaged import read_run_config

# The defaults of `evodsp fit`.
_EPOCH, _FRACTION, _MIN_PLDDT, _IDENTITY = 1000, 0.75, 50.0, 0.4
_OVERRIDING = ("validation_chains", "test_chains", "exclude_like", "exclude_identity")
"""Options that replace the settings of the same name."""
_FOLDERS = ("alignment_dir", "structure_dir")


@dataclass(frozen=True)
class RunData:
    """The chains of a run."""

    training: DataSet
    scored: dict[str, list[str]]
    """Validation chains, and test chains if they are named, by the name of the set."""
    distillation: DataSet | None


def data_of_run(settings: DoctorConfig) -> RunData:
    """The data that a run with these settings would read. Raises UserError that names a wrong setting."""
    content = read_run_config(settings.config)
    block, model = content.get("data", {}), _mapping(content, "model", "config")
    if not isinstance(block, dict) or (settings.config is not None and not block):
        raise UserError(f"--config {settings.config}: has no block 'data'; give a config of 'evodsp fit'")
    loss = _loss(_mapping(model, "loss", "model"))
    given = {name: value for name in _OVERRIDING if (value := getattr(settings, name)) is not None}
    block = {**block, **given, **({} if settings.chains is None else {"train_chains": settings.chains})}
    index = settings.index or block.get("index")
    records, unit = _records(settings, block, index, model)
    examiner = Examiner(records, block.get("chain_data_cache"))
    share = float(block.get("exclude_identity", _IDENTITY))
    check_exclusion(block.get("exclude_like") is not None, share != _IDENTITY, "data.")
    excluded = exclusion(block.get("exclude_like"), share, examiner)
    of_set = _mapping(block, "distillation", "data")
    alignment_dir, structure_dir = of_set.get("alignment_dir"), of_set.get("structure_dir")
    min_plddt, fraction = float(of_set.get("min_plddt", _MIN_PLDDT)), float(of_set.get("fraction", _FRACTION))
    predictions = open_predictions(
        alignment_dir, structure_dir, of_set.get("index"), of_set.get("store"), min_plddt, unit
    )
    samples = float(block.get("samples_per_epoch") or _EPOCH)
    distillation = None
    if predictions is not None:
        predicted = Examiner(predictions, of_set.get("chain_data_cache"))
        others = None if excluded is None else replace(excluded, comparison=predicted)
        selection = _selection(of_set, FILTERS_OF_PREDICTIONS, "data.distillation", others)
        counted = CountedStructures(loss, _number(of_set, "assumed_resolution"), "data.distillation.assumed_resolution")
        chains = _chains(of_set.get("chains"))
        distillation = DataSet(predicted, chains, selection, samples * fraction, counted, kind="distillation")
        samples *= 1 - fraction
    selection = _selection({**block, "index": index}, FilterConfig(), "data", excluded)
    counted = CountedStructures(loss, _number(block, "assumed_resolution"))
    training = DataSet(examiner, _chains(block.get("train_chains")), selection, samples, counted)
    scored = {kind: _chains(block.get(f"{kind}_chains")) or [] for kind in ("validation", "test")}
    return RunData(training, {kind: chains for kind, chains in scored.items() if chains}, distillation)


def _records(
    settings: DoctorConfig, block: dict[str, Any], index: str | None, model: dict[str, Any]
) -> tuple[Records, Unit]:
    """The records that the run reads, and what they are of."""
    pairing, assembly = block.get("pairing", "species"), block.get("assembly", "1")
    if pairing not in RULES:
        raise UserError(f"data.pairing is '{pairing}', but must be {' or '.join(RULES)}; correct the config")
    kind = COMPLEXES if settings.complexes else KIND_OF[_arrangement(model)]
    unit = Unit(kind, None if assembly is None else str(assembly), pairing)
    given = any(getattr(settings, name) for name in _FOLDERS)
    if (store := block.get("store")) is not None and not given:
        return open_store(store, unit, warn=_noted), unit
    roots = {name: getattr(settings, name) or block.get(name) for name in _FOLDERS}
    for name, root in roots.items():
        if root is None:
            raise UserError(f"the data to examine has no {name}; give --{name}, or --config with data.{name}")
    alignment_dir, structure_dir = map(str, roots.values())
    return open_files(alignment_dir, structure_dir, index, unit, warn=_noted), unit


def _noted(place: str, names: str) -> None:
    """Nothing: the report has a remark on each chain without rows for pairing."""


def _arrangement(model: dict[str, Any]) -> ArrangementName:
    """That of the run's model: `model.arrangement` of a config file, else that of its preset."""
    preset = PRESETS.get(str(model.get("preset")), ModelConfig())
    arrangement = model.get("arrangement", preset.arrangement)
    if arrangement not in KIND_OF:
        raise UserError(f"model.arrangement is '{arrangement}', but must be {' or '.join(KIND_OF)}; correct the config")
    return cast(ArrangementName, arrangement)


def _loss(block: dict[str, Any]) -> LossConfig:
    """The weights and bounds of the run's losses: the numbers of the config file, otherwise the defaults of `evodsp fit`."""
    names = {item.name for item in fields(LossConfig)} - {"scale_by_length"}
    given: dict[str, Any] = {name: value for name in names if (value := _number(block, name)) is not None}
    return replace(LossConfig(), **given)


def _number(block: dict[str, Any], name: str) -> float | None:
    """The number of that name in a block, if it is at least 0; otherwise None."""
    value = block.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _mapping(block: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = block.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(f"{where}.{name} is {value}, but must be a block of settings; correct the config")
    return value


def _selection(block: dict[str, Any], filters: FilterConfig, where: str, excluded: Exclusion | None) -> Selection:
    """The settings that filter and weight chains; `filters`: the ones that `evodsp fit` takes by default."""
    given, sampling = _mapping(block, "filters", where), cast(Sampling, block.get("sampling") or "uniform")
    try:
        values: dict[str, Any] = {k: float(value) if isinstance(value, int) else value for k, value in given.items()}
        chosen = replace(filters, **values)
        check_selection(chosen, sampling, where)
    except TypeError as error:
        raise UserError(
            f"{where}.filters is {given}, but may hold numbers max_resolution and max_residue_share, and max_release_date; "
            "correct the config"
        ) from error
    return Selection(where, block.get("chain_data_cache"), block.get("index"), chosen, filters, sampling, excluded)


def _chains(named: str | list[str] | None) -> list[str] | None:
    return None if named is None else chain_list(named)
