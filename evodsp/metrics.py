"""Scores of a predicted structure against the true one: lDDT, RMSD, GDT-TS, TM-score, and DockQ of an interface.

All functions take (predicted, true, mask). Positions are in Å; atoms with mask 0 are ignored. Nothing here is differentiated.
Superpositions are computed in fp64, whatever the input's dtype.

Shapes: *b batch axes, N atoms (one per residue for GDT and TM), R residues, A atoms of a residue, i residues of a slice. Of an
interface: L and M residues of its first and second chain, K contacts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64, Integer
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import ATOM_ORDER

LDDT_CUTOFF = 15.0
LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
GDT_TS_CUTOFFS = (1.0, 2.0, 4.0, 8.0)
CONTACT_CUTOFF = 5.0
"""Å: residues of two chains with atoms nearer than this are in contact (DockQ)."""
_INTERFACE_CUTOFF = 10.0  # Å: the atoms of residues of an interface, in DockQ
_INTERFACE_D0, _LIGAND_D0 = 1.5, 8.5  # Å: the RMSD at which DockQ's terms are one half
_BACKBONE = [ATOM_ORDER[name] for name in ("N", "CA", "C", "O")]
_PAIRS_AT_ONCE = 1 << 24  # atom pairs that lDDT and DockQ hold in memory at a time
_EVERY_FRAGMENT = 50  # residues, up to which superpositions begin with every fragment
_SEEDS_PER_SIZE = 64
_SEARCH_STEPS = 20


@torch.no_grad()
def lddt(
    predicted: Float[Tensor, "*b R A 3"],
    true: Float[Tensor, "*b R A 3"],
    mask: Float[Tensor, "*b R A"],
    cutoff: float = LDDT_CUTOFF,
    per_residue: bool = False,
    rows: slice = slice(None),
) -> Float[Tensor, "*b"] | Float[Tensor, "*b i"]:
    """Local distance difference test, 0 to 1 (Mariani et al. 2013), without checks of stereochemistry.

    Among the true distances below `cutoff` (Å) between atoms of different residues, the fraction that the prediction keeps
    to within 0.5, 1, 2 and 4 Å, averaged over the four. The score is 1 if no distance counts, as in AF2. The cost is (R
    A)^2, so prefer atom14 to atom37. `per_residue`: one score per residue, from the distances of its atoms. `rows`: a slice
    of step one; only distances from the atoms of these residues to all atoms are used.
    """
    residue = torch.arange(mask.shape[-2], device=mask.device)
    kept, counted = _lddt_sums(predicted, true, mask, residue, cutoff, rows)
    if not per_residue:
        kept, counted = kept.sum(-1), counted.sum(-1)
    return (kept + 1e-10) / (counted + 1e-10)


def _lddt_sums(
    predicted: Float[Tensor, "*b R A 3"],
    true: Float[Tensor, "*b R A 3"],
    mask: Float[Tensor, "*b R A"],
    group: Integer[Tensor, "*#b R"],
    cutoff: float,
    rows: slice,
) -> tuple[Float[Tensor, "*b i"], Float[Tensor, "*b i"]]:
    """Kept (averaged over thresholds) and counted distances from each residue of `rows` to residues of another group."""
    residues, atoms = mask.shape[-2:]
    predicted, true = (x.float() if x.dtype.itemsize < 4 else x for x in (predicted, true))
    mask = mask.to(true.dtype)
    first, last, _ = rows.indices(residues)

    def counts(rows: slice) -> tuple[Tensor, Tensor]:
        """Of a few rows, whose distances are in memory together."""

        def distances(x: Tensor) -> Tensor:
            between = _distances(x[..., rows, :, :].flatten(-3, -2), x.flatten(-3, -2))
            return between.unflatten(-1, (residues, atoms)).unflatten(-3, (rows.stop - rows.start, atoms))

        distance = distances(true)
        counted = (distance < cutoff) * mask[..., rows, :, None, None] * mask[..., None, None, :, :]
        other = group[..., rows, None] != group[..., None, :]
        counted = counted * other[..., :, None, :, None]
        error = (distance - distances(predicted)).abs()
        kept = sum((error < threshold).to(counted.dtype) for threshold in LDDT_THRESHOLDS) / len(LDDT_THRESHOLDS)
        return (kept * counted).sum((-1, -2, -3)), counted.sum((-1, -2, -3))

    step = max(1, _PAIRS_AT_ONCE // (max(1, mask[..., 0, 0].numel()) * residues * atoms * atoms))
    pieces = [counts(slice(start, min(start + step, last))) for start in range(first, last, step)]
    kept, counted = zip(*pieces, strict=True)
    return torch.cat(kept, -1), torch.cat(counted, -1)


def _distances(x: Float[Tensor, "*b n 3"], y: Float[Tensor, "*b m 3"]) -> Float[Tensor, "*b n m"]:
    """Distances, computed without a matrix product, whose rounding would decide whether a distance near a threshold counts."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def lddt_ca(
    predicted: Float[Tensor, "*b R 3"],
    true: Float[Tensor, "*b R 3"],
    mask: Float[Tensor, "*b R"],
    per_residue: bool = False,
    rows: slice = slice(None),
) -> Float[Tensor, "*b"] | Float[Tensor, "*b i"]:
    """lDDT of the CA atoms alone, 0 to 1: one score for the structure, or one `per_residue`, which the pLDDT head predicts.

    `rows`: as in `lddt`.
    """
    return lddt(predicted.unsqueeze(-2), true.unsqueeze(-2), mask.unsqueeze(-1), per_residue=per_residue, rows=rows)


