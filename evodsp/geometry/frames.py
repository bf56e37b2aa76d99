"""Rigid motions of three-dimensional space, x -> R x + t; and torsion angles <-> rigid-group frames <-> atoms, with the
labels made from them (supplement 1.8.4 and 1.8.5). Constant tables are tensors.

Rotations are applied as sums of elementwise products, not as matrix products: coordinates must keep the precision of their
dtype, and a matrix product would be computed in TF32 or, under autocast, in bf16 (errors of 0.1 Å at 50 Å). All operations
broadcast over batch axes.

Shape legend: *b batch axes, R residues. Rigid groups: backbone, omega, phi, psi, chi1..chi4. Torsion angles are those of the
last seven groups, as (sin, cos). Frames are stored as 12 numbers: rotation row by row, then translation. Positions are in Å.
Missing residues have masks and coordinates of zero; everything computed from them is masked and finite, gradients included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from evodsp.geometry import residues
from evodsp.geometry.residues import CA, C, N, O


class Constant:
    """A table that never changes, such as those of `geometry.residues`, with one copy per device and dtype in use."""

    def __init__(self, table: Shaped[np.ndarray, "..."]) -> None:
        self._table = table
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """The whole table. Callers share this tensor and must not change it."""
        held = self._copies.get((device, dtype))
        if held is None:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training later
                held = torch.as_tensor(self._table).to(device, dtype)
            if type(held) is Tensor:  # a fake tensor can only be used in its own mode
                self._copies[device, dtype] = held
        return held

    def like(self, values: Tensor) -> Shaped[Tensor, "..."]:
        """The whole table on the device and in the dtype of `values`."""
        return self.on(values.device, values.dtype)

    def per_residue(self, aatype: Int[Tensor, "*b"], like: Tensor) -> Float[Tensor, "..."]:
        """The row of each residue's type, from a table [21, ...]: [*b, ...], in the dtype of `like`."""
        return self.like(like)[aatype.long()]


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


_RENAMED = residues.RENAMING_MATRICES.argmax(-1)  # [21, 14] the slot whose name each slot takes
_RENAMED_SLOT = Constant(_RENAMED)
_IS_AMBIGUOUS = Constant((np.arange(14) != _RENAMED).astype(np.float32))
_GROUP_OF_ATOM14 = Constant(np.eye(8, dtype=np.float32)[residues.RESTYPE_ATOM14_TO_RIGID_GROUP])  # [21, 14, 8] one-hot
_GROUP_POSITIONS = Constant(residues.RESTYPE_ATOM14_RIGID_GROUP_POSITIONS)
_DEFAULT_FRAME = Constant(residues.RESTYPE_RIGID_GROUP_DEFAULT_FRAME)
_GROUP_MASK = Constant(residues.RESTYPE_RIGID_GROUP_MASK)
_GROUP_IS_AMBIGUOUS = Constant(residues.RESTYPE_RIGID_GROUP_IS_AMBIGUOUS)
_BASE_ATOMS = Constant(residues.RESTYPE_RIGID_GROUP_BASE_ATOMS.reshape(-1, 24))
_ATOM14_MASK, _ATOM37_MASK = Constant(residues.RESTYPE_ATOM14_MASK), Constant(residues.RESTYPE_ATOM37_MASK)
_ATOM14_OF_37, _ATOM37_OF_14 = (
    Constant(residues.RESTYPE_ATOM37_TO_ATOM14),
    Constant(residues.RESTYPE_ATOM14_TO_ATOM37),
)
_CHI_ATOMS = Constant(residues.CHI_ANGLES_ATOM_INDICES.reshape(-1, 16))
_CHI_MASK, _CHI_PI_PERIODIC = Constant(residues.CHI_ANGLES_MASK), Constant(residues.CHI_PI_PERIODIC)
_PSEUDO_BETA = Constant(residues.PSEUDO_BETA_SLOT[:, None])
# Psi is measured to O, which lies opposite to the next residue's N: its (sin, cos) change sign.
_PSI_TURNED = Constant(np.array([1, 1, -1, 1, 1, 1, 1], np.float32)[:, None])
_TURN_ABOUT_Y = Constant(np.array([-1, 1, -1], np.float32))
_TURN_ABOUT_X = Constant(np.array([1, -1, -1], np.float32))


