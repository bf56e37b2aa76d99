"""Faults of chains and complexes, found by reading them as training does, the overlap of training, validation and test chains
(shared chains, equal sequences, likeness of the others), and the bar before a training: what copies of the nearest
training chains score on held-out chains.

The identity of two sequences is the number of identical residues in their alignment by BLOSUM62 (a gap costs 11, each
further residue of it 1, gaps at the ends nothing), as a share of the shorter sequence, as in CD-HIT. X is identical to
nothing.

Millions of pairs cannot be aligned. So each chain of the smaller set is aligned only with the few sequences of the other set
that share most words of four residues with it, as a share of the words of the one that has fewer. Sequences without a common
word are not aligned: nobody would call them a leak.

Two complexes are as alike as their most alike chains. That is often no leak: complexes of a family share a chain, such as an
antigen. A complex is known from training if one training complex has a near chain for every chain of it: more than `NEAR` of
the residues are identical. Numbers of copies and chains of fewer than `SHORTEST` residues do not count. Each complex of the
smaller set is aligned with those of the other set whose chains share most words with its chains: the chain that shares least
decides.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal

import numpy as np

from evodsp.data.records import CHAINS, ONE_OF, Assembly
from evodsp.data.similarity.nearest import Bar, Compared, bar
from evodsp.data.similarity.sequences import MOST_CELLS, SHORTEST, WORD, Letters, Words, identity, plain
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.msa import QueryMismatch
from evodsp.data.sources.opening import ComplexFiles
from evodsp.data.sources.parsed import Parsed
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.printing import counted, one_line, progress

ALIGNED_WITH = 3
"""Number of sequences of the other set that a chain is aligned with."""
DEFINITION = (
    "Identity: identical residues of an alignment (BLOSUM62, gaps 11 and 1, free at the ends) as a share of the shorter "
    f"sequence. Each chain is aligned with the {ALIGNED_WITH} sequences of the other set that have most words of {WORD} "
    f"residues in common with it; sequences of under {SHORTEST} residues are compared for equality only."
)
NEAR = 0.4
"""Two chains are near with a larger share of identical residues."""
FEWEST_ALIGNED, PAIRS_ALIGNED = 30, 7_000
"""Complexes of the other set that a complex is aligned with: as many as make this number of pairs in all, but no fewer than
these. At 40 % identity the shared words do not tell well which are nearest."""
DEFINITION_OF_COMPLEXES = (
    f"{DEFINITION} Of two complexes the most alike chains count. A complex is known from another set if one complex of that "
    f"has, for each of its chains of at least {SHORTEST} residues, a chain with more than {NEAR:.0%} identity."
)

_MOST_KEPT = 1000
"""Sequences whose shared words are kept: complexes of a family share chains."""
_Chains = Mapping[str, tuple[str, ...]]
"""The distinct sequences of at least `SHORTEST` residues of each complex."""


@dataclass(frozen=True)
class Near:
    """A pair of aligned sequences, named by their chains."""

    first: str
    second: str
    identity: float
    """Their identity, 0 to 1."""


@dataclass(frozen=True)
class Overlap:
    """The overlap of two sets of chains."""

    sets: tuple[str, str]
    """The names of the two sets."""
    chains: list[str]
    """Chains that are in both sets."""
    same_sequence: list[tuple[str, str]]
    """Pairs of other chains, one of each set, with equal sequences: one pair for each such chain of the second set."""
    nearest: list[Near]
    """Nearest aligned chain for each chain of the second set whose sequence is not in the first; most alike first."""
    alignments: int
    """Number of pairs of sequences that were aligned."""
    unknown: int
    """Number of chains whose sequences are not known."""
    covered: list[Near] | None = None
    """Complexes of the second set that are known from the first, the most alike first; None for chains."""

    @property
    def both(self) -> dict[str, str]:
        """The chains of the second set that are in the first, or have the sequence of one there, each with that one."""
        return {**{key: key for key in self.chains}, **{second: first for first, second in self.same_sequence}}

    @property
    def highest(self) -> float | None:
        """The highest identity between a chain of the one set and one of the other; None if none is known."""
        if self.chains or self.same_sequence:
            return 1.0
        return self.nearest[0].identity if self.nearest else None


def overlap(sets: tuple[str, str], first: Letters, second: Letters) -> Overlap:
    """Compare two sets of chains or complexes, given as the sequences of the chains of each key, none where they are unknown.
    The second is the smaller one."""
    known = {key: frozenset(map(plain, letters)) for key, letters in first.items() if letters}
    others = {key: frozenset(map(plain, letters)) for key, letters in second.items() if letters and key not in first}
    of_all = {known[key]: key for key in reversed(list(known))}
    same = [(of_all[chains], key) for key, chains in others.items() if chains in of_all]
    of_first, of_second = (
        {key: long for key, chains in part.items() if (long := _long(chains))}
        for part in (known, {key: chains for key, chains in others.items() if chains not in of_all})
    )
    nearest, aligned = _nearest(of_first, of_second, f"{sets[0]} and {sets[1]} sequences")
    covered, more = None, 0
    if any(len(letters) > 1 for letters in (*first.values(), *second.values())):
        covered, more = _covered(of_first, of_second, f"{sets[0]} and {sets[1]} complexes")
    unknown = sum(not letters for letters in {**first, **second}.values())
    return Overlap(sets, [key for key in second if key in first], same, nearest, aligned + more, unknown, covered)


def _long(chains: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(letters for letters in chains if len(letters) >= SHORTEST))


def _nearest(first: _Chains, second: _Chains, name: str) -> tuple[list[Near], int]:
    """For each complex of `second` the one of `first` that has the most alike chain, most alike first; and the number of
    alignments."""
    owner = {letters: key for key in reversed(list(first)) for letters in first[key]}
    wanted = dict.fromkeys(letters for chains in second.values() for letters in chains)
    near = {letters: (owner[letters], 1.0) for letters in wanted if letters in owner}
    known, new, alignments = list(owner), [letters for letters in wanted if letters not in owner], 0
    if known and new:
        candidates = _candidates([(one,) for one in known], [(one,) for one in new], ALIGNED_WITH)
        with progress(f"compared {name}", len(new)) as advance:
            for letters, rows in zip(new, candidates, strict=True):
                others = [known[row] for row in rows if len(known[row]) * len(letters) <= MOST_CELLS]
                alignments += len(others)
                if others:
                    near[letters] = max(
                        ((owner[one], identity(one, letters)) for one in others), key=lambda one: one[1]
                    )
                advance(1)
    found = []
    for key, chains in second.items():
        if ranked := [near[letters] for letters in chains if letters in near]:
            other, share = max(ranked, key=lambda one: one[1])
            found.append(Near(other, key, share))
    return sorted(found, key=lambda one: -one.identity), alignments


def _covered(first: _Chains, second: _Chains, name: str) -> tuple[list[Near], int]:
    """The complexes of `second` for each chain of which one complex of `first` has a near chain, most alike first; the identity
    is that of the chain that has least. And the number of alignments."""
    if not first or not second:
        return [], 0
    known: dict[tuple[str, str], float] = {}

    def likeness(one: str, other: str) -> float:
        if one == other:
            return 1.0
        if len(one) * len(other) > MOST_CELLS:
            return 0.0
        if (one, other) not in known:
            known[one, other] = identity(other, one)
        return known[one, other]

    entries, found = list(first), []
    candidates = _candidates(
        list(first.values()), list(second.values()), max(FEWEST_ALIGNED, PAIRS_ALIGNED // len(second))
    )
    with progress(f"compared {name}", len(second)) as advance:
        for (key, chains), rows in zip(second.items(), candidates, strict=True):
            share, nearest = NEAR, ""
            for entry in (entries[row] for row in rows):
                least = 1.0
                for one in chains:
                    least = min(least, max(likeness(one, other) for other in first[entry]))
                    if least <= share:
                        break  # another complex is nearer
                else:
                    share, nearest = least, entry
            found += [Near(nearest, key, share)] if nearest else []
            advance(1)
    return sorted(found, key=lambda one: -one.identity), len(known)


def _candidates(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]], most: int) -> list[list[int]]:
    """For the chains of each complex of `second` the rows of the complexes of `first` with most words for each of them, best
    first, at most `most`."""
    letters = list(dict.fromkeys(one for chains in second for one in chains))
    words, column_of = Words(letters), {one: column for column, one in enumerate(letters)}
    shares_with = lru_cache(_MOST_KEPT)(words.shares_with)
    starts = np.cumsum([0, *map(len, second)])[:-1]
    columns = np.array([column_of[one] for chains in second for one in chains])
    best, best_rows = np.zeros((len(second), most)), np.full((len(second), most), -1)
    for row, chains in enumerate(first):
        shared = np.max([shares_with(one) for one in chains], axis=0)[columns]
        # The chain that shares least decides, of equals all chains together.
        points = np.minimum.reduceat(shared, starts) + 1e-3 * np.add.reduceat(shared, starts)
        better = np.flatnonzero(points > best[:, -1])
        best[better, -1], best_rows[better, -1] = points[better], row
        ranks = np.argsort(-best[better], axis=1, kind="stable")
        best[better] = np.take_along_axis(best[better], ranks, 1)
        best_rows[better] = np.take_along_axis(best_rows[better], ranks, 1)
    return [[row for row in found if row >= 0] for found in best_rows.tolist()]


State = Literal["good", "mismatching", "unreadable"]
SAME_PLACE = 0.5
"""Two CA atoms lie in the same place below this distance, in Å."""
_MOST_NOTED = 3
"""Pairs of copies in the same place that are named for one complex."""


@dataclass(frozen=True)
class Examined:
    """A chain or complex that was read, or the reason why it could not be read. Unknown numbers of a bad one are 0."""

    key: str
    state: State
    reason: str = ""
    sequences: tuple[str, ...] = ()
    """The sequences of its chains."""
    resolution: float = math.nan
    """Resolution in Å; 0 if the method has none."""
    release_date: str = ""
    depth: int = 0
    """Number of different sequences in the merged MSA; of a complex in those of all chains."""
    packed_bytes: int = 0
    """Its estimated size in a store: the rows of its MSAs and its coordinates, packed by zlib."""
    seconds: float = 0.0
    """The time that reading and merging took."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how its structure was read."""
    pairing_notes: tuple[str, ...] = ()
    """Remarks for the user on its rows for pairing."""


