"""Whether training can start on a data set, found before any GPU is booked.

All chains are looked up, the index's facts about them are counted, and a sample of them is read completely, as training
reads them. Training, validation and test chains are compared with each other.

The data that a run would read follow from the `data` block of a config of `evodsp fit` and the options of `evodsp data
doctor`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from itertools import combinations
from typing import Any, Literal, cast

import numpy as np

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
from evodsp.data.config import DoctorConfig
from evodsp.data.doctor.examination import Copied, Examined, Examiner, Overlap, copied, overlap
from evodsp.data.index.metadata import UNKNOWN_CLUSTER, UNKNOWN_DAY, ChainFacts, ChainTable, day_of, table_of
from evodsp.data.pool import WorkerEndedError, processes, with_progress
from evodsp.data.records import COMPLEXES
from evodsp.data.samples.selection import (
    CountedStructures,
    Presence,
    Selected,
    Selection,
    chain_list,
    exclusion,
    left_out_by_filters,
    open_predictions,
    select,
)
from evodsp.data.similarity.nearest import Exclusion
from evodsp.data.similarity.sequences import Letters
from evodsp.data.sources.chain_files import Lacking, Store
from evodsp.data.sources.layout import StructureListing
from evodsp.data.sources.opening import KIND_OF, Records, Unit, open_files, open_store
from evodsp.errors import UserError
from evodsp.packaged import read_run_config
from evodsp.report.runs import overlap_line


@dataclass(frozen=True)
class DataSet:
    """A set of chains as a run would use it."""

    examiner: Examiner
    training: list[str] | None
    """The names of its training chains; None for all chains with alignments but those that are scored."""
    selection: Selection
    """The settings that decide which of them are drawn."""
    samples: float
    """Training samples of an epoch that are drawn from it."""
    counted: CountedStructures
    """The rule by which the losses of the confidence heads count its structures."""
    kind: Literal["training", "distillation"] = "training"
    """The name of its chains in reports."""

    @property
    def place(self) -> str:
        """The folders and the index, or the store, that it is read from."""
        return self.examiner.place

    @property
    def units(self) -> str:
        """Word for its keys, in the plural."""
        return self.examiner.store.kind


@dataclass(frozen=True)
class Scored:
    """The findings about chains that a run scores and does not train on."""

    kind: str
    """The name of the set: validation or test."""
    missing: dict[str, Lacking]
    """The chains that lack alignments or structure."""
    examined: list[Examined]
    """All other chains, which were read."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a set."""

    data: DataSet
    training: list[str]
    """Training chains with alignments and structure."""
    selected: Selected
    """The usable chains that the filters of the run leave."""
    missing: dict[str, Lacking]
    """Training chains with a missing part, and that part: alignments, structure or record."""
    scored: list[Scored]
    """The findings about validation chains, and about test chains if they are others."""
    examined: list[Examined]
    """Training chains that were read."""
    table: ChainTable
    """The known facts about the training chains: about all that the run's cache or the index lists, otherwise about those
    read."""
    known_from: str
    """The source of the table: a file, or the chains that were read."""
    stale: list[str]
    """Sources that are newer than the index."""
    max_bad: float
    workers: int
    unreadable_headers: list[str] = field(default_factory=list)
    """The headers and alignments that the index could not read."""
    unaligned: list[str] = field(default_factory=list)
    """Entries with a structure file and no chain with alignments."""
    overlaps: list[Overlap] = field(default_factory=list)
    """The overlap of each two of training, validation and test chains."""
    copied: list[Copied] = field(default_factory=list)
    """Baseline on validation chains, and on test chains if they are others."""
    distillation: Diagnosis | None = None
    """The self-distillation set of the run."""
    held_out: int = 0
    """Chains that a set without a list leaves to validation and test."""

    @property
    def trained_on(self) -> list[str]:
        """A line for each scored set of which a chain is trained on, or has the sequence of a training chain."""
        both = {part.sets[1]: part.both for part in self.overlaps if part.sets[0] == self.data.kind and part.both}
        sizes = {part.kind: len(part.missing) + len(part.examined) for part in self.scored}
        return [f"{kind}: {overlap_line(chains, sizes[kind])}" for kind, chains in both.items()]

    @property
    def uncounted(self) -> str | None:
        """A line that says how many structures the losses of the confidence heads do not count; None if they count all."""
        resolutions = self.table.resolutions
        if self.data.kind == "distillation":
            resolutions = np.zeros_like(resolutions)  # whatever their files say
        return self.data.counted.line(resolutions, len(self.training), f"{self.data.kind} {self.data.units}")

    @property
    def bad(self) -> list[Examined]:
        return [chain for chain in self.examined if chain.state != "good"]

    @property
    def obstacles(self) -> list[str]:
        """The reasons why training cannot start; empty if it can."""
        found, kind = [], self.data.kind
        if not self.training:
            found.append(f"no {kind} {self.data.examiner.unit} has alignments and structure")
        elif not self.selected.keys:
            found.append(f"{self.data.selection.where}.filters: {self.selected.line(kind)}")
        if self.examined and len(self.bad) > self.max_bad * len(self.examined):
            found.append(
                f"{len(self.bad):,} of {len(self.examined):,} {kind} {self.data.units} read are bad (more than "
                f"{self.max_bad:.0%})"
            )
        for scored in self.scored:
            if scored.missing:
                found.append(f"{len(scored.missing):,} {scored.kind} {self.data.units} are missing")
            if bad := sum(chain.state != "good" for chain in scored.examined):
                found.append(f"{bad:,} {scored.kind} {self.data.units} are bad")
        return found if self.distillation is None else found + self.distillation.obstacles

    @property
    def of_one_chain(self) -> list[Examined]:
        """The complexes that were read and have one chain only."""
        is_complex = self.data.examiner.unit == "complex"
        return [one for one in self.examined if is_complex and len(one.sequences) == 1]

    def counts(self) -> dict[str, int]:
        """Numbers of chains by fault; faults that only reading shows are counted among the chains that were read."""
        states = Counter(chain.state for chain in self.examined)
        lacking = Counter(self.missing.values())
        examiner = self.data.examiner
        of_stores = {"without a record": lacking["record"]} if examiner.store.unknown == "record" else {}
        of_complexes = {
            "read, with a note on rows for pairing": sum(bool(chain.pairing_notes) for chain in self.examined),
            "read, of one chain only": len(self.of_one_chain),
        }
        return {
            "without alignments": lacking["alignments"],
            "without a structure": lacking["structure"],
            **of_stores,
            **({"of validation or test, left out": self.held_out} if self.held_out else {}),
            **{f"left out: {reason}": count for reason, count in self.selected.left_out.items()},
            "read": len(self.examined),
            "read, alignments of another sequence": states["mismatching"],
            "read, unreadable": states["unreadable"],
            "read, with a note on the structure": sum(bool(chain.notes) for chain in self.examined),
            **(of_complexes if examiner.unit == "complex" else {}),
            "unreadable header or first alignment (index)": len(self.unreadable_headers),
        }

    def store_bytes(self) -> int:
        """Estimated size of a feature store of all training chains."""
        good = [chain.packed_bytes for chain in self.examined if chain.state == "good"]
        return int(np.mean(good) * len(self.training)) if good else 0

    def store_seconds(self) -> float:
        """Estimated time to build it with all processes."""
        good = [chain.seconds for chain in self.examined if chain.state == "good"]
        return float(np.mean(good) * len(self.training) / max(1, self.workers)) if good else 0.0


