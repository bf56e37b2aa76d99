"""The whole model and its total loss over ranks against one device, in double precision.

Every term is on. The mean over ranks of their losses is the loss, and the mean of their gradients is its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from evodsp.rng import Draws
from tests.builders.comparison import close
from tests.builders.labelled_batch import WEIGHTS, whole_batch
from tests.builders.parameters import dense
from tests.builders.small_model import SMALL, config
from tests.ranks import RankPool

Sizes = tuple[int, int, int]
FOR_EIGHT = (9, 11, 13)


def run(
    samples: int, sizes: Sizes, exchange: Exchange, plan: CommunicationPlan, recompute: bool = True
) -> tuple[Tensor, dict[str, Tensor], AlphaFold]:
    """The loss, its terms, and the model with its gradients, as computed on this rank."""
    torch.set_default_dtype(torch.float64)
    try:
        model = dense(AlphaFold(config(recompute)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        use_exchange(model, exchange, plan)
        inputs = whole_batch(samples, sizes)
        output = model(inputs, [Draws.root(0).at(sample) for sample in range(samples)])
        loss, terms = total_loss(output, inputs, WEIGHTS, config().heads, exchange)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return loss.detach(), terms, model


def run_rank(
    handle: Any, samples: int, sizes: Sizes, plan: CommunicationPlan, recompute: bool, overlap: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    exchange = ShardedExchange(Group(handle), overlap)
    loss, terms, model = run(samples, sizes, exchange, plan, recompute)

    def mean(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=handle)
        return x / exchange.ranks

    losses = {name: mean(term.clone()) for name, term in {**terms, "loss": loss}.items()}
    return losses, {name: mean(p.grad) for name, p in model.named_parameters()}


def check(
    pool: RankPool,
    ranks: int,
    samples: int,
    sizes: Sizes,
    plan: CommunicationPlan,
    recompute: bool = True,
    overlap: bool = True,
) -> None:
    loss, terms, model = run(samples, sizes, LocalExchange(), CommunicationPlan(), recompute=False)
    for losses, gradients in pool.run(ranks, run_rank, samples, sizes, plan, recompute, overlap):
        for name, term in {**terms, "loss": loss}.items():
            close(losses[name], term, name)
        for name, parameter in model.named_parameters():
            close(gradients[name], parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize(
    ("ranks", "samples", "plan"),
    [
        (2, 1, CommunicationPlan()),
        (3, 2, CommunicationPlan("gather", "channel", "gather")),
        pytest.param(4, 2, CommunicationPlan(), marks=pytest.mark.verify),
        pytest.param(4, 1, CommunicationPlan(outer_product_mean="sum", stream_bias=True), marks=pytest.mark.verify),
    ],
    ids=str,
)
def test_model_and_loss_over_ranks_equal_one_device(
    pool: RankPool, ranks: int, samples: int, plan: CommunicationPlan
) -> None:
    """Catches a sharded term counted once instead of N times, and a replicated term counted N times."""
    check(pool, ranks, samples, SMALL, plan)


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
