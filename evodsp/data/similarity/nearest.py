"""The bar for a model: what copying the nearest training structure scores on one that was held out.

The nearest training structure has as many chains, in as many copies each, as the target. Each of its chains is aligned with
one of the target's (`pairs`), so that the sum of the alignment scores is highest; among all training structures the highest
sum counts, of equals the best resolution, and of equal ones the first. The copy has the target's sequences, and the places
of the atoms that the alignments pair with its own. Its lDDT-CA is compared with a prediction's; residues without a
counterpart keep no distance. A model that has learnt more than its training structures is better than the copy.

A chain is aligned with the training sequences that share most words with it, until the products of the lengths sum to
`MOST_CELLS`: with all of up to 7,000 domains of 120 residues, with the likeliest of a larger set.

Shapes: R residues of all chains, C chains, P permutations of them.

Chains or complexes that resemble those of a list are excluded, so that a run does not train on them. One resembles a listed
one if it has, for every chain of that, a chain with more than a share of identical residues (`pairs`: of the shorter
sequence), or an equal one. Numbers of copies do not count. Chains of fewer than `SHORTEST` residues count only where the
listed one has no other, and are compared for equality.

A sequence is aligned with the listed ones that share most words of four residues with it: with all that share one, unless
these would be more than `PAIRS_ALIGNED` in all.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.data.formats.fasta import read_fasta
from evodsp.data.pool import LocalProcesses, WorkerEndedError, processes_for, with_progress
from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity.sequences import (
    MOST_CELLS,
    SHORTEST,
    Letters,
    Words,
    identity,
    listed_sequences,
    paired,
    plain,
    read_sequences,
    same_residues,
    score,
    with_unlisted,
)
from evodsp.data.sources.opening import Records
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import CA
from evodsp.printing import one_line, progress
from evodsp.reading.text_files import text_of

MOST_FILES = 64
"""Training structures that are read for one target, at most: those of the highest score, and the next if none can be read."""
_IN_THIS_PROCESS = 3 * 10**9
"""Products of lengths, in all, up to which more processes would not be worth their start: about 15 seconds."""
_AT_ONCE, _LISTED = 500, 10_000
"""Chains that are compared by words at the same time, which takes 1 kB for each training sequence; and training sequences whose
words are listed at the same time."""
_MOST_WORDS = 65_535
"""More shared words of two sequences are not told apart."""
_FAR, _APART = 1e6, 1e5
"""Å: the place of residues without a counterpart, and their distance from each other."""
_MOST_EXCHANGES = 120
"""Ways to exchange identical chains of a copy that are scored, at most."""
_SAME_SCORE = 1e-9
_MOST_PERMUTED = 6
"""Chains, up to which all ways to assign them are tried; of more the best pair goes first."""

Read = Callable[[str], Assembly]
"""Reads the structure of a key. Raises UserError or OSError if it cannot be read. Processes can be sent it."""


@dataclass(frozen=True)
class Copy:
    """A chain or complex, and the scores of a copy of the nearest training structure."""

    chain: str
    nearest: str
    """The training chain or complex."""
    identity: float
    """Identical residues, as a share of the paired ones, 0 to 1."""
    coverage: float
    """Share of the residues that have a counterpart, 0 to 1."""
    lddt_ca: float
    """lDDT-CA of the copy, 0 to 1."""
    interface_lddt_ca: float | None = None
    """lDDT of the CA atoms over the distances between chains alone, 0 to 1; None if none of them is below 15 Å."""


@dataclass(frozen=True)
class Bar:
    """Nearest-neighbour baseline on a set of chains or complexes."""

    copies: list[Copy]
    without: dict[str, str] = field(default_factory=dict)
    """Chains or complexes without a copy, each with the reason."""
    trained_on: list[str] = field(default_factory=list)
    """Members of the set that are trained on, too. They are not copied from themselves."""

    @property
    def lddt_ca(self) -> float:
        """The mean over the set; NaN without any copy."""
        return _mean([copy.lddt_ca for copy in self.copies])

    @property
    def identity(self) -> float:
        """The mean over the set; NaN without any copy."""
        return _mean([copy.identity for copy in self.copies])

    @property
    def interface_lddt_ca(self) -> float | None:
        """The mean over the complexes whose chains are in contact; None without any."""
        known = [copy.interface_lddt_ca for copy in self.copies if copy.interface_lddt_ca is not None]
        return _mean(known) if known else None


@dataclass(frozen=True)
class PlacedCopy:
    """The copy of a training structure. `identity`, `coverage`: as of `Copy`. `assembly`: the target's chains with atoms of the
    training structure, and the names that its chains have."""

    nearest: str
    identity: float
    coverage: float
    assembly: Assembly


Placed = tuple[PlacedCopy, Assembly]
"""A copy, and its target. It is scored where torch is."""


def nowhere(residues: int) -> Float64[np.ndarray, "R 3"]:
    """Places in Å, far from all atoms and from each other: those of residues without a counterpart keep no distance."""
    return np.repeat(_FAR + _APART * np.arange(residues, dtype=np.float64)[:, None], 3, axis=1)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def bar(
    name: str, targets: Letters, training: Letters, truth: Read, structures: Read, workers: int | None = None
) -> Bar:
    """Compute the baseline on the targets, with a line of progress. `name`: a word for a target, such as validation chain.
    The rest is as in `copies`."""
    found = {}
    with progress(f"copied the nearest for each {name}", len(targets)) as advance:
        for key, copy in copies(targets, training, truth, structures, workers):
            found[key] = copy
            advance(1)
    return gathered(found, targets, training)


def gathered(found: Mapping[str, Copy | str], targets: Iterable[str], training: Container[str]) -> Bar:
    """The bar of the targets, in their order, given what `copies` yields for each."""
    return Bar(
        [copy for key in targets if isinstance(copy := found[key], Copy)],
        {key: copy for key in targets if isinstance(copy := found[key], str)},
        [key for key in targets if key in training],
    )


def copies(
    targets: Letters, training: Letters, truth: Read, structures: Read, workers: int | None = None
) -> Iterator[tuple[str, Copy | str]]:
    """The scores of `placed_copies`."""
    for key, placed in placed_copies(targets, TrainingSet(training), truth, structures, workers):
        yield key, placed if isinstance(placed, str) else _scored(key, *placed)


def placed_copies(
    targets: Letters, training: TrainingSet, truth: Read, structures: Read, workers: int | None = None
) -> Iterator[tuple[str, Placed | str]]:
    """Copies of the targets as they are done, or the reasons why there is none; nothing of one target stops the others.

    `targets`: the sequences of the chains of each, none where they are unknown. `truth`, `structures`: read the structures of
    the targets and of the training set. `workers`: processes; None takes one a core where they are worth it.
    """
    known = {key: tuple(map(plain, letters)) for key, letters in targets.items() if letters}
    yield from ((key, "its sequence is unknown") for key in targets if key not in known)
    jobs = [(key, of_key, truth, structures) for key, of_key in training.candidates(known)]
    if workers is None:
        workers = processes_for(sum(of_key.cells for _, of_key, *_ in jobs), _IN_THIS_PROCESS)
    for number, placed in LocalProcesses(workers).map(_place, jobs):
        yield jobs[number][0], str(placed) if isinstance(placed, WorkerEndedError) else placed


@dataclass(frozen=True)
class _Candidates:
    """The training structures that may be the nearest of a target.

    `own`: the target's sequences. `likely`: for each of them the training sequences that it is aligned with. `others`: for each
    set of chains the number and name of each structure that has it.
    """

    own: tuple[str, ...]
    likely: Mapping[str, Sequence[str]]
    others: Sequence[tuple[tuple[str, ...], Sequence[tuple[int, str]]]]

    @property
    def cells(self) -> int:
        """Products of the lengths that are aligned."""
        return sum(len(mine) * sum(map(len, others)) for mine, others in self.likely.items())

    def ranked(self) -> tuple[list[tuple[int, int, str]], dict[str, Int64[np.ndarray, " C"]]]:
        """Score, number and name of each structure; and the place, in it, of the counterpart of each of the target's chains."""
        points = {mine: {other: score(other, mine) for other in others} for mine, others in self.likely.items()}
        ranked: list[tuple[int, int, str]] = []
        counterparts: dict[str, Int64[np.ndarray, " C"]] = {}
        for letters, owners in self.others:
            table = np.array([[points[mine].get(other, -np.inf) for other in letters] for mine in self.own], np.float64)
            assigned = _best_assignment(table)
            if np.isfinite(total := table[np.arange(len(self.own)), assigned].sum()):
                ranked += [(int(total), number, name) for number, name in owners]
                counterparts |= {name: assigned for _, name in owners}
        return ranked, counterparts


