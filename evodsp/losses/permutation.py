"""Permutations of the ground truth that fit the prediction: of copies of a chain (AlphaFold-Multimer, supplement 7.3),
and of the names of symmetric atoms (algorithm 26).

Copies of a chain have the same sequence, so a model cannot know which of them is called the first. Before the losses compare
anything, the true copies are therefore exchanged so that they fit the prediction. Positions are in Å. Shapes: R residues of
the crop (all chains, and padding), C chains of the complex, S of which the crop shows, L residues of its longest chain, K
alignments that are tried.

A turn of 180 degrees about the last torsion of aspartate, glutamate, phenylalanine or tyrosine only swaps the names of
atoms. The losses compare the prediction with the naming that is nearer to it. Positions are in Å. Shapes: B batch, R
residues, n residues that may have ambiguous atoms, k of them, A atoms, a of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int, Int64, Num, Shaped
from torch import Tensor

from evodsp.geometry.frames import Rigid
from evodsp.geometry.residues import CA, RENAMING_MATRICES
from evodsp.losses.structure import rows_at_once, take
from evodsp.metrics import best_rotation
from evodsp.parallel.exchange import Exchange, LocalExchange
from evodsp.rng import Draws

ENTITIES = "copies_entity"
"""The entry of a batch with the number of each chain's sequence [B, C], from 1 on, on the host. A sample whose chains all have
sequences of their own has none: zeros, or C is 0."""
COPIES = "copies_"
"""The beginning of the names of the labels of all chains before the crop, [B, C, L, ...]; the rest is the label's name."""

FEWEST_ATOMS = 3
"""CA atoms that two chains must share to be superposed; fewer do not determine the motion."""

# All in Å. Costs are rounded, so that ranks whose last digits differ find the same cost equal. The rounding is far above the
# error of the sums and far below an error that matters.
_DECIMALS = 4
_OTHER_CHAIN = 1e-5  # less than the rounding: among equal costs a chain keeps its own truth
_NOTHING_IN_COMMON = 1e6


@dataclass(frozen=True)
class TrueChains:
    """The CA atoms of all chains of a complex, before it is cropped. Row k is the chain whose `asym_id` is k + 1."""

    positions: Float[Tensor, "C L 3"]
    mask: Float[Tensor, "C L"]
    """1 for CA atoms that are resolved."""
    entity_id: Sequence[int]
    """By chain: equal numbers for equal sequences. They are on the host, so that a complex without copies waits for nothing."""


def with_fitting_labels(
    positions: Float[Tensor, "B R 37 3"],
    batch: Mapping[str, Tensor],
    draws: Sequence[Draws],
    exchange: Exchange = LocalExchange(),
) -> dict[str, Tensor]:
    """The batch with the labels of the true copies that fit the prediction of each sample (`align_chains`).

    A batch without copies of chains, or of single chains, is returned as it is. `positions`: predicted, in Å. `draws`: the
    random stream of each sample. On several ranks the first one's choice counts, so all of them call this together; for each
    sample with copies the host waits for the device once.
    """
    entities = batch[ENTITIES].tolist() if ENTITIES in batch else []
    if not any(map(any, entities)):
        return dict(batch)
    labels = {
        name.removeprefix(COPIES): values
        for name, values in batch.items()
        if name.startswith(COPIES) and name != ENTITIES
    }
    predicted = positions.detach()[:, :, CA]
    fitting: list[Mapping[str, Tensor]] = []
    for sample, numbers in enumerate(entities):
        entity = [number for number in numbers if number]
        if not entity:
            fitting.append({name: batch[name][sample] for name in labels})
            continue
        own = {name: values[sample, : len(entity)] for name, values in labels.items()}
        truth = TrueChains(own["all_atom_positions"][:, :, CA], own["all_atom_mask"][:, :, CA], entity)
        chain, residue = batch["asym_id"][sample, -1], batch["residue_index"][sample, -1]
        chosen = align_chains(predicted[sample], chain, residue, truth, draws[sample].at("true_copies"))
        fitting.append(labels_of_crop(own, exchange.of_first(chosen.to(chain.device)), chain, residue))
    return {**batch, **{name: torch.stack([one[name] for one in fitting]) for name in labels}}


