"""Structure module (algorithms 20 to 24). Lengths are in nm inside and in Å in the result.

Shape legend: B batch, R residues, i this rank's shard of the residues as rows of the pair (on one device all of them),
T iterations, H heads, D scalar width, P query points, V value points. The pair representation stays sharded: each rank computes
attention for its rows. Tensors without a second residue axis are small, and whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from evodsp.config import StructureModuleConfig
from evodsp.geometry.frames import atom14_to_atom37, frames_to_atom14, torsion_angles_to_frames
from evodsp.geometry.residues import RESTYPE_ATOM37_MASK
from evodsp.geometry.rigid import Rigid
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams
from evodsp.model.in_place import Budgeted, collected
from evodsp.model.kernels.dropout import draw_masks
from evodsp.model.outputs import StructureOutput
from evodsp.model.precision import without_autocast
from evodsp.model.primitives import LayerNorm, Linear, ShardedModule
from evodsp.rng import Draws

NM_TO_ANGSTROM = 10.0
ANGLES = 7
PLACES = ("attention", "transition")
"""Dropout follows these layers, in every iteration."""


@dataclass(frozen=True)
class PairRows:
    """The pair representation that all iterations read, normalised and on I: whole, or a few rows at a time.

    In single precision it is twice as large as in bf16. So without gradients its rows are normalised where they are needed,
    again in each iteration.
    """

    of: Callable[[slice], Float[Tensor, "B n R c_z"]]
    """Some of its rows."""
    pieces: Sequence[slice]
    """All of them, in order."""

    @classmethod
    def whole(cls, z: Float[Tensor, "B i R c_z"]) -> PairRows:
        return cls(lambda rows: z[:, rows], [slice(None)])


class InvariantPointAttention(ShardedModule):
    """Invariant point attention (algorithm 22). z on I.

    Squared distances between points are expanded, |q|^2 + |k|^2 - 2 q.k, so that the scalar and the point part of the logits
    are one matrix product and no tensor of size R x R x H x P x 3 exists. Points are first shifted by the centre of the
    chain, which changes no distance and keeps the expansion accurate in fp32.
    """

    def __init__(self, c_s: int, c_z: int, config: StructureModuleConfig) -> None:
        super().__init__()
        self.config = config
        h, d, e = config.heads, config.scalar_query_width, config.scalar_value_width
        p, v = config.query_points, config.value_points
        self.query = Linear(c_s, h * d)
        self.key_value = Linear(c_s, h * (d + e))
        self.query_points = Linear(c_s, 3 * h * p)
        self.key_value_points = Linear(c_s, 3 * h * (p + v))
        self.pair_bias = Linear(c_z, h)
        self.point_weight = nn.Parameter(torch.full((h,), math.log(math.e - 1.0)))  # its softplus is 1
        self.output = Linear(h * (e + 4 * v + c_z), c_s, init="final")

    def forward(
        self,
        s: Float[Tensor, "B R c_s"],
        z: PairRows,
        pair_bias: Float[Tensor, "B H i R"],
        frames: Rigid,
        mask: Float[Tensor, "B R"],
    ) -> Float[Tensor, "B R c_s"]:
        """The update of s. `pair_bias`: `self.pair_bias` of z, computed once for all iterations. `frames`: [B, R], in nm."""
        c = self.config
        p = c.query_points
        rows = self.exchange.owned(s.shape[1])
        q = self.query(s[:, rows]).unflatten(-1, (c.heads, -1))
        k, v = self.key_value(s).unflatten(-1, (c.heads, -1)).split((c.scalar_query_width, c.scalar_value_width), -1)
        centre = (frames.translation * mask.unsqueeze(-1)).sum(1, keepdim=True) / (mask.sum(1).view(-1, 1, 1) + 1e-6)
        local = frames[:, :, None, None]
        centred = Rigid(local.rotation, local.translation - centre.detach()[:, :, None, None])
        q_points = centred[:, rows].apply(self._points(self.query_points(s[:, rows])))  # [B, i, H, P, 3]
        k_points, v_points = centred.apply(self._points(self.key_value_points(s))).split((p, c.value_points), -2)

        # Equal variance of the three parts of the logits at the start (supplement 1.8.2).
        scalar_scale = math.sqrt(1.0 / (3.0 * c.scalar_query_width))
        point_scale = math.sqrt(1.0 / (3.0 * p * 4.5)) * F.softplus(self.point_weight)  # [H]
        q_all = torch.cat([q * scalar_scale, (q_points * point_scale[:, None, None]).flatten(-2)], -1).transpose(1, 2)
        k_all = torch.cat([k, k_points.flatten(-2)], -1).transpose(1, 2)  # [B, H, R, D + 3P]
        q_square = (q_points.square().sum((-1, -2)) * (-0.5 * point_scale)).transpose(1, 2).unsqueeze(-1)
        k_square = (k_points.square().sum((-1, -2)) * (-0.5 * point_scale)).transpose(1, 2).unsqueeze(-2)
        values = torch.cat([v, v_points.flatten(-2)], -1).transpose(1, 2)

        def updated(some: slice) -> Tensor:  # [B, n, c_s], of n of this rank's rows
            # All rows are `slice(None)`, which is free; the gradient of another slice is a copy.
            here = rows if some == slice(None) else slice(rows.start + some.start, rows.start + some.stop)
            logits = q_all[:, :, some] @ k_all.transpose(-1, -2) + q_square[:, :, some] + k_square
            logits = logits + math.sqrt(1.0 / 3.0) * pair_bias[:, :, some]
            logits = logits - 1e5 * (1.0 - mask[:, None, here, None] * mask[:, None, None, :])
            weights = logits.softmax(-1)  # [B, H, n, R]
            o, o_points = (weights @ values).transpose(1, 2).split((c.scalar_value_width, 3 * c.value_points), -1)
            o_points = centred[:, here].apply_inverse(o_points.unflatten(-1, (-1, 3)))  # [B, n, H, V, 3]
            o_norms = (o_points.square().sum(-1) + 1e-8).sqrt()
            o_pair = weights.transpose(1, 2) @ z.of(some)  # [B, n, H, c_z]
            x, y, w = (part.flatten(-2) for part in o_points.unbind(-1))
            return self.output(torch.cat([o.flatten(-2), x, y, w, o_norms.flatten(-2), o_pair.flatten(-2)], -1))

        update = collected(updated, z.pieces, 1, rows.stop - rows.start)
        return self.exchange.gather(update, "i", whole=s.shape[1])

    def _points(self, flat: Float[Tensor, "B _ n"]) -> Float[Tensor, "B _ H p 3"]:
        """The projection holds all x, then all y, then all z coordinates."""
        return torch.stack(flat.unflatten(-1, (3, self.config.heads, -1)).unbind(2), -1)


class AngleBlock(nn.Module):
    """Residual block of the angle network (algorithm 20, line 12)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first = Linear(c, c, init="relu")
        self.second = Linear(c, c, init="final")

    def forward(self, a: Float[Tensor, "B R c"]) -> Float[Tensor, "B R c"]:
        return a + self.second(self.first(a.relu()).relu())


