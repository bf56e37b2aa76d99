"""The bar for a model: what copying the nearest training chain scores on a chain that was held out.

The nearest training chain is the one with the highest alignment score (`pairs`); of equals the one of the best resolution, and
of equal ones the first. Its CA atoms are put on the residues that the alignment pairs with its own. The lDDT-CA of this copy is
compared with a prediction's; residues without a counterpart keep no distance. A model that has learnt more than its training
structures is better than the copy.

A chain is aligned with the training sequences that share most words with it, until the products of the lengths sum to
`MOST_CELLS`: with all of up to 7,000 domains of 120 residues, with the likeliest of a larger set. Shapes: R residues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from evodsp.data.executors import LocalProcesses, processes
from evodsp.data.pool import WorkerEndedError
from evodsp.data.records import Chain
from evodsp.data.similarity.pairs import MOST_CELLS, Words, paired, plain, same_residues, score
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.progress import progress
from evodsp.reading.quoting import one_line

MOST_FILES = 64
"""Training structures that are read for one chain, at most: those of the highest score, and the next if they cannot be read."""
_IN_THIS_PROCESS = 3 * 10**9
"""Products of lengths, in all, up to which more processes would not be worth their start: about 15 seconds."""
_AT_ONCE, _LISTED = 500, 10_000
"""Chains that are compared by words at the same time, which takes 1 kB for each training sequence; and training sequences whose
words are listed at the same time."""
_MOST_WORDS = 65_535
"""More shared words of two sequences are not told apart."""
_FAR, _APART = 1e6, 1e5
"""Å: the place of residues without a counterpart, and their distance from each other."""


@runtime_checkable
class Structures(Protocol):
    """A source of structures by chain key, such as a folder, or a feature store."""

    def chain(self, key: str) -> Chain:
        """The chain. Raises UserError or OSError if it cannot be read."""


@dataclass(frozen=True)
class Copy:
    """A chain, and the score of a copy of its nearest training chain."""

    chain: str
    nearest: str
    """The training chain."""
    identity: float
    """Identical residues, as a share of the paired ones, 0 to 1."""
    coverage: float
    """Share of the chain's residues that have a counterpart, 0 to 1."""
    lddt_ca: float
    """lDDT-CA of the copy, 0 to 1."""


@dataclass(frozen=True)
class Bar:
    """What copying scores on a set of chains."""

    copies: list[Copy]
    without: dict[str, str] = field(default_factory=dict)
    """Chains without a copy, each with the reason."""
    trained_on: list[str] = field(default_factory=list)
    """Chains of the set that are training chains, too. They are not copied from themselves."""

    @property
    def lddt_ca(self) -> float:
        """The mean over the chains; NaN without any."""
        return _mean([copy.lddt_ca for copy in self.copies])

    @property
    def identity(self) -> float:
        """The mean over the chains; NaN without any."""
        return _mean([copy.identity for copy in self.copies])


def nowhere(residues: int) -> Float64[np.ndarray, "R 3"]:
    """Places in Å, far from all atoms and from each other: those of residues without a counterpart keep no distance."""
    return np.repeat(_FAR + _APART * np.arange(residues, dtype=np.float64)[:, None], 3, axis=1)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def bar(
    name: str,
    targets: Mapping[str, str],
    training: Mapping[str, str],
    truth: Structures,
    structures: Structures,
    workers: int | None = None,
) -> Bar:
    """What copying scores on the targets, with a line of progress. `name`: what kind of chains they are; see `copies`."""
    made = copies(targets, training, truth, structures, workers)
    return counted_bar(f"{name} chain", made, targets, training)