@torch.no_grad()
def align_chains(
    predicted: Float[Tensor, "R 3"],
    asym_id: Num[Tensor, " R"],
    residue_index: Num[Tensor, " R"],
    truth: TrueChains,
    draws: Draws,
) -> Int64[Tensor, " C"]:
    """For each predicted chain the row of `truth` to compare it with: a permutation of 0 … C - 1, on the host.

    `predicted`: CA positions. `asym_id`: chain numbers from 1, and 0 for padding. `residue_index`: numbers in the chain from
    0. `draws`: the sample's random stream, which decides between equally good anchors.

    One predicted chain, the anchor (`choose_anchor`), is compared with each true chain of its sequence in turn: the truth is
    moved so that this chain lies on the anchor, and the other chains are assigned by their RMSD, the best pair of chains
    first. Of these assignments the one that has the smallest RMSD after a superposition of everything is the result; those that
    leave more chains without a resolved residue to compare come after the others. Only resolved residues of the crop count.
    Among equal assignments, and where nothing can be compared (without an anchor, or if the prediction is not finite), chains
    keep their own truth.

    The assignment is greedy. It is the best of all permutations if the anchor's superposition puts the other chains nearest to
    their own places. Where the anchor is small or badly predicted, the others are turned about it, and it may not be.

    Everything is computed on the host in float64 from one copy of the arguments, for which the host waits once; not at all if
    no two chains have the same sequence. The result is not differentiated.
    """
    entity = torch.tensor(truth.entity_id)
    chains = len(entity)
    own = torch.arange(chains)
    if len(set(truth.entity_id)) == chains:
        return own
    predicted, asym_id, residue_index, positions, mask = _on_host(
        predicted, asym_id, residue_index, truth.positions, truth.mask
    )
    real = asym_id > 0
    predicted, chain, residue = predicted[real], asym_id[real].long() - 1, residue_index[real].long()
    # Near the origin the sums of squares keep their digits.
    predicted, positions = predicted - predicted.mean(0), positions - _mean(positions, mask)
    shown = chain.unique()
    products = torch.zeros(len(shown), chains, 7, 7, dtype=torch.float64)  # of [predicted chain, true chain]
    for place, number in enumerate(shown):
        here = (chain == number).nonzero()[:, 0]
        copies = (entity == entity[number]).nonzero()[:, 0]
        there = copies[:, None], residue[here]
        products[place, copies] = _products(predicted[here], positions[there], mask[there])
    common = products[..., 3, 3]  # resolved residues

    resolved = torch.zeros(chains, dtype=torch.int64)
    resolved[shown] = common[torch.arange(len(shown)), shown].long()
    anchor = choose_anchor(truth.entity_id, resolved.tolist(), draws)
    if anchor is None:
        return own
    place = int((shown == anchor).nonzero())
    tried = ((entity == entity[anchor]) & (common[place] >= FEWEST_ATOMS)).nonzero()[:, 0]
    motion = _superposition(products[place, tried])
    cost = _rmsd(motion[:, None, None], products) + _OTHER_CHAIN * (shown[:, None] != own)
    assigned = _assign(cost.masked_fill(entity[shown, None] != entity, torch.inf), place, tried)

    together = products[torch.arange(len(shown)), assigned].sum(1)  # [K, 7, 7]
    # A chain whose truth has none of its residues adds no error, but its labels would be lost.
    lost = (common[torch.arange(len(shown)), assigned] == 0).sum(1)
    total = _rmsd(_superposition(together), together) + _OTHER_CHAIN * (tried != anchor) + _NOTHING_IN_COMMON * lost
    return _with_hidden_chains(shown, assigned[total.argmin()], entity)


def choose_anchor(entity_id: Sequence[int], resolved: Sequence[int], draws: Draws) -> int | None:
    """The chain on which the truth is superposed: the least ambiguous one of those that the crop shows.

    `entity_id`: of all chains of the complex. `resolved`: the number of resolved CA atoms that each has in the crop. Chains
    with fewer than three cannot be the anchor. Among the others, those with the fewest copies in the complex come first,
    then those with the most resolved atoms; `draws` decides between equals. None: no chain can be it.
    """
    copies = Counter(entity_id)
    ranks = {
        number: (copies[entity], -atoms)
        for number, (entity, atoms) in enumerate(zip(entity_id, resolved, strict=True))
        if atoms >= FEWEST_ATOMS
    }
    if not ranks:
        return None
    first = min(ranks.values())
    equal = [number for number, rank in ranks.items() if rank == first]
    return equal[draws.at("anchor").integer(0, len(equal))]


def labels_of_crop(
    labels: Mapping[str, Shaped[Tensor, "C L ..."]],
    permutation: Int64[Tensor, " C"],
    asym_id: Num[Tensor, " R"],
    residue_index: Num[Tensor, " R"],
) -> dict[str, Shaped[Tensor, "R ..."]]:
    """The labels of the crop's residues, each from the true chain that `permutation` gives its chain.

    `labels`: of all chains of the complex, before the crop, row k of chain k + 1. `permutation` is on their device.
    `asym_id`, `residue_index`: as in `align_chains`. Padding has zeros.
    """
    real, residue = asym_id > 0, residue_index.long()
    rows = permutation[(asym_id.long() - 1).clamp(min=0)]
    return {
        name: label[rows, residue].where(real.view(-1, *(1,) * (label.ndim - 2)), 0) for name, label in labels.items()
    }