@dataclass(frozen=True)
class Examiner(Compared):
    """Looks at the keys of a store. Processes can be sent it."""

    @property
    def unit(self) -> str:
        """Word for a key, in the singular."""
        return ONE_OF[self.store.kind]

    @property
    def definition(self) -> str:
        """Definition of likeness, for reports."""
        return DEFINITION if self.store.kind == CHAINS else DEFINITION_OF_COMPLEXES

    @property
    def place(self) -> str:
        """The folders and the index, or the store, that it reads, for reports."""
        store = self.store
        if isinstance(store, FeatureStore):
            return store.address
        folders = [str(store.alignment_dir), str(store.structure_dir)]
        assembly = [store.assembly_name] if isinstance(store, ComplexFiles) else []
        return ", ".join([*folders, *assembly, "no index" if store.index is None else str(store.index.path)])

    def examine(self, key: str) -> Examined:
        """Read one. An error that the user can repair is in the result; any other is raised."""
        begun = time.perf_counter()
        try:
            parsed = self.store.parsed(key)
        except UserError as error:
            return Examined(
                key, "mismatching" if isinstance(error, QueryMismatch) else "unreadable", one_line(str(error))
            )
        seconds = time.perf_counter() - begun
        assembly, chains = parsed.assembly, parsed.assembly.chains
        # Chains of one sequence have one MSA, which a store keeps once, as it does the rows for pairing.
        of_sequence = parsed.of_each_sequence.values()
        rows = [one.msa for own in of_sequence for one in (own.msa, own.pairing) if one is not None]
        kept = [*(one.astype(np.uint8) for one in rows), *(chain.positions for chain in chains)]
        where = ("" if assembly.key is not None else f"chain {chain.chain_id}: " for chain in chains)
        notes = [f"{place}{note}" for place, chain in zip(where, chains, strict=True) for note in chain.notes]
        released = chains[0].release_date
        return Examined(
            key,
            "good",
            sequences=tuple(chain.sequence for chain in chains),
            resolution=chains[0].resolution or 0.0,
            release_date="" if released is None else released.isoformat(),
            depth=sum(own.msa.num_alignments for own in of_sequence),
            packed_bytes=sum(len(zlib.compress(array.tobytes(), 1)) for array in kept),
            seconds=seconds,
            notes=(*dict.fromkeys(notes), *copies_in_one_place(assembly)),
            pairing_notes=tuple(self._of_pairing(parsed)),
        )

    def differs_from_index(self, key: str) -> bool:
        """Whether the alignments of a key are other files than its index says; False without one."""
        store = self.store
        if isinstance(store, FeatureStore) or store.index is None:
            return False
        return store.index.differs(store.name_of(key), store.alignment_dir)

    def _of_pairing(self, parsed: Parsed) -> Iterator[str]:
        """Remarks on the rows that pair the chains of several sequences, one for each sequence."""
        rule, first_of = self.store.rule, parsed.of_each_sequence
        if rule is None or len(first_of) == 1:
            return  # copies are not paired
        for own in first_of.values():
            rows = 0 if own.pairing is None else len(own.pairing.keys) - 1
            nameless = 0 if own.pairing is None else sum(not key for key in own.pairing.keys[1:])
            if not rows:
                yield f"chain {own.query.name}: no rows to pair with other chains ({rule.names})"
            elif nameless:
                yield f"chain {own.query.name}: {nameless:,} of {rows:,} rows have no name to be paired by"


