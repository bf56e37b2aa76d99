"""Structure module (algorithms 20 to 24). Lengths are in nm inside and in Å in the result.

Shape legend: B batch, R residues, i this rank's shard of the residues as rows of the pair (on one device all of them),
T iterations, H heads, D scalar width, P query points, V value points. The pair representation stays sharded: each rank computes
attention for its rows. Tensors without a second residue axis are small, and whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from evodsp.config import StructureModuleConfig
from evodsp.geometry.frames import Rigid, atom14_to_atom37, frames_to_atom14, torsion_angles_to_frames
from evodsp.geometry.residues import RESTYPE_ATOM37_MASK
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams
from evodsp.model.graphs import Recorded
from evodsp.model.heads import StructureOutput
from evodsp.model.kernels.chunked import draw_masks
from evodsp.model.precision import without_autocast
from evodsp.model.primitives import Budgeted, LayerNorm, Linear, ShardedModule
from evodsp.model.sharded import Pieces
from evodsp.rng import Draws

ANGLES = 7
PLACES = ("attention", "transition")
"""Layers after which dropout is applied, in every iteration."""


@dataclass(frozen=True)
class PairRows:
    """The pair representation that all iterations read, normalised and on I: whole, or a few rows at a time.

    In single precision it is twice as large as in bf16. So with a memory budget its rows are normalised when they are read,
    again in each iteration.
    """

    of: Callable[[slice], Float[Tensor, "B n R c_z"]]
    """Function that returns some rows."""
    pieces: Pieces
    """All rows."""

    @classmethod
    def whole(cls, z: Float[Tensor, "B i R c_z"]) -> PairRows:
        return cls(lambda rows: z[:, rows], Pieces([slice(None)], 1, z.shape[1]))


@dataclass(frozen=True)
class PointAttentionTerms:
    """Tensors that all iterations of invariant point attention share."""

    weight: Float[Tensor, "n c_s"]
    """Weights of the four projections of s, joined: for each head the scaled query, key and value; then all x of each head's
    query, key and value points, all y and all z."""
    bias: Float[Tensor, " n"]
    point_scale: Float[Tensor, " H"]
    logits: Float[Tensor, "B H i R"]
    """The terms of the logits that come from the pair representation and the mask."""
    centring: Float[Tensor, "B R 1"]
    """Weight of each residue in the mean position of its chain."""


class InvariantPointAttention(ShardedModule):
    """Invariant point attention (algorithm 22). z is on I.

    Squared distances between points are expanded, |q|^2 + |k|^2 - 2 q.k, so that the scalar and the point part of the logits
    are one matrix product and no tensor of size R x R x H x P x 3 exists. Points are first shifted by the centre of the
    chain, which changes no distance and keeps the expansion accurate in fp32.
    """

    def __init__(self, c_s: int, c_z: int, config: StructureModuleConfig) -> None:
        super().__init__()
        self.config = config
        h, d, e = config.heads, config.scalar_query_width, config.scalar_value_width
        p, v = config.query_points, config.value_points
        self.query = Linear(c_s, h * d, bias=config.scalar_bias)
        self.key_value = Linear(c_s, h * (d + e), bias=config.scalar_bias)
        self.query_points = Linear(c_s, 3 * h * p)
        self.key_value_points = Linear(c_s, 3 * h * (p + v))
        self.pair_bias = Linear(c_z, h)
        self.point_weight = nn.Parameter(torch.full((h,), math.log(math.e - 1.0)))  # its softplus is 1
        self.output = Linear(h * (e + 4 * v + c_z), c_s, init="final")

    def shared(self, z: PairRows, mask: Float[Tensor, "B R"]) -> PointAttentionTerms:
        """The tensors that the iterations of a pass share. z is on I, `mask` is whole."""
        c, rows = self.config, self.exchange.owned(mask.shape[1])
        # Equal variance of the three parts of the logits at the start (supplement 1.8.2).
        scalar_scale = math.sqrt(1.0 / (3.0 * c.scalar_query_width))
        point_scale = math.sqrt(1.0 / (3.0 * c.query_points * 4.5)) * F.softplus(self.point_weight)

        def joined(of: Callable[[Linear], Tensor]) -> Tensor:
            scalars = [of(self.query) * scalar_scale, of(self.key_value)]
            points = [of(self.query_points), of(self.key_value_points)]  # all x, then all y, then all z
            return torch.cat(
                [
                    torch.cat([x.unflatten(0, (c.heads, -1)) for x in scalars], 1).flatten(0, 1),
                    torch.cat([x.unflatten(0, (3, c.heads, -1)) for x in points], 2).flatten(0, 2),
                ]
            )

        def logits(some: slice) -> Tensor:  # [B, H, n, R], of n of this rank's rows
            absent = 1.0 - mask[:, None, _within(rows, some), None] * mask[:, None, None]
            of_pair = self.pair_bias(z.of(some)).permute(0, 3, 1, 2)
            return torch.add(math.sqrt(1.0 / 3.0) * of_pair, absent, alpha=-1e5).contiguous()

        return PointAttentionTerms(
            joined(lambda layer: layer.weight),
            joined(lambda layer: layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias),
            point_scale,
            z.pieces.collect(logits, dim=2),
            (mask / (mask.sum(1, keepdim=True) + 1e-6)).unsqueeze(-1),
        )

    def forward(
        self, s: Float[Tensor, "B R c_s"], z: PairRows, shared: PointAttentionTerms, frames: Rigid
    ) -> Float[Tensor, "B R c_s"]:
        """The update of s. `frames`: [B, R], in the module's unit of length."""
        c = self.config
        h, d, e, p, v = c.heads, c.scalar_query_width, c.scalar_value_width, c.query_points, c.value_points
        rows = self.exchange.owned(s.shape[1])
        scalars, points = F.linear(s, shared.weight, shared.bias).split((h * (2 * d + e), 3 * h * (2 * p + v)), -1)
        query, key, value = scalars.unflatten(-1, (h, -1)).transpose(1, 2).split((d, d, e), -1)  # [B, H, R, D]
        centre = (frames.translation.detach() * shared.centring).sum(1, keepdim=True)
        centred = Rigid(frames.rotation, frames.translation - centre)
        points = centred.apply_to_planes(points.unflatten(-1, (3, -1))).unflatten(-1, (h, -1))  # [B, R, 3, H, 2P + V]
        query_points, key_points, value_points = points.permute(0, 3, 1, 2, 4).split((p, p, v), -1)  # [B, H, R, 3, P]

        scaled = query_points * shared.point_scale.view(-1, 1, 1, 1)
        queries = torch.cat([query, scaled.flatten(-2)], -1)[:, :, rows]
        keys = torch.cat([key, key_points.flatten(-2)], -1)  # [B, H, R, D + 3P]
        values = torch.cat([value, value_points.flatten(-2)], -1)
        key_square = key_points.square().sum((-1, -2)) * (-0.5 * shared.point_scale).unsqueeze(-1)  # [B, H, R]

        def updated(some: slice) -> Tensor:  # [B, n, c_s], of n of this rank's rows
            added = shared.logits[:, :, some] + key_square.unsqueeze(-2)
            logits = torch.baddbmm(added.flatten(0, 1), queries[:, :, some].flatten(0, 1), keys.flatten(0, 1).mT)
            weights = logits.softmax(-1).view_as(added)  # [B, H, n, R]
            o, o_points = (weights @ values).transpose(1, 2).split((e, 3 * v), -1)  # [B, n, H, e]
            planes = o_points.unflatten(-1, (3, -1)).transpose(2, 3).flatten(-2)  # [B, n, 3, H V]
            planes = centred[:, _within(rows, some)].apply_inverse_to_planes(planes)
            norms = (planes.square().sum(-2) + 1e-8).sqrt()
            o_pair = weights.transpose(1, 2) @ z.of(some)  # [B, n, H, c_z]
            return self.output(torch.cat([o.flatten(-2), planes.flatten(-2), norms, o_pair.flatten(-2)], -1))

        update = z.pieces.collect(updated)
        return self.exchange.gather(update, "i", whole=s.shape[1])


