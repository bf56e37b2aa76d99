"""The chains of a set that a run takes (they are in its list, have files and pass the filters), the chain of sample
number i by AlphaFold2's weights (supplement 1.2.5), and self-distillation sets: predicted structures as training
targets (supplement 1.3).

The losses of the confidence heads count structures whose resolution is within bounds (supplement 1.9.6). A structure without
a resolution (NMR, a prediction, often a file of one's own) has the resolution 0, as in AlphaFold2, and is not counted. A run
on such chains alone learns no confidence, and its `train/plddt` is 0. A message says so, for nobody would see why.

AlphaFold2 takes a random chain and accepts it with a probability; OpenFold repeats that for a whole epoch. Here a chain is
drawn with its share of the sum of these probabilities, which gives the same distribution. docs/data.md lists every
difference from the supplement and from OpenFold.

The draws are addressed. Sample i has a sequence of candidates, attempts 0, 1, 2, …, each drawn from (seed, i, attempt) and
from nothing else. Its chain is the first candidate that is not left out (`evodsp.training.loader`). So

- a sample is a function of (seed, i, the chains left out at i), whatever happened at other samples, on other ranks or before a
  resume: no draw consumes the state of a generator;
- leaving out one more chain c changes exactly the samples whose chain was c: any other sample's accepted candidate comes
  before or without c, and stays the first that is not left out;
- with weights w, the accepted chain has the distribution of the remaining weights. Attempts are independent, each is rejected
  with probability q = the share of the chains left out, so chain c is taken with probability w_c (1 + q + q^2 + …) = w_c / (1
  - q).

A draw takes one binary search in the cumulative weights, whatever the number of chains.

The prediction's confidence stands in the B-factors. Atoms of residues below a pLDDT are masked, so that nothing is learned
from parts of which the prediction was unsure. A predicted structure has no resolution, so losses that need an experiment's
do not count it (unless one is assumed), and no release date, so its templates need `data.max_template_date`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float64

from evodsp.config import FilterConfig, LossConfig, Sampling, parse_latest_date
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import UNKNOWN_DAY, ChainFacts, ChainTable, cached_entries, cached_table, table_of
from evodsp.data.pool import WorkerEndedError, processes_for, with_progress
from evodsp.data.records import COMPLEXES
from evodsp.data.similarity.nearest import Compared, Exclusion, is_fasta, sequences_of_fasta, sequences_of_keys
from evodsp.data.sources.chain_files import Lacking, Store
from evodsp.data.sources.opening import Records, Unit, open_files, open_store
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import FileFormatError, UserError
from evodsp.printing import counted
from evodsp.reading.text_files import lines_of
from evodsp.rng import Draws


def left_out_by_filters(
    table: ChainTable, filters: FilterConfig, where: str = "data.filters"
) -> dict[str, Bool[np.ndarray, " n"]]:
    """Whether each filter leaves each chain out, by the filter's reason. A chain may be left out for several reasons.
    `where`: the name of the filters in messages.
    """
    reasons: dict[str, Bool[np.ndarray, " n"]] = {}
    if filters.max_resolution is not None:
        unknown = np.isnan(table.resolutions)
        reasons["unknown resolution"] = unknown
        # A resolution of 0 stands for a method that has none.
        reasons[f"resolution above {filters.max_resolution:g} Å"] = ~unknown & (
            table.resolutions > filters.max_resolution
        )
    if filters.max_residue_share is not None:
        unknown = np.isnan(table.largest_fractions)
        reasons["unknown sequence"] = unknown
        # Rounded as the table is, or 4 of 5 residues would be more than 0.8.
        most = np.float32(filters.max_residue_share)
        reasons[f"more than {filters.max_residue_share:.0%} of one residue type"] = ~unknown & (
            table.largest_fractions > most
        )
    if (latest := parse_latest_date(f"{where}.max_release_date", filters.max_release_date)) is not None:
        unknown = table.release_days == UNKNOWN_DAY
        reasons["unknown release date"] = unknown
        reasons[f"released after {latest}"] = ~unknown & (table.release_days > (latest - date(1970, 1, 1)).days)
    return reasons


class ChainDraws:
    """Draws chains. Without `weights` each epoch of n samples is a permutation of the n keys, so that all are seen equally
    often; with them each sample is drawn independently in proportion to its chain's weight.

    A permutation is attempt 0 only: the places of chains that are left out are filled by equally likely draws of the others.
    """

    def __init__(self, draws: Draws, keys: Sequence[str], weights: Float64[np.ndarray, " n"] | None = None) -> None:
        """`draws`: a stream of this object's own. Raises ValueError unless weights are above zero and finite, one per key."""
        if weights is not None and not (
            len(weights) == len(keys) and (weights > 0).all() and np.isfinite(weights).all()
        ):
            raise ValueError(f"{len(keys)} keys need as many finite weights above 0, not {weights}")
        self.keys = keys
        self._draws = draws
        self._cumulative = None if weights is None else np.cumsum(weights, dtype=np.float64)
        self._epoch: tuple[int, np.ndarray] | None = None

    def candidate(self, sample: int, attempt: int) -> str:
        """The chain that attempt number `attempt` draws for `sample`."""
        if self._cumulative is None and attempt == 0:
            return self.keys[self._in_permutation(sample)]
        uniform = precise_uniform(self._draws.at("chain", sample), attempt)
        if self._cumulative is None:
            return self.keys[int(uniform * len(self.keys))]
        at = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        return self.keys[min(int(at), len(self.keys) - 1)]  # rounding may reach the very end

    def choose(self, sample: int, left_out: Container[str]) -> str:
        """The chain of `sample`, none of `left_out`. Raises UserError if all chains are left out."""
        attempt = 0
        while (key := self.candidate(sample, attempt)) in left_out:
            attempt += 1
            if attempt % _ATTEMPTS_UNTIL_COUNTED == 0 and all(key in left_out for key in self.keys):
                raise UserError(f"all {len(self.keys)} chains to train on are left out; correct their files")
        return key

    def _in_permutation(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.keys))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._draws.at("epoch", epoch).permutation(len(self.keys))
        return int(self._epoch[1][place])