def torsion_angles_to_frames(backbone: Rigid, angles: Float[Tensor, "*b 7 2"], aatype: Int[Tensor, "*b"]) -> Rigid:
    """Frames [*b, 8] of all rigid groups (algorithms 24 and 25).

    `backbone`: frames [*b]. `angles`: unit vectors (sin, cos). Groups that a residue type lacks have a zero rotation.
    """
    default = _DEFAULT_FRAME.per_residue(aatype, angles)
    sin = torch.cat([torch.zeros_like(angles[..., :1, :1]), angles[..., :1]], -2)  # the backbone group does not rotate
    cos = torch.cat([torch.ones_like(angles[..., :1, 1:]), angles[..., 1:]], -2)
    x, y, z = default[..., :3, :3].unbind(-1)
    turned = Rigid(torch.stack([x, cos * y + sin * z, cos * z - sin * y], -1), default[..., :3, 3])
    chain = [turned[..., 4:5]]
    for group in (5, 6, 7):  # the parent of a side-chain group is the preceding one
        chain.append(chain[-1].compose(turned[..., group : group + 1]))
    return backbone.unsqueeze(-1).compose(Rigid.cat([turned[..., :4], *chain], -1))


def frames_to_atom14(frames: Rigid, aatype: Int[Tensor, "*b"]) -> Float[Tensor, "*b 14 3"]:
    """Atom positions from the frames [*b, 8] of the rigid groups (algorithm 24, line 11). Absent atoms are at the origin."""
    like = frames.translation
    # A one-hot sum instead of a gather: on a GPU the gather's backward adds in no fixed order.
    member = _GROUP_OF_ATOM14.per_residue(aatype, like)  # [*b, 14, 8]
    of_atom = Rigid(
        (member[..., None, None] * frames.rotation.unsqueeze(-4)).sum(-3),
        (member[..., None] * frames.translation.unsqueeze(-3)).sum(-2),
    )
    positions = of_atom.apply(_GROUP_POSITIONS.per_residue(aatype, like))
    return positions * _ATOM14_MASK.per_residue(aatype, like).unsqueeze(-1)


def atom14_to_atom37(atom14: Tensor, aatype: Int[Tensor, "*b"]) -> Tensor:
    """Values [*b, 37, ...] per atom name from values [*b, 14, ...] per atom of the residue. Absent atoms get zero."""
    mask = _ATOM37_MASK.per_residue(aatype, atom14)
    return _select(atom14, _ATOM14_OF_37, aatype) * _trailing(mask, atom14)


def atom37_to_atom14(atom37: Tensor, aatype: Int[Tensor, "*b"]) -> Tensor:
    """Values [*b, 14, ...] per atom of the residue from values [*b, 37, ...] per atom name. Absent atoms get zero."""
    mask = _ATOM14_MASK.per_residue(aatype, atom37)
    return _select(atom37, _ATOM37_OF_14, aatype) * _trailing(mask, atom37)


