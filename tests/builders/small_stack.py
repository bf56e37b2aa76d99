"""A small Evoformer stack with dropout, and its inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.rng import Draws

RESIDUES = 7


def small_stack(blocks: int, rate: float = 0.25) -> tuple[EvoformerStack, tuple[Tensor, ...]]:
    """A stack of dense parameters, and m, z and their masks."""
    preset = ModelConfig.preset("test")
    config: EvoformerConfig = dataclasses.replace(
        preset.evoformer, blocks=blocks, msa_dropout=rate, pair_dropout=rate, checkpoint=False
    )
    torch.manual_seed(0)
    stack = EvoformerStack(preset.channels.msa, preset.channels.pair, config)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = torch.randn(2, 5, RESIDUES, preset.channels.msa), torch.randn(2, RESIDUES, RESIDUES, preset.channels.pair)
    return stack, (*inputs, torch.ones(2, 5, RESIDUES), torch.ones(2, RESIDUES, RESIDUES))


def streams(seed: int) -> list[Draws]:
    """The dropout streams of two samples."""
    return [Draws.root(seed).at(sample) for sample in range(2)]
