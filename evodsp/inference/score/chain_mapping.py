"""A predicted complex beside the true one: which predicted chain is compared with which true chain, and the scores.

Chains belong together by their sequences. Identical copies may be exchanged: of all mappings the one with the highest DockQ
counts, the mean over the true interfaces. Where there are too many to try, or no interface, copies are assigned by the RMSD
after a superposition (`evodsp.losses.permutation.align_chains`).

Shapes: L residues of a chain, R of all true chains. Positions in Å.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

import numpy as np
import torch
from jaxtyping import Int64

from evodsp import metrics
from evodsp.data.records import Assembly, Chain
from evodsp.data.similarity.nearest import nowhere
from evodsp.data.similarity.pairs import MOST_CELLS, paired, plain, same_residues
from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.losses.permutation import TrueChains, align_chains
from evodsp.metrics import ChainAtoms, InterfaceScore, TrueInterface
from evodsp.rng import Draws

SAME_CHAIN = 0.9
"""Identical residues, as a share of the shorter sequence, from which two chains are taken for the same."""
MOST_MAPPINGS = 720
"""Mappings that are tried, at most: those of a homohexamer."""
_DECIMALS = 6
"""Mean DockQ of mappings is rounded, so that symmetric copies keep the order of the files."""

Chosen = tuple[int | None, ...]
"""For each true chain its predicted chain; None: it is missing."""


@dataclass(frozen=True)
class ChainMapping:
    """Which predicted chain each true chain is compared with, and why this one."""

    chains: Chosen
    by: str
    """sequence: there is no choice. Otherwise what decides between identical copies: DockQ or RMSD."""


class ComplexComparison:
    """A true complex and a prediction of it. Raises UserError if they have no chain in common."""

    def __init__(self, truth: Assembly, predicted: Assembly) -> None:
        self.truth, self.predicted = truth, predicted
        self._true = [_atoms(chain) for chain in truth.chains]
        pairs = combinations(range(len(self._true)), 2)
        between = (((a, b), TrueInterface.between(self._true[a], self._true[b])) for a, b in pairs)
        self.interfaces: Mapping[tuple[int, int], TrueInterface] = {
            pair: interface for pair, interface in between if interface is not None
        }
        """The true chains that are in contact, two each."""
        sequences = dict(zip(truth.entities, (chain.sequence for chain in truth.chains), strict=True))
        self.likenesses = [_most_like(chain.sequence, sequences) for chain in predicted.chains]
        """Which true chains each predicted chain is a copy of; None: of none."""
        if not any(self.likenesses):
            raise UserError(
                f"{truth.pdb_id}: none of the {len(predicted.chains)} predicted chains has the sequence of one of its "
                f"{len(truth.chains)} chains; compare a prediction with the structure of the same complex"
            )
        self._placed: dict[tuple[int | None, int], ChainAtoms] = {}
        self._scores: dict[tuple[tuple[int, int], Chosen], InterfaceScore] = {}

    @property
    def resolved(self) -> int:
        """The number of true residues with a CA."""
        return int(sum(atoms.mask[:, CA].sum() for atoms in self._true))

    def mapping(self) -> ChainMapping:
        """The best mapping of predicted to true chains."""
        members = [
            ([n for n, e in enumerate(self.truth.entities) if e == entity], self._predicted_of(entity))
            for entity in sorted(set(self.truth.entities))
        ]
        choices = math.prod(math.perm(max(len(true), len(ours)), min(len(true), len(ours))) for true, ours in members)
        if choices == 1:
            return ChainMapping(next(_mappings(members)), "sequence")
        if not self.interfaces or choices > MOST_MAPPINGS:
            return ChainMapping(self._by_rmsd(members), "RMSD")
        return ChainMapping(max(_mappings(members), key=lambda chosen: round(self.dockq(chosen), _DECIMALS)), "DockQ")

    def dockq(self, chosen: Chosen) -> float:
        """Mean DockQ over the true interfaces, of which there is one at least; a missing chain's have 0."""
        return math.fsum(self.score(pair, chosen).dockq for pair in self.interfaces) / len(self.interfaces)

    def score(self, pair: tuple[int, int], chosen: Chosen) -> InterfaceScore:
        """The score of the interface of two true chains."""
        ours = tuple(chosen[n] for n in pair)
        if (pair, ours) not in self._scores:
            atoms = (self._on_truth(chain, n) for chain, n in zip(ours, pair, strict=True))
            self._scores[pair, ours] = self.interfaces[pair].score(*atoms)
        return self._scores[pair, ours]

    def lddt_ca(self, chosen: Chosen) -> float:
        """lDDT-CA over all true residues; those that are not predicted keep no distance."""
        return float(metrics.lddt_ca(*self._alphas(chosen, range(len(chosen)))))

    def interface_lddt_ca(self, chosen: Chosen, of: Sequence[int] | None = None) -> float | None:
        """lDDT-CA over the distances between different chains, of all chains or those given; None if none is below 15 Å."""
        chains = range(len(chosen)) if of is None else of
        number = torch.repeat_interleave(torch.tensor([len(self.truth.chains[n]) for n in chains]))
        found = float(metrics.interface_lddt_ca(*self._alphas(chosen, chains), number))
        return None if math.isnan(found) else found

    def _alphas(self, chosen: Chosen, chains: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predicted and true CA [R, 3], and 1 for each that is true [R], of some of the true chains."""
        true = [self._true[n] for n in chains]
        predicted = [self._on_truth(chosen[n], n) for n in chains]
        there = torch.cat([atoms.mask[:, CA] for atoms in predicted])[:, None]
        positions = torch.cat([atoms.positions[:, CA] for atoms in predicted])
        return (
            positions.where(there, torch.from_numpy(nowhere(len(positions)))),
            torch.cat([atoms.positions[:, CA] for atoms in true]),
            torch.cat([atoms.mask[:, CA] for atoms in true]).double(),
        )

    def _predicted_of(self, entity: int) -> list[int]:
        """The predicted chains with the sequence of an entity of the truth."""
        return [n for n, found in enumerate(self.likenesses) if found is not None and found.entity == entity]

    def _on_truth(self, chain: int | None, true: int) -> ChainAtoms:
        """The atoms of a predicted chain on the residues of a true one. What it lacks, or all of None, has no atoms."""
        key = chain, self.truth.entities[true]
        if key not in self._placed:
            length = len(self.truth.chains[true])
            positions, mask = np.zeros((length, 37, 3)), np.zeros((length, 37), bool)
            if chain is not None and (found := self.likenesses[chain]) is not None:
                ours, theirs = found.pairs.T
                positions[theirs] = self.predicted.chains[chain].positions[ours]
                mask[theirs] = self.predicted.chains[chain].mask[ours] > 0.5
            self._placed[key] = ChainAtoms(torch.from_numpy(positions), torch.from_numpy(mask))
        return self._placed[key]

    def _by_rmsd(self, members: Sequence[tuple[list[int], list[int]]]) -> Chosen:
        """The mapping that `align_chains` finds. Chains without a counterpart face one without atoms."""
        slots: list[tuple[int | None, int | None, int]] = []  # predicted and true chain, entity
        for entity, (true, ours) in enumerate(members):
            for n in range(max(len(true), len(ours))):
                slots.append((ours[n] if n < len(ours) else None, true[n] if n < len(true) else None, entity))
        longest = max(len(chain) for chain in self.truth.chains)
        positions, mask = torch.zeros(len(slots), longest, 3).double(), torch.zeros(len(slots), longest).double()
        predicted, asym, residue = [], [], []
        for slot, (chain, true_chain, entity) in enumerate(slots):
            if true_chain is not None:
                atoms = self._true[true_chain]
                positions[slot, : len(atoms.mask)] = atoms.positions[:, CA]
                mask[slot, : len(atoms.mask)] = atoms.mask[:, CA].double()
            shown = self._on_truth(chain, members[entity][0][0])
            there = shown.mask[:, CA].nonzero()[:, 0]
            predicted.append(shown.positions[there, CA])
            asym.append(torch.full_like(there, slot + 1))
            residue.append(there)
        truth = TrueChains(positions, mask, [entity for *_, entity in slots])
        order = align_chains(torch.cat(predicted), torch.cat(asym), torch.cat(residue), truth, Draws.root(0))
        chosen: list[int | None] = [None] * len(self.truth.chains)
        for (chain, *_), row in zip(slots, order.tolist(), strict=True):
            if (true_chain := slots[row][1]) is not None:
                chosen[true_chain] = chain
        return tuple(chosen)


@dataclass(frozen=True)
class Likeness:
    """The true chains that a predicted one is a copy of, and the residues [P, 2] that correspond: predicted, true."""

    entity: int
    identity: float
    pairs: Int64[np.ndarray, "P 2"]


def _most_like(sequence: str, entities: Mapping[int, str]) -> Likeness | None:
    """The entity with this sequence, or with the most similar one; None if none is similar enough."""
    for entity, letters in entities.items():
        if letters == sequence:
            return Likeness(entity, 1.0, np.repeat(np.arange(len(letters))[:, None], 2, axis=1))
    best = None
    for entity, letters in entities.items():
        if len(sequence) * len(letters) > MOST_CELLS:
            continue
        mine, theirs = plain(sequence), plain(letters)
        pairs = paired(mine, theirs)
        identity = same_residues(mine, theirs, pairs) / min(len(mine), len(theirs))
        if identity >= SAME_CHAIN and (best is None or identity > best.identity):
            best = Likeness(entity, identity, pairs)
    return best


def _mappings(members: Sequence[tuple[list[int], list[int]]]) -> Iterator[Chosen]:
    """Every mapping, those in the order of the files first. `members`: true and predicted chains of each entity."""
    chains = sum(len(true) for true, _ in members)
    for parts in product(*(_assignments(true, ours) for true, ours in members)):
        chosen: list[int | None] = [None] * chains
        for part in parts:
            for true, ours in part:
                chosen[true] = ours
        yield tuple(chosen)


def _assignments(true: list[int], ours: list[int]) -> list[list[tuple[int, int]]]:
    """Every way to give as many true chains as possible a predicted one each."""
    if len(ours) >= len(true):
        return [list(zip(true, some, strict=True)) for some in permutations(ours, len(true))]
    return [list(zip(some, ours, strict=True)) for some in permutations(true, len(ours))]


def _atoms(chain: Chain) -> ChainAtoms:
    return ChainAtoms(torch.from_numpy(chain.positions).double(), torch.from_numpy(chain.mask) > 0.5)
