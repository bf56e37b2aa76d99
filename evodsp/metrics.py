"""Scores of a predicted structure against the true one: lDDT, RMSD, GDT-TS, TM-score.

All functions take (predicted, true, mask). Positions are in Å; atoms with mask 0 are ignored. Nothing here is differentiated.
Superpositions are computed in fp64, whatever the input's dtype.

Shapes: *b batch axes, N atoms (one per residue for GDT and TM), R residues, A atoms of a residue, i residues of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evodsp.geometry.rigid import Rigid

LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
GDT_TS_CUTOFFS = (1.0, 2.0, 4.0, 8.0)
_PAIRS_AT_ONCE = 1 << 24  # atom pairs that lDDT holds in memory at a time
_SEEDS_PER_LENGTH = 32
_SEARCH_STEPS = 20


@torch.no_grad()
def lddt(
    predicted: Float[Tensor, "*b R A 3"],
    true: Float[Tensor, "*b R A 3"],
    mask: Float[Tensor, "*b R A"],
    cutoff: float = 15.0,
    per_residue: bool = False,
    rows: slice = slice(None),
) -> Float[Tensor, "*b"] | Float[Tensor, "*b i"]:
    """Local distance difference test, 0 to 1 (Mariani et al. 2013), without checks of stereochemistry.

    Among the true distances below `cutoff` (Å) between atoms of different residues, the fraction that the prediction keeps
    to within 0.5, 1, 2 and 4 Å, averaged over the four. The score is 1 if no distance counts, as in AF2. The cost is (R
    A)^2, so prefer atom14 to atom37. `per_residue`: one score per residue, from the distances of its atoms. `rows`: a slice
    of step one; only distances from the atoms of these residues to all atoms are used.
    """
    residues, atoms = mask.shape[-2:]
    predicted, true = (x.float() if x.dtype.itemsize < 4 else x for x in (predicted, true))
    mask = mask.to(true.dtype)
    first, last, _ = rows.indices(residues)
    batch = max(1, mask[..., 0, 0].numel())
    step = max(1, _PAIRS_AT_ONCE // (batch * residues * atoms * atoms))
    kept, counted = zip(
        *(
            _lddt_counts(predicted, true, mask, slice(start, min(start + step, last)), cutoff)
            for start in range(first, last, step)
        ),
        strict=True,
    )
    kept_all, counted_all = torch.cat(kept, -1), torch.cat(counted, -1)
    if not per_residue:
        kept_all, counted_all = kept_all.sum(-1), counted_all.sum(-1)
    return (kept_all + 1e-10) / (counted_all + 1e-10)


def _lddt_counts(
    predicted: Float[Tensor, "*b R A 3"],
    true: Float[Tensor, "*b R A 3"],
    mask: Float[Tensor, "*b R A"],
    rows: slice,
    cutoff: float,
) -> tuple[Float[Tensor, "*b rows"], Float[Tensor, "*b rows"]]:
    """Kept (averaged over thresholds) and counted distances from the residues `rows` to all others."""
    shape = (rows.stop - rows.start, *mask.shape[-1:], *mask.shape[-2:])  # rows, A, R, A

    def distances(x: Tensor) -> Tensor:
        between = _distances(x[..., rows, :, :].flatten(-3, -2), x.flatten(-3, -2))
        return between.unflatten(-1, shape[2:]).unflatten(-3, shape[:2])

    distance = distances(true)
    counted = (distance < cutoff) * mask[..., rows, :, None, None] * mask[..., None, None, :, :]
    number = torch.arange(mask.shape[-2], device=mask.device)
    other = number[rows, None] != number
    counted = counted * other[:, None, :, None]
    error = (distance - distances(predicted)).abs()
    kept = sum((error < threshold).to(counted.dtype) for threshold in LDDT_THRESHOLDS) / len(LDDT_THRESHOLDS)
    return (kept * counted).sum((-1, -2, -3)), counted.sum((-1, -2, -3))


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

    The result is a lower bound, as in every program: `_search` tries a limited number of superpositions. On perturbed
    random chains of 30 to 150 residues a search from every fragment found at most 0.02 more (for `tm_score` 0.011). The
    score is 0 without atoms.
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

    The largest mean of 1 / (1 + (d / d0)^2) over the superpositions of `_search`: a lower bound, as in the TM-score
    program, whose scheme this follows with fewer seeds. Length and d0 count the unmasked residues. The score is 0 without
    atoms.
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
    """Fragments of the whole length, half of it, … down to 4 residues, a quarter of their size apart, at most 32 per size."""
    index = torch.arange(length)
    fragments = []
    size = length
    while size >= min(4, length):
        count = min(_SEEDS_PER_LENGTH, 4 * (length - size) // size + 1)
        starts = torch.linspace(0, length - size, count).round().long().unsqueeze(1)
        fragments.append((index >= starts) & (index < starts + size))
        size //= 2
    return torch.cat(fragments)
