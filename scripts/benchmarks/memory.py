"""Peak memory of activations on one rank, for several numbers of ranks: forward and backward pass, full-width layers.

    python -m scripts.benchmarks.memory [--ranks 1 2 4 8 16] [--whole] [--largest 20]

Stacks have 4 blocks and run in fp32. Sizes: S=128 sequences, R=256 residues, 256 extra sequences; pair stacks alone R=384. The
count includes every tensor created during the two passes, gradients of activations among them; it excludes parameters, their
gradients and input features. One rank of a fake group (`fake_ranks.py`) runs on tensors without memory, with attention chunks
sized as on a GPU. `of 1`: of the memory of one device, which every way of communicating is on one rank.
The exit code is 1 if each of 4 ranks needs more than 0.30 of the memory of one under DSP.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.heads import ModelOutput
from evodsp.model.kernels import by_chunks, chunked, products
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.collectives import DIMENSION
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.selftest.shared_device import random_features

from .fake_ranks import fake_group
from .pair_stacks import DAP_REGATHERING, DSP, DSP_REGATHERING, FASTFOLD, FOLD_CP, Method
from .peak_memory import PeakMemory

MIB = 2**20
Module = TypeVar("Module", bound=nn.Module)
Config = TypeVar("Config", EvoformerConfig, TemplateConfig)
Part = Callable[[Exchange, bool], PeakMemory]
"""A program to be measured on one rank. The flag asks for the origins of what is alive at the peak."""
RANKS = (1, 2, 4, 8, 16)
SEQUENCES, RESIDUES, EXTRA, TEMPLATES, BLOCKS = 128, 256, 256, 4, 4
PAIR_RESIDUES, DEPTH = 384, ModelConfig().evoformer.blocks
LIMIT_AT_4 = 0.30
"""Largest allowed ratio of a rank's memory at 4 ranks to the memory of one device."""


def output_tensors(output: ModelOutput) -> list[Tensor]:
    """All output tensors that a loss or the next recycling iteration reads."""
    structure = output.structure
    return [
        *output.representations.values(),
        *output.logits.values(),
        structure.angles,
        structure.unnormalized_angles,
        structure.atom14,
        structure.backbone.to_flat12(),
        structure.frames.to_flat12(),
    ]


def stacks(exchange: Exchange, origins: bool = False, plan: CommunicationPlan | None = None) -> PeakMemory:
    """Forward and backward pass of the extra-MSA stack and the Evoformer. Their sharded inputs are counted."""
    config = ModelConfig.preset("model_1")
    channels = config.channels
    with torch.device("meta"):
        extra = _prepared(
            EvoformerStack(channels.extra_msa, channels.pair, _short(config.extra_msa), True), exchange, plan
        )
        evoformer = _prepared(EvoformerStack(channels.msa, channels.pair, _short(config.evoformer)), exchange, plan)
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


def stacks_under_dap(exchange: Exchange, origins: bool = False) -> PeakMemory:
    """`stacks` under FastFold's schedule."""
    return stacks(exchange, origins, DAP)


def pair_stacks(method: Method, blocks: int, recompute: bool) -> Part:
    """Forward and backward pass of pair stacks alone. `recompute`: each block is computed again in the backward pass."""

    def part(exchange: Exchange, origins: bool = False) -> PeakMemory:
        config = dataclasses.replace(ModelConfig().evoformer, checkpoint=recompute)
        c_z, r = ModelConfig().channels.pair, PAIR_RESIDUES
        on_one = DSP if exchange.ranks == 1 else method
        with torch.device("meta"):
            stack = _with_gradients(on_one.stack(blocks, c_z, config, exchange))
            shape = [1, r, r, c_z]
            shape[DIMENSION[method.axis]] = _local_size(exchange, r)
            mask = torch.empty(1, r, r)
            with PeakMemory(origins) as memory:
                stack(torch.empty(shape, requires_grad=True), mask).sum().backward()
        return memory

    return part


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
            output = model.one_pass(members, model.first_inputs(members[0]))
            terms = [x.sum() for x in output_tensors(output) if x.requires_grad]
            torch.stack(terms).sum().backward()
    return memory


def _short(config: Config) -> Config:
    return dataclasses.replace(config, blocks=min(BLOCKS, config.blocks), checkpoint=False)


