"""Collectives of a whole training step on 8 to 512 ranks: the planner's against the ledger of a rank that runs the whole model.

The other ranks do not exist: PyTorch's fake process group returns at once. Tensors have shapes only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from evodsp.config import LossConfig, ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Ledger
from evodsp.planner.device import load_device
from evodsp.planner.program import PlannedStep, SampleSizes, program, sample_batch
from evodsp.planner.simulate import items_of
from evodsp.planner.trace import Communication
from evodsp.rng import Draws
from scripts.benchmarks.fake_ranks import fake_group

PRESET = ModelConfig.preset("model_1_ptm")
LOSS = LossConfig(violation=1.0, experimentally_resolved=0.01, pae=0.1)
SIZES = SampleSizes(residues=530, clusters=519, extra=1030, templates=4)
"""Every rank of 512 has a shard; 16 divides none of the sizes."""


def model_of(blocks: int, recomputed: bool | int) -> ModelConfig:
    """The preset's widths with fewer blocks: the planner follows four, or seven, and repeats them. Of other parts, which it
    follows one by one, there is one."""
    return dataclasses.replace(
        PRESET,
        evoformer=dataclasses.replace(PRESET.evoformer, blocks=blocks, checkpoint=recomputed),
        extra_msa=dataclasses.replace(PRESET.extra_msa, blocks=1),
        templates=dataclasses.replace(PRESET.templates, blocks=1),
        structure_module=dataclasses.replace(PRESET.structure_module, iterations=1),
    )


def on_fake_ranks(step: PlannedStep) -> Counter[tuple[bool, str, int]]:
    """Collectives in the ledger after a pass with gradients: whether in the forward pass, kind, bytes."""
    ledger = Ledger()
    with fake_group(step.ranks, step.rank, ledger) as group, torch.device("meta"):
        model = AlphaFold(step.model).to("meta")  # its buffers are made from arrays
        exchange = ShardedExchange(group)
        use_exchange(model, exchange)
        batch = sample_batch(step)
        assert step.loss is not None
        loss, _ = total_loss(model(batch, [Draws.root(0)]), batch, step.loss, step.model.heads, exchange)
        loss.backward()
    return Counter((entry.phase == "forward", entry.kind, entry.bytes) for entry in ledger.entries)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("ranks", "rank", "recomputed"),
    [
        (8, 7, True),
        *(
            (ranks, rank, recomputed)
            for ranks, recomputed in ((8, 4), (64, False), (512, True))
            for rank in (0, ranks - 1)
        ),
    ],
)
def test_collectives_are_those_of_the_whole_model(ranks: int, rank: int, recomputed: bool | int) -> None:
    """Catches a segment that is repeated once too often, and a number of ranks at which the planner cuts other shards."""
    step = PlannedStep(model_of(5 if recomputed is True else 9, recomputed), SIZES, LOSS, ranks, rank, half=False)
    items = items_of(program(step), load_device("h100"))
    planned = Counter(
        (item.phase == "forward", item.kind, item.bytes) for item in items if isinstance(item, Communication)
    )
    assert planned == on_fake_ranks(step)
