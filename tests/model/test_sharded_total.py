"""The whole model and its total loss over ranks against one device, in double precision.

Every term is on. The mean over ranks of their losses is the loss, and the mean of their gradients is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from evodsp.training.gradients import freeze
from tests.builders.comparison import close
from tests.builders.labelled_batch import WEIGHTS, whole_batch
from tests.builders.small_model import SMALL, config
from tests.ranks import RankPool

Sizes = tuple[int, int, int]
FOR_EIGHT = (9, 11, 13)


def run(
    samples: int,
    sizes: Sizes,
    exchange: Exchange,
    plan: CommunicationPlan,
    recompute: bool = True,
    frozen: Sequence[str] = (),
) -> tuple[Tensor, dict[str, Tensor], AlphaFold]:
    """The loss, its terms, and the model with its gradients, as computed on this rank."""
    torch.set_default_dtype(torch.float64)
    try:
        model = dense(AlphaFold(config(recompute)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        freeze(model, frozen)
        use_exchange(model, exchange, plan)
        inputs = whole_batch(samples, sizes)
        output = model(inputs, [Draws.root(0).at(sample) for sample in range(samples)])
        loss, terms = total_loss(output, inputs, WEIGHTS, config().heads, exchange)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return loss.detach(), terms, model


def run_rank(
    handle: Any,
    samples: int,
    sizes: Sizes,
    plan: CommunicationPlan,
    recompute: bool,
    overlap: bool,
    frozen: Sequence[str],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    exchange = ShardedExchange(Group(handle), overlap)
    loss, terms, model = run(samples, sizes, exchange, plan, recompute, frozen)

    def mean(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=handle)
        return x / exchange.ranks

    losses = {name: mean(term.clone()) for name, term in {**terms, "loss": loss}.items()}
    return losses, {name: mean(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@cache
def on_one_device(samples: int, sizes: Sizes) -> tuple[Tensor, dict[str, Tensor], AlphaFold]:
    return run(samples, sizes, LocalExchange(), CommunicationPlan(), recompute=False)


def check(
    pool: RankPool,
    ranks: int,
    samples: int,
    sizes: Sizes,
    plan: CommunicationPlan,
    recompute: bool = True,
    overlap: bool = True,
    frozen: Sequence[str] = (),
) -> None:
    """`frozen`: parts that the ranks do not train; the one device trains all."""
    loss, terms, model = on_one_device(samples, sizes)
    trained = AlphaFold(config())
    freeze(trained, frozen)
    names = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    for losses, gradients in pool.run(ranks, run_rank, samples, sizes, plan, recompute, overlap, frozen):
        for name, term in {**terms, "loss": loss}.items():
            close(losses[name], term, name)
        assert gradients.keys() == names
        for name, parameter in model.named_parameters():
            if name in names:
                close(gradients[name], parameter.grad, f"gradient of {name}")


@pytest.mark.verify_but("2-1-*")
@pytest.mark.parametrize(
    ("ranks", "samples", "plan"),
    [
        (2, 1, CommunicationPlan()),
        (3, 2, CommunicationPlan("gather", "channel", "gather")),
        (4, 2, CommunicationPlan()),
        (4, 1, CommunicationPlan(outer_product_mean="sum", stream_bias=True)),
    ],
    ids=str,
)
def test_model_and_loss_over_ranks_equal_one_device(
    pool: RankPool, ranks: int, samples: int, plan: CommunicationPlan
) -> None:
    """Catches a sharded term counted once instead of N times, and a replicated term counted N times."""
    check(pool, ranks, samples, SMALL, plan)


BEFORE = ("*embedder", "template*", "extra_msa_stack", "evoformer.blocks.0")
WITHIN = ("evoformer.blocks.[0-9].pair*", "extra_msa_stack.blocks.0.msa_stack", "structure_module.attention")
AFTER = ("structure_module", "heads", "single")


@pytest.mark.verify_but("1-True-True-*")
@pytest.mark.parametrize(
    ("ranks", "recompute", "overlap", "frozen"),
    [
        (ranks, *ways, frozen)
        for ranks in (1, 2, 3)
        for ways in ((True, True), (False, True), (True, False))
        for frozen in (BEFORE, WITHIN, AFTER)
    ],
)
def test_frozen_parts_change_no_other_gradient(
    pool: RankPool, ranks: int, recompute: bool, overlap: bool, frozen: Sequence[str]
) -> None:
    """Catches a gradient that does not pass a frozen layer, one that a frozen layer has, and ranks whose collectives do not
    meet because one of them leaves a backward pass out."""
    check(pool, ranks, 1, SMALL, CommunicationPlan(), recompute, overlap, frozen)


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("samples", "recompute", "overlap"), [(1, False, True), (2, True, False), (2, False, False)])
def test_model_and_loss_recomputed_or_not_overlapped_or_not(
    pool: RankPool, ranks: int, samples: int, recompute: bool, overlap: bool
) -> None:
    """Catches a collective that is correct only with overlap, or only with recomputation."""
    check(pool, ranks, samples, SMALL, CommunicationPlan(), recompute, overlap)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.stop()


@pytest.mark.verify
@pytest.mark.parametrize("samples", [1, 2])
def test_model_and_loss_over_eight_ranks_equal_one_device(eight: RankPool, samples: int) -> None:
    """Catches errors on empty shards: there are more ranks than heads, operand channels or templates."""
    check(eight, 8, samples, FOR_EIGHT, CommunicationPlan())
