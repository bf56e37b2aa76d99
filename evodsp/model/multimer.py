"""The parts of AlphaFold-Multimer's model that are not AlphaFold2's: relative positions that know chains, and templates of
single chains. The order of its blocks' sub-layers is `evodsp.config.MULTIMER`.

Shape legend: B batch, T templates, N = B x T, S sequences, R residues, I J residues of the pair, c c_m c_z channels. A small
letter (s r j) is this rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.
Templates have z on J.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from evodsp.config import EmbedderConfig, TemplateConfig
from evodsp.geometry.frames import atom37_to_torsion_angles
from evodsp.geometry.residues import LETTERS_WITH_GAP, UNKNOWN
from evodsp.model.dropout import NO_DROPOUT, DropoutKeys, Streams
from evodsp.model.embedders import differences, distance_one_hot, squared_edges
from evodsp.model.evoformer import PairStack
from evodsp.model.primitives import LayerNorm, Linear, ShardedModule
from evodsp.model.sharded import Made, Sharded, Update
from evodsp.model.templates import (
    AlignedStructures,
    TemplatePairStack,
    TemplateTorsionEmbedder,
    backbone_mask,
    outer,
    positions_in_frames,
)
from evodsp.rng import Draws

CHIS = 4
CHAIN_TORSION_FEATURES = LETTERS_WITH_GAP + 3 * CHIS


class ChainRelativePosition(Linear):
    """Embedding of how two residues lie to each other: their distance along the chain, or that they are in other chains;
    whether their chains have the same sequence; and the difference of the numbers of these copies. Without the layer's bias.

    The columns of its weight are those of three one-hot vectors, side by side: 2 k + 2 distances, 1 for equal sequences,
    2 q + 2 differences of copies; k and q are the settings' bounds.
    """

    computes_in_float32 = True

    def __init__(self, c_z: int, config: EmbedderConfig) -> None:
        self.max_offset, self.max_chain = config.max_relative_position, config.max_relative_chain
        super().__init__(2 * self.max_offset + 2 + 1 + 2 * self.max_chain + 2, c_z)

    def forward(  # type: ignore[override]
        self, features: Mapping[str, Tensor], rows: slice, columns: slice
    ) -> Float[Tensor, "B I j c_z"]:
        """The embeddings of the given rows and columns."""
        of_offsets, of_equal, of_copies = self.weight.t().split([2 * self.max_offset + 2, 1, 2 * self.max_chain + 2])

        def bins(name: str, bound: int, same: Tensor) -> Tensor:
            clipped = differences(features[name], rows, columns).clamp(-bound, bound) + bound
            return torch.where(same, clipped, 2 * bound + 1).long()

        same_chain, same_sequence = (
            differences(features[name], rows, columns) == 0 for name in ("asym_id", "entity_id")
        )
        # The last difference of copies means another sequence; all others come with an equal one.
        of_copies = torch.cat([of_copies[:-1] + of_equal, of_copies[-1:]])
        offsets = F.embedding(bins("residue_index", self.max_offset, same_chain), of_offsets)
        return offsets + F.embedding(bins("sym_id", self.max_chain, same_sequence), of_copies)


@dataclass(frozen=True)
class ChainTemplates(AlignedStructures):
    """Templates of a complex, each aligned to the chains one by one. A template that is not there has no atoms."""

    chain: Int[Tensor, "B R"]
    """The number of each residue's chain."""

    FEATURES: ClassVar[Mapping[str, str]] = {**AlignedStructures.FEATURES, "chain": "asym_id"}
    WHOLE: ClassVar[tuple[str, ...]] = ("chain",)


class ChainTemplateStack(TemplatePairStack):
    """The template pair stack: pair stacks of Evoformer blocks. It takes t on J and returns it on J."""

    takes = "j"

    def __init__(self, config: TemplateConfig) -> None:
        super().__init__(config, [PairStack(config.channels, config) for _ in range(config.blocks)])


