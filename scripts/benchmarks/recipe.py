"""What AlphaFold2's recipe costs: the configs `af2_*.yaml` as they are, traced on ranks that do not exist.

    python -m scripts.benchmarks.recipe [--config af2_initial ...] [--meshes 8x2 512x8]

For each config and mesh: how many batches a data rank accumulates, the floating-point operations of a sample's training step,
and, on its first rank, the peak memory of the activations and the bytes that its collectives move. One rank of a fake group
(`fake_ranks.py`) runs the whole model at full size on tensors without memory, in fp32: a pass without gradient for recycling,
and one forward and backward with blocks recomputed, without the losses. Recycling draws 1 to 4 passes, 2.5 on average: a step
counts 1.5 of the former and one of the latter. Operations are those of matrix products (torch's FlopCounterMode), 2 for a
product and its sum.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.ledger import Ledger
from evodsp.training.checks import Settings
from evodsp.training.command import TrainingCLI
from evodsp.training.sample_counts import batching

from .fake_ranks import fake_group
from .memory import _gpu_chunks, _prepared
from .peak_memory import PeakMemory
from .random_inputs import output_tensors, random_features

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("af2_initial", "af2_finetune", "af2_finetune_ptm")
MESHES = ("1x1", "8x2", "512x8")
PASSES_WITHOUT_GRADIENT = 1.5
"""Mean number of passes before the last one: 0 to 3, equally likely."""


@dataclass(frozen=True)
class Traced:
    """One rank's share of a training step of one sample."""

    flops: float
    peak_bytes: int
    moved_bytes: int


def settings_of(name: str) -> Settings:
    """The settings of a config, with which no run is prepared."""
    return TrainingCLI("fit", ["--config", str(CONFIGS / f"{name}.yaml")]).settings


def trace(settings: Settings, exchange: Exchange, ledger: Ledger) -> Traced:
    """Run one rank's share of a training step on tensors without memory."""
    config, features = settings.model.model_config(), settings.data.train
    with torch.device("meta"):
        model = AlphaFold(config)
    # The pass creates tables of residues on the CPU, so the parameters are fake tensors of the CPU too, not meta tensors.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode(allow_non_fake_inputs=True), _gpu_chunks():
        model = _prepared(model.to_empty(device="cpu"), exchange)
        templates, residues = features.max_templates, features.crop_size or 0
        batch = random_features(features.msa_clusters - templates, features.extra_msa, residues, templates)
        members = [{name: batch[name][:, 0] for name in model.features}]
        with FlopCounterMode(display=False) as before, torch.no_grad():
            model.one_pass(members, model._first(batch))
        moved_before = ledger.bytes()
        with FlopCounterMode(display=False) as last, PeakMemory() as memory:
            output = model.one_pass(members, model._first(batch))
            terms = [x.sum() for x in output_tensors(output) if x.requires_grad]
            torch.stack(terms).sum().backward()
    flops = PASSES_WITHOUT_GRADIENT * before.get_total_flops() + last.get_total_flops()
    moved = PASSES_WITHOUT_GRADIENT * moved_before + (ledger.bytes() - moved_before)
    return Traced(flops, memory.peak, int(moved))


def on_mesh(settings: Settings, ranks: int, sequence: int) -> Traced:
    """On the first rank of `ranks`, in a group of `sequence`."""
    ledger = Ledger()
    if sequence == 1:
        return trace(settings, LocalExchange(), ledger)
    with fake_group(sequence, ledger=ledger) as group:
        return trace(settings, ShardedExchange(group), ledger)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="ranks x ranks of a sample", metavar="8x2")
    arguments = parser.parse_args()
    print("config             ranks  seq data  acc.   steps   TFLOP   of 1     GiB  moved GiB     s")
    for name in arguments.config:
        settings, alone = settings_of(name), None
        for mesh in arguments.meshes:
            ranks, sequence = map(int, mesh.split("x"))
            step = batching(settings.run.global_batch, ranks // sequence, settings.data.batch_size, 1)
            begun = time.perf_counter()
            traced = on_mesh(settings, ranks, sequence)
            alone = alone or traced.flops
            print(
                f"{name:18}{ranks:6}{sequence:5}{step.data_ranks:5}{step.accumulate:6}"
                f"{step.steps(settings.run.max_samples or 0):8}{traced.flops / 1e12:8.1f}{traced.flops / alone:7.3f}"
                f"{traced.peak_bytes / 2**30:8.1f}{traced.moved_bytes / 2**30:11.2f}{time.perf_counter() - begun:6.0f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
