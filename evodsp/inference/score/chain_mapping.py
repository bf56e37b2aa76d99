"""A predicted complex beside the true one: which predicted chain is compared with which true chain, and the scores.

Chains belong together by their sequences. Copies may be exchanged: of all mappings whose sequences agree equally well, the one
with the highest DockQ counts, the mean over the true interfaces. Where there are too many to try, or no interface, copies are
assigned by the RMSD after a superposition (`evodsp.losses.permutation.align_chains`). Copies may differ in a few residues: a
PDB file without SEQRES has the residues that were seen in each. Then residues correspond by their numbers, if both files number
them alike, otherwise by an alignment, which may shift residues beside a missing one.

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
from evodsp.data.similarity.sequences import MOST_CELLS, paired, plain, same_residues
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER, CA, RESTYPE_ATOM37_MASK, UNKNOWN, encode_sequence
from evodsp.losses.permutation import TrueChains, align_chains
from evodsp.metrics import ChainAtoms, InterfaceScore, TrueInterface
from evodsp.rng import Draws

SAME_CHAIN = 0.9
"""Identical residues, as a share of the shorter sequence, from which two chains are taken for copies."""
SAME_NUMBERED = 0.9
"""Identical residues, as a share of those with one number and of those that an alignment finds, from which numbers count."""
MOST_CHAINS = 64
"""Chains of a complex that are compared: the memory to assign copies grows with the third power."""
MOST_MAPPINGS = 720
"""Mappings that are tried, at most: those of a homohexamer."""
_ATOMS_OF = RESTYPE_ATOM37_MASK > 0
"""The atoms of each residue type, and the last one of a chain; X may have any."""
_ATOMS_OF[:, ATOM_ORDER["OXT"]] = True
_ATOMS_OF[UNKNOWN] = True
_DECIMALS = 6
"""Mean DockQ of mappings is rounded, so that symmetric copies keep the order of the files."""

Chosen = tuple[int | None, ...]
"""Predicted chain of each true chain; None: it is missing."""


@dataclass(frozen=True)
class ChainMapping:
    """Assignment of predicted chains to true ones, and its reason."""

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
        self._copies = _copies(truth.chains)
        firsts = [truth.chains[group[0]] for group in self._copies]
        self.copies_of = [_most_like(chain, firsts) for chain in predicted.chains]
        """The number of the group of true chains that each predicted chain is a copy of; None: of none."""
        if set(self.copies_of) == {None}:
            raise UserError(
                f"{truth.pdb_id}: none of the {len(predicted.chains)} predicted chains has the sequence of one of its "
                f"{len(truth.chains)} chains; compare a prediction with the structure of the same complex"
            )
        self._beside: dict[tuple[int, int], Likeness] = {}
        self._placed: dict[tuple[int | None, int], ChainAtoms] = {}
        self._scores: dict[tuple[tuple[int, int], Chosen], InterfaceScore] = {}

    @property
    def resolved(self) -> int:
        """The number of true residues with a CA."""
        return int(sum(atoms.mask[:, CA].sum() for atoms in self._true))

    def likeness(self, chain: int, true: int) -> Likeness:
        """A predicted and a true chain, side by side."""
        if (chain, true) not in self._beside:
            self._beside[chain, true] = chains_beside(self.predicted.chains[chain], self.truth.chains[true])
        return self._beside[chain, true]

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
        return float(metrics.lddt_ca(*self.alphas(chosen)))

    def interface_lddt_ca(self, chosen: Chosen, of: Sequence[int] | None = None) -> float | None:
        """lDDT-CA over the distances between different chains, of all chains or those given; None if none is below 15 Å."""
        chains = range(len(chosen)) if of is None else of
        number = torch.repeat_interleave(torch.tensor([len(self.truth.chains[n]) for n in chains]))
        found = float(metrics.interface_lddt_ca(*self.alphas(chosen, chains), number))
        return None if math.isnan(found) else found

    def alphas(
        self, chosen: Chosen, of: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predicted and true CA [R, 3], and 1 for each that is true [R], of all true chains or those given. What is not
        predicted is far away from all."""
        chains = range(len(chosen)) if of is None else of
        true = [self._true[n] for n in chains]
        predicted = [self._on_truth(chosen[n], n) for n in chains]
        there = torch.cat([atoms.mask[:, CA] for atoms in predicted])[:, None]
        positions = torch.cat([atoms.positions[:, CA] for atoms in predicted])
        return (
            positions.where(there, torch.from_numpy(nowhere(len(positions)))),
            torch.cat([atoms.positions[:, CA] for atoms in true]),
            torch.cat([atoms.mask[:, CA] for atoms in true]).double(),
        )

    def counterparts(self, chosen: Chosen) -> Int64[np.ndarray, " R"]:
        """Predicted residue of each true one, by its number among those of all predicted chains; -1: there is none."""
        lengths = [len(chain) for chain in self.predicted.chains]
        numbers = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        found = []
        for true, chain in enumerate(chosen):
            found.append(np.full(len(self.truth.chains[true]), -1))
            if chain is not None:
                ours, theirs = self.likeness(chain, true).pairs.T
                found[-1][theirs] = numbers[chain][ours]
        return np.concatenate(found)

    def _predicted_of(self, number: int) -> list[int]:
        """The predicted chains that are copies of a group of true chains."""
        return [chain for chain, group in enumerate(self.copies_of) if group == number]

    def _on_truth(self, chain: int | None, true: int) -> ChainAtoms:
        """The atoms of a predicted chain on the residues of a true one. What it lacks, or all of None, has no atoms."""
        if (chain, true) not in self._placed:
            onto = self.truth.chains[true]
            if chain is None:
                none = torch.zeros(len(onto), 37, dtype=torch.bool)
                self._placed[chain, true] = ChainAtoms(none.unsqueeze(-1).expand(-1, -1, 3).double(), none)
            else:
                self._placed[chain, true] = _placed(self.predicted.chains[chain], onto)
        return self._placed[chain, true]

    def _by_rmsd(self, members: Sequence[tuple[list[int], list[int]]]) -> Chosen:
        """The mapping that `align_chains` finds, by the residues of the longest chain of each group of copies. Chains without a
        counterpart face one without atoms."""
        slots: list[tuple[int | None, int | None, int]] = []  # predicted chain, true chain, group
        for group, (true, ours) in enumerate(members):
            for n in range(max(len(true), len(ours))):
                slots.append((ours[n] if n < len(ours) else None, true[n] if n < len(true) else None, group))
        longest = [max((self.truth.chains[n] for n in true), key=len) for true, _ in members]
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
    """Two chains side by side."""

    identity: float
    """Identical residues, as a share of the shorter sequence, 0 to 1; 0 if that is shorter than half of the other."""
    pairs: Int64[np.ndarray, "P 2"]
    """The residues that correspond, from 0."""
    by: str = "alignment"
    """Rule by which residues correspond: alignment or number."""