class ChainTemplateEmbedder(ShardedModule):
    """The update of the pair representation from templates: the mean of the embedded templates, without attention.

    Each template is embedded together with the pair representation. Missing templates count in the mean, as in AF-Multimer's
    code. Distances and directions between chains are hidden, because a template is of one chain.
    """

    lower: Tensor

    def __init__(self, c_z: int, config: TemplateConfig) -> None:
        super().__init__()
        c = config.channels
        self.distances = Linear(config.distogram_bins, c, init="relu")
        self.beta_mask = Linear(1, c, init="relu")
        self.column_type = Linear(LETTERS_WITH_GAP, c, init="relu")
        self.row_type = Linear(LETTERS_WITH_GAP, c, init="relu")
        self.direction_x = Linear(1, c, init="relu")
        self.direction_y = Linear(1, c, init="relu")
        self.direction_z = Linear(1, c, init="relu")
        self.backbone_mask = Linear(1, c, init="relu")
        self.query_norm = LayerNorm(c_z)
        self.query = Linear(c_z, c, init="relu")
        self.stack = ChainTemplateStack(config)
        self.norm = LayerNorm(c)
        self.output = Linear(c, c_z, init="relu")
        lower = squared_edges(config.distogram_min_distance, config.distogram_max_distance, config.distogram_bins)
        self.register_buffer("lower", lower, persistent=False)

    def dropout_streams(self, draws: Sequence[Draws], templates: int) -> Streams:
        """The dropout streams, a separate one for each template. `draws`: this module's stream for each sample.

        `templates`: number of templates of a sample.
        """
        return self.stack.dropout_streams([d.at("template", number) for d in draws for number in range(templates)])

    def forward(self, pair: Sharded, templates: ChainTemplates, keys: DropoutKeys = NO_DROPOUT) -> Update:
        """The update of z. `keys`: keys of `dropout_streams`."""
        if pair.in_pieces and keys.flat is None:  # dropout keys are for all templates together
            return self._one_after_another(pair, templates)
        return Made(self.output(self.embedded(pair, templates, keys).mean(1).relu()))

    def _one_after_another(self, pair: Sharded, templates: ChainTemplates) -> Update:
        """Embeds one template at a time, of which only the sum is kept."""
        count = templates.aatype.shape[1]
        total = self.embedded(pair, templates.only(slice(1)), NO_DROPOUT)[:, 0]
        for number in range(1, count):
            total += self.embedded(pair, templates.only(slice(number, number + 1)), NO_DROPOUT)[:, 0]
        width = total.shape[-1] + pair.x.shape[-1]
        return pair.update(lambda rows: self.output((rows / count).relu()), total, width=width)

    def embedded(self, pair: Sharded, templates: ChainTemplates, keys: DropoutKeys) -> Float[Tensor, "B T I j c_t"]:
        """The pair representation of each template, on J."""
        batch, count = templates.aatype.shape[:2]
        mask = pair.mask.unsqueeze(1).expand(-1, count, -1, -1).flatten(0, 1)  # a view if there is one sample

        def rows_of(rows: slice) -> Tensor:
            return self._embedding(pair, templates, rows)

        # The intermediates are features, their sum with four other terms, and the norm of the query.
        width = 2 * self.distances.in_features + 5 * self.query.out_features + 2 * self.query.in_features
        pieces = pair.budget.cut(pair.total_sizes[0], 1, mask, width * templates.beta.element_size())
        t = pieces.collect(rows_of, dim=2)  # axis 1 is that of the templates
        return self.norm(self.stack(t.flatten(0, 1), mask, keys)).unflatten(0, (batch, count))

    def _embedding(self, pair: Sharded, templates: ChainTemplates, rows: slice) -> Float[Tensor, "B T I j c_t"]:
        """The embedding of some rows: the sum of the layers of all features."""
        dtype, columns = pair.x.dtype, self.exchange.owned(pair.total_sizes[0])
        types = templates.aatype.long()
        layers = (
            self.distances, self.beta_mask, self.direction_x, self.direction_y, self.direction_z, self.backbone_mask,
        )  # fmt: skip
        every = *layers, self.column_type, self.row_type, self.query
        # Not the sum of a stack, whose backward pass gives all biases one and the same memory as their gradients.
        bias = torch.zeros_like(self.query.bias)
        for layer in every:
            bias = bias + layer.bias
        features = self.features(templates, rows, columns).to(dtype)
        embedding = F.linear(features, torch.cat([layer.weight for layer in layers], 1), bias)
        embedding = embedding + F.embedding(types[:, :, columns], self.column_type.weight.t()).unsqueeze(2)
        embedding = embedding + F.embedding(types[:, :, rows], self.row_type.weight.t()).unsqueeze(3)
        return embedding + F.linear(self.query_norm(pair.x[:, rows]), self.query.weight).unsqueeze(1)

    def features(self, templates: ChainTemplates, rows: slice, columns: slice) -> Float[Tensor, "B T I j features"]:
        """Pair features of each template: CB distances, directions from i to j, and the masks of both."""
        same = (differences(templates.chain, rows, columns) == 0).unsqueeze(1)
        beta, beta_mask = templates.beta, templates.beta_mask
        both = outer(beta_mask[:, :, rows], beta_mask[:, :, columns]) * same
        distances = distance_one_hot(beta[:, :, rows], beta[:, :, columns], self.lower) * both.unsqueeze(-1)
        backbone = backbone_mask(templates.atom_mask)
        frames = (outer(backbone[:, :, rows], backbone[:, :, columns]) * same).unsqueeze(-1)
        towards = positions_in_frames(templates.positions, rows, columns)
        towards = towards / towards.square().sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
        return torch.cat([distances, both.unsqueeze(-1), towards * frames, frames], -1)


class ChainTorsionEmbedder(TemplateTorsionEmbedder):
    """Templates as rows of the MSA. A row counts where chi1 is defined."""

    width, mask = CHAIN_TORSION_FEATURES, -CHIS

    @staticmethod
    @torch.no_grad()
    def features(templates: AlignedStructures) -> Float[Tensor, "B T R 34"]:
        """Residue types, the sines and the cosines of chi1 to chi4, and which of these angles are defined."""
        aatype = templates.aatype.clamp(max=UNKNOWN)
        found = atom37_to_torsion_angles(aatype, templates.positions, templates.atom_mask)
        defined = found["torsion_angles_mask"][..., -CHIS:]
        sines, cosines = (found["torsion_angles_sin_cos"][..., -CHIS:, :] * defined.unsqueeze(-1)).unbind(-1)
        types = F.one_hot(templates.aatype.long(), LETTERS_WITH_GAP).to(defined.dtype)
        return torch.cat([types, sines, cosines, defined], -1)