DISTILLED = "distillation/"
"""The prefix of names of a self-distillation set's chains, here and in the quarantine."""


class MixedDraws:
    """Draws a sample from a self-distillation set with probability `fraction`, otherwise from the other chains.

    Leaving a chain out does not change which of the two a sample is from: its replacement comes from the same set.
    """

    def __init__(self, draws: Draws, chains: ChainChoice, distilled: ChainChoice, fraction: float) -> None:
        self._draws, self._chains, self._distilled, self._fraction = draws, chains, distilled, fraction

    def choose(self, sample: int, left_out: Container[str]) -> str:
        """As `ChainDraws.choose`."""
        is_distilled = precise_uniform(self._draws.at("source", sample), 0) < self._fraction
        return (self._distilled if is_distilled else self._chains).choose(sample, left_out)


ChainChoice = ChainDraws | MixedDraws
"""Decides which chain a sample is made of."""
_ATTEMPTS_UNTIL_COUNTED = 64
"""Number of left-out candidates after which it is checked that there are others."""


def precise_uniform(draws: Draws, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits: `Draws.uniform` has 24, too few to choose among a million weights."""
    high, low, _, _ = draws.words(position)
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)


def open_predictions(
    alignment_dir: str | None,
    structure_dir: str | None,
    index: str | None,
    store: str | None,
    min_plddt: float,
    unit: Unit = Unit(),  # noqa: B008 (frozen)
) -> Records | None:
    """The records of a self-distillation set, given its settings in `data.distillation`; None if they name none.

    Raises UserError that names the setting.
    """
    if store is not None:
        built = open_store(store, unit, setting="data.distillation.store")
        if built.min_plddt is None:
            raise UserError(
                f"data.distillation.store is {store}, which was built without --min_plddt, so nothing in it is masked; build "
                f"it with --min_plddt {min_plddt:g}"
            )
        if built.min_plddt != min_plddt:
            raise UserError(
                f"data.distillation.min_plddt is {min_plddt:g}, but {store} was built with --min_plddt {built.min_plddt:g}; "
                "set it to that, or build the store again"
            )
        return built
    if alignment_dir is None or structure_dir is None:
        return None
    for name, path in (("alignment_dir", alignment_dir), ("structure_dir", structure_dir)):
        if not Path(path).is_dir():
            raise UserError(
                f"data.distillation.{name} is {path}, which is not a folder; give the folder, or leave it out"
            )
    return open_files(alignment_dir, structure_dir, index, unit, min_plddt)


@dataclass(frozen=True)
class DistillationSet:
    """A self-distillation set as samples are made of it. Picklable, for workers."""

    source: Records
    """The source of its chains: their files, or a feature store that was built of them."""
    max_rows: int
    """Most rows of an MSA that are used; they are a random sample."""
    templates: TemplateSource | None = None
    """The source of templates for its chains; None if samples have none."""
    assumed_resolution: float | None = None
    """The resolution in Å that its chains, which have none, are given; with None the losses of the confidence heads do not
    count them."""


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
    """Chains that `data.exclude_like` excludes: keys of the run's data, or a FASTA file. `share`: `data.exclude_identity`."""
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
    """Chains that are left out besides."""

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
    """Facts in the files of each key, nothing where they cannot be read; shows progress. An index keeps such facts."""
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
        fix = f"; to use those without one, set {self.setting}, such as 2.0" if without else ""
        return (
            f"{' and '.join(filter(None, (have, outside)))}: they do not train {names}, as in AlphaFold2, so "
            f"train/{terms[0]} is 0 in steps of such chains alone{fix}"
        )