def atom37_to_torsion_angles(
    aatype: Int[Tensor, "*b R"], positions: Float[Tensor, "*b R 37 3"], mask: Float[Tensor, "*b R 37"]
) -> dict[str, Tensor]:
    """Torsion angles omega (of the bond before the residue), phi, psi, chi1..chi4 of given structures.

    The preceding residue is the preceding entry of the arrays, so missing residues must be included (and masked). Returns
    `torsion_angles_sin_cos` [*b, R, 7, 2]; `alt_torsion_angles_sin_cos`, with the symmetric side-chain angles turned by pi;
    `torsion_angles_mask` [*b, R, 7], 1 where all four atoms are present. Undefined angles are (0, 0).
    """
    mask = mask.to(positions.dtype)
    atoms = torch.cat([positions, mask.unsqueeze(-1)], -1)  # [*b, R, 37, xyz and mask]
    before = torch.cat([torch.zeros_like(atoms[..., :1, :, :]), atoms[..., :-1, :, :]], -3)
    # Slots are taken one at a time, because a list of slots would be copied to the device in each call.
    previous_ca, previous_c, n, ca, c, o = (
        *(before[..., slot, :] for slot in (CA, C)), *(atoms[..., slot, :] for slot in (N, CA, C, O))
    )  # fmt: skip
    backbone = [
        torch.stack(four, -2) for four in ((previous_ca, previous_c, n, ca), (previous_c, n, ca, c), (n, ca, c, o))
    ]
    chi = _select(atoms, _CHI_ATOMS, aatype).unflatten(-2, (4, 4))
    corners = torch.cat([torch.stack(backbone, -3), chi], -3)  # [*b, R, angle, corner, xyz and mask]

    first, second, third, fourth = corners[..., :3].unbind(-2)
    local = Rigid.from_three_points(second, third, first).apply_inverse(fourth)
    sin_cos = local[..., 1:].flip(-1)  # z, y
    sin_cos = sin_cos * torch.rsqrt(sin_cos.square().sum(-1, keepdim=True) + 1e-8) * _PSI_TURNED.like(positions)

    chi_mask = _CHI_MASK.per_residue(aatype, positions)
    exists = corners[..., 3].prod(-1) * torch.cat([torch.ones_like(chi_mask[..., :3]), chi_mask], -1)
    sin_cos = sin_cos * exists.unsqueeze(-1)
    is_symmetric = _CHI_PI_PERIODIC.per_residue(aatype, positions)
    turned = torch.cat([torch.ones_like(is_symmetric[..., :3]), 1.0 - 2.0 * is_symmetric], -1).unsqueeze(-1)
    return {
        "torsion_angles_sin_cos": sin_cos,
        "alt_torsion_angles_sin_cos": sin_cos * turned,
        "torsion_angles_mask": exists,
    }


def atom37_to_frames(
    aatype: Int[Tensor, "*b"], positions: Float[Tensor, "*b 37 3"], mask: Float[Tensor, "*b 37"]
) -> dict[str, Tensor]:
    """Frames of all rigid groups of given structures (algorithm 21, with each group's three base atoms).

    Returns `rigidgroups_gt_frames` [*b, 8, 12]; `rigidgroups_gt_exists` [*b, 8], 1 where all three atoms are present;
    `rigidgroups_group_exists`, 1 where the residue type has the group; `rigidgroups_group_is_ambiguous`, 1 where turning the
    group by pi swaps equivalent atoms; and `rigidgroups_alt_gt_frames`, with the ambiguous groups turned.
    """
    base = _select(positions, _BASE_ATOMS, aatype).unflatten(-2, (8, 3))
    base_mask = _select(mask.to(positions.dtype), _BASE_ATOMS, aatype).unflatten(-1, (8, 3))
    group_exists = _GROUP_MASK.per_residue(aatype, positions)
    is_ambiguous = _GROUP_IS_AMBIGUOUS.per_residue(aatype, positions)

    frames = Rigid.from_three_points(*base.unbind(-2))
    # The backbone's x axis points from CA to C, the other groups' axes away from their first atom.
    turn = torch.ones_like(frames.rotation[..., 0, :])
    turn[..., 0, :] = _TURN_ABOUT_Y.like(positions)
    frames = Rigid(frames.rotation * turn.unsqueeze(-2), frames.translation)
    turn = torch.where(is_ambiguous.unsqueeze(-1) > 0, _TURN_ABOUT_X.like(positions), 1.0)
    alternative = Rigid(frames.rotation * turn.unsqueeze(-2), frames.translation)
    return {
        "rigidgroups_gt_frames": frames.to_flat12(),
        "rigidgroups_gt_exists": group_exists * base_mask.prod(-1),
        "rigidgroups_group_exists": group_exists,
        "rigidgroups_group_is_ambiguous": is_ambiguous,
        "rigidgroups_alt_gt_frames": alternative.to_flat12(),
    }