@torch.no_grad()
def interface_lddt_ca(
    predicted: Float[Tensor, "*b R 3"],
    true: Float[Tensor, "*b R 3"],
    mask: Float[Tensor, "*b R"],
    chain: Integer[Tensor, "*#b R"],
) -> Float[Tensor, "*b"]:
    """lDDT of the CA atoms over the distances between different chains alone, 0 to 1; nan if none of them is below 15 Å.

    `chain`: the number of each residue's chain.
    """
    atoms = predicted.unsqueeze(-2), true.unsqueeze(-2), mask.unsqueeze(-1)
    kept, counted = _lddt_sums(*atoms, chain, LDDT_CUTOFF, slice(None))
    return kept.sum(-1) / counted.sum(-1)


@torch.no_grad()
def superpose(mobile: Float[Tensor, "*m N 3"], target: Float[Tensor, "*t N 3"], weight: Float[Tensor, "*b N"]) -> Rigid:
    """The rigid motion that brings `mobile` nearest to `target` in the weighted least-squares sense (Kabsch 1976).

    It is always a proper rotation, never a reflection. With fewer than three atoms it is one of many equally good motions.
    Batch axes broadcast.
    """
    dtype = mobile.dtype
    mobile, target, weight = mobile.double(), target.double(), weight.double()
    weight = (weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)).unsqueeze(-1)
    mobile_centre, target_centre = (weight * mobile).sum(-2), (weight * target).sum(-2)
    weighted = weight * (mobile - mobile_centre.unsqueeze(-2))
    covariance = weighted.transpose(-1, -2) @ (target - target_centre.unsqueeze(-2))
    rotation = best_rotation(covariance)
    translation = target_centre - (rotation @ mobile_centre.unsqueeze(-1)).squeeze(-1)
    return Rigid(rotation.to(dtype), translation.to(dtype))


@torch.no_grad()
def best_rotation(covariance: Float[Tensor, "*b 3 3"]) -> Float[Tensor, "*b 3 3"]:
    """The proper rotation R with the largest tr(R C) for C = sum of x yᵀ: it turns points x nearest to y (Kabsch 1976)."""
    # Values that are not finite would stop the decomposition. The centres then are not finite either, and neither is the
    # motion.
    u, _, vh = torch.linalg.svd(covariance.where(covariance.isfinite(), 0))
    # If the best orthogonal map is a reflection, flip the axis of the smallest singular value, which is the last.
    keep_hand = torch.ones_like(covariance[..., 0])
    keep_hand[..., 2] = torch.linalg.det(u @ vh).sign()
    return ((u * keep_hand.unsqueeze(-2)) @ vh).transpose(-1, -2)


