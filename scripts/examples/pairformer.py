"""A trunk of one's own: AlphaFold3's MSA module and Pairformer, without diffusion, each sample spread over several ranks.

    torchrun --nproc-per-node 2 -m scripts.examples.pairformer --sequence 2      (or srun, or mpirun; 1 is one process)

It learns distances between residues of the bundled proteins, and which atoms are resolved. Algorithm numbers are those of
AlphaFold3's supplement; docs/parallelize.md explains the parts of evodsp that this file uses.

Shapes: B batch, S sequences, R residues, I J residues of the pair, H heads, c channels. A small letter (s i j) is this rank's
shard of that axis. Masks are whole on every rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.config import ChannelsConfig, EmbedderConfig, EvoformerConfig, FeatureConfig, HeadsConfig
from evodsp.data.samples.dataset import SampleDataset, collate
from evodsp.data.samples.raw_features import FEATURE_AXES
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.features.batch import with_features
from evodsp.launch.process_group import start, stop
from evodsp.losses.total import distogram_loss, experimentally_resolved_loss
from evodsp.model.dropout import NO_MASKS, Dropout, DropoutKeys, Masks, below
from evodsp.model.embedders import TARGET_CHANNELS, InputEmbedder
from evodsp.model.evoformer import BlocksInTurn, PairStack, pair_layers
from evodsp.model.heads import DistogramHead, ExperimentallyResolvedHead
from evodsp.model.layers import MSARowAttention, OuterProductMean
from evodsp.model.primitives import (
    Budgeted,
    LayerNorm,
    Linear,
    ShardedModule,
    SubLayer,
    use_exchange,
    working_width,
)  # fmt: skip
from evodsp.model.sharded import Sharded, Update
from evodsp.parallel import average_gradients, init_mesh
from evodsp.parallel.exchange import ShardedExchange
from evodsp.rng import Draws

CHANNELS = ChannelsConfig(msa=32, pair=24, single=48)
PAIR = EvoformerConfig(pair_heads=2, pair_head_width=12, triangle_channels=24, pair_dropout=0.1)
MSA_BLOCKS, PAIRFORMER_BLOCKS, ROW_DROPOUT = 2, 3, 0.05  # AlphaFold3: 4, 48 and 0.15
FEATURES = FeatureConfig(crop_size=None, msa_clusters=32, extra_msa=1, recycles=0)


class SwiGLU(SubLayer):
    """Transition (algorithm 11)."""

    takes = ("i", "j")

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.norm, hidden = LayerNorm(channels), factor * channels
        self.widen, self.narrow = Linear(channels, 2 * hidden, bias=False), Linear(hidden, channels, False, "final")

    def forward(self, representation: Sharded) -> Update:
        return representation.update(self._rows, representation.x, width=working_width(self))

    def _rows(self, x: Float[Tensor, "B n1 n2 c"]) -> Float[Tensor, "B n1 n2 c"]:
        gate, hidden = self.widen(self.norm(x)).chunk(2, -1)
        return self.narrow(nn.functional.silu(gate) * hidden)


class PairWeightedAveraging(ShardedModule):
    """MSA pair-weighted averaging (algorithm 10). m is on S, z on J: only the H weights of each pair are communicated."""

    def __init__(self, c_m: int, c_z: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.norm, self.pair_norm = heads, LayerNorm(c_m), LayerNorm(c_z)
        self.value, self.pair_weight = Linear(c_m, heads * width, bias=False), Linear(c_z, heads, bias=False)
        self.gate, self.output = Linear(c_m, heads * width, init="gate"), Linear(heads * width, c_m, init="final")

    def forward(self, msa: Sharded, pair: Sharded) -> Update:
        logits = self.exchange.gather(self.pair_weight(self.pair_norm(pair.x)), "j", whole=pair.total_sizes[0])
        weights = logits.masked_fill(pair.mask.unsqueeze(-1) == 0, -1e9).softmax(2)  # [B, I, J, H]
        return msa.update(lambda m: self._rows(m, weights), msa.x, width=working_width(self))

    def _rows(self, m: Float[Tensor, "B s R c"], weights: Float[Tensor, "B R R H"]) -> Float[Tensor, "B s R c"]:
        value, gate = self.value(m := self.norm(m)).unflatten(-1, (self.heads, -1)), self.gate(m).sigmoid()
        return self.output(gate * torch.einsum("bijh,bsjhc->bsihc", weights, value).flatten(-2))


class MSABlock(Budgeted):
    """A block of the MSA module (algorithm 8). Takes and returns m on S, where it stays, and z on J."""

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.outer_product_mean = OuterProductMean(c_m, c_z, channels=12)
        self.averaging, self.transition = PairWeightedAveraging(c_m, c_z, heads=4, width=8), SwiGLU(c_m, 4)
        self.row_dropout = Dropout(c_m, ROW_DROPOUT, "averaging", shared_axis="seq")
        self.pair_stack = PairStack(c_z, PAIR, pair_layers(c_z, PAIR, SwiGLU))
        self.dropouts, self.parts = (self.row_dropout, *self.pair_stack.dropouts), (self,)

    def forward(
        self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor, masks: Masks = NO_MASKS
    ) -> tuple[Float[Tensor, "B s R c_m"], Float[Tensor, "B I j c_z"]]:
        msa, pair = self.sharded(m, "seq", msa_mask), self.sharded(z, "j", pair_mask)
        pair += self.outer_product_mean(msa)  # algorithm 9
        msa += self.row_dropout(self.averaging(msa, pair), masks)
        msa += self.transition(msa)
        return msa.x, self.pair_stack(pair.x, pair_mask, masks)


class PairformerBlock(Budgeted):
    """A block of the Pairformer (algorithm 17). Takes and returns z on J, and s as an MSA of one row, on S: attention with pair
    bias (algorithm 24) is that of a row. So s is on the first rank; what it computes is a small part of a block."""

    def __init__(self, c_s: int, c_z: int) -> None:
        super().__init__()
        self.pair_stack, self.transition = PairStack(c_z, PAIR, pair_layers(c_z, PAIR, SwiGLU)), SwiGLU(c_s, 4)
        self.attention = MSARowAttention(c_s, c_z, heads=4, head_width=12)
        self.dropouts, self.parts = self.pair_stack.dropouts, (self,)

    def forward(
        self, s: Tensor, z: Tensor, single_mask: Tensor, pair_mask: Tensor, masks: Masks = NO_MASKS
    ) -> tuple[Float[Tensor, "B _ R c_s"], Float[Tensor, "B I j c_z"]]:
        z = self.pair_stack(z, pair_mask, masks)
        single, pair = self.sharded(s, "seq", single_mask), self.sharded(z, "j", pair_mask)
        single += self.attention(single, self.attention.bias(pair))
        single += self.transition(single)
        return single.x, z


class Trunk(ShardedModule):
    """Embedders, MSA module, Pairformer and two heads (algorithm 1 without atoms, templates, recycling, diffusion)."""

    def __init__(self, channels: ChannelsConfig = CHANNELS) -> None:
        super().__init__()
        c_m, c_z, c_s = channels.msa, channels.pair, channels.single
        self.embedder, self.single = InputEmbedder(channels, EmbedderConfig()), Linear(TARGET_CHANNELS, c_s, bias=False)
        self.msa_module = BlocksInTurn([MSABlock(c_m, c_z) for _ in range(MSA_BLOCKS)], True)
        self.pairformer = BlocksInTurn([PairformerBlock(c_s, c_z) for _ in range(PAIRFORMER_BLOCKS)], True)
        self.distogram, self.resolved = DistogramHead(channels, HeadsConfig()), ExperimentallyResolvedHead(channels)

    def forward(self, features: Mapping[str, Tensor], draws: Sequence[Draws] = ()) -> tuple[Tensor, Tensor]:
        """Logits of this rank's rows of the distogram [B, i, R, bins], and of atoms [B, R, 37]. `draws`: streams of dropout."""
        target, mask = features["target_feat"], features["seq_mask"]
        pair_mask = mask.unsqueeze(2) * mask.unsqueeze(1)
        streams = below(("msa",), self.msa_module.dropout_streams([d.at("msa") for d in draws]))
        streams |= below(("pair",), self.pairformer.dropout_streams([d.at("pair") for d in draws]))
        m = self.embedder.msa_representation(target, self.exchange.shard(features["msa_feat"], "seq"))
        z = self.embedder.pair_representation(features)
        s = self.exchange.shard(self.single(target).unsqueeze(1), "seq")
        keys = DropoutKeys.of(streams, mask.device)
        _, z = self.msa_module(m, z, features["msa_mask"], pair_mask, keys.at("msa"))
        s, z = self.pairformer(s, z, mask.unsqueeze(1), pair_mask, keys.at("pair"))
        z, s = self.exchange.switch(z, "j", "i", whole=mask.shape[1]), self.exchange.gather(s, "seq", whole=1)
        return self.distogram(z), self.resolved(s.squeeze(1))

    def loss(self, batch: Mapping[str, Tensor], draws: Sequence[Draws] = ()) -> Tensor:
        """The loss of a batch; with several ranks, the mean over ranks is the loss."""
        distogram, atoms = self(batch, draws)
        labels = batch["pseudo_beta"], batch["pseudo_beta_mask"]
        distances = distogram_loss(distogram, *labels, 2.3125, 21.6875, self.exchange)  # Å
        observed = batch["all_atom_mask"], batch["atom37_atom_exists"], batch["resolution"]
        return (distances + 0.01 * experimentally_resolved_loss(atoms, *observed, 0.0, 3.0)).mean()