def _on_host(*tensors: Num[Tensor, "..."]) -> list[Float64[Tensor, "..."]]:
    """The tensors on the host, by one copy. Integers below 2^53 are exact in float64."""
    flat = torch.cat([x.double().flatten() for x in tensors]).cpu()
    return [x.view(y.shape) for x, y in zip(flat.split([y.numel() for y in tensors]), tensors, strict=True)]


def _mean(positions: Float64[Tensor, "C L 3"], mask: Float64[Tensor, "C L"]) -> Float64[Tensor, " 3"]:
    return (positions * mask.unsqueeze(-1)).sum((0, 1)) / mask.sum().clamp(min=1)


def _products(
    predicted: Float64[Tensor, "n 3"], true: Float64[Tensor, "c n 3"], mask: Float64[Tensor, "c n"]
) -> Float64[Tensor, "c 7 7"]:
    """Sums of q qᵀ over the resolved residues, with q = (true, 1, predicted).

    They hold all that the best superposition and the distances after any motion need, for every set of chains, whose sums
    are added.
    """
    q = torch.cat([true, torch.ones_like(true[..., :1]), predicted.expand_as(true)], -1)
    return (q * mask.unsqueeze(-1)).mT @ q


def _superposition(products: Float64[Tensor, "K 7 7"]) -> Float64[Tensor, "K 3 7"]:
    """The motion M = (R, t, -1) of the truth that makes the sum of |M q|² = |R true + t - predicted|² smallest."""
    count = products[:, 3, 3, None]
    true, predicted = products[:, :3, 3] / count, products[:, 4:, 3] / count  # centres
    rotation = best_rotation(products[:, :3, 4:] - products[:, :3, 3, None] * predicted[:, None])
    translation = predicted.unsqueeze(-1) - rotation @ true.unsqueeze(-1)
    return torch.cat([rotation, translation, -torch.eye(3, dtype=torch.float64).expand_as(rotation)], -1)


def _rmsd(motion: Float64[Tensor, "*#b 3 7"], products: Float64[Tensor, "*#b 7 7"]) -> Float64[Tensor, "*b"]:
    """Root of the mean of |M q|² over resolved residues, in Å, rounded; very large where there are none."""
    square = ((motion @ products) * motion).sum((-1, -2)).clamp(min=0)
    distance = (square / products[..., 3, 3]).sqrt()
    return distance.nan_to_num(nan=_NOTHING_IN_COMMON, posinf=_NOTHING_IN_COMMON).round(decimals=_DECIMALS)


def _assign(cost: Float64[Tensor, "K S C"], anchor: int, true_anchors: Int64[Tensor, " K"]) -> Int64[Tensor, "K S"]:
    """The true chain of each predicted chain: always the cheapest pair of two chains that are free, after the anchor's pair.

    `cost` is infinite for pairs [predicted, true] of different sequences. As those never mix, the order is the same as
    sequence by sequence.
    """
    tries, shown, chains = cost.shape
    attempt = torch.arange(tries)
    assigned = torch.empty(tries, shown, dtype=torch.int64)
    predicted, true = torch.full_like(true_anchors, anchor), true_anchors
    for _ in range(shown):
        assigned[attempt, predicted] = true
        cost[attempt, predicted] = torch.inf
        cost[attempt, :, true] = torch.inf
        cheapest = cost.flatten(1).argmin(1)
        predicted, true = cheapest // chains, cheapest % chains
    return assigned


def _with_hidden_chains(
    shown: Int64[Tensor, " S"], assigned: Int64[Tensor, " S"], entity: Int64[Tensor, " C"]
) -> Int64[Tensor, " C"]:
    """The permutation of all chains. Those that the crop does not show keep their own truth where it is free; the others get
    what is left of their sequence."""
    free = set(range(len(entity))) - set(assigned.tolist())
    hidden = set(range(len(entity))) - set(shown.tolist())
    permutation = torch.arange(len(entity))
    permutation[shown] = assigned
    without = sorted(hidden - free)
    free -= hidden
    for number in without:
        permutation[number] = min(true for true in free if entity[true] == entity[number])
        free.remove(int(permutation[number]))
    return permutation


_SWAPPED = (RENAMING_MATRICES.diagonal(axis1=1, axis2=2) == 0).any(0).nonzero()[0]
_SLOTS = slice(int(_SWAPPED.min()), int(_SWAPPED.max()) + 1)
"""The four consecutive atom14 slots whose names swap in some residue."""