@torch.no_grad()
def rmsd(
    predicted: Float[Tensor, "*b N 3"], true: Float[Tensor, "*b N 3"], mask: Float[Tensor, "*b N"]
) -> Float[Tensor, "*b"]:
    """Root-mean-square deviation after optimal superposition, in Å. It is 0 without atoms."""
    mobile, target = predicted.double(), true.double()
    moved = superpose(mobile, target, mask).unsqueeze(-1).apply(mobile)
    square = ((moved - target).square().sum(-1) * mask).sum(-1) / mask.sum(-1).clamp(min=1e-12)
    return square.sqrt().to(predicted.dtype)


def gdt_ts(
    predicted: Float[Tensor, "*b N 3"],
    true: Float[Tensor, "*b N 3"],
    mask: Float[Tensor, "*b N"],
    cutoffs: Sequence[float] = GDT_TS_CUTOFFS,
) -> Float[Tensor, "*b"]:
    """Global distance test, 0 to 1 (Zemla 2003).

    The largest fraction of CA atoms that a superposition brings to within a cutoff, averaged over the cutoffs 1, 2, 4 and 8 Å,
    each with its own best superposition. `cutoffs` (0.5, 1, 2, 4) give GDT-HA.

    The result is a lower bound, as in every program: `_search` tries a limited number of superpositions, of chains of at most
    50 residues from every fragment. On 340 perturbed random chains of 51 to 100 residues a search from every fragment found at
    most 0.03 more (for `tm_score` 0.018). The score is 0 without atoms.
    """

    def score(mobile: Float[Tensor, "n 3"], target: Float[Tensor, "n 3"]) -> Float[Tensor, ""]:
        limits = mobile.new_tensor(cutoffs)
        best = torch.zeros_like(limits)
        for distance in _search(mobile, target, limits):
            within = (distance <= limits[:, None, None]).to(distance.dtype).mean(-1)
            best = torch.maximum(best, within.amax(-1))
        return best.mean()

    return _each_structure(score, predicted, true, mask)


def tm_score(
    predicted: Float[Tensor, "*b N 3"], true: Float[Tensor, "*b N 3"], mask: Float[Tensor, "*b N"]
) -> Float[Tensor, "*b"]:
    """Template modelling score, 0 to 1 (Zhang & Skolnick 2004), of CA atoms paired by residue.

    The largest mean of 1 / (1 + (d / d0)^2) over the superpositions of `_search`: a lower bound, as in the TM-score program,
    whose scheme this follows, from more seeds for short chains and fewer for long ones. Length and d0 count the unmasked
    residues. The score is 0 without atoms.
    """

    def score(mobile: Float[Tensor, "n 3"], target: Float[Tensor, "n 3"]) -> Float[Tensor, ""]:
        d0 = tm_d0(len(target))
        near = mobile.new_tensor([min(max(d0, 4.5), 8.0)])
        distances = _search(mobile, target, near)
        return torch.stack([(1 / (1 + (distance / d0).square())).mean(-1).amax() for distance in distances]).amax()

    return _each_structure(score, predicted, true, mask)


def tm_d0(length: int) -> float:
    """The distance in Å at which an atom pair counts one half in the TM-score of `length` residues, at least 0.5."""
    return max(0.5, 1.24 * max(length - 15, 0) ** (1 / 3) - 1.8)