def atom14_ground_truth(
    aatype: Int[Tensor, "*b"], positions: Float[Tensor, "*b 37 3"], mask: Float[Tensor, "*b 37"]
) -> dict[str, Tensor]:
    """Observed atoms in atom14 order, under both namings of equivalent atoms (supplement 1.8.5).

    Returns `atom14_gt_positions`, `atom14_alt_gt_positions` [*b, 14, 3] and [*b, 14]: `atom14_gt_exists`,
    `atom14_alt_gt_exists` (observed), `atom14_atom_is_ambiguous` and `atom14_atom_exists` (by residue type).
    """
    exists = atom37_to_atom14(mask.to(positions.dtype), aatype)
    atom14 = atom37_to_atom14(positions, aatype) * exists.unsqueeze(-1)
    return {
        "atom14_gt_positions": atom14,
        "atom14_gt_exists": exists,
        "atom14_alt_gt_positions": _select(atom14, _RENAMED_SLOT, aatype),
        "atom14_alt_gt_exists": _select(exists, _RENAMED_SLOT, aatype),
        "atom14_atom_is_ambiguous": _IS_AMBIGUOUS.per_residue(aatype, positions),
        "atom14_atom_exists": _ATOM14_MASK.per_residue(aatype, positions),
    }


@overload
def pseudo_beta(
    aatype: Int[Tensor, "*b"], positions: Float[Tensor, "*b 37 3"], mask: None = None
) -> Float[Tensor, "*b 3"]: ...
@overload
def pseudo_beta(
    aatype: Int[Tensor, "*b"], positions: Float[Tensor, "*b 37 3"], mask: Float[Tensor, "*b 37"]
) -> tuple[Float[Tensor, "*b 3"], Float[Tensor, "*b"]]: ...
def pseudo_beta(
    aatype: Int[Tensor, "*b"], positions: Float[Tensor, "*b 37 3"], mask: Float[Tensor, "*b 37"] | None = None
) -> Float[Tensor, "*b 3"] | tuple[Float[Tensor, "*b 3"], Float[Tensor, "*b"]]:
    """CB position (CA for glycine); with a mask, also 1 where that atom is present."""
    beta = _select(positions, _PSEUDO_BETA, aatype).squeeze(-2)
    return beta if mask is None else (beta, _select(mask, _PSEUDO_BETA, aatype).squeeze(-1))


@torch.no_grad()
def structure_labels(
    aatype: Int[Tensor, " R"], positions: Float[Tensor, "R 37 3"], mask: Float[Tensor, "R 37"]
) -> dict[str, Tensor]:
    """All labels that the losses need, from a chain's observed atoms.

    These are the arrays of the four functions above and: `all_atom_positions`, `all_atom_mask`, the input; `chi_angles`,
    `chi_mask` [R, 4], side-chain angles in radians; `backbone_affine_mask` [R], 1 where N, CA and C are present;
    `pseudo_beta` [R, 3], `pseudo_beta_mask` [R]. The backbone frames are `rigidgroups_gt_frames[:, 0]`.
    """
    torsions = atom37_to_torsion_angles(aatype, positions, mask)
    frames = atom37_to_frames(aatype, positions, mask)
    beta, beta_mask = pseudo_beta(aatype, positions, mask)
    return {
        "all_atom_positions": positions,
        "all_atom_mask": mask,
        **torsions,
        **frames,
        **atom14_ground_truth(aatype, positions, mask),
        "chi_angles": torch.atan2(*torsions["torsion_angles_sin_cos"][..., 3:, :].unbind(-1)),
        "chi_mask": torsions["torsion_angles_mask"][..., 3:],
        "backbone_affine_mask": frames["rigidgroups_gt_exists"][..., 0],
        "pseudo_beta": beta,
        "pseudo_beta_mask": beta_mask,
    }


def _trailing(mask: Tensor, values: Tensor) -> Tensor:
    """`mask` with trailing axes of size one, so that it broadcasts with `values`."""
    return mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))


def _select(values: Tensor, table: Constant, aatype: Int[Tensor, "*b"]) -> Tensor:
    """Gather from values [*b, n, ...] per atom the m slots that the table [21, m] lists per residue type: [*b, m, ...]."""
    slots = table.on(aatype.device, torch.int64)[aatype.long()]
    return torch.take_along_dim(values, _trailing(slots, values), dim=aatype.ndim)
