"""The whole model over several ranks against one device, in double precision: outputs and all gradients.

As in `test_sharded`, sizes do not divide, parameters are random and dropout is on. With templates and two cycles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import HeadsConfig, ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import use_exchange
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.comparison import close
from tests.builders.poisoned_group import PoisonedGroup
from tests.builders.small_model import SMALL, chains, config, features, features_of_chains, tensors
from tests.ranks import RankPool

SHARDED: dict[str, Axis] = {
    "msa": "res", "pair": "j", "distogram_logits": "i", "predicted_aligned_error_logits": "i", "masked_msa_logits": "res",
}  # fmt: skip


def gathered(x: Tensor, name: str, exchange: Exchange) -> Tensor:
    """An output gathered from all ranks."""
    return exchange.gather(x, SHARDED[name], whole=SMALL[2]) if name in SHARDED else x


def without_blocks() -> ModelConfig:
    """The model without extra-MSA stack and template stack, as configs/family.yaml has it, and without Evoformer."""
    whole = config()
    changed = {
        name: dataclasses.replace(getattr(whole, name), blocks=0) for name in ("extra_msa", "evoformer", "templates")
    }
    return dataclasses.replace(whole, **changed)


KINDS = {
    "monomer": (config, features),
    "without blocks": (without_blocks, features),
    "multimer": (chains, features_of_chains),
}


def run(
    batch: int, exchange: Exchange, kind: str = "monomer"
) -> tuple[dict[str, Tensor], dict[str, Tensor], AlphaFold]:
    """Outputs, gradients of the floating-point inputs, and the model with its gradients (0 where it has none)."""
    config_of, features_of = KINDS[kind]
    model = dense(AlphaFold(config_of()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # larger parameters would saturate the sigmoids
    use_exchange(model, exchange)
    inputs = features_of(batch)
    wanted = {name: inputs[name].requires_grad_() for name in ("target_feat", "msa_feat", "extra_deletion_value")}
    output = model(inputs, [Draws.root(0).at(sample) for sample in range(batch)])
    outputs = {name: gathered(value, name, exchange) for name, value in tensors(output).items()}
    generator = torch.Generator().manual_seed(11)
    terms = []
    for value in outputs.values():
        weight = torch.randn(value.shape, dtype=torch.float64, generator=generator) / math.sqrt(value.numel())
        terms.append((weight * value).sum())
    torch.stack(terms).sum().backward()
    for x in (*model.parameters(), *wanted.values()):
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad
    return outputs, {name: x.grad for name, x in wanted.items()}, model


def run_rank(handle: Any, batch: int, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    try:
        exchange = ShardedExchange(PoisonedGroup(handle))
        outputs, inputs, model = run(batch, exchange, kind)
    finally:
        torch.set_default_dtype(torch.float32)

    def mean(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=handle)
        return gradient / exchange.ranks

    gradients = {name: mean(p.grad) for name, p in model.named_parameters()}
    return {k: v.detach() for k, v in outputs.items()}, {k: mean(g) for k, g in inputs.items()}, gradients


@pytest.mark.verify_but("3-1-without blocks", "3-2-multimer")
@pytest.mark.parametrize(
    ("ranks", "batch", "kind"),
    [
        (3, 2, "monomer"),
        (3, 1, "without blocks"),
        (3, 2, "multimer"),
        *((4, batch, kind) for batch in (1, 2) for kind in ("monomer", "multimer")),
        (2, 1, "multimer"),
    ],
)
def test_the_whole_model_over_ranks_equals_one_device(pool: RankPool, ranks: int, batch: int, kind: str) -> None:
    """Catches a module that computes the wrong shard, gradients lost where a sample is sharded or gathered, and a stack without
    blocks that leaves its input where it was."""
    torch.set_default_dtype(torch.float64)
    try:
        outputs, inputs, model = run(batch, LocalExchange(), kind)
    finally:
        torch.set_default_dtype(torch.float32)
    for found_outputs, found_inputs, found_parameters in pool.run(ranks, run_rank, batch, kind):
        for name, output in outputs.items():
            close(found_outputs[name], output.detach(), name)
        for name, gradient in inputs.items():
            close(found_inputs[name], gradient, f"gradient of {name}")
        for name, parameter in model.named_parameters():
            close(found_parameters[name], parameter.grad, f"gradient of {name}")


def test_no_head_is_left_out() -> None:
    """Catches a tested model that lacks a head: the comparison would pass without it."""
    assert config().heads == dataclasses.replace(
        HeadsConfig(plddt_channels=8), experimentally_resolved=True, predicted_aligned_error=True
    )


def predicted(present: int, absent: int, exchange: Exchange) -> dict[str, Tensor]:
    """Outputs without dropout for `present` templates and as many masked zeros as `absent`."""
    inputs = features(2)
    inputs["seq_mask"][:] = 1
    inputs["msa_mask"][:, :, 0] = 1  # the query: a column without any sequence averages over absent ones
    for name in (name for name in inputs if name.startswith("template_")):
        inputs[name] = inputs[name][:, :, : present + absent].clone()
        inputs[name][:, :, present:] = 0
    model = dense(AlphaFold(config()))
    use_exchange(model, exchange)
    with torch.no_grad():
        return {name: gathered(value, name, exchange) for name, value in tensors(model(inputs)).items()}


def predicted_by_rank(handle: Any, present: int) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    try:
        return predicted(present, 0, ShardedExchange(PoisonedGroup(handle)))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.verify_but("0")
@pytest.mark.parametrize("present", [0, 1])
def test_absent_templates_change_nothing(pool: RankPool, present: int) -> None:
    """Catches a model that cannot do without templates, on one device and on three, and rows of the MSA that are lost."""
    torch.set_default_dtype(torch.float64)
    try:
        padded, alone = predicted(present, 3 - present, LocalExchange()), predicted(present, 0, LocalExchange())
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (alone, *pool.run(3, predicted_by_rank, present)):
        for name, value in padded.items():
            close(found[name], value, name)