def _each_structure(
    score: Callable[[Tensor, Tensor], Tensor],
    predicted: Float[Tensor, "*b N 3"],
    true: Float[Tensor, "*b N 3"],
    mask: Float[Tensor, "*b N"],
) -> Float[Tensor, "*b"]:
    """`score` of each structure's unmasked atoms, one structure at a time: the superpositions tried depend on their number."""
    atoms = mask.shape[-1]
    with torch.no_grad():
        scores = [
            score(x[m], y[m]) if m.any() else x.new_zeros(())
            for x, y, m in zip(
                predicted.double().reshape(-1, atoms, 3),
                true.double().reshape(-1, atoms, 3),
                mask.reshape(-1, atoms) > 0,
                strict=True,
            )
        ]
    return torch.stack(scores).reshape(mask.shape[:-1]).to(predicted.dtype)


def _search(
    mobile: Float[Tensor, "n 3"], target: Float[Tensor, "n 3"], limits: Float[Tensor, " C"]
) -> Iterator[Float[Tensor, "K n"]]:
    """Distances between paired atoms under many superpositions, K at a time.

    For each of the C limits, every seed fragment is superposed. Then the atoms within the limit (at least the three nearest)
    are superposed again, until the selection stays the same, or for 20 steps.
    """
    seeds = _seed_fragments(len(mobile)).to(mobile.device)
    selected = seeds.repeat(len(limits), 1)
    limit = limits.repeat_interleave(len(seeds)).unsqueeze(1)
    for _ in range(_SEARCH_STEPS):
        motion = superpose(mobile, target, selected.double())
        distance = torch.linalg.vector_norm(motion.unsqueeze(-1).apply(mobile) - target, dim=-1)
        yield distance
        third = distance.kthvalue(min(3, len(mobile)), dim=-1, keepdim=True).values
        nearest = distance <= torch.maximum(limit, third)
        moves = (nearest != selected).any(-1)
        if not moves.any():
            return
        selected, limit = nearest[moves], limit[moves]


