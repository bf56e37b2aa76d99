"""The chains of a set that a run takes: they are in its list, have files and pass the filters. The losses do not count all of
them.

The losses of the confidence heads count structures whose resolution is within bounds (supplement 1.9.6). A structure without a
resolution (NMR, a prediction, often a file of one's own) has the resolution 0, as in AlphaFold2, and is not counted. A run on
such chains alone learns no confidence, and its `train/plddt` is 0. A message says so, for nobody would see why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float64

from evodsp.config import FilterConfig, LossConfig, Sampling
from evodsp.data.executors import processes_for, with_progress
from evodsp.data.index.chain_table import ChainTable
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import ChainFacts, cached_entries, cached_table, table_of
from evodsp.data.pool import WorkerEndedError
from evodsp.data.records import COMPLEXES
from evodsp.data.samples.sampling import left_out_by_filters
from evodsp.data.similarity.comparison import Compared
from evodsp.data.similarity.exclusion import Exclusion, is_fasta, sequences_of_fasta, sequences_of_keys
from evodsp.data.sources.store import Lacking, Store
from evodsp.errors import FileFormatError, UserError
from evodsp.printing import counted
from evodsp.reading.text_files import lines_of

_IN_THIS_PROCESS = 2000
"""Chains whose facts are read without further processes."""


def chain_list(chains: str | list[str]) -> list[str]:
    """The names in a list of chains: the list itself, or a text file with one name per line ('#' begins a comment).

    Raises UserError if the file is missing, empty or no UTF-8 text, or if a name is listed twice.
    """
    source = chains if isinstance(chains, str) else "the list of chains"
    listed = chains_and_lines(chains) if isinstance(chains, str) else [(name, None) for name in chains]
    if not listed:
        raise UserError(f"{source}: no chain names in it; write one per line")
    names: set[str] = set()
    for name, line in listed:
        if name in names:
            raise FileFormatError(source, f"'{name}' is listed more than once; remove the repetition", line)
        names.add(name)
    return [name for name, _ in listed]


def chains_and_lines(path: str) -> list[tuple[str, int | None]]:
    """The names in a text file, as `chain_list` reads them, each with its line. Raises UserError if there is no such file."""
    if Path(path).is_dir():
        raise UserError(
            f"{path}: is a folder, but a list of chains is a file with one name per line; give the file, "
            "or a list [102m_A, ...]"
        )
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file of chain names; write one name per line, or give a list [102m_A, ...]")
    lines = enumerate(lines_of(path), start=1)
    return [(name, number) for number, line in lines if (name := line.partition("#")[0].strip())]


def exclusion(source: str | list[str] | None, share: float, comparison: Compared) -> Exclusion | None:
    """What `data.exclude_like` names: keys of the run's data, or a FASTA file. `share`: `data.exclude_identity`."""
    if source is None:
        return None
    listed = sequences_of_fasta(str(source)) if is_fasta(source) else sequences_of_keys(chain_list(source), comparison)
    return Exclusion(listed, share, comparison)


class Presence:
    """Looks keys up in time that does not grow with their number. Whether files can be read is not checked."""

    def __init__(self, store: Store) -> None:
        self.keys = store.keys()
        """The keys of the store: chains with alignments, entries with alignments of a chain; sorted."""
        self._known = frozenset(self.keys)
        self._name_of, self._unknown, self._is_resolved = store.name_of, store.unknown, store.structure_lookup()

    def lacks(self, key: str) -> Lacking | None:
        """The part that the key lacks; None if it has all."""
        if (key := self.name_of(key)) not in self._known:
            return self._unknown
        return None if self._is_resolved(key) else "structure"

    def name_of(self, key: str) -> str:
        """The name of a key among `keys`, if it has one there."""
        return self._name_of(key) if key not in self._known and key.rpartition("_")[0] in self._known else key

    def training(self, listed: list[str] | None, held_out: Iterable[str]) -> list[str]:
        """The keys to train on: `listed`, or without a list all but `held_out`."""
        if listed is not None:
            return listed
        others = {self.name_of(key) for key in held_out}
        return [key for key in self.keys if key not in others]