class TrainingSet:
    """The sequences of training structures, from which copies are made. `sequences`: those of the chains of each, by name."""

    def __init__(self, sequences: Letters) -> None:
        self.sequences = {name: tuple(map(plain, letters)) for name, letters in sequences.items()}
        self._owners: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for number, (name, letters) in enumerate(self.sequences.items()):
            if letters:
                self._owners.setdefault(letters, []).append((number, name))

    @cached_property
    def _with(self) -> dict[str, list[tuple[str, ...]]]:
        """The sets of chains in which each sequence is."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for letters in self._owners:
            for one in dict.fromkeys(letters):
                found.setdefault(one, []).append(letters)
        return found

    def candidates(self, targets: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, _Candidates]]:
        """Structures to copy from, by target. Nothing is a copy of itself."""
        letters, owns = list(self._with), list(dict.fromkeys(one for own in targets.values() for one in own))
        rows = dict(zip(owns, _candidates_of(letters, owns), strict=True))
        for key, own in targets.items():
            likely = {one: [letters[row] for row in rows[one]] for one in own}
            union, kinds = {one for some in likely.values() for one in some}, _kinds(own)
            sets = dict.fromkeys(one for first in union for one in self._with[first] if union.issuperset(one))
            others = [
                (one, owners)
                for one in sets
                if _kinds(one) == kinds and (owners := [owner for owner in self._owners[one] if owner[1] != key])
            ]
            aligned = {one for chains, _ in others for one in chains}
            likely = {mine: [one for one in some if one in aligned] for mine, some in likely.items()}
            yield key, _Candidates(own, likely, others)


def _scored(key: str, copy: PlacedCopy, target: Assembly) -> Copy:
    """The scores of the copy: identical chains of the target are exchanged so that lDDT-CA is highest."""
    import torch  # here, so that the processes that align do not wait for it

    from evodsp import metrics

    def alpha(chains: Iterable[Chain], part: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(chain, part)[:, CA] for chain in chains])).double()

    true, resolved = alpha(target.chains, "positions"), alpha(target.chains, "mask")
    numbers = torch.from_numpy(np.repeat(np.arange(len(target.chains)), [len(chain) for chain in target.chains]))
    places = torch.from_numpy(nowhere(len(target)))
    best, interface = -math.inf, math.nan
    for order in _exchanged(target.entities):
        sources = [copy.assembly.chains[place] for place in order]
        copied = torch.where(alpha(sources, "mask")[:, None] > 0.5, alpha(sources, "positions"), places)
        lddt = float(metrics.lddt_ca(copied, true, resolved))
        if lddt > best + _SAME_SCORE:
            best = lddt
            if len(target.chains) > 1:
                interface = float(metrics.interface_lddt_ca(copied, true, resolved, numbers))
    return Copy(key, copy.nearest, copy.identity, copy.coverage, best, None if math.isnan(interface) else interface)


def _place(key: str, candidates: _Candidates, truth: Read, structures: Read) -> Placed | str:
    """The copy of a target, and the target; or the reason why there is none."""
    if not candidates.others:
        return _none_is_like(candidates.own)
    try:
        target = truth(key)
    except (UserError, OSError) as error:
        return one_line(str(error))
    if not any(chain.mask[:, CA].any() for chain in target.chains):
        return "no residue of it has a CA"
    copy = _copy(target, candidates, structures)
    return copy if isinstance(copy, str) else (copy, target)


def _copy(target: Assembly, candidates: _Candidates, structures: Read) -> PlacedCopy | str:
    ranked, counterparts = candidates.ranked()
    if not ranked:
        return _none_is_like(candidates.own)
    found = _best_that_is_read(ranked, structures)
    if isinstance(found, str):
        return f"its nearest training {'chains' if len(candidates.own) == 1 else 'complexes'} cannot be read: {found}"
    nearest, assembly = found
    places = counterparts[nearest].tolist()
    return _copied(target, nearest, [(assembly.names[place], assembly.chains[place]) for place in places])


def _none_is_like(own: Sequence[str]) -> str:
    if len(own) == 1:
        return "there is no training chain that it could be aligned with"
    return "there is no training complex with as many chains of as many kinds that it could be aligned with"


def _copied(target: Assembly, nearest: str, sources: Sequence[tuple[str, Chain]]) -> PlacedCopy:
    """The copy. `sources`: for each chain of the target the chain that is copied, with its name."""
    chains, same, pairs_of_all = [], 0, 0
    for mine, (name, source) in zip(target.chains, sources, strict=True):
        letters = plain(mine.sequence), plain(source.sequence)
        pairs = paired(*letters)
        pairs = pairs[source.mask[pairs[:, 1], CA] > 0.5]
        same += same_residues(*letters, pairs)
        pairs_of_all += len(pairs)
        positions, mask = np.zeros_like(mine.positions), np.zeros_like(mine.mask)
        positions[pairs[:, 0]], mask[pairs[:, 0]] = source.positions[pairs[:, 1]], source.mask[pairs[:, 1]]
        chains.append(replace(mine, pdb_id=nearest, chain_id=name, positions=positions, mask=mask))
    copy = Assembly(nearest, tuple(name for name, _ in sources), tuple(chains))
    return PlacedCopy(nearest, same / max(1, pairs_of_all), pairs_of_all / len(target), copy)


def _exchanged(entities: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The ways to exchange chains of one sequence, at most `_MOST_EXCHANGES`, the given order first."""
    groups = [[place for place, entity in enumerate(entities) if entity == one] for one in dict.fromkeys(entities)]
    ways = itertools.product(*(itertools.permutations(group) for group in groups))
    for way in itertools.islice(ways, _MOST_EXCHANGES):
        order = dict(zip(itertools.chain(*groups), itertools.chain(*way), strict=True))
        yield tuple(order[place] for place in range(len(entities)))