def counted_bar(
    name: str, made: Iterable[tuple[str, Copy | str]], targets: Collection[str], training: Container[str]
) -> Bar:
    """The bar of what `copies` yields, with a line of progress. `name`: what a target is, such as a validation chain."""
    found = {}
    with progress(f"copied the nearest for each {name}", len(targets)) as advance:
        for key, copy in made:
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
    targets: Mapping[str, str],
    training: Mapping[str, str],
    truth: Structures,
    structures: Structures,
    workers: int | None = None,
) -> Iterator[tuple[str, Copy | str]]:
    """For each target, as it is done, its copy, or the reason why there is none; nothing of one chain stops the others.

    `targets` and `training`: sequences by key, '' where it is unknown. `truth`, `structures`: the structures of the targets and
    of the training chains, which processes can be sent. `workers`: processes; None takes one a core where they are worth it.
    """
    known = {key: plain(sequence) for key, sequence in targets.items() if sequence}
    yield from ((key, "its sequence is unknown") for key in targets if key not in known)
    rows: dict[str, list[tuple[int, str]]] = {}
    for row, (key, sequence) in enumerate(training.items()):
        if sequence:
            rows.setdefault(plain(sequence), []).append((row, key))
    letters = list(rows)
    names = list(known)
    jobs, cells = [], 0
    for key, candidates in zip(names, candidates_of(letters, list(known.values())), strict=True):
        others = [(letters[row], [one for one in rows[letters[row]] if one[1] != key]) for row in candidates]
        listed = [(sequence, owners) for sequence, owners in others if owners]
        cells += len(known[key]) * sum(len(sequence) for sequence, _ in listed)
        jobs.append((key, known[key], listed, truth, structures))
    if workers is None:
        workers = 1 if cells <= _IN_THIS_PROCESS else processes(None)
    for number, placed in LocalProcesses(workers).map(_place, jobs):
        if isinstance(placed, WorkerEndedError):
            placed = str(placed)
        yield names[number], placed if isinstance(placed, str) else placed.scored()


def candidates_of(first: list[str], second: list[str]) -> Iterator[list[int]]:
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


@dataclass(frozen=True)
class _Placed:
    """A copy whose atoms have their places, to be scored where torch is."""

    chain: str
    nearest: str
    identity: float
    coverage: float
    copied: Float64[np.ndarray, "R 3"]
    true: Float64[np.ndarray, "R 3"]
    resolved: Float64[np.ndarray, " R"]

    def scored(self) -> Copy:
        import torch  # here, so that the processes that align do not wait for it

        from evodsp import metrics

        copied, true, resolved = (torch.from_numpy(values) for values in (self.copied, self.true, self.resolved))
        lddt = float(metrics.lddt_ca(copied, true, resolved))
        return Copy(self.chain, self.nearest, self.identity, self.coverage, lddt)


def _place(
    key: str,
    sequence: str,
    candidates: Sequence[tuple[str, Sequence[tuple[int, str]]]],
    truth: Structures,
    structures: Structures,
) -> _Placed | str:
    """The copy of the nearest training chain, or the reason why there is none. `candidates`: sequences, and the numbers and
    names of the chains that have each."""
    if not candidates:
        return "there is no training chain that it could be aligned with"
    try:
        target = truth.chain(key)
    except (UserError, OSError) as error:
        return one_line(str(error))
    if not target.mask[:, CA].any():
        return "no residue of it has a CA"
    found = _nearest(sequence, candidates, structures)
    if isinstance(found, str):
        return found
    name, source = found
    mine, others = plain(target.sequence), plain(source.sequence)
    pairs = paired(mine, others)
    pairs = pairs[source.mask[pairs[:, 1], CA] > 0.5]
    place = nowhere(len(target))
    place[pairs[:, 0]] = source.positions[pairs[:, 1], CA]
    return _Placed(
        key,
        name,
        same_residues(mine, others, pairs) / max(1, len(pairs)),
        len(pairs) / len(target),
        place,
        target.positions[:, CA].astype(np.float64),
        target.mask[:, CA].astype(np.float64),
    )


def _nearest(
    sequence: str, candidates: Sequence[tuple[str, Sequence[tuple[int, str]]]], structures: Structures
) -> tuple[str, Chain] | str:
    """The nearest training chain that can be read, or the reason why none can."""
    ranked = [
        (points, number, name)
        for points, owners in ((score(letters, sequence), owners) for letters, owners in candidates)
        for number, name in owners
    ]
    found = best_that_is_read(ranked, lambda name: (structures.chain(name),))
    if isinstance(found, str):
        return f"its nearest training chains cannot be read: {found}"
    name, (chain,) = found
    return name, chain


def best_that_is_read(
    ranked: Iterable[tuple[int, int, str]], read: Callable[[str], tuple[Chain, ...]]
) -> tuple[str, tuple[Chain, ...]] | str:
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
        known: list[tuple[float, int, str, tuple[Chain, ...]]] = []
        for number, name in equals:
            try:
                chains = read(name)
            except (UserError, OSError) as error:
                problem = problem or one_line(str(error))
                continue
            if any(chain.mask[:, CA].any() for chain in chains):
                known.append((chains[0].resolution or math.inf, number, name, chains))
        if known:
            return min(known, key=lambda one: one[:2])[2:]
        left -= len(equals)
        if not left:
            break
    return problem or "no residue of them has a CA"