@dataclass(frozen=True)
class KnownChains:
    """Facts about chains or complexes."""

    table: ChainTable
    source: str
    """The file that holds them."""
    frequencies: Callable[[], Float64[np.ndarray, " n"]]
    """Returns how often `sampling: alphafold2` takes each, in any unit."""


@dataclass(frozen=True)
class Selection:
    """The settings that filter and weight the chains of a set."""

    where: str
    """The prefix of these settings' names: data, or data.distillation."""
    chain_data_cache: str | None
    index: str | None
    filters: FilterConfig
    default: FilterConfig
    """The filters where none is given."""
    sampling: Sampling
    excluded: Exclusion | None = None
    """What is not trained on besides."""

    @property
    def is_applied(self) -> bool:
        """Whether the filters leave chains out. Those that nobody gave do so only where facts are asked for anyway."""
        return self.chain_data_cache is not None or self.sampling == "alphafold2" or self.filters != self.default

    def unapplied(self, places: Mapping[str, str]) -> str | None:
        """A line for those who gave filters that leave nothing out, because their values are the defaults; otherwise None.
        `places`: where each setting is given, such as '--' or 'file:line: '."""
        name = f"{self.where}.filters"
        place = next((place for key, place in places.items() if f"{key}.".startswith(f"{name}.")), None)
        if place is None or self.is_applied:
            return None
        return (
            f"{place.removeprefix('--')}{name} are not applied: values that are all the default leave out chains only "
            f"with {self.where}.chain_data_cache or {self.where}.sampling alphafold2; give one of these, or a value next to "
            f"the default, such as {name}.max_resolution 8.9"
        )

    def known(self, keys: Sequence[str], store: Store) -> KnownChains | None:
        """The facts about `keys`, from the cache, the index, or their files; None if no setting asks for facts.

        An index alone filters nothing: it may be there only to make a run start quickly.
        """
        if self.chain_data_cache is not None:
            if store.kind == COMPLEXES:
                table, frequencies = cached_entries(self.chain_data_cache)
                return KnownChains(table, self.chain_data_cache, lambda: frequencies)
            table = cached_table(self.chain_data_cache)
            return KnownChains(table, self.chain_data_cache, table.frequencies)
        if not self.is_applied:
            return None
        if self.index is not None:
            index = DataIndex(self.index, store.kind)
            return KnownChains(index.table, self.index, index.frequencies)
        if self.sampling == "alphafold2":
            raise UserError(
                f"{self.where}.sampling is alphafold2, but {self.where}.chain_data_cache and {self.where}.index are null; give "
                "OpenFold's chain_data_cache.json or an index (evodsp data index), which have the lengths and cluster sizes, "
                f"or set {self.where}.sampling to uniform"
            )
        table = table_of(keys, read_facts(keys, store))
        return KnownChains(table, "their files", table.frequencies)


def read_facts(keys: Sequence[str], store: Store) -> list[ChainFacts]:
    """What the files of each key say, nothing where they cannot be read; shows progress. An index keeps such facts."""
    found = [ChainFacts()] * len(keys)
    workers = processes_for(len(keys), _IN_THIS_PROCESS)
    for at, facts in with_progress("read for the filters", _facts, [(store, key) for key in keys], workers):
        found[at] = ChainFacts() if isinstance(facts, WorkerEndedError) else facts
    return found


def _facts(store: Store, key: str) -> ChainFacts:
    try:
        return store.facts(key)
    except (UserError, OSError):  # said when a sample is made of it
        return ChainFacts()