def _seed_fragments(length: int) -> Bool[Tensor, "F n"]:
    """Every fragment of at least three residues of a short chain. Of a longer one those of the whole length, half of it, … down
    to 4 residues, as in the TM-score program, at most 64 per size."""
    index = torch.arange(length)
    if length <= _EVERY_FRAGMENT:
        sizes = list(range(min(3, length), length + 1))
    else:
        sizes = [max(4, length >> halved) for halved in range((length // 4).bit_length() + 1)]
    fragments = []
    for size in dict.fromkeys(sizes):
        starts = torch.linspace(0, length - size, min(_SEEDS_PER_SIZE, length - size + 1)).round().long().unsqueeze(1)
        fragments.append((index >= starts) & (index < starts + size))
    return torch.cat(fragments)


@dataclass(frozen=True)
class ChainAtoms:
    """The heavy atoms of a chain, in the order of atom37. Positions in Å, those without an atom anywhere."""

    positions: Float64[Tensor, "L 37 3"]
    mask: Bool[Tensor, "L 37"]


@dataclass(frozen=True)
class InterfaceScore:
    """Scores of a predicted interface against the true one."""

    contacts: int
    """True contacts: pairs of residues with heavy atoms within 5 Å."""
    recovered: int
    """Number of true contacts that the prediction has, too."""
    interface_rmsd: float
    """RMSD in Å of the backbones of residues within 10 Å of the other chain, superposed; infinite where none is predicted."""
    ligand_rmsd: float
    """RMSD in Å of the shorter chain's backbone after the longer one's was superposed; infinite where one is not predicted."""

    @property
    def fnat(self) -> float:
        """The share of the true contacts that the prediction has, 0 to 1."""
        return self.recovered / self.contacts

    @property
    def dockq(self) -> float:
        """DockQ, 0 to 1 (Basu & Wallner 2016): the mean of `fnat` and of 1 / (1 + (d / d0)^2) of both RMSDs."""
        terms = (
            1 / (1 + (d / d0) ** 2) for d, d0 in ((self.interface_rmsd, _INTERFACE_D0), (self.ligand_rmsd, _LIGAND_D0))
        )
        return (self.fnat + sum(terms)) / 3


@dataclass(frozen=True)
class TrueInterface:
    """Two true chains in contact, and what DockQ compares: as in version 2 of its program, whose source settles what the paper
    leaves open. The longer chain, by residues with atoms, is the receptor; of equals the second."""

    first: ChainAtoms
    second: ChainAtoms
    contacts: Int64[Tensor, "K 2"]
    near: Bool[Tensor, "L M"]
    """Residues with heavy atoms within 10 Å."""

    @classmethod
    @torch.no_grad()
    def between(cls, first: ChainAtoms, second: ChainAtoms) -> TrueInterface | None:
        """The interface of two chains; None if they are not in contact."""
        distance = _between_residues(first, second)
        contacts = (distance < CONTACT_CUTOFF).nonzero()
        return cls(first, second, contacts, distance < _INTERFACE_CUTOFF) if len(contacts) else None

    @torch.no_grad()
    def score(self, first: ChainAtoms, second: ChainAtoms) -> InterfaceScore:
        """The score of a prediction of both chains, residue by residue. What it lacks has no atoms."""
        one, other = self.contacts.unbind(-1)
        apart = _distances(first.positions[one], second.positions[other])
        counts = first.mask[one, :, None] & second.mask[other, None, :]
        recovered = apart.where(counts, math.inf).flatten(1).amin(-1) < CONTACT_CUTOFF

        # [predicted atoms, true atoms, which of them to compare], of the backbone of each chain
        chains = [
            (own.positions[:, _BACKBONE], true.positions[:, _BACKBONE], (own.mask & true.mask)[:, _BACKBONE])
            for own, true in ((first, self.first), (second, self.second))
        ]
        near = self.near & first.mask.any(-1)[:, None] & second.mask.any(-1)
        interface = [
            (own[both & inside[:, None]], true[both & inside[:, None]])
            for (own, true, both), inside in zip(chains, (near.any(1), near.any(0)), strict=True)
        ]
        whole = [(own[both], true[both]) for own, true, both in chains]
        lengths = [int(true.mask.any(-1).sum()) for true in (self.first, self.second)]
        receptor, ligand = whole if lengths[0] > lengths[1] else whole[::-1]
        predicted, true = (torch.cat(atoms) for atoms in zip(*interface, strict=True))
        return InterfaceScore(
            contacts=len(self.contacts),
            recovered=int(recovered.sum()),
            interface_rmsd=_rmsd_after((predicted, true), (predicted, true)),
            ligand_rmsd=_rmsd_after(receptor, ligand),
        )


def _between_residues(first: ChainAtoms, second: ChainAtoms) -> Float64[Tensor, "L M"]:
    """The smallest distance between heavy atoms of each pair of residues, in Å; infinite without atoms."""
    owner, other = first.mask.nonzero()[:, 0], second.mask.nonzero()[:, 0]
    mine, theirs = first.positions[first.mask], second.positions[second.mask]
    found = mine.new_full((len(first.mask), len(second.mask)), math.inf)
    step = max(1, _PAIRS_AT_ONCE // max(1, len(theirs)))
    for atoms, residues in zip(mine.split(step), owner.split(step), strict=True):
        nearest = found.new_full((len(atoms), len(second.mask)), math.inf)
        nearest.scatter_reduce_(1, other.expand(len(atoms), -1), _distances(atoms, theirs), "amin")
        found.scatter_reduce_(0, residues[:, None].expand_as(nearest), nearest, "amin")
    return found


def _rmsd_after(
    superposed: tuple[Float64[Tensor, "n 3"], Float64[Tensor, "n 3"]],
    compared: tuple[Float64[Tensor, "m 3"], Float64[Tensor, "m 3"]],
) -> float:
    """The RMSD of predicted and true atoms after the motion that superposes others; infinite if there are none of either."""
    if not len(superposed[0]) or not len(compared[0]):
        return math.inf
    motion = superpose(*superposed, torch.ones_like(superposed[0][:, 0]))
    moved = motion.unsqueeze(-1).apply(compared[0])
    return float((moved - compared[1]).square().sum(-1).mean().sqrt())
