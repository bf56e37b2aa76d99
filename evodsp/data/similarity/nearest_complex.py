"""The bar for a model of complexes: what copying the nearest training complex scores.

The nearest training complex has as many chains, in as many copies each, as the target. Each of its chains is aligned with one
of the target's, so that the sum of the alignment scores is highest; among all training complexes the highest sum counts, of
equals the best resolution (`nearest`). The copy has the target's sequences and the places of the training complex' atoms.

Shapes: C chains of a complex, P permutations of them, R residues of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity.nearest import Bar, Copy, best_that_is_read, candidates_of, nowhere
from evodsp.data.similarity.pairs import paired, plain, same_residues, score
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.reading.quoting import one_line

_MOST_EXCHANGES = 120
"""Ways to exchange identical chains of a copy that are scored, at most."""
_SAME_SCORE = 1e-9
_MOST_PERMUTED = 6
"""Chains, up to which all ways to assign them are tried; of more the best pair goes first."""


@dataclass(frozen=True)
class ComplexCopy:
    """A copy of the nearest training complex. `identity`, `coverage`: as of `evodsp.data.similarity.nearest.Copy`."""

    nearest: str
    identity: float
    coverage: float
    assembly: Assembly
    """The target's chains with atoms of the training complex, and the names that its chains have."""


@dataclass(frozen=True)
class CopiedComplex(Copy):
    """A complex, and the scores of a copy of its nearest training complex."""

    interface_lddt_ca: float | None = None
    """lDDT of the CA atoms over the distances between chains alone, 0 to 1; None if none of them is below 15 Å."""


def interface_lddt_ca(bar: Bar) -> float | None:
    """The mean over the complexes of a bar whose chains are in contact; None without any."""
    values = [copy.interface_lddt_ca for copy in bar.copies if isinstance(copy, CopiedComplex)]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def complex_copies(
    targets: Mapping[str, Sequence[str]], training: Mapping[str, Sequence[str]], read: Callable[[str], Assembly]
) -> Iterator[tuple[str, Copy | str]]:
    """For each target its copy, or the reason why there is none; nothing of one complex stops the others.

    `targets`, `training`: the sequences of the chains of each, none where they are unknown. `read`: as for `TrainingComplexes`.
    """
    known = TrainingComplexes({name: letters for name, letters in training.items() if letters}, read)
    for name in targets:
        try:
            target = read(name)
            copy = known.copy_for(name, target)
        except (UserError, OSError) as error:
            yield name, one_line(str(error))
        else:
            yield name, copy if isinstance(copy, str) else _scored(name, target, copy)


def _scored(name: str, target: Assembly, copy: ComplexCopy) -> CopiedComplex:
    """The scores of a copy: identical chains of the target are exchanged so that lDDT-CA is highest."""
    import torch  # here, because the commands of data sets do not wait for it

    from evodsp import metrics

    true = torch.from_numpy(np.concatenate([chain.positions[:, CA] for chain in target.chains]).astype(np.float64))
    resolved = torch.from_numpy(np.concatenate([chain.mask[:, CA] for chain in target.chains]).astype(np.float64))
    numbers = torch.from_numpy(np.repeat(np.arange(len(target.chains)), [len(chain) for chain in target.chains]))
    places = torch.from_numpy(nowhere(len(target)))
    best, best_interface = -math.inf, math.nan
    for order in _exchanged(target.entities):
        chains = [copy.assembly.chains[place] for place in order]
        atoms, seen = (
            np.concatenate([getattr(chain, part)[:, CA] for chain in chains]) for part in ("positions", "mask")
        )
        copied = torch.where(torch.from_numpy(seen > 0.5)[:, None], torch.from_numpy(atoms).double(), places)
        score = float(metrics.lddt_ca(copied, true, resolved))
        if score > best + _SAME_SCORE:
            best, best_interface = score, float(metrics.interface_lddt_ca(copied, true, resolved, numbers))
    interface = None if math.isnan(best_interface) else best_interface
    return CopiedComplex(name, copy.nearest, copy.identity, copy.coverage, best, interface)