def copies_in_one_place(assembly: Assembly) -> list[str]:
    """Remarks on chains of one sequence of which most CA atoms lie in the same places: an operator that moves nothing, or a
    chain that the file has twice."""
    found = []
    for (name, one), (other_name, other) in combinations(zip(assembly.names, assembly.chains, strict=True), 2):
        if one.sequence != other.sequence:
            continue
        both = (one.mask[:, CA] > 0.5) & (other.mask[:, CA] > 0.5)
        apart = np.linalg.norm(one.positions[both, CA] - other.positions[both, CA], axis=-1)
        if (same := int((apart < SAME_PLACE).sum())) > both.sum() / 2:
            found.append(f"chains {name} and {other_name} lie in the same place ({same:,} of {both.sum():,} CA atoms)")
    more = [f"{len(found) - _MOST_NOTED:,} more pairs of chains lie in the same place"] if found[_MOST_NOTED:] else []
    return found[:_MOST_NOTED] + more


MOST_COPIED = 200
"""Chains of a set for which training chains are copied: of more, that many are drawn by the seed."""
COPYING = {
    "chain": (
        "A model has learnt more than its training structures if it exceeds this. The nearest training chain has the highest "
        "alignment score (BLOSUM62, gaps 11 and 1, free at the ends). Its CA atoms are put on the residues that the alignment "
        "pairs. Identity is that of the paired residues, coverage their share of the chain."
    ),
    "complex": (
        "A model has learnt more than its training structures if it exceeds this. The nearest training complex has as many "
        "chains in as many copies and the highest sum of the alignment scores of its chains (BLOSUM62, gaps 11 and 1, free "
        "at the ends). Its CA atoms are put on the residues that the alignments pair. Identity is that of the paired residues, "
        "coverage their share of all residues. evodsp score --complexes true --baseline nearest says the DockQ of copies."
    ),
}
"""Method of copying, by what is copied."""


