"""What the recipes `af2_*.yaml` and `finetune_own.yaml` cost: the configs as they are, traced on ranks that do not exist.

    python -m scripts.benchmarks.recipe [--config af2_initial ...] [--meshes 8x2 512x8]

For each config and mesh: how many batches a data rank accumulates, and, of one sample's training step on the first rank, the
floating-point operations and the bytes that its collectives move. One rank of a fake group (`fake_ranks.py`) runs the model at
full widths on tensors without memory, in fp32, with the formulas of the operators: forward and backward, blocks recomputed,
without the losses. Blocks of a stack are alike: one and two are run, and the others count as the second. Recycling draws 1 to 4
passes, 2.5 on average, so a step counts 1.5 forward passes more. Operations are those of matrix products (torch's
FlopCounterMode), 2 for a product and its sum.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from evodsp.config import FeatureConfig, KernelsConfig, ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels.registry import choose
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.ledger import Ledger
from evodsp.training.checks import Settings
from evodsp.training.command import TrainingCLI
from evodsp.training.sample_counts import batching

from .fake_ranks import fake_group
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
    moved_bytes: float


def settings_of(name: str) -> Settings:
    """The settings of a config, with which no run is prepared."""
    return TrainingCLI("fit", ["--config", str(CONFIGS / f"{name}.yaml")]).settings


def trace(config: ModelConfig, features: FeatureConfig, exchange: Exchange, ledger: Ledger) -> Traced:
    """Run one rank's share of a training step on tensors without memory."""
    with torch.device("meta"):
        model = AlphaFold(config)
    # The pass creates tables of residues on the CPU, so the parameters are fake tensors of the CPU too, not meta tensors.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    kernels, _ = choose(KernelsConfig(backend="reference"), torch.device("cpu"), torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        use_exchange(model, exchange)
        use_kernels(model, kernels)
        templates, residues = features.max_templates, features.crop_size or 0
        batch = random_features(features.msa_clusters - templates, features.extra_msa, residues, templates)
        members = [{name: batch[name][:, 0] for name in model.features}]
        with FlopCounterMode(display=False) as flops:
            output = model.one_pass(members, model._first(members[0]))
            terms = [x.sum() for x in output_tensors(output) if x.requires_grad]
            forward = Traced(flops.get_total_flops(), ledger.bytes())
            torch.stack(terms).sum().backward()
    return Traced(
        PASSES_WITHOUT_GRADIENT * forward.flops + flops.get_total_flops(),
        PASSES_WITHOUT_GRADIENT * forward.moved_bytes + ledger.bytes(),
    )


def on_mesh(config: ModelConfig, features: FeatureConfig, sequence: int) -> Traced:
    """On the first rank of a group of `sequence`."""
    ledger = Ledger()
    if sequence == 1:
        return trace(config, features, LocalExchange(), ledger)
    with fake_group(sequence, ledger=ledger) as group:
        return trace(config, features, ShardedExchange(group), ledger)


def whole(settings: Settings, sequence: int) -> Traced:
    """With all blocks of the config, from models of one and two blocks a stack."""
    config, features = settings.model.model_config(), settings.data.train

    def traced(evoformer: int, extra_msa: int) -> Traced:
        stacks = {"evoformer": evoformer, "extra_msa": extra_msa}
        short = {name: replace(getattr(config, name), blocks=blocks) for name, blocks in stacks.items()}
        return on_mesh(replace(config, **short), features, sequence)

    base, deeper, deeper_extra = traced(1, 1), traced(2, 1), traced(1, 2)
    more, more_extra = config.evoformer.blocks - 1, config.extra_msa.blocks - 1
    numbers = (
        one + more * (two - one) + more_extra * (three - one)
        for one, two, three in zip(astuple(base), astuple(deeper), astuple(deeper_extra), strict=True)
    )
    return Traced(*numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", choices=(*NAMES, "finetune_own"), default=NAMES)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="ranks x ranks of a sample", metavar="8x2")
    arguments = parser.parse_args()
    print("config             ranks  seq data  acc.   steps   TFLOP   of 1  moved GiB     s")
    for name in arguments.config:
        settings, alone = settings_of(name), None
        for mesh in arguments.meshes:
            ranks, sequence = map(int, mesh.split("x"))
            step = batching(settings.run.global_batch, ranks // sequence, settings.data.batch_size, 1)
            begun = time.perf_counter()
            traced = whole(settings, sequence)
            alone = alone or traced.flops
            print(
                f"{name:18}{ranks:6}{sequence:5}{step.data_ranks:5}{step.accumulate:6}"
                f"{step.steps(settings.run.max_samples or 0):8}{traced.flops / 1e12:8.1f}{traced.flops / alone:7.3f}"
                f"{traced.moved_bytes / 2**30:11.2f}{time.perf_counter() - begun:6.0f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