def diagnose(
    data: DataSet,
    scored: Mapping[str, list[str]],
    sample: int,
    seed: int,
    workers: int | None,
    max_bad: float,
    distillation: Diagnosis | None = None,
    held_out: Iterable[str] = (),
) -> Diagnosis:
    """Examine the chains of a run. `sample`: the number of its training chains to read, 0 for all. `scored`: its validation
    and test chains, by the name of the set. `distillation`: the diagnosis of its self-distillation set.
    `held_out`: the chains that are not trained on where the set has no list.
    """
    store = data.examiner.store
    presence = Presence(store)
    listed = presence.training(data.training, held_out)
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    usable = [key for key in listed if key not in missing]
    selected = select(usable, data.selection, store)
    drawn = selected.keys
    if sample and sample < len(drawn):
        drawn = random.Random(seed).sample(drawn, sample)
    lacking_of = {key: presence.lacks(key) for keys in scored.values() for key in keys}
    wanted = list(dict.fromkeys([*drawn, *(key for key, lacking in lacking_of.items() if lacking is None)]))
    found: dict[str, Examined] = {}
    number = min(processes(workers), len(wanted))
    pieces = [(data.examiner, key) for key in wanted]
    for at, chain in with_progress(f"read {data.kind} {data.units}", Examiner.examine, pieces, number):
        ended = isinstance(chain, WorkerEndedError)
        found[wanted[at]] = Examined(wanted[at], "unreadable", str(chain)) if ended else chain
    examined = [found[key] for key in sorted(drawn)]
    sets = {name: keys for name, keys in {data.kind: selected.keys, **scored}.items() if keys}
    letters: dict[str, tuple[str, ...]] = {}
    if len(sets) > 1:
        keys = dict.fromkeys(key for keys in sets.values() for key in keys)
        letters = data.examiner.sequences(keys, {key: one.sequences for key, one in found.items()}, number)
    readable = {
        kind: [key for key in keys if lacking_of[key] is None and found[key].state == "good"]
        for kind, keys in scored.items()
    }
    table, known_from = _known(data, store, usable, selected, examined)
    overlaps = _overlaps(sets, letters)
    trained_on = {part.sets[1] for part in overlaps if part.sets[0] == data.kind and part.both}
    return Diagnosis(
        data,
        usable,
        selected,
        missing,
        [
            Scored(
                kind,
                {key: lacking for key in keys if (lacking := lacking_of[key]) is not None},
                [found[key] for key in keys if lacking_of[key] is None],
            )
            for kind, keys in scored.items()
        ],
        examined,
        table,
        known_from,
        _stale(data.examiner, wanted),
        max_bad,
        max(1, number),
        _unreadable_headers(store, listed),
        [] if store.structure_dir is None else StructureListing(store.structure_dir).entries_without(presence.keys),
        overlaps,
        [
            copied(kind, keys, letters, selected.keys, data.examiner, seed, number)
            for kind, keys in readable.items()
            if letters and kind not in trained_on
        ],
        distillation,
        len(presence.keys) - len(listed) if data.training is None else 0,
    )


