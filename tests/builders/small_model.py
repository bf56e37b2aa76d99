"""A small model with every head and templates, its features and outputs by name; a small stack with dropout, and its inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig, as_multimer
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.heads import ModelOutput
from evodsp.parallel.collectives import Axis
from evodsp.parallel.exchange import Exchange
from evodsp.parallel.testing import dense
from evodsp.rng import Draws

TEMPLATES, CYCLES = 3, 2
SMALL = (5, 6, 7)
"""Clusters, extra sequences, residues."""


def config(recompute: bool = True, projections: bool = False) -> ModelConfig:
    """The `test` preset with templates and every head. With `recompute`, all stacks recompute activations; with
    `projections`, those of both MSA stacks recompute the projections of attention.
    """
    base = ModelConfig.preset("test")
    again = {"checkpoint": recompute, "checkpoint_projections": projections}
    return dataclasses.replace(
        base,
        templates=TemplateConfig(
            True, channels=8, blocks=2, pair_heads=2, pair_head_width=3, triangle_channels=5, attention_heads=2,
            attention_head_width=3, unit_vector=True, checkpoint=recompute,
        ),
        evoformer=dataclasses.replace(base.evoformer, **again),
        extra_msa=dataclasses.replace(base.extra_msa, **again),
        heads=dataclasses.replace(base.heads, experimentally_resolved=True, predicted_aligned_error=True),
    )  # fmt: skip


def chains(recompute: bool = True) -> ModelConfig:
    """The same sizes arranged as in AlphaFold-Multimer, with an extra-MSA block whose MSA nobody reads and one before it."""
    base = config(recompute)
    return as_multimer(dataclasses.replace(base, extra_msa=dataclasses.replace(base.extra_msa, blocks=2)))


def features_of_chains(batch: int, sizes: tuple[int, int, int] = SMALL) -> dict[str, Tensor]:
    """Features of a complex: one chain, and two copies of another."""
    found = features(batch, sizes)
    r = sizes[2]
    first = r // 2
    second = first + (r - first) // 2
    numbers = {"asym_id": (1, 2, 3), "entity_id": (1, 2, 2), "sym_id": (1, 1, 2)}
    lengths = torch.tensor([first, second - first, r - second])
    for name, of in numbers.items():
        found[name] = torch.tensor(of).repeat_interleave(lengths).int().expand(batch, CYCLES, r)
    found["target_feat"] = found["target_feat"][..., :21].contiguous()
    return found


def features(batch: int, sizes: tuple[int, int, int] = SMALL) -> dict[str, Tensor]:
    """Random features of `batch` samples for `CYCLES` cycles, with padding in every mask. `sizes`: see `SMALL`."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, CYCLES, *shape, dtype=torch.float64, generator=generator)

    def letters(count: int, *shape: int) -> Tensor:
        return torch.randint(count, (batch, CYCLES, *shape), generator=generator).int()

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
    """The output tensors that losses and recycling read, by name."""
    logits = {f"{name}_logits": value for name, value in output.logits.items()}
    structure = output.structure
    return {
        **output.representations,
        **logits,
        "angles": structure.angles,
        "atom14": structure.atom14,
        "backbone": structure.backbone.to_flat12(),
        "frames": structure.frames.to_flat12(),
    }


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


def halved(settings: ModelConfig) -> AlphaFold:
    """A model whose parameters are all random, in double precision. Larger ones would saturate the sigmoids."""
    model = dense(AlphaFold(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def in_float32(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The features in single precision."""
    return {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}


SHARDED: dict[str, Axis] = {
    "msa": "res", "pair": "j", "distogram_logits": "i", "predicted_aligned_error_logits": "i", "masked_msa_logits": "res",
}  # fmt: skip
"""Outputs that are sharded, and along which axis."""


def gathered(x: Tensor, name: str, exchange: Exchange) -> Tensor:
    """An output of a `SMALL` model gathered from all ranks."""
    return exchange.gather(x, SHARDED[name], whole=SMALL[2]) if name in SHARDED else x