def _within(rows: slice, some: slice) -> slice:
    """The slice of the whole that some of a rank's rows are. (`slice(None)`, all of them, needs no copy; other slices do.)"""
    return rows if some == slice(None) else slice(rows.start + some.start, rows.start + some.stop)


class AngleBlock(nn.Module):
    """Residual block of the angle network (algorithm 20, line 12)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first = Linear(c, c, init="relu")
        self.second = Linear(c, c, init="final")

    def forward(self, a: Float[Tensor, "*T B R c"]) -> Float[Tensor, "*T B R c"]:
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
        self, s: Float[Tensor, "*T B R c_s"], s_initial: Float[Tensor, "B R c_s"]
    ) -> tuple[Float[Tensor, "*T B R 7 2"], Float[Tensor, "*T B R 7 2"]]:
        """Unit (sin, cos) vectors, and the vectors before normalisation. All iterations are computed together, because none
        needs another's angles.
        """
        a = self.current(s.relu()) + self.initial(s_initial.relu())
        for block in self.blocks:
            a = block(a)
        raw = self.angles(a.relu()).unflatten(-1, (ANGLES, 2))
        return raw / raw.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt(), raw


class StructureModule(Recorded, Budgeted):
    """Backbone frames, torsion angles and all atoms from the single and pair representations (algorithm 20)."""

    sharded_inputs = (1,)
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

    def settings(self) -> Hashable | None:
        return super().settings(), self.memory

    def dropout_streams(self, draws: Sequence[Draws]) -> Streams:
        """The dropout streams of the module. `draws`: this module's stream for each sample."""
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
        """Runs in the parameters' precision even under autocast, as in AF2: bf16 would misplace atoms by 0.1 Å. `keys`: keys
        of `dropout_streams`.
        """
        dtype = self.initial.weight.dtype
        with without_autocast(s.device):
            return self._fold(s.to(dtype), self._normalised(z, mask), aatype, mask, keys)

    def _normalised(self, z: Float[Tensor, "B i R c_z"], mask: Float[Tensor, "B R"]) -> PairRows:
        dtype = self.initial.weight.dtype
        if not self.budget.in_place:
            return PairRows.whole(self.pair_norm(z.to(dtype)))
        # The intermediates are rows in single precision, normalised rows, logits, the mask, and their sum.
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
        shared = self.attention.shared(z, mask)
        s = self.initial(s_initial)
        frames = Rigid.identity(tuple(mask.shape), like=s)
        motions, states = [], []
        kept = self._kept(keys, s)
        for iteration in range(self.config.iterations):
            s = s + self.attention(s, z, shared, frames)
            s = self.attention_norm(s if kept is None else s * kept[iteration])
            update = s
            for layer in self.transition[:-1]:
                update = layer(update).relu()
            s = s + self.transition[-1](update)
            s = self.transition_norm(s if kept is None else s * kept[self.config.iterations + iteration])
            frames = frames.compose(self._update(self.backbone_update(s)))
            motions.append(frames)
            states.append(s)
            # Earlier rotations get gradients only from their own losses; otherwise training is unstable (supplement 1.8.3).
            frames = frames.stop_rotation_gradient()
        angles, raw_angles = self.angle_network(torch.stack(states), s_initial)
        backbone = motions[-1].scale_translation(self.config.position_scale)
        groups = torsion_angles_to_frames(backbone, angles[-1], aatype)
        atom14 = frames_to_atom14(groups, aatype)
        return StructureOutput(
            backbone=Rigid.stack(motions, 0).scale_translation(self.config.position_scale),
            angles=angles,
            unnormalized_angles=raw_angles,
            frames=groups,
            atom14=atom14,
            positions=atom14_to_atom37(atom14, aatype),
            mask=self.atom37_mask[aatype.long()] * mask.unsqueeze(-1),
            single=s,
        )

    @staticmethod
    def _update(vector: Float[Tensor, "B R 6"]) -> Rigid:
        """Backbone update (algorithm 23): the quaternion (1, b, c, d), normalised, and a translation in the local frame."""
        quaternion = F.pad(vector[..., :3], (1, 0), value=1.0)
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