def _overlaps(sets: Mapping[str, list[str]], letters: Letters) -> list[Overlap]:
    """Compare each two of the sets; the first is the largest."""
    return [
        overlap(pair, *({key: letters[key] for key in sets[name]} for name in pair)) for pair in combinations(sets, 2)
    ]


def _known(
    data: DataSet, store: Store, usable: list[str], selected: Selected, examined: list[Examined]
) -> tuple[ChainTable, str]:
    """The known facts about the usable chains, and their source."""
    if (known := selected.known) is not None:
        table, source = known.table, known.source
    elif store.index is not None:
        table, source = store.index.table, str(store.index.path)
    else:
        return read_table(examined), f"the {data.kind} {data.units} that were read"
    rows = np.array([row for row in table.rows_of(usable, store.name_of) if row is not None], np.int64)
    return selected_rows(table, rows), f"all {data.kind} {data.units} in {source}"


def _stale(examiner: Examiner, read: list[str]) -> list[str]:
    if examiner.store.index is None:
        return []
    changed = [key for key in read if examiner.differs_from_index(key)]
    what = examiner.store.kind
    files = (
        f"the files of {len(changed):,} of {len(read):,} {what} that were read, such as {changed[0]}" if changed else ""
    )
    return [*examiner.store.stale_sources(), *([files] if files else [])]


def _unreadable_headers(store: Store, listed: list[str]) -> list[str]:
    index = store.index
    if index is None:
        return []
    rows = np.array([row for key in listed if (row := index.keys.find(key)) is not None], np.int64)
    return [index.content.problems[int(row)] for row in rows[index.content.problems.lengths()[rows] > 0]]


def read_table(chains: list[Examined]) -> ChainTable:
    """The facts about chains that reading showed; their cluster sizes are unknown."""
    good = sorted((chain for chain in chains if chain.state == "good"), key=lambda chain: chain.key)
    released = [date.fromisoformat(chain.release_date) if chain.release_date else None for chain in good]
    facts = [
        ChainFacts("".join(chain.sequences), chain.resolution, day_of(day))
        for chain, day in zip(good, released, strict=True)
    ]
    return table_of([chain.key for chain in good], facts)


def selected_rows(table: ChainTable, rows: np.ndarray) -> ChainTable:
    """The given rows of a table. Representatives are the rows themselves: alignments are looked up by key."""
    return ChainTable(
        keys=[table.keys[int(row)] for row in rows],
        lengths=table.lengths[rows],
        resolutions=table.resolutions[rows],
        release_days=table.release_days[rows],
        cluster_sizes=table.cluster_sizes[rows],
        largest_fractions=table.largest_fractions[rows],
        unknown_fractions=table.unknown_fractions[rows],
        representatives=np.arange(len(rows), dtype=np.int32),
    )


def filter_reasons(found: Diagnosis) -> dict[str, int]:
    """Chains removed by each filter (also by filters that are off), then chains without release date or cluster size.
    A chain may have several reasons."""
    table, selection = found.table, found.data.selection
    reasons = {
        **left_out_by_filters(table, selection.filters, f"{selection.where}.filters"),
        "unknown release date": table.release_days == UNKNOWN_DAY,
        "unknown cluster size": table.cluster_sizes == UNKNOWN_CLUSTER,
    }
    return {reason: int(rows.sum()) for reason, rows in reasons.items()}


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
    """Arrangement of the run's model: `model.arrangement` of a config file, else that of its preset."""
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
