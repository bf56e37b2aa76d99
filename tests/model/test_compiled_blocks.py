"""Blocks of sharded stacks under torch.compile: one graph each, with the collectives inside, and the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from evodsp.config import ModelConfig
from evodsp.model.dropout import DropoutKeys, Masks, draw_blocks
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.ranks import UncheckedPool

RESIDUES = 7
PLANS = {
    "evoformer": CommunicationPlan(),
    "extra": CommunicationPlan(),
    "extra_sum": CommunicationPlan(outer_product_mean="sum"),
}


@pytest.fixture(scope="module")
def unchecked() -> Iterator[UncheckedPool]:
    ranks = UncheckedPool(3)
    yield ranks
    ranks.stop()


def graphs(handle: Any, kind: str, projections: bool) -> int:
    """The number of graphs that torch makes of two blocks of a stack, for two steps with other random numbers. Raises if they
    compute something else. `projections`: whether the blocks compute the projections of attention again; they then get keys of
    dropout in place of masks.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    exchange = ShardedExchange(Group(handle))
    preset, extra = ModelConfig.preset("test"), kind != "evoformer"
    base = preset.extra_msa if extra else preset.evoformer
    c_m, c_z = (preset.channels.extra_msa if extra else preset.channels.msa), preset.channels.pair
    again = {"checkpoint": False, "checkpoint_projections": projections}
    config = dataclasses.replace(base, blocks=2, msa_dropout=0.25, pair_dropout=0.25, **again)
    stack = dense(EvoformerStack(c_m, c_z, config, extra))
    use_exchange(stack, exchange, PLANS[kind])
    generator = torch.Generator().manual_seed(3)
    msa, pair = torch.randn(1, 5, RESIDUES, c_m, generator=generator), torch.randn(1, 7, 7, c_z, generator=generator)
    inputs = [exchange.shard(msa, "seq").clone().requires_grad_(), exchange.shard(pair, "j").clone().requires_grad_()]
    true_masks = [(torch.randn(1, n, RESIDUES, generator=generator) > -1).double() for n in (5, RESIDUES)]

    def masks_of(seed: int) -> Sequence[Masks]:
        keys = DropoutKeys.of(stack.dropout_streams([Draws.root(seed)]))
        if not projections:
            return draw_blocks(stack.blocks, keys, RESIDUES, stack.kernels)
        names = [[d.layer for d in block.dropouts] for block in stack.blocks]
        return [{name: keys.stack([("block", n, name)])[0] for name in own} for n, own in enumerate(names)]

    count = [0]

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        count[0] += 1
        return aot_eager(graph, examples)

    def run(block: Any, parameters: list[nn.Parameter], own: Masks) -> list[Tensor]:
        m, z = block(*inputs, *true_masks, own)
        gradients = torch.autograd.grad(m.square().sum() + z.square().sum(), [*inputs, *parameters])
        return [m.detach(), z.detach(), *gradients]

    for block, own in [
        (block, own) for seed in (1, 2) for block, own in zip(stack.blocks, masks_of(seed), strict=True)
    ]:
        # The softmax takes no notice of this bias, so its gradient is rounding.
        parameters = [p for name, p in block.named_parameters() if not name.endswith("row_attention.pair_norm.bias")]
        expected = run(block, parameters, own)
        found = run(torch.compile(block, fullgraph=True, backend=backend), parameters, own)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))
    torch.compiler.reset()
    return count[0]


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("projections", [False, True])
def test_a_sharded_block_is_one_graph(unchecked: UncheckedPool, ranks: int, kind: str, projections: bool) -> None:
    """Catches a graph break at a collective, a graph for each block, keys of dropout or names of blocks that are compiled into
    the graph (each step would compile anew), and outputs or gradients that compiling changes.

    Dropout is on, parameters are all random, sizes differ and do not divide.
    """
    assert unchecked.run(ranks, graphs, kind, projections) == [1] * ranks
