"""Rigid motions of three-dimensional space: x -> R x + t.

Rotations are applied as sums of elementwise products, not as matrix products: coordinates must keep the precision of their
dtype, and a matrix product would be computed in TF32 or, under autocast, in bf16 (errors of 0.1 Å at 50 Å).
Shapes: *b batch axes. All operations broadcast over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.geometry.constants import Constant

Index = int | slice | None | EllipsisType


@dataclass(frozen=True)
class Rigid:
    """A batch of rigid motions. `self.compose(other)` applies `other` first."""

    rotation: Float[Tensor, "*b 3 3"]
    """Rotation matrices."""
    translation: Float[Tensor, "*b 3"]
    """Translations, in the unit of the points."""

    @classmethod
    def identity(cls, shape: Sequence[int], like: Tensor) -> Rigid:
        """Identity motions with batch shape `shape` and the dtype and device of `like`."""
        eye = torch.eye(3, dtype=like.dtype, device=like.device)
        return cls(eye.expand(*shape, 3, 3), like.new_zeros(*shape, 3))

    @classmethod
    def from_three_points(
        cls,
        negative_x_axis: Float[Tensor, "*b 3"],
        origin: Float[Tensor, "*b 3"],
        xy_plane: Float[Tensor, "*b 3"],
        eps: float = 1e-8,
    ) -> Rigid:
        """Frames by Gram-Schmidt (algorithm 21, with AF2's choice of the first point).

        The first point lies on the negative x axis, the second is the origin, and the third lies in the xy plane at positive y.
        `eps` is added under the square root of each norm. It keeps the result and its gradient finite for coinciding points
        (absent atoms at the origin); their rotation is the zero matrix.
        """
        e0 = _normalised(origin - negative_x_axis, eps)
        in_plane = xy_plane - origin
        e1 = _normalised(in_plane - e0 * (e0 * in_plane).sum(-1, keepdim=True), eps)
        e2 = torch.linalg.cross(e0, e1)
        return cls(torch.stack([e0, e1, e2], -1), origin)

    @classmethod
    def from_quaternion(cls, quaternion: Float[Tensor, "*b 4"], translation: Float[Tensor, "*b 3"]) -> Rigid:
        """The rotations of unit quaternions (w, x, y, z), with translations. The caller normalises the quaternions
        (algorithm 23).
        """
        products = (quaternion.unsqueeze(-1) * quaternion.unsqueeze(-2)).flatten(-2)
        rotation = (products.unsqueeze(-2) * _ROTATION_OF_PRODUCTS.like(quaternion)).sum(-1)
        return cls(rotation.unflatten(-1, (3, 3)), translation)

    @classmethod
    def from_flat12(cls, flat: Float[Tensor, "*b 12"]) -> Rigid:
        """Motions from 9 rotation entries, row by row, and 3 translation entries: the form in which labels store frames."""
        return cls(flat[..., :9].unflatten(-1, (3, 3)), flat[..., 9:])

    def to_flat12(self) -> Float[Tensor, "*b 12"]:
        """The inverse of `from_flat12`."""
        return torch.cat([self.rotation.flatten(-2), self.translation], -1)

    @property
    def shape(self) -> torch.Size:
        """Batch shape."""
        return self.translation.shape[:-1]

    def compose(self, other: Rigid) -> Rigid:
        """The composition x -> self(other(x)). Batch shapes broadcast."""
        moved = rotated(self.rotation, torch.cat([other.rotation, other.translation.unsqueeze(-1)], -1))
        rotation, translation = moved.split((3, 1), -1)
        return Rigid(rotation, translation.squeeze(-1) + self.translation)

    def apply(self, points: Float[Tensor, "*points 3"]) -> Float[Tensor, "*out 3"]:
        """The points moved by self. The leading axes of the points broadcast with the batch."""
        return rotated(self.rotation, points.unsqueeze(-1)).squeeze(-1) + self.translation

    def apply_inverse(self, points: Float[Tensor, "*points 3"]) -> Float[Tensor, "*out 3"]:
        """The points in self's local coordinates: the inverse of `apply`."""
        return rotated(self.rotation.mT, (points - self.translation).unsqueeze(-1)).squeeze(-1)

    def apply_to_planes(self, points: Float[Tensor, "*b 3 n"]) -> Float[Tensor, "*b 3 n"]:
        """`apply` to n points of each motion, given as all their x, then all y, then all z: the fast order for many points."""
        return rotated(self.rotation, points) + self.translation.unsqueeze(-1)

    def apply_inverse_to_planes(self, points: Float[Tensor, "*b 3 n"]) -> Float[Tensor, "*b 3 n"]:
        """`apply_inverse` to n points of each motion, in the order of `apply_to_planes`."""
        return rotated(self.rotation.mT, points - self.translation.unsqueeze(-1))

    def scale_translation(self, factor: float) -> Rigid:
        """The same motion with its translation multiplied by `factor` (a change of unit)."""
        return Rigid(self.rotation, self.translation * factor)

    def stop_rotation_gradient(self) -> Rigid:
        """The same motion, with the rotation detached from the graph (algorithm 20, line 20)."""
        return Rigid(self.rotation.detach(), self.translation)

    def unsqueeze(self, dim: int) -> Rigid:
        """Insert a batch axis of size one at `dim`; negative `dim` counts from the last batch axis."""
        return Rigid(self.rotation.unsqueeze(_axis(dim, 2)), self.translation.unsqueeze(_axis(dim, 1)))

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Rigid:
        """Basic indexing of the batch axes."""
        index = index if isinstance(index, tuple) else (index,)
        return Rigid(self.rotation[(*index, slice(None), slice(None))], self.translation[(*index, slice(None))])

    @classmethod
    def stack(cls, motions: Sequence[Rigid], dim: int = 0) -> Rigid:
        """Stack batches of one shape along a new batch axis `dim`."""
        rotations = torch.stack([m.rotation for m in motions], _axis(dim, 2))
        return cls(rotations, torch.stack([m.translation for m in motions], _axis(dim, 1)))

    @classmethod
    def cat(cls, motions: Sequence[Rigid], dim: int = 0) -> Rigid:
        """Concatenate batches along batch axis `dim`."""
        rotations = torch.cat([m.rotation for m in motions], _axis(dim, 2))
        return cls(rotations, torch.cat([m.translation for m in motions], _axis(dim, 1)))


torch.export.register_dataclass(Rigid)  # registered as a pytree, because FSDP2 finds tensors in pytrees only


def _axis(dim: int, trailing: int) -> int:
    """Batch axis `dim` as an axis of a tensor that has `trailing` axes after the batch axes."""
    return dim if dim >= 0 else dim - trailing


def _normalised(vector: Float[Tensor, "*b 3"], eps: float) -> Float[Tensor, "*b 3"]:
    return vector * torch.rsqrt(vector.square().sum(-1, keepdim=True) + eps)


def _rotation_of_products() -> np.ndarray:
    """[9, 16]: each entry of the rotation matrix, row by row, as a sum of products of two of a quaternion's four numbers."""
    terms = [
        "ww+xx-yy-zz", "xy+yx-wz-zw", "xz+zx+wy+yw",
        "xy+yx+wz+zw", "ww-xx+yy-zz", "yz+zy-wx-xw",
        "xz+zx-wy-yw", "yz+zy+wx+xw", "ww-xx-yy+zz",
    ]  # fmt: skip
    table = np.zeros((9, 4, 4), np.float32)
    for entry, term in enumerate(terms):
        for sign, first, second in zip("+" + term[2::3], term[0::3], term[1::3], strict=True):
            table[entry, "wxyz".index(first), "wxyz".index(second)] = 1 if sign == "+" else -1
    return table.reshape(9, 16)


_ROTATION_OF_PRODUCTS = Constant(_rotation_of_products())


def rotated(rotation: Float[Tensor, "*b 3 3"], points: Float[Tensor, "*points 3 n"]) -> Float[Tensor, "*out 3 n"]:
    """rotation @ points, as sums of elementwise products. Leading axes broadcast."""
    out: Tensor = _Rotated.apply(rotation, points)
    return out


class _Rotated(torch.autograd.Function):
    """rotation @ points as sums, with gradients as sums too. With autograd alone, three products take five times as many
    operators.
    """

    @staticmethod
    def forward(ctx: Any, rotation: Tensor, points: Tensor) -> Tensor:
        ctx.save_for_backward(rotation, points)
        return _sum_of_columns(rotation, points)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rotation, points = ctx.saved_tensors
        of_rotation = of_points = None
        if ctx.needs_input_grad[0]:
            products = grad.unsqueeze(-2) * points.unsqueeze(-3)  # [*out, 3, 3, n]
            of_rotation = products.sum(-1).sum_to_size(rotation.shape)
        if ctx.needs_input_grad[1]:
            of_points = _sum_of_columns(rotation.mT, grad).sum_to_size(points.shape)
        return of_rotation, of_points


def _sum_of_columns(
    rotation: Float[Tensor, "*b 3 3"], points: Float[Tensor, "*points 3 n"]
) -> Float[Tensor, "*out 3 n"]:
    """The sum of the rotation's columns, weighted by the coordinates."""
    columns, (x, y, z) = rotation.unsqueeze(-1).unbind(-2), points.unsqueeze(-3).unbind(-2)
    return (columns[0] * x).addcmul_(columns[1], y).addcmul_(columns[2], z)