def samples(data_rank: int, data_ranks: int, device: str) -> Iterator[tuple[dict[str, Tensor], list[Draws]]]:
    """Batches of a bundled protein, each with its stream of dropout. The ranks of a sequence group take the same ones."""
    source, keys = ChainFiles("data/alignments", "data/mmcif_files"), Path("data/train.txt").read_text().split()
    chains = SampleDataset(source, keys, FEATURES, seed=0, training=True)
    for number in count(data_rank, data_ranks):
        batch = with_features(collate([chains[number]]), FEATURES)
        first_pass = {name: (x[:, 0] if name in FEATURE_AXES else x).to(device) for name, x in batch.items()}
        yield first_pass, [Draws.root(0).at("dropout", number)]


def train(steps: int, sequence: int) -> None:
    """Train on the ranks that a launcher started, `sequence` of them with the same sample."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # the same weights on every rank
    model, mesh = Trunk().to(device), init_mesh(sequence)
    use_exchange(model, ShardedExchange(mesh.sequence_group()))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, (batch, draws) in zip(range(steps), samples(mesh.data_rank, mesh.data, device), strict=False):
        loss = model.loss(batch, draws)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters(), mesh)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(shown := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {shown.item():.6f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share a sample")
    start()
    train(**vars(parser.parse_args()))
    stop()
