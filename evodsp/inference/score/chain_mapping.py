"""A predicted complex beside the true one: which predicted chain is compared with which true chain, and the scores.

Chains belong together by their sequences. Copies may be exchanged: of all mappings whose sequences agree equally well, the one
with the highest DockQ counts, the mean over the true interfaces. Where there are too many to try, or no interface, copies are
assigned by the RMSD after a superposition (`evodsp.losses.permutation.align_chains`). Copies may differ in a few residues: a
PDB file without SEQRES has the residues that were seen in each.

Shapes: L residues of a chain, R of all true chains, P pairs of residues. Positions in Å.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
"""Identical residues, as a share of the shorter sequence, from which two chains are taken for copies."""
MOST_CHAINS = 64
"""Chains of a complex that are compared: the memory to assign copies grows with the third power."""
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
    """A true complex and a prediction of it. Raises UserError if they have no chain in common, or more than `MOST_CHAINS`."""

    def __init__(self, truth: Assembly, predicted: Assembly) -> None:
        if (most := max(len(truth.chains), len(predicted.chains))) > MOST_CHAINS:
            raise UserError(
                f"{truth.pdb_id}: {most} chains, but complexes of at most {MOST_CHAINS} are compared; take another assembly, "
                "or the asymmetric unit (--assembly null)"
            )
        self.truth, self.predicted = truth, predicted
        self._true = [_atoms(chain) for chain in truth.chains]
        pairs = combinations(range(len(self._true)), 2)
        between = (((a, b), TrueInterface.between(self._true[a], self._true[b])) for a, b in pairs)
        self.interfaces: Mapping[tuple[int, int], TrueInterface] = {
            pair: interface for pair, interface in between if interface is not None
        }
        """The true chains that are in contact, two each."""
        self._copies = _copies([chain.sequence for chain in truth.chains])
        firsts = [truth.chains[group[0]].sequence for group in self._copies]
        self.copies_of = [_most_like(chain.sequence, firsts) for chain in predicted.chains]
        """The number of the group of true chains that each predicted chain is a copy of; None: of none."""
        if set(self.copies_of) == {None}:
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

    def likeness(self, chain: int, true: int) -> Likeness:
        """The sequences of a predicted and of a true chain, side by side."""
        return likeness(self.predicted.chains[chain].sequence, self.truth.chains[true].sequence)

    def mapping(self) -> ChainMapping:
        """The best mapping of predicted to true chains: of those whose sequences agree best, the one that fits best."""
        members = [(true, self._predicted_of(number)) for number, true in enumerate(self._copies)]
        if math.prod(_choices(true, ours) for true, ours in members) > MOST_MAPPINGS:
            return ChainMapping(self._by_rmsd(members), "RMSD")
        identity: dict[Chosen, float] = {}
        for chosen in _mappings(members):
            pairs = ((chain, true) for true, chain in enumerate(chosen) if chain is not None)
            identity[chosen] = round(math.fsum(self.likeness(*pair).identity for pair in pairs), _DECIMALS)
        most = max(identity.values())
        left = [chosen for chosen, value in identity.items() if value == most]
        if len(left) == 1:
            return ChainMapping(left[0], "sequence")
        if not self.interfaces:
            return ChainMapping(self._by_rmsd(members), "RMSD")
        return ChainMapping(max(left, key=lambda chosen: round(self.dockq(chosen), _DECIMALS)), "DockQ")

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

    def _predicted_of(self, number: int) -> list[int]:
        """The predicted chains that are copies of a group of true chains."""
        return [chain for chain, group in enumerate(self.copies_of) if group == number]

    def _on_truth(self, chain: int | None, true: int) -> ChainAtoms:
        """The atoms of a predicted chain on the residues of a true one. What it lacks, or all of None, has no atoms."""
        if (chain, true) not in self._placed:
            letters = self.truth.chains[true].sequence
            if chain is None:
                none = torch.zeros(len(letters), 37, dtype=torch.bool)
                self._placed[chain, true] = ChainAtoms(none.unsqueeze(-1).expand(-1, -1, 3).double(), none)
            else:
                self._placed[chain, true] = _placed(self.predicted.chains[chain], letters)
        return self._placed[chain, true]

    def _by_rmsd(self, members: Sequence[tuple[list[int], list[int]]]) -> Chosen:
        """The mapping that `align_chains` finds, by the residues of the longest chain of each group of copies. Chains without a
        counterpart face one without atoms."""
        slots: list[tuple[int | None, int | None, int]] = []  # predicted chain, true chain, group
        for group, (true, ours) in enumerate(members):
            for n in range(max(len(true), len(ours))):
                slots.append((ours[n] if n < len(ours) else None, true[n] if n < len(true) else None, group))
        longest = [max((self.truth.chains[n].sequence for n in true), key=len) for true, _ in members]
        positions = torch.zeros(len(slots), max(map(len, longest)), 3).double()
        mask = torch.zeros_like(positions[..., 0])
        predicted, asym, residue = [], [], []
        for slot, (chain, true_chain, group) in enumerate(slots):
            if true_chain is not None:
                atoms = _placed(self.truth.chains[true_chain], longest[group])
                positions[slot, : len(atoms.mask)] = atoms.positions[:, CA]
                mask[slot, : len(atoms.mask)] = atoms.mask[:, CA].double()
            if chain is not None:
                shown = _placed(self.predicted.chains[chain], longest[group])
                there = shown.mask[:, CA].nonzero()[:, 0]
                predicted.append(shown.positions[there, CA])
                asym.append(torch.full_like(there, slot + 1))
                residue.append(there)
        truth = TrueChains(positions, mask, [group for *_, group in slots])
        order = align_chains(torch.cat(predicted), torch.cat(asym), torch.cat(residue), truth, Draws.root(0))
        chosen: list[int | None] = [None] * len(self.truth.chains)
        for (chain, *_), row in zip(slots, order.tolist(), strict=True):
            if (true_chain := slots[row][1]) is not None:
                chosen[true_chain] = chain
        return tuple(chosen)


@dataclass(frozen=True)
class Likeness:
    """Two sequences side by side."""

    identity: float
    """Identical residues, as a share of the shorter sequence, 0 to 1; 0 if that is shorter than half of the other."""
    pairs: Int64[np.ndarray, "P 2"]
    """The residues that correspond, from 0."""


@lru_cache(maxsize=512)
def likeness(first: str, second: str) -> Likeness:
    """Equal sequences correspond residue by residue, others by their best alignment (`evodsp.data.similarity.pairs`)."""
    if first == second:
        return Likeness(1.0, np.repeat(np.arange(len(first))[:, None], 2, axis=1))
    shorter, longer = sorted((len(first), len(second)))
    if 2 * shorter < longer or shorter * longer > MOST_CELLS:
        return Likeness(0.0, np.zeros((0, 2), np.int64))
    letters = plain(first), plain(second)
    pairs = paired(*letters)
    return Likeness(same_residues(*letters, pairs) / shorter, pairs)


def _copies(sequences: Sequence[str]) -> list[list[int]]:
    """The chains in groups of copies, in the order in which their sequences first occur."""
    groups: list[list[int]] = []
    for chain, letters in enumerate(sequences):
        like = _most_like(letters, [sequences[group[0]] for group in groups])
        if like is None:
            groups.append([chain])
        else:
            groups[like].append(chain)
    return groups


def _most_like(sequence: str, others: Sequence[str]) -> int | None:
    """The number of the most similar sequence, of equals the first; None if none is similar enough."""
    identities = [likeness(sequence, letters).identity for letters in others]
    best = max(identities, default=0.0)
    return identities.index(best) if best >= SAME_CHAIN else None


def _choices(true: list[int], ours: list[int]) -> int:
    """The number of ways to give as many true chains as possible a predicted one each."""
    return math.perm(max(len(true), len(ours)), min(len(true), len(ours)))


def _mappings(members: Sequence[tuple[list[int], list[int]]]) -> Iterator[Chosen]:
    """Every mapping, those in the order of the files first. `members`: true and predicted chains of each group."""
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


def _placed(chain: Chain, letters: str) -> ChainAtoms:
    """The atoms of a chain on the residues of a sequence. Residues without a counterpart have none."""
    ours, theirs = likeness(chain.sequence, letters).pairs.T
    positions, mask = np.zeros((len(letters), 37, 3)), np.zeros((len(letters), 37), bool)
    positions[theirs], mask[theirs] = chain.positions[ours], chain.mask[ours] > 0.5
    return ChainAtoms(torch.from_numpy(positions), torch.from_numpy(mask))


def _atoms(chain: Chain) -> ChainAtoms:
    return ChainAtoms(torch.from_numpy(chain.positions).double(), torch.from_numpy(chain.mask) > 0.5)
