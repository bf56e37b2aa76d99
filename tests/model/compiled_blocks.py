"""Compiles the blocks of a stack, with dropout, and counts the graphs that torch made. Run by test_dropout.

The blocks are alike, so one graph serves all of them, and the random numbers of every step. Raises if a graph breaks or
computes something else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evodsp.model.dropout import DropoutKeys, Masks, draw_blocks
from evodsp.model.evoformer import EvoformerBlock, EvoformerStack
from tests.builders.small_model import RESIDUES, small_stack, streams


def own_masks(stack: EvoformerStack, number: int, keys: DropoutKeys, leaf: str) -> Masks:
    """What block `number` gets: its masks, or the keys to draw them from."""
    if leaf == "masks":
        return draw_blocks(stack.blocks, keys, RESIDUES, stack.kernels)[number]
    return {d.layer: keys.stack([("block", number, d.layer)])[0] for d in stack.blocks[number].dropouts}


def graphs(leaf: str) -> int:
    """Number of graphs for two blocks and two steps."""
    stack, inputs = small_stack(2)
    compiled = [0]

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled[0] += 1
        return graph.forward

    def gradient(block: Any, masks: Masks) -> list[Tensor]:
        m, z = block(*inputs, masks)
        return list(torch.autograd.grad((m.square().sum() + z.square().sum()), list(stack.blocks[number].parameters())))

    for number, block in enumerate(stack.blocks):
        assert isinstance(block, EvoformerBlock)
        for seed in (0, 1):
            masks = own_masks(stack, number, DropoutKeys.of(stack.dropout_streams(streams(seed))), leaf)
            expected = gradient(block, masks)
            found = gradient(torch.compile(block, fullgraph=True, backend=backend), masks)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    torch.compiler.reset()
    return compiled[0]
