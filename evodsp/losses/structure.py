"""Losses of the structure: frame-aligned point error (FAPE, algorithm 28) of the backbone and of the side chains
(supplement 1.9.2), of the torsion angles (algorithm 27), and of chains that are too near to each other (supplement of
AlphaFold-Multimer, section 7).

FAPE compares every point as seen from every frame, F x A distances. They are computed, summed and differentiated for a few
frames at a time, so no array of that size is ever held: memory is O(F + A), and the working set stays in a CPU's cache.
Frames and points are whole on every rank; each rank computes its share of the frames. No size depends on data. Positions are
in Å. In complexes the backbone's pairs within chains and those across chains have a mean each, both from one pass.

No size may depend on data on the device, because the host would have to wait for it. Existing entries are therefore listed
on the host (`evodsp.data.samples.dataset.collate`); without such a list all entries are computed, and masks leave out those
that do not exist.

`chain` is the number of each residue's chain, from 1 on; in padding it is 0. No number of chains is assumed.

Shapes: b samples, F frames, A points, T iterations, B batch, R residues, n torsion angles (sin, cos).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.geometry.frames import Rigid
from evodsp.model.precision import without_autocast
from evodsp.parallel.exchange import Exchange, LocalExchange

# Number of pairs computed at once: about a core's cache, or enough to fill a GPU.
CPU_PAIRS = 1 << 17
GPU_PAIRS = 1 << 22


def rows_at_once(pairs_per_row: int, device: torch.device) -> int:
    """Number of rows of pairs to compute at once; memory is linear in the number of rows and columns."""
    return max(1, (CPU_PAIRS if device.type == "cpu" else GPU_PAIRS) // max(1, pairs_per_row))


def take(values: Shaped[Tensor, "B n *c"], listed: Int[Tensor, "B m"] | None) -> Shaped[Tensor, "B _ *c"]:
    """The listed entries of each sample, or all entries without a list. A list must not name an entry twice."""
    if listed is None:
        return values
    return torch.take_along_dim(values, listed.view(*listed.shape, *(1,) * (values.ndim - 2)), 1)


_SLACK = 4.0
"""Å by which the distance between two chains may be too small at no cost."""
_SCALE = 20.0
"""Å beyond the slack that give a loss of 1."""


def count_pairs(
    mask: Float[Tensor, "B R"], chain: Int[Tensor, "B R"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """The numbers of ordered pairs of marked residues within chains and across chains, without an array of pairs."""
    # A chain's slot is where its first residue comes in the order of chains: below R, whatever the chain's number.
    slot = torch.searchsorted(chain.sort(-1).values, chain.contiguous())
    counts = torch.zeros_like(mask).scatter_add(-1, slot, mask)
    return counts.square().sum(-1), (counts * (counts.sum(-1, keepdim=True) - counts)).sum(-1)


def unique_residue_numbers(residue_index: Int[Tensor, "B R"], chain: Int[Tensor, "B R"]) -> Int[Tensor, "B R"]:
    """A number for each residue of a complex that no other has; two differ by one if the residues are neighbours in one chain.

    `residue_index` numbers the residues of each chain. The residues of a chain come in their order, without those of others.
    """
    # Small numbers, because what compares them may hold them in float32: chain times a large number would be rounded.
    bonded = (residue_index.diff(dim=1) == 1) & (chain.diff(dim=1) == 0)
    steps = torch.where(bonded, 1, 2)
    return torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)


def chain_centre_loss(
    ca: Float[Tensor, "B R 3"],
    true_ca: Float[Tensor, "B R 3"],
    mask: Float[Tensor, "B R"],
    chain: Int[Tensor, "B R"],
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """Mean over ordered pairs of chains of min((d - d_true + 4 Å) / 20 Å, 0)^2; d is the distance between the chains' centres.

    A centre is the mean of the CA atoms that are resolved (`mask`); chains without any do not count. As in Uni-Fold, a chain
    and itself are a pair, of loss 0. The loss keeps apart chains that a model has put into one another (supplement of
    AlphaFold-Multimer, section 7). All arguments are whole on every rank; each rank sums over the pairs of its own residues'
    chains, and the mean over ranks is the loss.
    """
    dtype, rows = torch.promote_types(ca.dtype, torch.float32), exchange.owned(mask.shape[1])
    same = (chain[:, :, None] == chain[:, None]) * mask[:, None].to(dtype)
    residues = same.sum(-1).clamp(min=1)
    # Each residue stands for its part of its chain, so the number of chains need not be known.
    part = mask.to(dtype) / residues

    def distances(positions: Tensor) -> Tensor:
        # Not a matrix product, which may round to TF32.
        sums = [(same * x[:, None]).sum(-1) for x in positions.to(dtype).unbind(-1)]
        centre = torch.stack(sums, -1) / residues[..., None]
        difference = centre[:, rows, None] - centre[:, None]
        return torch.sqrt(1e-10 + difference.square().sum(-1))  # 1e-10 keeps the gradient finite where centres coincide

    missing = ((distances(ca) - distances(true_ca) + _SLACK) / _SCALE).clamp(max=0)
    total = exchange.ranks * (part[:, rows, None] * part[:, None] * missing.square()).sum((1, 2))
    return total / part.sum(-1).square().clamp(min=1)


CLAMP_DISTANCE = 10.0
"""Largest error in Å; larger errors are clamped to this (supplement 1.9.2)."""
LENGTH_SCALE = 10.0
"""Error in Å that gives a loss of 1."""
INTERFACE_CLAMP = 30.0
"""Largest error across chains in Å, so wide that chains in wrong places are still pulled."""
INTERFACE_SCALE = 20.0
"""Error across chains in Å that gives a loss of 1."""

_EPS = 1e-4


@dataclass(frozen=True)
class _Kind:
    """Pairs of frames and points with a mean of their own."""

    clamp: float | None
    """The largest error in Å; None: no bound."""
    scale: float
    """The error in Å that gives a loss of 1."""


class _ErrorSum(torch.autograd.Function):
    """sum over f, a of frame_mask_f point_mask_a e(|M_f q_a|), with e(d) = d - w max(d - clamp, 0), per sample.

    `M_f` [3, 7] maps q_a = (predicted point, true point, 1) to the difference of the two points, each seen from its own frame.
    The forward pass also computes the gradients, which are as small as the inputs, while a chunk's distances are in memory.
    With `chains`, the numbers of the frames' and of the points' chains, there are two sums: pairs within chains, and across.
    Each has its entry in `clamps`. |x| is sqrt(x^2 + eps), or, if `floored`, max(|x|, eps).
    """

    @staticmethod
    def forward(
        ctx: Any,
        transforms: Float[Tensor, "b F 3 7"],
        points: Float[Tensor, "b 7 A"],
        frame_mask: Float[Tensor, "b F"],
        point_mask: Float[Tensor, "b A"],
        clamped_fraction: Float[Tensor, " b"],
        clamps: tuple[float, ...],
        eps: float,
        floored: bool,
        chains: tuple[Int[Tensor, "b F"], Int[Tensor, "b A"]] | None,
    ) -> tuple[Float[Tensor, " b"], ...]:
        (samples, frames), count = frame_mask.shape, point_mask.shape[1]
        rows = rows_at_once(samples * count, points.device)
        differentiate = any(ctx.needs_input_grad[:2])
        totals = [points.new_zeros(samples) for _ in clamps]
        grads = [(torch.empty_like(transforms), torch.zeros_like(points)) for _ in clamps]
        fraction, coordinates = clamped_fraction[:, None, None], points[:, None, None]  # [b, 1, 1, 7, A]
        # Masks multiply the small factors of each product, never an array of F x A.
        counted, masked_points = point_mask[:, :, None], (points * point_mask[:, None]).mT
        for start in range(0, frames, rows):
            here = slice(start, start + rows)
            transform, mask = transforms[:, here], frame_mask[:, here, None, None]
            same = None if chains is None else chains[0][:, here, None] == chains[1][:, None]
            # Seven scaled additions: a matrix product may round to TF32 or bf16, an error of 0.05 Å at 50 Å.
            difference = transform[..., 6:].expand(*transform.shape[:3], count).clone()
            for k in range(6):
                difference.addcmul_(transform[..., k : k + 1], coordinates[..., k, :])
            x, y, z = difference.unbind(2)
            squared = x.square().addcmul_(y, y).addcmul_(z, z)
            distance = squared.sqrt_().clamp_(min=eps) if floored else squared.add_(eps).sqrt_()
            excess = (distance - _clamp_of_pairs(clamps, same, distance)).clamp_(min=0)
            error = torch.addcmul(distance, excess, fraction, value=-1)
            for total, part in zip(totals, _by_kind(error, same), strict=True):
                total += (mask[:, :, 0] * (part @ counted)).sum((1, 2))
            if differentiate:
                slope = excess.sign_().mul_(-fraction).add_(1).div_(distance)  # e'(d) / d
                if floored:
                    slope.masked_fill_(distance <= eps, 0)
                pull = difference.mul_(slope[:, :, None])
                of_axes = None if same is None else same[:, :, None]
                for (grad_transforms, grad_points), part in zip(grads, _by_kind(pull, of_axes), strict=True):
                    flat = part.flatten(1, 2)  # [b, rows * 3, A]
                    grad_transforms[:, here] = (flat @ masked_points).unflatten(1, (-1, 3)) * mask
                    grad_points += (transform * mask).flatten(1, 2).mT @ flat
        for _, grad_points in grads:
            grad_points *= point_mask[:, None]
        ctx.save_for_backward(*(x for pair in grads for x in pair))
        return tuple(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Float[Tensor, " b"]) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        of_transforms, of_points = _weighted(grads, saved[::2]), _weighted(grads, saved[1::2])
        return of_transforms, of_points, None, None, None, None, None, None, None


def _clamp_of_pairs(
    clamps: tuple[float, ...], same: Bool[Tensor, "b f A"] | None, like: Float[Tensor, "b f A"]
) -> Float[Tensor, "b f A"] | float:
    """The largest error of each pair."""
    return clamps[0] if same is None else torch.full_like(like, clamps[1]).masked_fill_(same, clamps[0])


def _by_kind(values: Float[Tensor, "*f A"], same: Bool[Tensor, "*#f A"] | None) -> Iterator[Float[Tensor, "*f A"]]:
    """The values of all pairs; or, given which pairs are of one chain, those within chains and those across, 0 elsewhere."""
    if same is None:
        yield values
    else:
        yield values * same
        yield values * ~same


def _weighted(
    weights: Sequence[Float[Tensor, "#b"]], values: Sequence[Float[Tensor, "#b *c"]]
) -> Float[Tensor, "#b *c"]:
    """The weighted sum of the values."""
    first, *others = (w.view(-1, *[1] * (x.ndim - 1)) * x for w, x in zip(weights, values, strict=True))
    for other in others:
        first += other
    return first


def frame_aligned_point_error(
    frames: Rigid,
    true_frames: Rigid,
    frame_mask: Float[Tensor, "*#b F"],
    points: Float[Tensor, "*#b A 3"],
    true_points: Float[Tensor, "*#b A 3"],
    point_mask: Float[Tensor, "*#b A"],
    clamp_distance: float | None = CLAMP_DISTANCE,
    clamped_fraction: Float[Tensor, "*#b"] | None = None,
    length_scale: float = LENGTH_SCALE,
    eps: float = _EPS,
    exchange: Exchange = LocalExchange(),
    floored: bool = False,
) -> Float[Tensor, "*b"]:
    """Frame-aligned point error (algorithm 28): mean distance between points and true points, each seen from every frame and
    true frame.

    `frames` and `true_frames` are [*b, F]; all batch axes broadcast. `clamp_distance` in Å bounds each distance (None: no
    bound). `clamped_fraction` mixes the bounded error (1) with the unbounded one (0) per sample; the default is 1. The
    result is in units of `length_scale` Å. It is differentiable (once) in `frames` and `points`. The computation is in
    float32 or wider, regardless of autocast. On several ranks, each rank sums over its share of the frames and multiplies
    by the number of ranks. A distance is sqrt(d^2 + eps), or, if `floored`, max(d, eps) as in AlphaFold-Multimer's code.
    """
    (error,) = _mean_errors(
        frames, true_frames, frame_mask, points, true_points, point_mask, (_Kind(clamp_distance, length_scale),),
        None, clamped_fraction, eps, exchange, floored,
    )  # fmt: skip
    return error


def _mean_errors(
    frames: Rigid,
    true_frames: Rigid,
    frame_mask: Float[Tensor, "*#b F"],
    points: Float[Tensor, "*#b A 3"],
    true_points: Float[Tensor, "*#b A 3"],
    point_mask: Float[Tensor, "*#b A"],
    kinds: Sequence[_Kind],
    chain: Int[Tensor, "*#b F"] | None,
    clamped_fraction: Float[Tensor, "*#b"] | None,
    eps: float,
    exchange: Exchange,
    floored: bool,
) -> list[Float[Tensor, "*b"]]:
    """The mean error of each kind of pairs.

    With `chain`, the number of each residue's chain, there are two kinds, within and across chains; frames and points are then
    those of residues, under one mask. Other arguments: see `frame_aligned_point_error`.
    """
    batch = torch.broadcast_shapes(
        frames.shape[:-1], true_frames.shape[:-1], frame_mask.shape[:-1],
        points.shape[:-2], true_points.shape[:-2], point_mask.shape[:-1],
    )  # fmt: skip
    dtype = torch.promote_types(points.dtype, torch.float32)

    def flat(x: Tensor, inner: int) -> Tensor:
        shape = x.shape[x.ndim - inner :]
        return x.to(dtype).expand((*batch, *shape)).reshape((batch.numel(), *shape))

    frame_mask, point_mask = flat(frame_mask, 1), flat(point_mask, 1)
    here = exchange.owned(frame_mask.shape[1])
    if chain is None:
        pairs, chains = [frame_mask.sum(-1) * point_mask.sum(-1)], None
    else:
        of_chain = chain.expand((*batch, *chain.shape[-1:])).reshape(frame_mask.shape)
        pairs, chains = list(count_pairs(point_mask, of_chain)), (of_chain[:, here], of_chain)
    rotation, translation, true_rotation, true_translation, frame_mask = (
        x[:, here]
        for x in (
            flat(frames.rotation, 3), flat(frames.translation, 2),
            flat(true_frames.rotation, 3), flat(true_frames.translation, 2), frame_mask,
        )
    )  # fmt: skip
    points, true_points = flat(points, 2), flat(true_points, 2)
    # Translating a structure and its frames together changes rounding only, so both are moved near the origin.
    centre, true_centre = _centre(points, point_mask), _centre(true_points, point_mask)
    points, translation = points - centre, translation - centre
    true_points, true_translation = true_points - true_centre, true_translation - true_centre

    offset = _rotate(true_rotation.mT, true_translation) - _rotate(rotation.mT, translation)
    transforms = torch.cat([rotation.mT, -true_rotation.mT, offset[..., None]], dim=-1)
    stacked = torch.cat([points, true_points, torch.ones_like(points[..., :1])], dim=-1).mT.contiguous()
    clamps = tuple(float("inf") if kind.clamp is None else kind.clamp for kind in kinds)
    fraction = points.new_ones(len(points)) if clamped_fraction is None else flat(clamped_fraction, 0)
    with without_autocast(points.device):
        totals = _ErrorSum.apply(transforms, stacked, frame_mask, point_mask, fraction, clamps, eps, floored, chains)
    return [
        (exchange.ranks * total / (kind.scale * (eps + count))).reshape(batch)
        for total, count, kind in zip(totals, pairs, kinds, strict=True)
    ]


def backbone_fape(
    backbone: Rigid,
    true_backbone: Rigid,
    mask: Float[Tensor, "B R"],
    use_clamped_fape: Float[Tensor, " B"] | None = None,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, " B"]:
    """FAPE of the CA atoms in the backbone frames, mean over the iterations (line 17 of algorithm 20).

    `backbone` is [T, B, R], `true_backbone` [B, R]. `use_clamped_fape` is 1 where the error is clamped at 10 Å (the
    default) and 0 where it is not (supplement 1.11.5); values between mix the two.
    """
    error = frame_aligned_point_error(
        backbone, true_backbone, mask, backbone.translation, true_backbone.translation, mask,
        clamped_fraction=use_clamped_fape, exchange=exchange,
    )  # fmt: skip
    return error.mean(dim=0)


def backbone_fape_by_chain(
    backbone: Rigid,
    true_backbone: Rigid,
    mask: Float[Tensor, "B R"],
    chain: Int[Tensor, "B R"],
    use_clamped_fape: Float[Tensor, " B"] | None = None,
    interface_clamp: float = INTERFACE_CLAMP,
    exchange: Exchange = LocalExchange(),
    floored: bool = False,
) -> list[Float[Tensor, " B"]]:
    """The FAPE of `backbone_fape` within chains and across chains, each the mean over its own pairs, from one pass.

    `chain`: the number of each residue's chain. Errors within chains are clamped at 10 Å and in units of 10 Å, those across
    chains are clamped at `interface_clamp` Å and in units of 20 Å (AlphaFold-Multimer). `use_clamped_fape` holds for both, as
    in Uni-Fold. The second is 0 if there is one chain. `floored`: see `frame_aligned_point_error`.
    """
    kinds = _Kind(CLAMP_DISTANCE, LENGTH_SCALE), _Kind(interface_clamp, INTERFACE_SCALE)
    errors = _mean_errors(
        backbone, true_backbone, mask, backbone.translation, true_backbone.translation, mask, kinds,
        chain, use_clamped_fape, _EPS, exchange, floored,
    )  # fmt: skip
    return [error.mean(dim=0) for error in errors]


def sidechain_fape(
    frames: Rigid,
    true_frames: Rigid,
    frame_mask: Float[Tensor, "B R 8"],
    atom14: Float[Tensor, "B R 14 3"],
    true_atom14: Float[Tensor, "B R 14 3"],
    atom_mask: Float[Tensor, "B R 14"],
    exchange: Exchange = LocalExchange(),
    observed_frames: Int[Tensor, "B F"] | None = None,
    observed_atoms: Int[Tensor, "B A"] | None = None,
    floored: bool = False,
) -> Float[Tensor, " B"]:
    """FAPE of all atoms in all rigid groups (line 28 of algorithm 20), always clamped at 10 Å, in complexes across chains too.

    `frames` and `true_frames` are [B, R, 8]. The true structure has been renamed by `evodsp.losses.permutation`.
    `observed_frames` (of R x 8) and `observed_atoms` (of R x 14) list what the masks may mark. Without a list, frames and
    atoms that residues lack are computed and masked: three quarters of all pairs. `floored`: see `frame_aligned_point_error`.
    """
    frames, true_frames = (_listed(x, observed_frames) for x in (frames, true_frames))
    atom14, true_atom14 = (take(x.flatten(1, 2), observed_atoms) for x in (atom14, true_atom14))
    masks = take(frame_mask.flatten(1), observed_frames), take(atom_mask.flatten(1), observed_atoms)
    return frame_aligned_point_error(
        frames, true_frames, masks[0], atom14, true_atom14, masks[1], exchange=exchange, floored=floored
    )


def _centre(points: Float[Tensor, "b A 3"], mask: Float[Tensor, "b A"]) -> Float[Tensor, "b 1 3"]:
    """Mean of the unmasked points. It needs no gradient: the loss does not depend on it."""
    mask = mask[..., None]
    return ((points * mask).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True).clamp(min=1)).detach()


def _rotate(rotation: Float[Tensor, "b F 3 3"], vector: Float[Tensor, "b F 3"]) -> Float[Tensor, "b F 3"]:
    """Rotate a vector elementwise instead of by a matrix product, for the reason given in `_ErrorSum`."""
    return (rotation * vector[..., None, :]).sum(-1)


def _listed(frames: Rigid, observed: Int[Tensor, "B F"] | None) -> Rigid:
    """[B, R, 8] -> [B, F], or [B, R * 8] without a list."""
    return Rigid(take(frames.rotation.flatten(1, 2), observed), take(frames.translation.flatten(1, 2), observed))


def torsion_loss(
    angles: Float[Tensor, "T B R n 2"],
    truth: Float[Tensor, "B R n 2"],
    alternative: Float[Tensor, "B R n 2"],
    mask: Float[Tensor, "B R n"],
) -> Float[Tensor, " B"]:
    """Torsion angle loss (algorithm 27): squared distance on the unit circle to the true angle or its alternative, whichever is
    nearer; mean over T, R and n.

    `alternative` differs from `truth` by pi where the side chain is symmetric. `angles` have unit length. The training loss
    passes the four chi angles only, as AlphaFold2's code does, although the algorithm also lists the backbone torsions.
    """
    error = torch.minimum((angles - truth).square().sum(-1), (angles - alternative).square().sum(-1))
    return (error * mask).sum((0, 2, 3)) / (angles.shape[0] * mask.sum((1, 2)) + 1e-10)


def angle_norm_loss(angles: Float[Tensor, "T B R n 2"], mask: Float[Tensor, "B R"]) -> Float[Tensor, " B"]:
    """Absolute deviation of unnormalised angle vectors from unit length; mean over T, the residues of `mask` and n."""
    # 1e-6 keeps the root differentiable at zero.
    error = ((angles.square().sum(-1) + 1e-6).sqrt() - 1).abs()
    iterations, count = angles.shape[0], angles.shape[3]
    return (error * mask[..., None]).sum((0, 2, 3)) / (iterations * count * mask.sum(1) + 1e-10)