@contextmanager
def _gpu_chunks() -> Iterator[None]:
    """Use a GPU's chunk sizes although the fake tensors are on the CPU."""
    with ExitStack() as patches:
        for module in (by_chunks, chunked, products):
            patches.enter_context(patch.object(module, "chunk_numbers", lambda x, on_gpu: on_gpu))
        yield


def _prepared(module: Module, exchange: Exchange, plan: CommunicationPlan | None = None) -> Module:
    """Set the exchange and the plan, and allocate parameter gradients beforehand so that they are not counted."""
    use_exchange(module, exchange, plan)
    return _with_gradients(module)


def _with_gradients(module: Module) -> Module:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def _local_size(exchange: Exchange, size: int) -> int:
    local = exchange.owned(size)
    return local.stop - local.start


def measure(part: Part, ranks: int, origins: bool = False) -> PeakMemory:
    """Memory of the first rank, which is never smaller than another's. With `ranks` 1: one device, no collectives."""
    if ranks == 1:
        return part(LocalExchange(), origins)
    with fake_group(ranks) as group:
        return part(ShardedExchange(group), origins)


def print_table(parts: dict[str, Part], all_ranks: Iterable[int], largest: int) -> dict[int, float]:
    """Print the peaks for each number of ranks; return the first part's peaks as fractions of one rank's."""
    first = next(iter(parts))
    peaks: dict[tuple[str, int], int] = {}
    print(f"{'':13}" + "".join(f"{name:>17}" for name in parts))
    print(f"{'ranks':>5}{'ideal':>8}" + f"{'MiB':>9}{'of 1':>8}" * len(parts))
    for ranks in (everyone := sorted({1, *all_ranks})):
        measured = {name: measure(part, ranks, largest > 0) for name, part in parts.items()}
        peaks |= {(name, ranks): memory.peak for name, memory in measured.items()}
        cells = [f"{m.peak / MIB:9.0f}{m.peak / peaks[name, 1]:8.3f}" for name, m in measured.items()]
        print(f"{ranks:5}{1 / ranks:8.3f}" + "".join(cells), flush=True)
        for name, memory in measured.items():
            print_largest(name, memory, largest)
    return {ranks: peaks[first, ranks] / peaks[first, 1] for ranks in everyone}


def print_largest(name: str, memory: PeakMemory, largest: int) -> None:
    """Print the `largest` groups of tensors alive at the peak."""
    sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for allocation in memory.at_peak:
        sums[allocation.origin, allocation.shape] += allocation.bytes
    for (origin, shape), size in sums.most_common(largest):
        print(f"{'':7}{name:12}{size / MIB:9.1f} MiB  {list(shape)}  {origin}")


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
    print(f"{BLOCKS} blocks per stack, fp32, forward + backward; S={SEQUENCES} R={RESIDUES}, {EXTRA} extra sequences")
    ranks, largest = arguments.ranks, arguments.largest
    print("\nextra-MSA stack and Evoformer, nothing recomputed")
    good = print_table({"DSP": stacks, "DAP": stacks_under_dap}, ranks, largest).get(4, 0.0) <= LIMIT_AT_4
    print(f"\npair stacks alone, R={PAIR_RESIDUES}, {BLOCKS} blocks, nothing recomputed")
    print_table({m.name: pair_stacks(m, BLOCKS, False) for m in (DSP, FASTFOLD, FOLD_CP)}, ranks, largest)
    print(
        f"\npair stacks alone, R={PAIR_RESIDUES}, {DEPTH} blocks, each one recomputed; 'regathers': gathers again for it"
    )
    methods = (DSP, DSP_REGATHERING, FASTFOLD, DAP_REGATHERING, FOLD_CP)
    print_table({m.name: pair_stacks(m, DEPTH, True) for m in methods}, ranks, largest)
    if arguments.whole:
        print(f"\nthe whole model (model_1_ptm with {TEMPLATES} templates, without a loss), nothing recomputed")
        good &= print_table({"DSP": whole_model}, ranks, largest).get(4, 0.0) <= LIMIT_AT_4
    print(f"\n{'ok' if good else 'FAILED'}: under DSP each of 4 ranks may need at most {LIMIT_AT_4} of 1 rank's memory")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
