"""Stacks run over several ranks and compared with one device: outputs, input gradients, parameter gradients.

Dropout is on, parameters are all random, and the transport shows what is read or changed in flight. The mean over ranks of
their losses is the loss, so each rank multiplies its shard's loss by N.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evodsp.config import ALPHAFOLD2, MULTIMER, ModelConfig, TemplateConfig, import_layers
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.recomputation import Recomputed
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.collectives import DIMENSION, Axis
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.testing import _in_double as in_double
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.comparison import close
from tests.builders.poisoned_group import PoisonedGroup
from tests.ranks import RankPool

RESIDUES = 7
Stack = Literal["evoformer", "extra", "extra_deep", "outer_first", "outer_first_extra", "templates"]
SEQUENCES = {"evoformer": 5, "extra": 6, "extra_deep": 40, "outer_first": 5, "outer_first_extra": 6, "templates": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack and the options it runs with."""

    stack: Stack
    batch: int = 1
    recompute: bool = False
    projections: bool | int = False
    overlap: bool = True
    plan: CommunicationPlan = dataclasses.field(default_factory=CommunicationPlan)
    blocks: int = 3
    layers: tuple[str, ...] = ()
    """Sub-layers of a block; (): as the stack's name says."""

    @property
    def order(self) -> tuple[str, ...]:
        return self.layers or (MULTIMER if self.stack.startswith("outer_first") else ALPHAFOLD2)

    def __str__(self) -> str:
        """The test id: what differs from the defaults."""
        plan = {name: value for name, value in vars(self.plan).items() if value != getattr(CommunicationPlan(), name)}
        options = [name for name in ("recompute", "projections", "overlap") if getattr(self, name)]
        options += [entry for entry in self.layers if entry not in ALPHAFOLD2 or self.layers.count(entry) > 1]
        options += [f"no {name}" for name in ALPHAFOLD2 if self.layers and name not in self.layers]
        return ",".join(
            [self.stack, f"batch={self.batch}", *options, *(f"{name}={value}" for name, value in plan.items())]
        )


@dataclasses.dataclass(frozen=True)
class Found:
    """A rank's shards of the outputs, and gradients averaged over ranks."""

    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]


def stack_of(case: Case) -> nn.Module:
    """The stack of `case`, with random parameters."""
    config = ModelConfig.preset("test")
    if case.stack == "templates":
        templates = TemplatePairStack(
            TemplateConfig(
                True, channels=10, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=5, checkpoint=case.recompute
            )
        )  # fmt: skip
        if case.projections:
            templates.recompute(Recomputed.of(2, case.recompute, case.projections))
        return dense(templates)
    extra = is_extra(case.stack)
    again = {"checkpoint": case.recompute, "checkpoint_projections": case.projections}
    sizes = dataclasses.replace(
        config.extra_msa if extra else config.evoformer, blocks=case.blocks, layers=case.order, **again
    )
    channels = config.channels.extra_msa if extra else config.channels.msa
    if case.layers:
        sizes = import_layers(dataclasses.replace(config, evoformer=sizes)).evoformer
    return dense(EvoformerStack(channels, config.channels.pair, sizes, extra))


def is_extra(stack: Stack) -> bool:
    """Whether it is an extra-MSA stack."""
    return "extra" in stack


def given(
    case: Case, exchange: Exchange
) -> tuple[nn.Module, dict[str, Tensor], list[Tensor], tuple[Any, ...], dict[str, Axis]]:
    """The stack; its representations by name, whole; this rank's shards of them; its other arguments; and the axes along which
    its results are sharded."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    config, b, s, r = ModelConfig.preset("test").channels, case.batch, SEQUENCES[case.stack], RESIDUES
    stack = stack_of(case)
    use_exchange(stack, exchange, case.plan)
    pair = random(b, r, r, config.pair).requires_grad_()
    pair_mask = (random(b, r, r) > -1).double()
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0).at(sample) for sample in range(b)]))
    if case.stack == "templates":
        return stack, {"z": pair}, [exchange.shard(pair, "i")], (pair_mask, keys), {"z": "j"}
    extra = is_extra(case.stack)
    msa = random(b, s, r, config.extra_msa if extra else config.msa).requires_grad_()
    msa_mask = (random(b, s, r) > -1).double()
    shards, m_axis = (
        [exchange.shard(msa, "seq"), exchange.shard(pair, "j")],
        case.plan.extra_msa_axis if extra else "res",
    )
    return stack, {"m": msa, "z": pair}, shards, (msa_mask, pair_mask, keys), {"m": m_axis, "z": "j"}


def run(case: Case, exchange: Exchange, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor], nn.Module]:
    """Forward and backward pass: outputs, input gradients, and the module with its parameter gradients."""
    stack, inputs, shards, others, axes = given(case, exchange)
    results = stack(*shards, *others)
    outputs = dict(zip(inputs, [results] if isinstance(results, Tensor) else results, strict=True))
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(x.shape, dtype=torch.float64, generator=generator) for name, x in inputs.items()}
    loss = sum((exchange.shard(weights[name], axes[name]) * output).sum() for name, output in outputs.items())
    (ranks * loss).backward()
    return outputs, {name: x.grad for name, x in inputs.items()}, stack


def run_rank(handle: Any, case: Case) -> Found:
    exchange = ShardedExchange(PoisonedGroup(handle), case.overlap)
    ranks = exchange.group.size
    outputs, inputs, stack = in_double(run, case, exchange, ranks)

    def mean(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=handle)
        return gradient / ranks

    return Found(
        {name: x.detach() for name, x in outputs.items()},
        {name: mean(gradient) for name, gradient in inputs.items()},
        {name: mean(p.grad) for name, p in stack.named_parameters() if p.grad is not None},
    )


def check(pool: RankPool, case: Case, numbers_of_ranks: tuple[int, ...]) -> None:
    """Compare `case` on each number of ranks with one device."""
    alone = dataclasses.replace(case, recompute=False, projections=False)
    outputs, inputs, stack = in_double(run, alone, LocalExchange(), 1)
    m_axis = case.plan.extra_msa_axis if is_extra(case.stack) else "res"
    axis_of = {"m": DIMENSION[m_axis], "z": 2}
    for ranks in numbers_of_ranks:
        found = pool.run(ranks, run_rank, case)
        for name, output in outputs.items():
            close(
                torch.cat([rank.outputs[name] for rank in found], axis_of[name]),
                output.detach(),
                f"{name}, {ranks} ranks",
            )
        for rank in found:
            for name, gradient in inputs.items():
                close(rank.inputs[name], gradient, f"gradient of {name}, {ranks} ranks")
            trained = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
            assert trained.keys() == rank.parameters.keys()
            for name, gradient in trained.items():
                close(rank.parameters[name], gradient, f"gradient of {name}, {ranks} ranks")