@lru_cache(maxsize=512)
def likeness(first: str, second: str) -> Likeness:
    """Equal sequences correspond residue by residue, others by their best alignment (`evodsp.data.similarity.sequences`)."""
    if first == second:
        return Likeness(1.0, np.repeat(np.arange(len(first))[:, None], 2, axis=1))
    shorter, longer = sorted((len(first), len(second)))
    if 2 * shorter < longer or shorter * longer > MOST_CELLS:
        return Likeness(0.0, np.zeros((0, 2), np.int64))
    letters = plain(first), plain(second)
    pairs = paired(*letters)
    return Likeness(same_residues(*letters, pairs) / shorter, pairs)


def chains_beside(first: Chain, second: Chain) -> Likeness:
    """Equal sequences correspond residue by residue, others by the numbers of the residues that were seen, if residues with one
    number have one letter and the alignment finds hardly more of them; otherwise by the alignment."""
    found = likeness(first.sequence, second.sequence)
    if first.sequence == second.sequence or not len(found.pairs):
        return found
    of_number = [_by_number(chain) for chain in (first, second)]
    shared = [number for number in of_number[0] if number in of_number[1]]
    pairs = np.array([[of[number] for of in of_number] for number in shared], np.int64).reshape(-1, 2)
    letters = plain(first.sequence), plain(second.sequence)
    same = same_residues(*letters, pairs)
    known = sum("X" not in (letters[0][one], letters[1][other]) for one, other in pairs.tolist())
    if not same or same < SAME_NUMBERED * max(known, same_residues(*letters, found.pairs)):
        return found
    return Likeness(max(found.identity, same / min(map(len, letters))), pairs, "number")


def _by_number(chain: Chain) -> dict[tuple[int, str], int]:
    """The place of each residue that was seen, by its number and insertion code; none if two have the same."""
    seen = np.flatnonzero(~chain.is_missing).tolist()
    found = {(int(chain.residue_number[at]), chain.insertion_code[at]): at for at in seen}
    return found if len(found) == len(seen) else {}


def _copies(chains: Sequence[Chain]) -> list[list[int]]:
    """The chains in groups of copies, in the order in which their sequences first occur."""
    groups: list[list[int]] = []
    for number, chain in enumerate(chains):
        like = _most_like(chain, [chains[group[0]] for group in groups])
        if like is None:
            groups.append([number])
        else:
            groups[like].append(number)
    return groups


def _most_like(chain: Chain, others: Sequence[Chain]) -> int | None:
    """The number of the most similar chain, of equals the first; None if none is similar enough."""
    identities = [chains_beside(chain, other).identity for other in others]
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


def _placed(chain: Chain, onto: Chain) -> ChainAtoms:
    """The atoms of a chain on the residues of another one. Residues without a counterpart have none."""
    ours, theirs = torch.from_numpy(chains_beside(chain, onto).pairs).unbind(-1)
    atoms = _atoms(chain)
    positions, mask = torch.zeros(len(onto), 37, 3).double(), torch.zeros(len(onto), 37, dtype=torch.bool)
    positions[theirs], mask[theirs] = atoms.positions[ours], atoms.mask[ours]
    return ChainAtoms(positions, mask)


def _atoms(chain: Chain) -> ChainAtoms:
    """The atoms of a chain. A modified residue has those of its parent amino acid, of the letter in the sequence."""
    mask = (chain.mask > 0.5) & _ATOMS_OF[encode_sequence(chain.sequence)]
    return ChainAtoms(torch.from_numpy(chain.positions).double(), torch.from_numpy(mask))
