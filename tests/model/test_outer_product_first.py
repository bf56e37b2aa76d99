"""Stacks whose blocks begin with the outer product mean, on one device."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from evodsp.config import ALPHAFOLD2, MULTIMER, ModelConfig
from evodsp.model.dropout import NO_MASKS
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.sharded import Sharded
from evodsp.parallel.testing import dense

SEQUENCES, RESIDUES = 5, 7


def drawn(extra: bool, blocks: int = 3) -> SimpleNamespace:
    """A stack with random parameters, and its inputs, in double precision."""
    config = ModelConfig.preset("test")
    sizes = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=blocks, layers=MULTIMER)
    c_m = config.channels.extra_msa if extra else config.channels.msa
    stack = dense(EvoformerStack(c_m, config.channels.pair, sizes, extra)).double()
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    m, z = random(2, SEQUENCES, RESIDUES, c_m), random(2, RESIDUES, RESIDUES, config.channels.pair)
    masks = (random(2, SEQUENCES, RESIDUES) > -1).double(), (random(2, RESIDUES, RESIDUES) > -1).double()
    return SimpleNamespace(stack=stack, m=m, z=z, msa_mask=masks[0], pair_mask=masks[1])


def one_after_another(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The sub-layers in the order in which DeepMind's code calls them: all of the MSA, then all of the pair."""
    msa, pair = Sharded.whole(given.m, "seq", given.msa_mask), Sharded.whole(given.z, "j", given.pair_mask)
    for block in given.stack.blocks:
        layers, pairs = block.msa_stack, block.pair_stack
        pair += layers.outer_product_mean(msa)
        msa += layers.row_attention(msa, layers.row_attention.bias(pair))
        msa += layers.column_attention(msa)
        msa += layers.transition(msa)
        pair = Sharded.whole(pairs(pair.x, given.pair_mask, NO_MASKS), "j", given.pair_mask)
    return msa.x, pair.x


@pytest.mark.parametrize("extra", [False, True])
def test_the_order_of_sub_layers_is_deepminds(extra: bool) -> None:
    """Catches a bias that is projected from the pair representation before the outer product mean or after its own update, and
    an outer product mean of updated rows.
    """
    given = drawn(extra)
    m, z = one_after_another(given)
    own_m, own_z = given.stack(given.m, given.z, given.msa_mask, given.pair_mask)
    torch.testing.assert_close(own_z, z, rtol=1e-11, atol=1e-11)
    if not extra:  # nobody reads the m of an extra-MSA stack
        torch.testing.assert_close(own_m, m, rtol=1e-11, atol=1e-11)


def test_the_msa_of_the_last_extra_block_is_not_computed() -> None:
    """Catches computing what nobody reads; its parameters exist, because the published files hold them."""
    given = drawn(extra=True)
    called: list[int] = []
    for number, block in enumerate(given.stack.blocks):
        for layer in (block.msa_stack.row_attention, block.msa_stack.column_attention, block.msa_stack.transition):
            layer.register_forward_hook(lambda *_, number=number: called.append(number))
    given.stack(given.m, given.z, given.msa_mask, given.pair_mask)
    assert called == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("order", [ALPHAFOLD2, MULTIMER])
def test_what_lies_between_the_halves_of_a_pair_stack_is_freed(order: tuple[str, ...]) -> None:
    """Catches a name for the pair representation before the attentions, which keeps a shard of it during all of them."""
    config = ModelConfig.preset("test")
    stack = EvoformerStack(
        config.channels.msa, config.channels.pair, dataclasses.replace(config.evoformer, layers=order)
    )
    between: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    for block in stack.blocks:
        starting, ending = block.pair_stack.attention_starting, block.pair_stack.attention_ending
        starting.register_forward_pre_hook(lambda _, given: between.append(weakref.ref(given[0].x)))
        ending.register_forward_pre_hook(lambda *_: alive.append(between[-1]() is not None))
    z = torch.randn(1, RESIDUES, RESIDUES, config.channels.pair)
    m = torch.randn(1, SEQUENCES, RESIDUES, config.channels.msa)
    with torch.no_grad():
        stack(m, z, torch.ones(m.shape[:3]), torch.ones(z.shape[:3]))
    assert alive == [False] * len(stack.blocks)