@dataclass(frozen=True)
class Copied:
    """Nearest-neighbour baseline on a set of chains."""

    kind: str
    """The name of the set: validation or test."""
    readable: int
    """Chains of the set that can be read."""
    bar: Bar
    """Baseline on these chains, or on `MOST_COPIED` of them."""
    unit: str = "chain"
    """Word for what is copied."""

    @property
    def line(self) -> str:
        """A line for a terminal."""
        found, said = self.bar, f"{self.kind}: copying the nearest training {self.unit} scores"
        tried = len(found.copies) + len(found.without)
        number = (
            f"{tried:,} of {counted(self.readable, self.unit)}, drawn by --seed"
            if tried < self.readable
            else counted(tried, self.unit)
        )
        without = ""
        if found.without:
            key, reason = next(iter(found.without.items()))
            without = f"; {len(found.without):,} have no copy, such as {key}: {reason}"
        if not found.copies:
            return f"{said} nothing ({number}{without})"
        interface = found.interface_lddt_ca
        between = "" if interface is None else f" and interface lDDT-CA {interface:.3f}"
        return f"{said} lDDT-CA {found.lddt_ca:.3f}{between}, at {found.identity:.0%} identity ({number}{without})"

    def as_json(self) -> dict[str, Any]:
        found = self.bar
        means = (found.lddt_ca, found.identity) if found.copies else (None, None)
        head = {"set": self.kind, "chains": self.readable, "lddt_ca": means[0], "identity": means[1]}
        interface = found.interface_lddt_ca
        return {**head, **({} if interface is None else {"interface_lddt_ca": interface}), **asdict(found)}


def copied(
    kind: str,
    keys: list[str],
    letters: Letters,
    training: Sequence[str],
    examiner: Examiner,
    seed: int,
    workers: int,
) -> Copied:
    """Compute the baseline on `keys`, which can be read. `letters`: the sequences of all of them."""
    drawn = set(random.Random(seed).sample(keys, MOST_COPIED)) if len(keys) > MOST_COPIED else set(keys)
    targets = {key: letters[key] for key in keys if key in drawn}
    known = {key: letters[key] for key in training}
    read = examiner.store.assembly_of
    made = bar(f"{kind} {examiner.unit}", targets, known, read, read, workers)
    return Copied(kind, len(keys), made, examiner.unit)
