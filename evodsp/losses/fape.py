"""Frame-aligned point error (algorithm 28) and the two losses made of it: backbone and side chains (supplement 1.9.2).

FAPE compares every point as seen from every frame, F x A distances. They are computed, summed and differentiated for a few
frames at a time, so no array of that size is ever held: memory is O(F + A), and the working set stays in a CPU's cache.
Frames and points are whole on every rank; each rank computes its share of the frames. No size depends on data. Positions
are in Å.

Shapes: b samples, F frames, A points, T iterations, B batch, R residues.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.geometry.rigid import Rigid
from evodsp.losses.pairs import rows_at_once, take
from evodsp.model.precision import without_autocast
from evodsp.parallel.exchange import Exchange, LocalExchange

CLAMP_DISTANCE = 10.0
"""Largest error in Å; larger errors are clamped to this (supplement 1.9.2)."""
LENGTH_SCALE = 10.0
"""Error in Å that gives a loss of 1."""


class _ErrorSum(torch.autograd.Function):
    """sum over f, a of frame_mask_f point_mask_a e(|M_f q_a|), with e(d) = d - w max(d - clamp, 0), per sample.

    `M_f` [3, 7] maps q_a = (predicted point, true point, 1) to the difference of the two points, each seen from its own frame.
    The forward pass also computes the gradients, which are as small as the inputs, while a chunk's distances are in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        transforms: Float[Tensor, "b F 3 7"],
        points: Float[Tensor, "b 7 A"],
        frame_mask: Float[Tensor, "b F"],
        point_mask: Float[Tensor, "b A"],
        clamped_fraction: Float[Tensor, " b"],
        clamp: float,
        eps: float,
    ) -> Float[Tensor, " b"]:
        (samples, frames), count = frame_mask.shape, point_mask.shape[1]
        rows = rows_at_once(samples * count, points.device)
        differentiate = any(ctx.needs_input_grad[:2])
        total = points.new_zeros(samples)
        grad_transforms, grad_points = torch.empty_like(transforms), torch.zeros_like(points)
        fraction, coordinates = clamped_fraction[:, None, None], points[:, None, None]  # [b, 1, 1, 7, A]
        # Masks multiply the small factors of each product, never an array of F x A.
        counted, masked_points = point_mask[:, :, None], (points * point_mask[:, None]).mT
        for start in range(0, frames, rows):
            here = slice(start, start + rows)
            transform, mask = transforms[:, here], frame_mask[:, here, None, None]
            # Seven scaled additions: a matrix product may round to TF32 or bf16, an error of 0.05 Å at 50 Å.
            difference = transform[..., 6:].expand(*transform.shape[:3], count).clone()
            for k in range(6):
                difference.addcmul_(transform[..., k : k + 1], coordinates[..., k, :])
            x, y, z = difference.unbind(2)
            distance = x.square().addcmul_(y, y).addcmul_(z, z).add_(eps).sqrt_()
            excess = (distance - clamp).clamp_(min=0)
            error = torch.addcmul(distance, excess, fraction, value=-1)
            total += (mask[:, :, 0] * (error @ counted)).sum((1, 2))
            if differentiate:
                slope = excess.sign_().mul_(-fraction).add_(1).div_(distance)  # e'(d) / d
                flat = difference.mul_(slope[:, :, None]).flatten(1, 2)  # [b, rows * 3, A]
                grad_transforms[:, here] = (flat @ masked_points).unflatten(1, (-1, 3)) * mask
                grad_points += (transform * mask).flatten(1, 2).mT @ flat
        grad_points *= point_mask[:, None]
        ctx.save_for_backward(grad_transforms, grad_points)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, " b"]) -> tuple[Tensor | None, ...]:
        grad_transforms, grad_points = ctx.saved_tensors
        grad = grad[:, None, None]
        return grad[..., None] * grad_transforms, grad * grad_points, None, None, None, None, None


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
    eps: float = 1e-4,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, "*b"]:
    """Mean distance between points and true points, each seen from every frame and true frame (algorithm 28).

    `frames` and `true_frames` are [*b, F]; all batch axes broadcast. `clamp_distance` in Å bounds each distance (None: no
    bound). `clamped_fraction` mixes the bounded error (1) with the unbounded one (0) per sample; the default is 1. The
    result is in units of `length_scale` Å. It is differentiable (once) in `frames` and `points`. The computation is in
    float32 or wider, regardless of autocast. On several ranks, each rank sums over its share of the frames and multiplies
    by the number of ranks.
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
    pairs = frame_mask.sum(-1) * point_mask.sum(-1)
    here = exchange.owned(frame_mask.shape[1])
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
    clamp = float("inf") if clamp_distance is None else clamp_distance
    fraction = points.new_ones(len(points)) if clamped_fraction is None else flat(clamped_fraction, 0)
    with without_autocast(points.device):
        total = exchange.ranks * _ErrorSum.apply(transforms, stacked, frame_mask, point_mask, fraction, clamp, eps)
    return (total / (length_scale * (eps + pairs))).reshape(batch)


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
) -> Float[Tensor, " B"]:
    """FAPE of all atoms in all rigid groups (line 28 of algorithm 20), always clamped at 10 Å.

    `frames` and `true_frames` are [B, R, 8]. The true structure has been renamed by `evodsp.losses.renaming`.
    `observed_frames` (of R x 8) and `observed_atoms` (of R x 14) list what the masks may mark. Without a list, frames and
    atoms that residues lack are computed and masked: three quarters of all pairs.
    """
    frames, true_frames = (_listed(x, observed_frames) for x in (frames, true_frames))
    atom14, true_atom14 = (take(x.flatten(1, 2), observed_atoms) for x in (atom14, true_atom14))
    masks = take(frame_mask.flatten(1), observed_frames), take(atom_mask.flatten(1), observed_atoms)
    return frame_aligned_point_error(frames, true_frames, masks[0], atom14, true_atom14, masks[1], exchange=exchange)


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
