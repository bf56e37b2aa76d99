"""The whole model over several ranks against one device, in double precision: outputs and all gradients.

As in `test_sharded`: sizes that do not divide and all differ, dense parameters, dropout, templates, two passes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import HeadsConfig, ModelConfig, TemplateConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.outputs import ModelOutput
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.layout import Axis
from evodsp.rng import Draws
from tests.model.test_sharded import close, dense
from tests.ranks import RankPool

TEMPLATES, CYCLES = 3, 2
SMALL = (5, 6, 7)
"""Clusters, extra sequences, residues."""


def config(recompute: bool = True) -> ModelConfig:
    base = ModelConfig.preset("test")
    return dataclasses.replace(
        base,
        templates=TemplateConfig(
            True, channels=8, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=5, attention_heads=2,
            attention_head_width=3, unit_vector=True, checkpoint=recompute,
        ),
        evoformer=dataclasses.replace(base.evoformer, checkpoint=recompute),
        extra_msa=dataclasses.replace(base.extra_msa, checkpoint=recompute),
        heads=dataclasses.replace(base.heads, experimentally_resolved=True, predicted_aligned_error=True),
    )  # fmt: skip


def features(batch: int, sizes: tuple[int, int, int] = SMALL) -> dict[str, Tensor]:
    """Random ones, with padding in every mask."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, CYCLES, *shape, dtype=torch.float64, generator=generator)

    def letters(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (batch, CYCLES, *shape), generator=generator).int()

    (s, e, r), t = sizes, TEMPLATES
    seq_mask = torch.ones(batch, CYCLES, r, dtype=torch.float64)
    seq_mask[-1, :, -1] = 0
    return {
        "aatype": letters(20, r)[:, :1].expand(-1, CYCLES, -1),
        "residue_index": torch.arange(r).int().expand(batch, CYCLES, r),
        "seq_mask": seq_mask,
        "target_feat": random(r, 22),
        "msa_feat": random(s, r, 49),
        "msa_mask": (random(s, r) > -1).double() * seq_mask.unsqueeze(-2),
        "extra_msa": letters(23, e, r),
        "extra_msa_mask": (random(e, r) > -1).double(),
        "extra_has_deletion": random(e, r).sign().clamp(min=0),
        "extra_deletion_value": random(e, r),
        "template_aatype": letters(22, t, r),
        "template_all_atom_positions": 10 * random(t, r, 37, 3),
        "template_all_atom_masks": (random(t, r, 37) > -1).double(),
        "template_pseudo_beta": 10 * random(t, r, 3),
        "template_pseudo_beta_mask": (random(t, r) > -1).double(),
        "template_mask": torch.ones(batch, CYCLES, t, dtype=torch.float64),
    }


def tensors(output: ModelOutput) -> dict[str, Tensor]:
    """What losses and recycling read."""
    own = {name: value for name, value in vars(output).items() if isinstance(value, Tensor)}
    structure = output.structure
    return own | {
        "angles": structure.angles,
        "atom14": structure.atom14,
        "backbone": structure.backbone.to_flat12(),
        "frames": structure.frames.to_flat12(),
    }


SHARDED: dict[str, Axis] = {
    "msa": "res", "pair": "j", "distogram_logits": "i", "pae_logits": "i", "masked_msa_logits": "res",
}  # fmt: skip


def whole(x: Tensor, name: str, exchange: Exchange) -> Tensor:
    """An output with all its shards."""
    return exchange.gather(x, SHARDED[name], whole=SMALL[2]) if name in SHARDED else x


def run(batch: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor], AlphaFold]:
    """Outputs, gradients of the inputs that have any, and the model with its gradients."""
    model = dense(AlphaFold(config()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # as dense as can be without saturating every sigmoid
    use_exchange(model, exchange)
    inputs = features(batch)
    wanted = {name: inputs[name].requires_grad_() for name in ("target_feat", "msa_feat", "extra_deletion_value")}
    output = model(inputs, [Draws.root(0).at(sample) for sample in range(batch)])
    outputs = {name: whole(value, name, exchange) for name, value in tensors(output).items()}
    generator = torch.Generator().manual_seed(11)
    terms = []
    for value in outputs.values():
        weight = torch.randn(value.shape, dtype=torch.float64, generator=generator) / math.sqrt(value.numel())
        terms.append((weight * value).sum())
    torch.stack(terms).sum().backward()
    return outputs, {name: x.grad for name, x in wanted.items()}, model


def run_rank(handle: Any, batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    try:
        exchange = ShardedExchange(Group(handle))
        outputs, inputs, model = run(batch, exchange)
    finally:
        torch.set_default_dtype(torch.float32)

    def mean(gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, group=handle)
        return gradient / exchange.ranks

    gradients = {name: mean(p.grad) for name, p in model.named_parameters()}
    return {k: v.detach() for k, v in outputs.items()}, {k: mean(g) for k, g in inputs.items()}, gradients


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (3, 2), pytest.param(4, 2, marks=pytest.mark.verify), (4, 1)])
def test_the_whole_model_over_ranks_equals_one_device(pool: RankPool, ranks: int, batch: int) -> None:
    """A part that is built for the wrong shard, or a gradient lost where the sample is split or gathered."""
    torch.set_default_dtype(torch.float64)
    try:
        outputs, inputs, model = run(batch, LocalExchange())
    finally:
        torch.set_default_dtype(torch.float32)
    for found_outputs, found_inputs, found_parameters in pool.run(ranks, run_rank, batch):
        for name, output in outputs.items():
            close(found_outputs[name], output.detach(), name)
        for name, gradient in inputs.items():
            close(found_inputs[name], gradient, f"gradient of {name}")
        for name, parameter in model.named_parameters():
            close(found_parameters[name], parameter.grad, f"gradient of {name}")


def test_no_head_is_left_out() -> None:
    """The model under test has every head, or the test would pass without them."""
    assert config().heads == dataclasses.replace(
        HeadsConfig(plddt_channels=8), experimentally_resolved=True, predicted_aligned_error=True
    )