def _kinds(sequences: Sequence[str]) -> list[int]:
    """Numbers of chains of each sequence, ascending: 1, 2 of a homodimer with another chain."""
    return sorted(Counter(sequences).values())


def _best_assignment(points: Float64[np.ndarray, "C C"]) -> Int64[np.ndarray, " C"]:
    """Linear assignment: for each row a column of its own, the permutation with the largest sum."""
    chains = len(points)
    if chains <= _MOST_PERMUTED:
        orders = _permutations(chains)
        return orders[points[np.arange(chains), orders].sum(1).argmax()]
    left, assigned = points.copy(), np.zeros(chains, np.int64)
    for _ in range(chains):
        row, column = np.unravel_index(np.where(np.isnan(left), -np.inf, left).argmax(), left.shape)
        assigned[row] = column
        left[row], left[:, column] = np.nan, np.nan
    return assigned


@cache
def _permutations(chains: int) -> Int64[np.ndarray, "P C"]:
    return np.array(list(itertools.permutations(range(chains))), np.int64)


def _candidates_of(first: list[str], second: list[str]) -> Iterator[list[int]]:
    """For each sequence of `second`, the rows of the sequences of `first` to align it with, the likeliest first."""
    lengths = np.array([len(sequence) for sequence in first], np.int64)
    for begin in range(0, len(second), _AT_ONCE):
        some = second[begin : begin + _AT_ONCE]
        unlike = np.full((len(some), len(first)), _MOST_WORDS, np.uint16)
        if max(map(len, some)) * lengths.sum() > MOST_CELLS:
            for row in range(0, len(first), _LISTED):
                words = Words(first[row : row + _LISTED])
                for target, sequence in enumerate(some):
                    unlike[target, row : row + _LISTED] -= np.minimum(
                        words.shared_with(sequence)[1], _MOST_WORDS
                    ).astype(np.uint16)
        for sequence, ranks in zip(some, unlike, strict=True):
            order = np.argsort(ranks, kind="stable")
            order = order[lengths[order] * len(sequence) <= MOST_CELLS]
            yield order[np.cumsum(lengths[order] * len(sequence)) <= MOST_CELLS].tolist()


