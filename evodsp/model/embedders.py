"""Input, extra-MSA and recycling embedders (algorithms 3, 4 and 32).

Shape legend: B batch, S clusters of the MSA, E extra sequences, R residues, I J residues of the pair, c channels. A small
letter (s e j) is this rank's shard of that axis; on one device it is the whole axis. Every rank computes only its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from evodsp.config import ChannelsConfig, EmbedderConfig
from evodsp.geometry.residues import LETTERS_WITH_MASK
from evodsp.model.primitives import LayerNorm, Linear, ShardedModule

TARGET_CHANNELS = 22
MSA_CHANNELS = 49
EXTRA_MSA_CHANNELS = 25


class RelativePosition(Linear):
    """Embedding of the distance along the chain (algorithm 4): the layer of a one-hot vector, without its bias."""

    computes_in_float32 = True
    """The gradient of a column of the weight is a sum over thousands of residue pairs."""

    def __init__(self, c_z: int, config: EmbedderConfig) -> None:
        self.max_offset = config.max_relative_position
        super().__init__(2 * self.max_offset + 1, c_z)

    def forward(  # type: ignore[override]
        self, features: Mapping[str, Tensor], rows: slice, columns: slice
    ) -> Float[Tensor, "B I j c_z"]:
        """The embeddings of the given rows and columns."""
        offset = differences(features["residue_index"], rows, columns)
        bins = offset.clamp(-self.max_offset, self.max_offset).long() + self.max_offset
        # A linear layer applied to a one-hot vector selects a column of its weight, so no [R, R, 65] tensor is needed.
        return F.embedding(bins, self.weight.t())


class InputEmbedder(ShardedModule):
    """Initial MSA and pair representations from the sequence and the clustered MSA (algorithms 3 and 4).

    `relative_position`: makes the layer that embeds the residues' places in their chains; it reads the features itself.
    """

    def __init__(
        self,
        channels: ChannelsConfig,
        config: EmbedderConfig,
        target_channels: int = TARGET_CHANNELS,
        relative_position: Callable[[int, EmbedderConfig], Linear] = RelativePosition,
    ) -> None:
        super().__init__()
        self.left = Linear(target_channels, channels.pair)
        self.right = Linear(target_channels, channels.pair)
        self.target_to_msa = Linear(target_channels, channels.msa)
        self.msa = Linear(MSA_CHANNELS, channels.msa)
        self.relative_position = relative_position(channels.pair, config)

    def msa_representation(
        self, target_feat: Float[Tensor, "B R c_t"], msa_feat: Float[Tensor, "B s R 49"]
    ) -> Float[Tensor, "B s R c_m"]:
        """The initial m, sharded along S as `msa_feat` is."""
        return self.msa(msa_feat) + self.target_to_msa(target_feat).unsqueeze(1)

    def pair_representation(
        self, features: Mapping[str, Tensor], rows: slice = slice(None)
    ) -> Float[Tensor, "B I j c_z"]:
        """The given rows of the initial z, on J."""
        target_feat = features["target_feat"]
        columns = self.exchange.owned(target_feat.shape[1])
        left, right = self.left(target_feat[:, rows]).unsqueeze(2), self.right(target_feat[:, columns]).unsqueeze(1)
        relative = self.relative_position(features, rows, columns)
        return (relative + left + right + self.relative_position.bias).to(left.dtype)


class ExtraMSAEmbedder(nn.Module):
    """Extra-MSA representation (algorithm 2, line 16)."""

    def __init__(self, channels: ChannelsConfig) -> None:
        super().__init__()
        self.linear = Linear(EXTRA_MSA_CHANNELS, channels.extra_msa)

    def forward(
        self,
        extra_msa: Int[Tensor, "B e R"],
        has_deletion: Float[Tensor, "B e R"],
        deletion_value: Float[Tensor, "B e R"],
    ) -> Float[Tensor, "B e R c_e"]:
        letters = F.one_hot(extra_msa.long(), LETTERS_WITH_MASK).to(has_deletion.dtype)
        return self.linear(torch.cat([letters, has_deletion.unsqueeze(-1), deletion_value.unsqueeze(-1)], -1))


class RecyclingEmbedder(ShardedModule):
    """Embeds the results of the previous pass, to be added to the input of the next (algorithm 32). The update of the MSA's
    first row is `msa_norm` of it; `pair_update` is the update of the pair.
    """

    lower: Tensor

    def __init__(self, channels: ChannelsConfig, config: EmbedderConfig) -> None:
        super().__init__()
        self.distance = Linear(config.recycle_bins, channels.pair)
        self.pair_norm = LayerNorm(channels.pair)
        self.msa_norm = LayerNorm(channels.msa)
        lower = squared_edges(config.recycle_min_distance, config.recycle_max_distance, config.recycle_bins)
        self.register_buffer("lower", lower, persistent=False)

    def pair_update(
        self, z: Float[Tensor, "B I j c_z"], beta: Float[Tensor, "B R 3"], rows: slice = slice(None)
    ) -> Float[Tensor, "B I j c_z"]:
        """The update of the given rows of the pair, on J. `z`: the same rows of the previous pass. `beta`: CB positions of
        the previous pass (CA for glycine), in Å; all zero in the first pass.
        """
        return self.pair_norm(z) + self.distance(self.distogram(beta, rows).to(z.dtype))

    def distogram(self, beta: Float[Tensor, "B R 3"], rows: slice = slice(None)) -> Float[Tensor, "B I j bins"]:
        """Distances from the residues of the given rows to all others as one-hot bins, on J."""
        return distance_one_hot(beta[:, rows], beta[:, self.exchange.owned(beta.shape[1])], self.lower)


def differences(of: Int[Tensor, "B R"], rows: slice, columns: slice) -> Int[Tensor, "B I j"]:
    """The value of each of the rows minus that of each of the columns."""
    return of[:, rows].unsqueeze(2) - of[:, columns].unsqueeze(1)


def squared_edges(first: float, last: float, bins: int) -> Float[Tensor, " bins"]:
    """Squares of the bins' lower edges, evenly spaced from `first` to `last`, in Å."""
    return torch.linspace(first, last, bins) ** 2


def distance_one_hot(
    rows: Float[Tensor, "*b I 3"], columns: Float[Tensor, "*b J 3"], lower: Float[Tensor, " bins"]
) -> Float[Tensor, "*b I J bins"]:
    """Binned distances as one-hot vectors (algorithm 5). `lower`: squared lower edges of the bins.

    A distance below the first bin gives all zeros; the last bin has no upper edge.
    """
    squared = (rows.unsqueeze(-2) - columns.unsqueeze(-3)).square().sum(-1, keepdim=True)
    upper = F.pad(lower[1:], (0, 1), value=1e8)
    return ((squared > lower) & (squared < upper)).to(rows.dtype)