@dataclass(frozen=True)
class Selected:
    """The chains that pass the filters."""

    keys: list[str]
    weights: Float64[np.ndarray, " n"] | None
    """The frequency with which each chain is drawn, in any unit; None: all are drawn equally often."""
    left_out: dict[str, int]
    """Numbers of chains that are left out, by reason; a reason without chains is absent."""
    known: KnownChains | None = None
    """The facts that the filters were applied to; None if they were not."""

    def line(self, kind: str) -> str:
        """A line that says how many chains are left, and why others are left out; '' if none is."""
        total = len(self.keys) + sum(self.left_out.values())
        said = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{len(self.keys)} of {counted(total, f'{kind} chain')}; left out: {said}" if said else ""


def select(keys: list[str], selection: Selection, store: Store) -> Selected:
    """Filter and weight the chains `keys` of a store. A chain that several filters leave out is counted with the first."""
    known = selection.known(keys, store)
    counts: dict[str, int] = {}
    kept, rows = keys, np.zeros(0, np.int64)
    if known is not None:
        reasons = left_out_by_filters(known.table, selection.filters, f"{selection.where}.filters")
        absent, counts = f"not in {known.source}", dict.fromkeys([f"not in {known.source}", *reasons], 0)
        found = []
        for key, row in zip(keys, known.table.rows_of(keys, store.name_of), strict=True):
            left_out = row is None or next((reason for reason, those in reasons.items() if those[row]), None)
            if row is None or left_out is not None:
                counts[absent if row is None else str(left_out)] += 1
            else:
                found.append((key, row))
        kept, rows = [key for key, _ in found], np.array([row for _, row in found], np.int64)
    if selection.excluded is not None:
        alike, unread = selection.excluded.resembling(kept)
        near = f"alike those of data.exclude_like (more than {selection.excluded.identity:.0%} identical)"
        counts |= {near: len(alike), "of a sequence that cannot be compared with them": len(unread)}
        unwanted = {*alike, *unread}
        stay = [place for place, key in enumerate(kept) if key not in unwanted]
        kept, rows = [kept[place] for place in stay], rows[stay] if known is not None else rows
    weights = None if selection.sampling == "uniform" or known is None else known.frequencies()[rows]
    return Selected(kept, weights, {reason: count for reason, count in counts.items() if count}, known)


@dataclass(frozen=True)
class CountedStructures:
    """The rule by which the losses of the confidence heads of a run count structures."""

    loss: LossConfig
    assumed: float | None
    """The resolution in Å that a structure without one is given; None gives it none."""
    setting: str = "data.assumed_resolution"
    """The name of the setting that holds it."""

    def line(self, resolutions: Float[np.ndarray, " n"], chains: int, kind: str) -> str | None:
        """A line about the chains that the losses do not count; None if they count all, or have no weight.

        `resolutions`: the resolutions in Å of all or some of the `chains` chains, 0 if there is none, NaN if unknown. `kind`:
        what the line calls them, such as training chains.
        """
        known = resolutions[~np.isnan(resolutions)]
        terms, loss = self.loss.by_resolution, self.loss
        low, high = loss.confidence_min_resolution, loss.confidence_max_resolution
        # A resolution that was rounded to float32, as a table has it, is not outside of bounds that it was given as.
        taken = np.where(known == 0, self.assumed or 0, known).astype(np.float32)
        is_outside = (taken < np.float32(low)) | (taken > np.float32(high))
        without, others = int((is_outside & (known == 0)).sum()), int((is_outside & (known != 0)).sum())
        if not terms or not without + others:
            return None
        among = f"{chains:,} {kind}" if len(known) == chains else f"{len(known):,} {kind} that were looked up"
        have = f"{without:,} of {among} have no resolution" if without else ""
        which = f"{others:,}" if without else f"{others:,} of {among}"
        outside = f"{which} have one outside of {low:g} to {high:g} Å" if others else ""
        names = " and ".join([", ".join(terms[:-1]), terms[-1]] if terms[1:] else terms)
        fix = f"; {self.setting} gives a resolution to those without one, such as 2.0" if without else ""
        return (
            f"{' and '.join(filter(None, (have, outside)))}: the loss {names} does not count them, as in AlphaFold2, so "
            f"train/{terms[0]} is 0 in steps of such chains alone{fix}"
        )
