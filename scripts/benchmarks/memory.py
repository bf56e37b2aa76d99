"""Peak memory of activations on one rank, for several numbers of ranks: forward and backward pass, full-width layers.

    python -m scripts.benchmarks.memory [--ranks 1 2 4 8 16] [--whole] [--largest 20]

S=128 sequences, R=256 residues, 256 extra sequences, 4 blocks in each stack, fp32, no recomputation. The count includes every
tensor created during the two passes, gradients of activations among them; it excludes parameters, their gradients and input
features. One rank of a fake group (`fake_ranks.py`) runs on tensors without memory, with attention chunks sized as on a GPU.
The exit code is 1 if each of 4 ranks needs more than 0.30 of the memory of one.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import attention, outer_product
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange

from .fake_ranks import fake_group
from .peak_memory import PeakMemory
from .random_inputs import output_tensors, random_features

MIB = 2**20
Module = TypeVar("Module", bound=nn.Module)
Config = TypeVar("Config", EvoformerConfig, TemplateConfig)
RANKS = (1, 2, 4, 8, 16)
SEQUENCES, RESIDUES, EXTRA, TEMPLATES, BLOCKS = 128, 256, 256, 4, 4
LIMIT_AT_4 = 0.30
"""Largest allowed ratio of a rank's memory at 4 ranks to the memory of one device."""


def stacks(exchange: Exchange, origins: bool = False) -> PeakMemory:
    """Forward and backward pass of the extra-MSA stack and the Evoformer. Their sharded inputs are counted."""
    config = ModelConfig.preset("model_1")
    channels = config.channels
    with torch.device("meta"):
        extra = _prepared(EvoformerStack(channels.extra_msa, channels.pair, _short(config.extra_msa), True), exchange)
        evoformer = _prepared(EvoformerStack(channels.msa, channels.pair, _short(config.evoformer)), exchange)
        s, e, r = (_local_size(exchange, size) for size in (SEQUENCES, EXTRA, RESIDUES))
        masks = {rows: torch.empty(1, rows, RESIDUES) for rows in {SEQUENCES, EXTRA, RESIDUES}}
        with PeakMemory(origins) as memory:
            m = torch.empty(1, s, RESIDUES, channels.msa, requires_grad=True)
            extra_m = torch.empty(1, e, RESIDUES, channels.extra_msa, requires_grad=True)
            z = torch.empty(1, RESIDUES, r, channels.pair, requires_grad=True)
            _, z = extra(extra_m, z, masks[EXTRA], masks[RESIDUES])
            m, z = evoformer(m, z, masks[SEQUENCES], masks[RESIDUES])
            (m.sum() + z.sum()).backward()
    return memory


def whole_model(exchange: Exchange, origins: bool = False) -> PeakMemory:
    """Forward and backward pass of model_1_ptm with short stacks: everything but the losses, without recycling."""
    config = ModelConfig.preset("model_1_ptm")
    config = dataclasses.replace(
        config,
        extra_msa=_short(config.extra_msa),
        evoformer=_short(config.evoformer),
        templates=_short(config.templates),
    )
    with torch.device("meta"):
        model = AlphaFold(config)
    # The pass creates tables of residues on the CPU, so the parameters are fake tensors of the CPU too, not meta tensors.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode(allow_non_fake_inputs=True), _gpu_chunks():
        model = _prepared(model.to_empty(device="cpu"), exchange)
        # As in the published models, the MSA clusters include one row per template.
        batch = random_features(SEQUENCES - TEMPLATES, EXTRA, RESIDUES, TEMPLATES)
        members = [{name: batch[name][:, 0] for name in model.features}]
        with PeakMemory(origins) as memory:
            output = model.one_pass(members, model._first(batch))
            terms = [x.sum() for x in output_tensors(output) if x.requires_grad]
            torch.stack(terms).sum().backward()
    return memory


def _short(config: Config) -> Config:
    return dataclasses.replace(config, blocks=min(BLOCKS, config.blocks), checkpoint=False)


@contextmanager
def _gpu_chunks() -> Iterator[None]:
    """Use a GPU's chunk sizes although the fake tensors are on the CPU."""
    with (
        patch.object(attention, "_CPU_CHUNK", attention._GPU_CHUNK),
        patch.object(outer_product, "_CPU_CHUNK", outer_product._GPU_CHUNK),
    ):
        yield


def _prepared(module: Module, exchange: Exchange) -> Module:
    """Set the exchange, and allocate parameter gradients beforehand so that they are not counted."""
    use_exchange(module, exchange)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def _local_size(exchange: Exchange, size: int) -> int:
    local = exchange.owned(size)
    return local.stop - local.start


def measure(part: Callable[[Exchange, bool], PeakMemory], ranks: int, origins: bool = False) -> PeakMemory:
    """Memory of the first rank, which is never smaller than another's. With `ranks` 1: one device, no collectives."""
    if ranks == 1:
        return part(LocalExchange(), origins)
    with fake_group(ranks) as group:
        return part(ShardedExchange(group), origins)


def print_table(
    part: Callable[[Exchange, bool], PeakMemory], all_ranks: Iterable[int], largest: int
) -> dict[int, float]:
    """Print the peak for each number of ranks; return each as a fraction of one rank's."""
    peaks: dict[int, int] = {}
    print(f"{'ranks':>5}{'MiB':>10}{'of 1 rank':>11}{'ideal':>8}")
    for ranks in sorted({1, *all_ranks}):
        memory = measure(part, ranks, largest > 0)
        peaks[ranks] = memory.peak
        print(f"{ranks:5}{memory.peak / MIB:10.0f}{memory.peak / peaks[1]:11.3f}{1 / ranks:8.3f}", flush=True)
        sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for allocation in memory.at_peak:
            sums[allocation.origin, allocation.shape] += allocation.bytes
        for (origin, shape), size in sums.most_common(largest):
            print(f"{'':7}{size / MIB:9.1f} MiB  {list(shape)}  {origin}")
    return {ranks: peak / peaks[1] for ranks, peak in peaks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks to measure (default: %(default)s)"
    )
    parser.add_argument("--whole", action="store_true", help="measure the whole model too (takes minutes)")
    parser.add_argument(
        "--largest", type=int, default=0, help="list the N largest groups of tensors alive at the peak", metavar="N"
    )
    arguments = parser.parse_args()
    print(f"S={SEQUENCES} R={RESIDUES}, {EXTRA} extra sequences, {BLOCKS} blocks per stack, fp32, forward + backward")
    print("\nextra-MSA stack and Evoformer")
    good = print_table(stacks, arguments.ranks, arguments.largest).get(4, 0.0) <= LIMIT_AT_4
    if arguments.whole:
        print(f"\nthe whole model (model_1_ptm with {TEMPLATES} templates, without a loss)")
        good &= print_table(whole_model, arguments.ranks, arguments.largest).get(4, 0.0) <= LIMIT_AT_4
    print(f"\n{'ok' if good else 'FAILED'}: at 4 ranks each may need at most {LIMIT_AT_4} of 1 rank's memory")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