def _best_that_is_read(ranked: Iterable[tuple[int, int, str]], read: Read) -> tuple[str, Assembly] | str:
    """The structure of the highest score that can be read, of equals that of the best resolution, of equal ones the first; or
    the reason why none can. At most `MOST_FILES` are read.

    `ranked`: score, number and name of each structure.
    """
    levels: dict[int, list[tuple[int, str]]] = {}
    for points, number, name in ranked:
        levels.setdefault(points, []).append((number, name))
    left, problem = MOST_FILES, ""
    for best in sorted(levels, reverse=True):
        equals = sorted(levels[best])[:left]
        known: list[tuple[float, int, str, Assembly]] = []
        for number, name in equals:
            try:
                assembly = read(name)
            except (UserError, OSError) as error:
                problem = problem or one_line(str(error))
                continue
            if any(chain.mask[:, CA].any() for chain in assembly.chains):
                known.append((assembly.chains[0].resolution or math.inf, number, name, assembly))
        if known:
            return min(known, key=lambda one: one[:2])[2:]
        left -= len(equals)
        if not left:
            break
    return problem or "no residue of them has a CA"


@dataclass(frozen=True)
class Compared:
    """The keys of a store, to be compared by the sequences of their chains. Processes can be sent it.

    `cache`: OpenFold's chain_data_cache.json, which has sequences of chains.
    """

    store: Records
    cache: str | None = None

    def listed(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The sequences of each key that a table lists; none of the others."""
        return listed_sequences(self.store, keys, {}, self.cache)

    def read(self, key: str) -> tuple[str, ...]:
        """The sequences of a key from its files; none if they cannot be read."""
        return read_sequences(self.store, key)

    def sequences(self, keys: Iterable[str], known: Letters, workers: int) -> dict[str, tuple[str, ...]]:
        """The sequences of each key: those that are `known`, that a table lists, or that are read."""
        return with_unlisted(self.store, listed_sequences(self.store, keys, known, self.cache), workers)

    def copies(self, targets: Letters, training: Letters, workers: int | None) -> Iterator[tuple[str, Copy | str]]:
        """Copies of the targets as they are done, or the reasons why there is none. `workers`: see `nearest.copies`."""
        return copies(targets, training, self.store.assembly_of, self.store.assembly_of, workers)


FEWEST_ALIGNED, PAIRS_ALIGNED = 5, 1_000_000
"""Listed sequences that a sequence is aligned with: as many as make this number of pairs in all, but no fewer than these."""
_LISTED_IN_THIS_PROCESS = 20_000
"""Pairs that are aligned without further processes."""
_SUFFIXES = (".fasta", ".fa", ".faa")


@dataclass(frozen=True)
class Exclusion:
    """Chains that a run leaves out of training by likeness. `listed`: the sequences of the listed chains or complexes by name.
    `identity`: the largest share of identical residues that is trained on. `comparison`: knows the sequences of the training
    keys."""

    listed: Letters
    identity: float
    comparison: Compared

    def resembling(self, keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """The keys that resemble a listed one, each with that one; and those whose sequences cannot be read. Shows progress."""
        keys = list(keys)
        letters = self.comparison.sequences(keys, {}, processes_for(len(keys), _LISTED_IN_THIS_PROCESS))
        return resembling(self.listed, letters, self.identity), [key for key in keys if not letters[key]]


def sequences_of_keys(keys: Sequence[str], comparison: Compared) -> Letters:
    """The sequences of listed keys. Raises UserError for one whose sequence cannot be read."""
    found = comparison.sequences(keys, {}, 1)
    if unknown := [key for key in keys if not found[key]]:
        raise UserError(
            f"data.exclude_like: the sequence of '{unknown[0]}' cannot be read from the run's data; correct the name, or "
            "give a FASTA file"
        )
    return found


def is_fasta(source: str | list[str]) -> bool:
    """Whether the setting names a FASTA file, by its suffix."""
    return isinstance(source, str) and source.lower().endswith(_SUFFIXES)


def sequences_of_fasta(path: str) -> Letters:
    """The sequences of a FASTA file by name; with ':' between the chains of a complex. Raises UserError for a broken record."""
    if not Path(path).is_file():
        raise UserError(f"data.exclude_like: {path}: no such FASTA file; check the path")
    found: dict[str, tuple[str, ...]] = {}
    for record in read_fasta(path, substitute=True, data=text_of(path), several=True):
        if isinstance(record.sequence, FileFormatError):
            raise record.sequence
        found[record.name] = record.chains or (record.sequence.letters,)
    return found


def resembling(listed: Letters, training: Letters, share: float) -> dict[str, str]:
    """The keys of `training` that resemble one of `listed`, each with the first such. `share`: see `Exclusion.identity`."""
    wanted = {name: _counted(letters) for name, letters in listed.items()}
    owners: dict[str, list[str]] = {}
    for key, letters in training.items():
        for one in {plain(chain) for chain in letters}:
            owners.setdefault(one, []).append(key)
    near = _near(list(dict.fromkeys(one for chains in wanted.values() for one in chains)), list(owners), share)
    found: dict[str, str] = {}
    for name, chains in wanted.items():
        having = [{key for one in near.get(chain, ()) for key in owners[one]} for chain in chains]
        for key in set.intersection(*having) if having else ():
            found.setdefault(key, name)
    return {key: found[key] for key in training if key in found}


def _counted(letters: Iterable[str]) -> list[str]:
    chains = sorted({plain(chain) for chain in letters})
    return [chain for chain in chains if len(chain) >= SHORTEST] or chains


def _near(listed: list[str], others: list[str], share: float) -> Mapping[str, list[str]]:
    """Sequences that are near each listed one."""
    known = set(others)
    near = {one: [one] if one in known else [] for one in listed}
    long, rest = ([one for one in part if len(one) >= SHORTEST] for part in (listed, others))
    if not long or not rest or share >= 1:
        return near
    words, most = Words(long), max(FEWEST_ALIGNED, PAIRS_ALIGNED // len(rest))
    jobs = []
    for one in rest:
        shares = words.shares_with(one)
        rows = np.argsort(-shares, kind="stable")[:most]
        candidates = [long[row] for row in rows[shares[rows] > 0] if len(long[row]) * len(one) <= MOST_CELLS]
        jobs += [(one, [other for other in candidates if other != one], share)]
    pairs = sum(len(candidates) for _, candidates, _ in jobs)
    for at, alike in with_progress(
        "compared with what is excluded", _alike, jobs, processes_for(pairs, _LISTED_IN_THIS_PROCESS)
    ):
        if isinstance(alike, WorkerEndedError):
            raise alike
        for other in alike:
            near[other].append(jobs[at][0])
    return near


def _alike(one: str, candidates: list[str], share: float) -> list[str]:
    return [other for other in candidates if identity(other, one) > share]
