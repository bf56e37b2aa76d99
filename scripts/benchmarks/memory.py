"""Most memory that activations take on one rank, for several numbers of ranks: forward and backward pass, full widths.

    python -m scripts.benchmarks.memory [--ranks 1 2 4 8 16] [--whole] [--largest 20]

S=128 sequences, R=256 residues, 256 extra sequences, 4 blocks in each stack, fp32, nothing recomputed. Counted are all tensors
that come and go during the passes, whatever module makes them, and the gradients of activations; not parameters, their
gradients and features. The program is a GPU's (the size of attention's chunks depends on that), on tensors without memory, of
one rank of a fake group (`fake_ranks.py`). Exit code 1 if 4 ranks need more of 1 rank's memory than is asked.
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
from .held import Activations
from .samples import output_tensors, random_features

MIB = 2**20
Module = TypeVar("Module", bound=nn.Module)
Config = TypeVar("Config", EvoformerConfig, TemplateConfig)
RANKS = (1, 2, 4, 8, 16)
SEQUENCES, RESIDUES, EXTRA, TEMPLATES, BLOCKS = 128, 256, 256, 4, 4
ASKED_OF_4 = 0.30
"""Most of one rank's memory that each of four may need."""


def stacks(exchange: Exchange, places: bool = False) -> Activations:
    """Extra-MSA stack and Evoformer, and their backward pass; the first shards of the representations count."""
    config = ModelConfig.preset("model_1")
    channels = config.channels
    with torch.device("meta"):
        extra = _prepared(EvoformerStack(channels.extra_msa, channels.pair, _short(config.extra_msa), True), exchange)
        evoformer = _prepared(EvoformerStack(channels.msa, channels.pair, _short(config.evoformer)), exchange)
        s, e, r = (_owned(exchange, whole) for whole in (SEQUENCES, EXTRA, RESIDUES))
        masks = {rows: torch.empty(1, rows, RESIDUES) for rows in {SEQUENCES, EXTRA, RESIDUES}}
        with Activations(places) as held:
            m = torch.empty(1, s, RESIDUES, channels.msa, requires_grad=True)
            extra_m = torch.empty(1, e, RESIDUES, channels.extra_msa, requires_grad=True)
            z = torch.empty(1, RESIDUES, r, channels.pair, requires_grad=True)
            _, z = extra(extra_m, z, masks[EXTRA], masks[RESIDUES])
            m, z = evoformer(m, z, masks[SEQUENCES], masks[RESIDUES])
            (m.sum() + z.sum()).backward()
    return held


def whole_model(exchange: Exchange, places: bool = False) -> Activations:
    """One pass of model_1_ptm with short stacks: embedders, templates, structure module and all heads as well; no loss."""
    config = ModelConfig.preset("model_1_ptm")
    config = dataclasses.replace(
        config,
        extra_msa=_short(config.extra_msa),
        evoformer=_short(config.evoformer),
        templates=_short(config.templates),
    )
    with torch.device("meta"):
        model = AlphaFold(config)
    # Tables of residues are made on the CPU during the pass: fake tensors of that device, with parameters among them.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode(allow_non_fake_inputs=True), _gpu_chunks():
        model = _prepared(model.to_empty(device="cpu"), exchange)
        # The published models count the templates' rows among the clusters.
        batch = random_features(SEQUENCES - TEMPLATES, EXTRA, RESIDUES, TEMPLATES)
        members = [{name: batch[name][:, 0] for name in model.features}]
        with Activations(places) as held:
            output = model.one_pass(members, model._first(batch))
            terms = [x.sum() for x in output_tensors(output) if x.requires_grad]
            torch.stack(terms).sum().backward()
    return held


def _short(config: Config) -> Config:
    return dataclasses.replace(config, blocks=min(BLOCKS, config.blocks), checkpoint=False)


@contextmanager
def _gpu_chunks() -> Iterator[None]:
    """Fake tensors of the CPU are to be treated like a GPU's."""
    with (
        patch.object(attention, "_CPU_CHUNK", attention._GPU_CHUNK),
        patch.object(outer_product, "_CPU_CHUNK", outer_product._GPU_CHUNK),
    ):
        yield


def _prepared(module: Module, exchange: Exchange) -> Module:
    """With gradients there already: like parameters they do not count."""
    use_exchange(module, exchange)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def _owned(exchange: Exchange, whole: int) -> int:
    own = exchange.owned(whole)
    return own.stop - own.start


def measure(part: Callable[[Exchange, bool], Activations], ranks: int, places: bool = False) -> Activations:
    """The first rank's memory; none has more. One rank is one device, without collectives."""
    if ranks == 1:
        return part(LocalExchange(), places)
    with fake_group(ranks) as group:
        return part(ShardedExchange(group), places)


def table(part: Callable[[Exchange, bool], Activations], all_ranks: Iterable[int], largest: int) -> dict[int, float]:
    """Print the peaks; each as a share of one rank's."""
    peaks: dict[int, int] = {}
    print(f"{'ranks':>5}{'MiB':>10}{'of 1 rank':>11}{'ideal':>8}")
    for ranks in sorted({1, *all_ranks}):
        held = measure(part, ranks, largest > 0)
        peaks[ranks] = held.peak
        print(f"{ranks:5}{held.peak / MIB:10.0f}{held.peak / peaks[1]:11.3f}{1 / ranks:8.3f}", flush=True)
        sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for piece in held.at_peak:
            sums[piece.where, piece.shape] += piece.bytes
        for (where, shape), size in sums.most_common(largest):
            print(f"{'':7}{size / MIB:9.1f} MiB  {list(shape)}  {where}")
    return {ranks: peak / peaks[1] for ranks, peak in peaks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="the whole model, too (minutes)")
    parser.add_argument("--largest", type=int, default=0, help="list so many kinds of tensors held at the peak")
    arguments = parser.parse_args()
    print(f"S={SEQUENCES} R={RESIDUES}, {EXTRA} extra sequences, {BLOCKS} blocks a stack, fp32, forward + backward")
    print("\nextra-MSA stack and Evoformer")
    good = table(stacks, arguments.ranks, arguments.largest).get(4, 0.0) <= ASKED_OF_4
    if arguments.whole:
        print(f"\nthe whole model (model_1_ptm with {TEMPLATES} templates, without a loss)")
        good &= table(whole_model, arguments.ranks, arguments.largest).get(4, 0.0) <= ASKED_OF_4
    print(f"\nasked of 4 ranks: at most {ASKED_OF_4} of 1 rank's: {'so it is' if good else 'NOT SO'}")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