@dataclass(frozen=True)
class RenamedTruth:
    """The ground truth under the naming that is nearer to the prediction."""

    alternative: Float[Tensor, "B R"]
    """1 where the alternative naming is nearer and was chosen."""
    atom14: Float[Tensor, "B R 14 3"]
    """Atom positions."""
    atom14_mask: Float[Tensor, "B R 14"]
    """1 for observed atoms."""
    frames: Rigid
    """Rigid-group frames [B, R, 8]."""


def compute_renamed_ground_truth(
    labels: dict[str, Tensor], atom14: Float[Tensor, "B R 14 3"], exchange: Exchange = LocalExchange()
) -> RenamedTruth:
    """The ground truth with each residue's symmetric atoms named as in the prediction `atom14`.

    `labels`: arrays of `evodsp.geometry.frames.structure_labels` with a batch axis, and, to save work, the lists
    `ambiguous_residues` and `observed_atoms` of `evodsp.data.samples.dataset.collate`. The result is not differentiated. All
    arguments are whole on every rank. Each rank decides for its share of the residues, and the decisions (at most R
    numbers) are gathered.
    """
    truth, other = labels["atom14_gt_positions"], labels["atom14_alt_gt_positions"]
    exists, other_exists = labels["atom14_gt_exists"], labels["atom14_alt_gt_exists"]
    ambiguous, observed = labels["atom14_atom_is_ambiguous"], labels.get("observed_atoms")
    listed = labels.get("ambiguous_residues")
    if listed is None:
        listed = torch.arange(exists.shape[1], device=exists.device).expand(exists.shape[:2])
    count = listed.shape[1]
    own = listed[:, exchange.owned(count)]
    local = alternative_naming_is_better(atom14, truth, other, exists, ambiguous, own, observed)
    decided = exchange.gather(local, "i", count)
    alternative = decided.new_zeros(exists.shape[:2]).scatter(1, listed, decided)
    chosen = alternative.bool()[..., None, None]
    frames = torch.where(chosen, labels["rigidgroups_alt_gt_frames"], labels["rigidgroups_gt_frames"])
    return RenamedTruth(
        alternative=alternative,
        atom14=torch.where(chosen, other, truth),
        atom14_mask=torch.where(chosen[..., 0], other_exists, exists),
        frames=Rigid.from_flat12(frames),
    )


@torch.no_grad()
def alternative_naming_is_better(
    atom14: Float[Tensor, "B R 14 3"],
    truth: Float[Tensor, "B R 14 3"],
    alternative: Float[Tensor, "B R 14 3"],
    exists: Float[Tensor, "B R 14"],
    is_ambiguous: Float[Tensor, "B R 14"],
    residues: Int[Tensor, "B k"] | None = None,
    atoms: Int[Tensor, "B a"] | None = None,
) -> Float[Tensor, "B _"]:
    """Renaming of symmetric atoms (algorithm 26): 1 where the alternative naming fits the prediction's distances to
    unambiguous atoms better, else 0.

    `residues`: residues to decide for; None: all. `truth`, `alternative`: true positions under both namings. `exists`: 1
    for observed atoms. `is_ambiguous`: 1 for atoms whose names swap. `atoms`: a list (of R x 14) with every observed atom;
    None: all of them.
    """
    dtype = torch.promote_types(atom14.dtype, torch.float32)
    rows = [take(x[:, :, _SLOTS].to(dtype), residues) for x in (atom14, truth, alternative)]
    # Only distances to unambiguous atoms count, because these have the same true position under both namings.
    columns = [take(x.flatten(1, 2).to(dtype), atoms) for x in (atom14, truth)]
    reference = take((exists * (1 - is_ambiguous)).flatten(1).to(dtype), atoms)[:, :, None]
    counted = take((exists * is_ambiguous)[:, :, _SLOTS].to(dtype), residues)
    at_once = rows_at_once(len(reference) * counted.shape[2] * reference.shape[1], atom14.device)
    parts = []
    for start in range(0, counted.shape[1], at_once):
        here = slice(start, start + at_once)
        predicted, error, other_error = (
            _distances(row[:, here].flatten(1, 2), column)
            for row, column in zip(rows, (columns[0], columns[1], columns[1]), strict=True)
        )
        gain = error.sub_(predicted).abs_().sub_(other_error.sub_(predicted).abs_()) @ reference
        parts.append((gain.view_as(counted[:, here]) * counted[:, here]).sum(-1))
    gains = torch.cat(parts, 1) if parts else counted.sum(-1)
    return (gains > 0).to(truth.dtype)


def _distances(x: Float[Tensor, "B n 3"], y: Float[Tensor, "B a 3"]) -> Float[Tensor, "B n a"]:
    """Distances in Å, computed without a matrix product, in which digits would be lost."""
    difference = x[:, :, None] - y[:, None]
    return difference.square_().sum(-1).sqrt_()