class AngleNetwork(nn.Module):
    """Side-chain and backbone torsion angles (algorithm 20, lines 11 to 14)."""

    def __init__(self, c_s: int, config: StructureModuleConfig) -> None:
        super().__init__()
        c = config.angle_channels
        self.current = Linear(c_s, c)
        self.initial = Linear(c_s, c)
        self.blocks = nn.ModuleList(AngleBlock(c) for _ in range(config.angle_blocks))
        self.angles = Linear(c, 2 * ANGLES)

    def forward(
        self, s: Float[Tensor, "B R c_s"], s_initial: Float[Tensor, "B R c_s"]
    ) -> tuple[Float[Tensor, "B R 7 2"], Float[Tensor, "B R 7 2"]]:
        """Unit (sin, cos) vectors, and the same before normalisation."""
        a = self.current(s.relu()) + self.initial(s_initial.relu())
        for block in self.blocks:
            a = block(a)
        raw = self.angles(a.relu()).unflatten(-1, (ANGLES, 2))
        return raw / raw.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt(), raw


class StructureModule(Budgeted):
    """Backbone frames, torsion angles and all atoms from the single and pair representations (algorithm 20)."""

    atom37_mask: Tensor
    computes_in_float32 = True

    def __init__(self, c_s: int, c_z: int, config: StructureModuleConfig) -> None:
        super().__init__()
        self.config = config
        self.single_norm = LayerNorm(c_s)
        self.pair_norm = LayerNorm(c_z)
        self.initial = Linear(c_s, c_s)
        self.attention = InvariantPointAttention(c_s, c_z, config)
        self.attention_norm = LayerNorm(c_s)
        last = config.transition_layers - 1
        self.transition = nn.ModuleList(
            Linear(c_s, c_s, init="final" if n == last else "relu") for n in range(config.transition_layers)
        )
        self.transition_norm = LayerNorm(c_s)
        self.backbone_update = Linear(c_s, 6, init="final")
        self.angle_network = AngleNetwork(c_s, config)
        self.register_buffer("atom37_mask", torch.from_numpy(RESTYPE_ATOM37_MASK).float(), persistent=False)

    def dropout_streams(self, draws: Sequence[Draws]) -> Streams:
        """The streams of dropout. `draws`: this module's stream for each sample."""
        iterations = range(self.config.iterations)
        return {(place, n): [d.at(place, n) for d in draws] for place in PLACES for n in iterations}

    def forward(
        self,
        s: Float[Tensor, "B R c_s"],
        z: Float[Tensor, "B i R c_z"],
        aatype: Int[Tensor, "B R"],
        mask: Float[Tensor, "B R"],
        keys: DropoutKeys = NO_DROPOUT,
    ) -> StructureOutput:
        """Runs in the parameters' precision even under autocast, as in AF2: bf16 would misplace atoms by 0.1 Å.

        `keys`: of `dropout_streams`.
        """
        dtype = self.initial.weight.dtype
        with without_autocast(s.device):
            return self._fold(s.to(dtype), self._normalised(z, mask), aatype, mask, keys)

    def _normalised(self, z: Float[Tensor, "B i R c_z"], mask: Float[Tensor, "B R"]) -> PairRows:
        dtype = self.initial.weight.dtype
        if self.budget is None:
            return PairRows.whole(self.pair_norm(z.to(dtype)))
        # The rows in single precision, normalised; logits, the mask, and what they become.
        width = 2 * z.shape[-1] + 6 * self.config.heads
        pair_mask = mask.unsqueeze(2).expand(-1, -1, mask.shape[1])
        pieces = self.budget.cut(z.shape[1], 1, pair_mask, width * self.initial.weight.element_size())
        return PairRows(lambda rows: self.pair_norm(z[:, rows].to(dtype)), pieces)

    def _fold(
        self,
        s: Float[Tensor, "B R c_s"],
        z: PairRows,
        aatype: Int[Tensor, "B R"],
        mask: Float[Tensor, "B R"],
        keys: DropoutKeys,
    ) -> StructureOutput:
        s_initial = self.single_norm(s)
        own = self.exchange.owned(s.shape[1])
        bias = collected(lambda rows: self.attention.pair_bias(z.of(rows)), z.pieces, 1, own.stop - own.start)
        pair_bias = bias.permute(0, 3, 1, 2)
        s = self.initial(s_initial)
        frames = Rigid.identity(tuple(mask.shape), like=s)
        backbones, angles, raw_angles = [], [], []
        kept = self._kept(keys, s)
        for iteration in range(self.config.iterations):
            s = s + self.attention(s, z, pair_bias, frames, mask)
            s = self.attention_norm(s if kept is None else s * kept[iteration])
            update = s
            for layer in self.transition[:-1]:
                update = layer(update).relu()
            s = s + self.transition[-1](update)
            s = self.transition_norm(s if kept is None else s * kept[self.config.iterations + iteration])
            frames = frames.compose(self._update(self.backbone_update(s)))
            unit, raw = self.angle_network(s, s_initial)
            backbones.append(frames.scale_translation(NM_TO_ANGSTROM))
            angles.append(unit)
            raw_angles.append(raw)
            # Earlier rotations get gradients only from their own losses; otherwise training is unstable (supplement 1.8.3).
            frames = frames.stop_rotation_gradient()
        groups = torsion_angles_to_frames(backbones[-1], angles[-1], aatype)
        atom14 = frames_to_atom14(groups, aatype)
        return StructureOutput(
            backbone=Rigid.stack(backbones, 0),
            angles=torch.stack(angles),
            unnormalized_angles=torch.stack(raw_angles),
            frames=groups,
            atom14=atom14,
            positions=atom14_to_atom37(atom14, aatype),
            mask=self.atom37_mask[aatype.long()] * mask.unsqueeze(-1),
            single=s,
        )

    @staticmethod
    def _update(vector: Float[Tensor, "B R 6"]) -> Rigid:
        """Backbone update (algorithm 23): the quaternion (1, b, c, d), normalised, and a translation in the local frame."""
        quaternion = torch.cat([torch.ones_like(vector[..., :1]), vector[..., :3]], -1)
        quaternion = quaternion / quaternion.square().sum(-1, keepdim=True).sqrt()
        return Rigid.from_quaternion(quaternion, vector[..., 3:])

    def _kept(self, keys: DropoutKeys, s: Float[Tensor, "B R c_s"]) -> Float[Tensor, "n B R c_s"] | None:
        """Factors of all dropout layers, 0 or 1 / (1 - rate): first those after attention, then those after the transition."""
        rate = self.config.dropout
        if keys.flat is None or rate == 0.0:
            return None
        paths = [(place, iteration) for place in PLACES for iteration in range(self.config.iterations)]
        masks = draw_masks(keys.stack(paths), s[0].numel(), rate)
        return masks.view(-1, *s.shape).to(s.dtype) * (1.0 / (1.0 - rate))