def _exchanged(entities: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The ways to exchange chains of one sequence, at most `_MOST_EXCHANGES`, the given order first."""
    groups = [[place for place, entity in enumerate(entities) if entity == one] for one in dict.fromkeys(entities)]
    ways = itertools.product(*(itertools.permutations(group) for group in groups))
    for way in itertools.islice(ways, _MOST_EXCHANGES):
        order = dict(zip(itertools.chain(*groups), itertools.chain(*way), strict=True))
        yield tuple(order[place] for place in range(len(entities)))


class TrainingComplexes:
    """Training complexes from which copies are made.

    `sequences`: of the chains of each, by name. `read`: reads the assembly of one; may raise UserError or OSError.
    """

    def __init__(self, sequences: Mapping[str, Sequence[str]], read: Callable[[str], Assembly]) -> None:
        self.sequences = {name: tuple(map(plain, letters)) for name, letters in sequences.items()}
        self._read = read
        self._letters = list(dict.fromkeys(letters for chains in self.sequences.values() for letters in chains))
        self._points: dict[tuple[str, str], int] = {}

    def copy_for(self, name: str, target: Assembly) -> ComplexCopy | str:
        """A copy in place of a target, or the reason why there is none. A complex is never copied from itself."""
        own = [plain(chain.sequence) for chain in target.chains]
        points = self._scores_with(list(dict.fromkeys(own)))
        ranked, order = [], {}
        for number, (other, others) in enumerate(self.sequences.items()):
            if other == name or _kinds(others) != _kinds(own):
                continue
            table = np.array([[points[mine].get(letters, -np.inf) for letters in others] for mine in own], np.float64)
            assigned = _best_assignment(table)
            if np.isfinite(total := table[np.arange(len(own)), assigned].sum()):
                ranked.append((int(total), number, other))
                order[other] = assigned
        if not ranked:
            return "there is no training complex with as many chains of as many kinds that it could be aligned with"
        assemblies: dict[str, Assembly] = {}

        def read(other: str) -> tuple[Chain, ...]:
            assemblies[other] = self._read(other)
            return assemblies[other].chains

        found = best_that_is_read(ranked, read)
        if isinstance(found, str):
            return f"its nearest training complexes cannot be read: {found}"
        nearest, chains = found
        names = assemblies[nearest].names
        return _copied(target, nearest, [(names[n], chains[n]) for n in order[nearest].tolist()])

    def _scores_with(self, own: list[str]) -> dict[str, dict[str, int]]:
        """The alignment scores of some sequences with those of the training chains that are likeliest near."""
        found: dict[str, dict[str, int]] = {}
        for mine, rows in zip(own, candidates_of(self._letters, own), strict=True):
            found[mine] = {self._letters[row]: self._score(mine, self._letters[row]) for row in rows}
        return found

    def _score(self, first: str, second: str) -> int:
        if (first, second) not in self._points:
            self._points[first, second] = score(first, second)
        return self._points[first, second]


def _kinds(sequences: Sequence[str]) -> list[int]:
    """How many chains each sequence has, ascending: 1, 2 of a homodimer with another chain."""
    return sorted(Counter(sequences).values())


def _best_assignment(points: Float64[np.ndarray, "C C"]) -> Int64[np.ndarray, " C"]:
    """For each row a column of its own, so that the sum is highest."""
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


def _copied(target: Assembly, nearest: str, sources: Sequence[tuple[str, Chain]]) -> ComplexCopy:
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
        chains.append(dataclasses.replace(mine, pdb_id=nearest, chain_id=name, positions=positions, mask=mask))
    copy = Assembly(nearest, tuple(name for name, _ in sources), tuple(chains))
    return ComplexCopy(nearest, same / max(1, pairs_of_all), pairs_of_all / len(target), copy)
