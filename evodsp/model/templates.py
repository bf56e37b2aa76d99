"""Templates in the pair representation (algorithms 16 and 17) and in the MSA (algorithm 2, lines 7 to 13; supplement 1.7.1).

Shape legend: B batch, T templates, N = B x T, R residues, I J residues of the pair, c channels, H heads, D head width. Small
letters (i j) are this rank's shard of that axis; on one device they are the whole axis.
z is on J. Template features per residue are small and whole on every rank, and so are masks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from evodsp.config import TemplateConfig
from evodsp.geometry.frames import Rigid, atom37_to_torsion_angles
from evodsp.geometry.residues import CA, LETTERS_WITH_GAP, UNKNOWN, C, N
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams, draw_blocks
from evodsp.model.embedders import distance_one_hot, squared_edges
from evodsp.model.evoformer import Block, PairStack, Stack, pair_layers
from evodsp.model.precision import mask_bias, wide
from evodsp.model.primitives import LayerNorm, Linear, ShardedModule
from evodsp.model.sharded import Made, Sharded, Update
from evodsp.parallel.collectives import Axis
from evodsp.rng import Draws

TORSION_FEATURES = LETTERS_WITH_GAP + 2 * 14 + 7
PSI = 2
ORDER = ("attention_starting", "attention_ending", "triangle_outgoing", "triangle_incoming", "pair_transition")
"""The sub-layers of a block of the template pair stack."""

TemplatePair = Float[Tensor, "N _ _ c_t"]


@dataclass(frozen=True)
class AlignedStructures:
    """Structures of similar sequences, aligned to the query. Positions are in Å; absent atoms are at zero."""

    aatype: Int[Tensor, "B T R"]
    """Residue types, 20 unknown and 21 gap."""
    positions: Float[Tensor, "B T R 37 3"]
    atom_mask: Float[Tensor, "B T R 37"]
    beta: Float[Tensor, "B T R 3"]
    """CB positions, CA for glycine."""
    beta_mask: Float[Tensor, "B T R"]

    FEATURES: ClassVar[Mapping[str, str]] = {
        "aatype": "template_aatype",
        "positions": "template_all_atom_positions",
        "atom_mask": "template_all_atom_masks",
        "beta": "template_pseudo_beta",
        "beta_mask": "template_pseudo_beta_mask",
    }
    """The processed feature of each field, [batch, template, …]."""
    WHOLE: ClassVar[tuple[str, ...]] = ()
    """The fields without an axis of templates."""

    @classmethod
    def from_features(cls: type[Aligned], features: Mapping[str, Tensor]) -> Aligned:
        """The templates in AF2's processed features."""
        return cls(**{name: features[feature] for name, feature in cls.FEATURES.items()})

    def only(self: Aligned, some: slice) -> Aligned:
        """Some of the templates."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in self.WHOLE]
        return dataclasses.replace(self, **{name: getattr(self, name)[:, some] for name in names})


Aligned = TypeVar("Aligned", bound=AlignedStructures)


@dataclass(frozen=True)
class Templates(AlignedStructures):
    """Templates of a chain."""

    mask: Float[Tensor, "B T"]
    """0 for templates that only fill up the batch."""

    FEATURES: ClassVar[Mapping[str, str]] = {**AlignedStructures.FEATURES, "mask": "template_mask"}


class TemplatePairStack(Stack):
    """Template pair stack (algorithm 16), without its last layer norm. Templates are independent. It takes t on I and returns
    it on J. The entries of its batch are samples x templates.
    """

    takes: Axis = "i"

    sharded_inputs = (0,)

    def __init__(self, config: TemplateConfig, blocks: Sequence[Block] | None = None) -> None:
        """`blocks`: other blocks than those of algorithm 16."""
        if blocks is None:
            ends: list[tuple[Axis, Axis]] = [("i", "j" if left == 1 else "i") for left in range(config.blocks, 0, -1)]
            layers = (pair_layers(config.channels, config, order=ORDER) for _ in ends)
            blocks = [PairStack(config.channels, config, *own) for own in zip(layers, ends, strict=True)]
        super().__init__(blocks, config.checkpoint)

    def forward(
        self, t: TemplatePair, pair_mask: Float[Tensor, "N R R"], keys: DropoutKeys = NO_DROPOUT
    ) -> TemplatePair:
        """Takes t on `takes` and returns it on J. `keys`: keys of `dropout_streams`."""
        masks = draw_blocks(self.blocks, keys, residues=pair_mask.shape[1], kernels=self.kernels)
        for number, (block, own) in enumerate(zip(self.blocks, masks, strict=True)):
            t = self.run(number, self.recomputation.covers(number) and t.requires_grad, block, t, pair_mask, own)
        if not self.blocks and self.takes != "j":  # the last one would have sent t to J
            t = self.exchange.switch(t, self.takes, "j", whole=pair_mask.shape[1])
        return t


class TemplatePointwiseAttention(nn.Module):
    """Each pair of residues attends to the same pair in the templates (algorithm 17). z and t are on J."""

    def __init__(self, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.attention_heads, config.attention_head_width
        width = self.heads * self.head_width
        self.query = Linear(c_z, width, bias=False, init="glorot")
        self.key_value = Linear(config.channels, 2 * width, bias=False, init="glorot", parts=2)
        self.output = Linear(width, c_z, init="final")

    def forward(
        self, t: Float[Tensor, "B T I j c_t"], z: Float[Tensor, "B I j c_z"], template_mask: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B I j c_z"]:
        """The update of z. If all templates are masked, the weights are uniform, as in AF2; the caller masks the update."""
        logits, v = self.logits_and_values(t, z, template_mask)
        o = (logits.softmax(1).to(v.dtype).unsqueeze(-1) * v).sum(1, dtype=v.dtype)  # added up in float32 even in bf16
        return self.output(o.flatten(-2))

    def logits_and_values(
        self, t: Float[Tensor, "B T I j c_t"], z: Float[Tensor, "B I j c_z"], template_mask: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T I j H"], Float[Tensor, "B T I j H D"]]:
        """The logits of the attention weights, and the values."""
        q = self.query(z).unflatten(-1, (self.heads, -1)) * self.head_width**-0.5
        k, v = self.key_value(t).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        # One query and a few keys per residue pair: elementwise products are faster than R x R tiny matrix products.
        return (q.unsqueeze(1) * k).sum(-1, dtype=wide(k.dtype)) + mask_bias(template_mask)[:, :, None, None, None], v


class TemplateEmbedder(ShardedModule):
    """The update of the pair representation from templates (algorithm 2, lines 9 to 13). z is on J."""

    lower: Tensor

    def __init__(self, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        self.unit_vector = config.unit_vector
        self.embedding = Linear(config.distogram_bins + 2 * LETTERS_WITH_GAP + 5, config.channels, init="relu")
        self.stack = TemplatePairStack(config)
        self.norm = LayerNorm(config.channels)
        self.attention = TemplatePointwiseAttention(c_z, config)
        lower = squared_edges(config.distogram_min_distance, config.distogram_max_distance, config.distogram_bins)
        self.register_buffer("lower", lower, persistent=False)

    def dropout_streams(self, draws: Sequence[Draws], templates: int) -> Streams:
        """The dropout streams, a separate one for each template. `draws`: this module's stream for each sample.

        `templates`: number of templates of a sample.
        """
        return self.stack.dropout_streams([d.at("template", number) for d in draws for number in range(templates)])

    def forward(self, pair: Sharded, templates: Templates, keys: DropoutKeys = NO_DROPOUT) -> Update:
        """The update of z, zero for a sample without templates. `keys`: keys of `dropout_streams`."""
        if pair.in_pieces and keys.flat is None:  # dropout keys are for all templates together
            return self._one_after_another(pair, templates)
        update = self.attention(self.embedded(pair, templates, keys), pair.x, templates.mask)
        return Made(update * present(templates, update.dtype))

    def _one_after_another(self, pair: Sharded, templates: Templates) -> Update:
        """Embeds one template at a time. Of the templates before it only the weighted mean of their values and the logarithm
        of the sum of their weights are kept. Each template updates the mean, a few rows at a time.

        For a sample without templates the weights differ from those of `forward`; its update is zero in both.
        """
        z, attention = pair.x, self.attention
        mean = z.new_zeros(*z.shape[:-1], attention.heads, attention.head_width)
        total = z.new_full((*z.shape[:-1], attention.heads), -math.inf, dtype=wide(z.dtype))
        # The intermediates are queries, keys and values, their products and differences.
        width = z.shape[-1] + 8 * attention.query.out_features

        def take_in(one: Templates) -> None:
            t = self.embedded(pair, one, NO_DROPOUT)
            for rows in pair.budget.pieces(z, 1, pair.mask, width):
                logits, values = attention.logits_and_values(t[:, :, rows], z[:, rows], one.mask)
                total[:, rows] = torch.logaddexp(total[:, rows], logits[:, 0])
                share = (logits[:, 0] - total[:, rows]).exp().to(mean.dtype).unsqueeze(-1)
                mean[:, rows] = torch.lerp(mean[:, rows], values[:, 0], share)

        for number in range(templates.mask.shape[1]):
            take_in(templates.only(slice(number, number + 1)))

        def update(mean: Float[Tensor, "B i J H D"]) -> Float[Tensor, "B i J c_z"]:
            return attention.output(mean.flatten(-2)) * present(templates, z.dtype)

        return pair.update(update, mean, width=width)

    def embedded(self, pair: Sharded, templates: Templates, keys: DropoutKeys) -> Float[Tensor, "B T I j c_t"]:
        """The pair representation of each template, on J, from features in the dtype of `pair`."""
        batch, count = templates.mask.shape
        mask = pair.mask.unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)  # a view if there is one sample
        own = self.exchange.owned(pair.total_sizes[0])
        size = own.stop - own.start

        def features_of(rows: slice) -> Tensor:
            return self.embedding(self.pair_features(templates, rows).to(pair.x.dtype))

        width = 3 * self.embedding.in_features  # the features, their concatenation, and its product with the mask
        pieces = pair.budget.cut(size, 1, mask, width * templates.beta.element_size())
        t = pieces.collect(features_of, dim=2)  # axis 1 is that of the templates
        return self.norm(self.stack(t.flatten(0, 1), mask, keys)).unflatten(0, (batch, count))

    def pair_features(self, templates: Templates, rows: slice = slice(None)) -> Float[Tensor, "B T i J features"]:
        """Pair features of each template: CB distances, residue types of j and i, directions from i to j, masks. On I.

        `rows`: slice of this rank's rows. Features are masked where a residue lacks backbone atoms: absent residues are all
        at the origin and would look like neighbours.
        """
        whole = templates.beta.shape[2]
        residues = range(whole)[self.exchange.owned(whole)][rows]
        rows = slice(residues.start, residues.stop)
        beta, beta_mask = templates.beta[:, :, rows], templates.beta_mask[:, :, rows]
        distances = distance_one_hot(beta, templates.beta, self.lower)
        letters = F.one_hot(templates.aatype.long(), LETTERS_WITH_GAP).to(distances.dtype)
        has_backbone = backbone_mask(templates.atom_mask)
        both = outer(has_backbone[:, :, rows], has_backbone)
        if self.unit_vector:
            towards = positions_in_frames(templates.positions, rows, slice(None))
            towards = towards * torch.rsqrt(towards.square().sum(-1, keepdim=True) + 1e-6)
        else:
            towards = distances.new_zeros(*distances.shape[:-1], 3)
        shape = (*distances.shape[:-1], LETTERS_WITH_GAP)
        features = [
            distances,
            outer(beta_mask, templates.beta_mask),
            letters.unsqueeze(-3).expand(shape),
            letters[:, :, rows].unsqueeze(-2).expand(shape),
            towards,
            both,
        ]
        return torch.cat([f if f.ndim == 5 else f.unsqueeze(-1) for f in features], -1) * both.unsqueeze(-1)


class TemplateTorsionEmbedder(nn.Module):
    """Templates as rows of the MSA (algorithm 2, lines 7 and 8). A row counts where psi is defined, which depends on the
    residue's own backbone only.
    """

    width = TORSION_FEATURES
    mask = PSI - 7
    """The feature that is the mask of the rows."""

    def __init__(self, c_m: int) -> None:
        super().__init__()
        self.embedding = Linear(self.width, c_m, init="relu")
        self.projection = Linear(c_m, c_m, init="relu")

    def forward(
        self, features: Float[Tensor, "B T R width"]
    ) -> tuple[Float[Tensor, "B T R c_m"], Float[Tensor, "B T R"]]:
        """Rows to append to the MSA, and their mask, from what the method `features` returns."""
        rows = self.projection(self.embedding(features.to(self.embedding.weight.dtype)).relu())
        return rows, features[..., self.mask]

    @staticmethod
    def features(templates: Any) -> Float[Tensor, "B T R width"]:
        """The features of each residue, which `embedding` reads."""
        return template_torsion_features(templates)


@torch.no_grad()
def template_torsion_features(templates: AlignedStructures) -> Float[Tensor, "B T R 57"]:
    """Residue types, seven torsion angles as (sin, cos), the same in alternative naming, and which are defined.

    AF2 does NOT mask angles whose atoms are partly absent. Its network has learnt the values that result from atoms at the
    origin, so they are computed here too. One of them is rounding noise in AF2: omega if the previous residue has neither CA
    nor C, because two identical points define no plane. Here it is (0, 0), the same on every machine.
    """
    aatype = templates.aatype.clamp(max=UNKNOWN)
    defined = atom37_to_torsion_angles(aatype, templates.positions, templates.atom_mask)["torsion_angles_mask"]
    # Prepend a residue of zeros and declare every atom present, so that no angle is masked.
    padded = F.pad(templates.positions, (0, 0, 0, 0, 1, 0))
    angles = atom37_to_torsion_angles(F.pad(aatype, (1, 0)), padded, torch.ones_like(padded[..., 0]))
    residue_before = F.pad(torch.maximum(*(templates.atom_mask[..., atom] for atom in (CA, C))), (1, 0))[..., :-1]
    keep = torch.cat([residue_before.unsqueeze(-1), torch.ones_like(defined[..., 1:])], -1).unsqueeze(-1)
    own, alternative = (
        (angles[name][..., 1:, :, :] * keep).flatten(-2)
        for name in ("torsion_angles_sin_cos", "alt_torsion_angles_sin_cos")
    )
    return torch.cat(
        [F.one_hot(templates.aatype.long(), LETTERS_WITH_GAP).to(defined.dtype), own, alternative, defined], -1
    )


def present(templates: Templates, dtype: torch.dtype) -> Float[Tensor, "B 1 1 1"]:
    """1 for samples that have a template, otherwise 0."""
    return (templates.mask.sum(1) > 0).to(dtype)[:, None, None, None]


def backbone_mask(atom_mask: Float[Tensor, "B T R 37"]) -> Float[Tensor, "B T R"]:
    """1 where a residue has N, CA and C."""
    return torch.stack([atom_mask[..., atom] for atom in (N, CA, C)], -1).prod(-1)


def positions_in_frames(
    positions: Float[Tensor, "B T R 37 3"], rows: slice, columns: slice
) -> Float[Tensor, "B T I J 3"]:
    """Positions of the columns' CA atoms in the backbone frame of each of the rows, in Å."""
    n, ca, c = (positions[..., atom, :] for atom in (N, CA, C))
    # Here C lies on the POSITIVE x axis, unlike in `from_three_points`; so C is mirrored at CA first.
    mirrored, origin, plane = (x[:, :, rows] for x in (2.0 * ca - c, ca, n))
    frames = Rigid.from_three_points(mirrored, origin, plane, eps=1e-20)
    return frames.unsqueeze(-1).apply_inverse(ca[:, :, columns].unsqueeze(-3))


def outer(rows: Float[Tensor, "B T i"], columns: Float[Tensor, "B T J"]) -> Float[Tensor, "B T i J"]:
    return rows.unsqueeze(-1) * columns.unsqueeze(-2)
