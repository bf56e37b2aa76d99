"""Stacks over several ranks against one device, in double precision: outputs, input gradients, parameter gradients.

Sizes differ and do not divide. Dropout is on. Parameters are all random: AF2's zero initialisation makes residual
branches zero, so mistakes in them would not show. The mean over ranks of their losses is the loss, so each rank
multiplies its shard's loss by N.
"""

from __future__ import annotations

import itertools

import pytest

from evodsp.model.schedule import DAP, CommunicationPlan
from tests.builders.sharded_stacks import SEQUENCES, Case, check
from tests.ranks import RankPool

# Three ranks, none of whose shards are alike, find what two and four find: these run the plainest cases only.
QUICK = [
    (Case("evoformer"), (2, 4)),
    (Case("evoformer", batch=2, recompute=True), (3,)),
    (Case("evoformer", recompute=True, overlap=False), (3,)),
    (Case("extra", batch=2), (2, 3)),
    (Case("extra_deep", recompute=True), (3,)),
    (Case("outer_first", batch=2), (2, 3)),
    (Case("outer_first", recompute=True), (3,)),
    (Case("outer_first_extra", batch=2, recompute=True), (3,)),
    (Case("outer_first_extra", plan=DAP), (2,)),
    (Case("templates", batch=2, recompute=True), (3,)),
    (Case("evoformer", plan=DAP), (3,)),
    (Case("extra", recompute=True, plan=CommunicationPlan(keep_gathered=False)), (3,)),
    (Case("extra_deep", recompute=True, plan=DAP), (3,)),
    (
        Case("extra", batch=2, recompute=True, plan=CommunicationPlan(outer_product_mean="sum", stream_bias=True)),
        (3,),
    ),
    (Case("templates", plan=CommunicationPlan("channel", "gather", stream_bias=True)), (2,)),
]
EVERY = list(itertools.starmap(Case, itertools.product(SEQUENCES, (1, 2), (False, True), (False, True))))


@pytest.mark.verify_but(
    "templates*", "outer_first_extra,batch=1*", "extra,batch=2,recompute*", "evoformer,batch=1,overlap-*"
)
@pytest.mark.parametrize(("case", "numbers_of_ranks"), QUICK, ids=str)
def test_parallel_equals_serial(pool: RankPool, case: Case, numbers_of_ranks: tuple[int, ...]) -> None:
    """Catches a gradient that is lost or counted twice, a transposed shard, and a dropout mask drawn by local position."""
    check(pool, case, numbers_of_ranks)


@pytest.mark.verify
@pytest.mark.parametrize("case", [*EVERY, *(case for case, _ in QUICK if case not in EVERY)], ids=str)
def test_parallel_equals_serial_in_every_combination(pool: RankPool, case: Case) -> None:
    """The same for every stack with batch 1 and 2, recomputation and overlap off and on, all plans, one to four ranks."""
    check(pool, case, (1, 2, 3, 4))
