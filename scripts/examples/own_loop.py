"""A training loop of your own: evodsp's samples, features, model and losses, and an optimizer of torch. No Lightning.

    python -m scripts.examples.own_loop --steps 20
    torchrun --nproc-per-node 2 -m scripts.examples.own_loop --accelerate true     (pip install accelerate)

With Accelerate each rank has samples of its own, and gradients are averaged: data parallelism. docs/training.md explains the
steps. What a run of `evodsp fit` adds: validation, checkpoints that resume exactly, moving averages, quarantine of bad chains,
and one sample over several ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.config import FeatureConfig, LossConfig, ModelConfig
from evodsp.data.samples.dataset import SampleDataset, collate
from evodsp.data.samples.raw_features import HOST
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.features.batch import with_features
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.rng import Draws

FEATURES = FeatureConfig(crop_size=48, msa_clusters=16, extra_msa=16, recycles=0)
SEED, BATCH = 0, 1


class WithLoss(nn.Module):
    """The model and its loss in one module, so that whoever wraps it (DDP, Accelerate) sees one forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model, self.loss = AlphaFold(config), LossConfig()

    def forward(self, batch: dict[str, Tensor], draws: list[Draws]) -> Tensor:
        """The mean loss of the samples. `draws`: of each sample, for dropout."""
        output = self.model(batch, draws)
        return total_loss(output, batch, self.loss, self.model.config.heads)[0]


def batches(folder: Path, rank: int, ranks: int, device: torch.device) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """The numbers and the features of the samples of one rank of `ranks`, without end."""
    chains = (folder / "train.txt").read_text().split()
    files = ChainFiles(folder / "alignments", folder / "mmcif_files")
    # Sample i is a crop of a chain, both drawn from (seed, i): any process makes the same one.
    dataset = SampleDataset(files, chains, FEATURES, SEED, training=True, batch_group=BATCH * ranks)
    first = rank * BATCH
    while True:
        numbers = list(range(first, first + BATCH))
        first += ranks * BATCH
        batch = collate([dataset[number] for number in numbers])
        moved = {name: x if name in HOST else x.to(device) for name, x in batch.items()}
        yield numbers, with_features(moved, FEATURES)


def train(folder: Path, steps: int, accelerate: bool = False) -> list[float]:
    """Train the preset `small`, and return the loss of each step of this rank."""
    torch.manual_seed(SEED)  # the same weights on each rank
    model: Any = WithLoss(ModelConfig.preset("small"))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    rank, ranks, device, accelerator = 0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    if accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=not torch.cuda.is_available())
        rank, ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model.to(device)
    model.train()
    losses, dropout = [], Draws.root(SEED).at("dropout")
    for numbers, batch in islice(batches(folder, rank, ranks, device), steps):
        loss = model(batch, [dropout.at(number) for number in numbers])
        accelerator.backward(loss) if accelerator else loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {len(losses)}  loss {losses[-1]:.2f}", flush=True)
    return losses


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder of train.txt, alignments and mmcif_files"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accelerate", choices=("true", "false"), default="false")
    options = parser.parse_args(words)
    train(options.data, options.steps, options.accelerate == "true")


if __name__ == "__main__":
    main()
