"""Stacks over several ranks against one device, in double precision: outputs, input gradients, parameter gradients.

Sizes differ and do not divide. Dropout is on. Parameters are all random: AF2's zero initialisation makes residual
branches zero, so mistakes in them would not show. The mean over ranks of their losses is the loss, so each rank
multiplies its shard's loss by N.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import HeadsConfig, ModelConfig
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Place
from evodsp.parallel.testing import _in_double as in_double
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from evodsp.training.gradients import freeze
from tests.builders.comparison import close
from tests.builders.labelled_batch import WEIGHTS, whole_batch
from tests.builders.poisoned_group import PoisonedGroup
from tests.builders.sharded_stacks import SEQUENCES, Case, check
from tests.builders.small_model import SMALL, chains, config, features, features_of_chains, gathered, halved, tensors
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


Ran = tuple[dict[str, Tensor], dict[str, Tensor], AlphaFold]
"""Outputs that every rank has, tensors whose mean over ranks counts, and the model with its gradients."""


def everything(ran: Ran) -> dict[str, Tensor]:
    """By name; a gradient is zero where a trained parameter has none on this rank."""
    outputs, shares, model = ran
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    trained = {f"gradient of {name}": p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    return {name: x.detach() for name, x in {**outputs, **shares, **gradients}.items()}


def on_rank(handle: Any, overlap: bool, run: Callable[..., Ran], *arguments: Any) -> dict[str, Tensor]:
    exchange = ShardedExchange(PoisonedGroup(handle), overlap)
    ran = in_double(run, exchange, *arguments)
    found = everything(ran)
    for name in [name for name in found if name not in ran[0]]:
        mean = found[name].clone()
        dist.all_reduce(mean, group=handle)
        found[name] = mean / exchange.ranks
    return found


def as_on_one_device(
    pool: RankPool,
    ranks: int,
    expected: dict[str, Tensor],
    run: Callable[..., Ran],
    *arguments: Any,
    overlap: bool = True,
) -> None:
    """Compare all that `run(exchange, *arguments)` computes on several ranks with what one device did."""
    for found in pool.run(ranks, on_rank, overlap, run, *arguments):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            close(found[name], x, name)


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


def run_model(exchange: Exchange, batch: int, kind: str) -> Ran:
    """With gradients of the floating-point inputs."""
    config_of, features_of = KINDS[kind]
    model, inputs = halved(config_of()), features_of(batch)
    use_exchange(model, exchange)
    wanted = {name: inputs[name].requires_grad_() for name in ("target_feat", "msa_feat", "extra_deletion_value")}
    output = model(inputs, [Draws.root(0).at(sample) for sample in range(batch)])
    outputs = {name: gathered(value, name, exchange) for name, value in tensors(output).items()}
    generator = torch.Generator().manual_seed(11)
    terms = []
    for value in outputs.values():
        weight = torch.randn(value.shape, dtype=torch.float64, generator=generator) / math.sqrt(value.numel())
        terms.append((weight * value).sum())
    torch.stack(terms).sum().backward()
    gradients = {f"gradient of {name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in wanted.items()}
    return outputs, gradients, model


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
    expected = everything(in_double(run_model, LocalExchange(), batch, kind))
    as_on_one_device(pool, ranks, expected, run_model, batch, kind)


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
    return in_double(predicted, present, 0, ShardedExchange(PoisonedGroup(handle)))


@pytest.mark.verify_but("0")
@pytest.mark.parametrize("present", [0, 1])
def test_absent_templates_change_nothing(pool: RankPool, present: int) -> None:
    """Catches a model that cannot do without templates, on one device and on three, and rows of the MSA that are lost."""
    padded, alone = (in_double(predicted, present, more, LocalExchange()) for more in (3 - present, 0))
    for found in (alone, *pool.run(3, predicted_by_rank, present)):
        for name, value in padded.items():
            close(found[name], value, name)


Sizes = tuple[int, int, int]
FOR_EIGHT = (9, 11, 13)


def run_total(
    exchange: Exchange,
    samples: int,
    sizes: Sizes,
    plan: CommunicationPlan = CommunicationPlan(),
    recompute: bool = True,
    frozen: Sequence[str] = (),
) -> Ran:
    """With the loss and its terms."""
    model = halved(config(recompute))
    freeze(model, frozen)
    use_exchange(model, exchange, plan)
    inputs = whole_batch(samples, sizes)
    output = model(inputs, [Draws.root(0).at(sample) for sample in range(samples)])
    loss, terms = total_loss(output, inputs, WEIGHTS, config().heads, exchange)
    loss.backward()
    return {}, {**terms, "loss": loss}, model


@cache
def on_one_device(samples: int, sizes: Sizes) -> dict[str, Tensor]:
    """What one device computes without recomputation; no parameter is without a gradient."""
    ran = in_double(run_total, LocalExchange(), samples, sizes, CommunicationPlan(), False)
    assert all(p.grad is not None for p in ran[2].parameters())
    return everything(ran)


def check_total(
    pool: RankPool,
    ranks: int,
    samples: int,
    sizes: Sizes,
    plan: CommunicationPlan = CommunicationPlan(),
    recompute: bool = True,
    overlap: bool = True,
    frozen: Sequence[str] = (),
) -> None:
    """`frozen`: parts that the ranks do not train; the one device trains all."""
    expected, model = on_one_device(samples, sizes), AlphaFold(config())
    freeze(model, frozen)
    untrained = {f"gradient of {name}" for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert bool(untrained) == bool(frozen)
    wanted = {name: x for name, x in expected.items() if name not in untrained}
    as_on_one_device(pool, ranks, wanted, run_total, samples, sizes, plan, recompute, frozen, overlap=overlap)


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
    check_total(pool, ranks, samples, SMALL, plan)


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
    check_total(pool, ranks, 1, SMALL, recompute=recompute, overlap=overlap, frozen=frozen)


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("samples", "recompute", "overlap"), [(1, False, True), (2, True, False), (2, False, False)])
def test_model_and_loss_recomputed_or_not_overlapped_or_not(
    pool: RankPool, ranks: int, samples: int, recompute: bool, overlap: bool
) -> None:
    """Catches a collective that is correct only with overlap, or only with recomputation."""
    check_total(pool, ranks, samples, SMALL, recompute=recompute, overlap=overlap)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.stop()


@pytest.mark.verify
@pytest.mark.parametrize("samples", [1, 2])
def test_model_and_loss_over_eight_ranks_equal_one_device(eight: RankPool, samples: int) -> None:
    """Catches errors on empty shards: there are more ranks than heads, operand channels or templates."""
    check_total(eight, 8, samples, FOR_EIGHT)


BATCH, ROWS, RESIDUES = 2, 13, 22
SLACK = 1.2
Mode = Literal["bf16", "bf16 on the wire", "bf16-mixed"]


def run_half(exchange: Exchange, dtype: torch.dtype, mixed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's shards of m and z, and its gradients of all parameters as one vector.

    `mixed`: parameters and masks in float32, and everything else in bf16 through autocast.
    """
    config = ModelConfig.preset("test")
    sizes = dataclasses.replace(config.evoformer, blocks=3)
    torch.manual_seed(0)
    stack = EvoformerStack(config.channels.msa, config.channels.pair, sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    entering = torch.bfloat16 if mixed else dtype
    m = torch.randn(BATCH, ROWS, RESIDUES, config.channels.msa, generator=generator).to(entering)
    z = torch.randn(BATCH, RESIDUES, RESIDUES, config.channels.pair, generator=generator).to(entering)
    masks = torch.ones(BATCH, ROWS, RESIDUES, dtype=dtype), torch.ones(BATCH, RESIDUES, RESIDUES, dtype=dtype)
    stack = stack.to(dtype)
    use_exchange(stack, exchange)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        m, z = stack(exchange.shard(m, "seq"), exchange.shard(z, "j"), *masks)
    assert m.dtype == z.dtype == entering
    ((m.double().square().sum() + z.double().square().sum()) * exchange.ranks).backward()
    gradients = [p.grad.double().flatten() for p in stack.parameters()]
    return m.detach().double(), z.detach().double(), torch.cat(gradients)


def run_half_rank(handle: Any, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    exchange = ShardedExchange(Group(handle), dtype=torch.bfloat16 if mode == "bf16 on the wire" else None)
    m, z, gradients = run_half(
        exchange, torch.bfloat16 if mode == "bf16" else torch.float32, mixed=mode == "bf16-mixed"
    )
    dist.all_reduce(gradients, group=handle)
    return m, z, gradients / exchange.ranks


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """99th percentile and maximum of the absolute difference."""
    difference = (found - exact).abs().flatten()
    return torch.quantile(difference, 0.99).item(), difference.max().item()


@pytest.mark.verify_but("3-bf16")
@pytest.mark.parametrize("mode", ["bf16", "bf16 on the wire", "bf16-mixed"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_half_precision_is_as_exact_as_on_one_device(pool: RankPool, ranks: int, mode: Mode) -> None:
    """Catches sums over ranks that are rounded once too often, and rounding of more than the messages."""
    exact = run_half(LocalExchange(), torch.float64)
    mixed = mode == "bf16-mixed"
    serial = run_half(LocalExchange(), torch.float32 if mixed else torch.bfloat16, mixed)
    found = pool.run(ranks, run_half_rank, mode)
    outputs = {
        "m": (torch.cat([rank[0] for rank in found], 2), serial[0], exact[0]),
        "z": (torch.cat([rank[1] for rank in found], 2), serial[1], exact[1]),
        "gradients": (found[0][2], serial[2], exact[2]),
    }
    for name, (parallel, one_device, reference) in outputs.items():
        pairs = zip(errors(parallel, reference), errors(one_device, reference), ("p99", "max"), strict=True)
        for error, allowed, which in pairs:
            assert error <= SLACK * allowed, f"{name}, {which}: {error:.3g}, on one device {allowed:.3g}"


class Wire(Place):
    """One rank of two in a single process: what the ranks gather, in the precision in which this one sends."""

    def __init__(self, rank: int, by_rank: list[Tensor]) -> None:
        super().__init__(rank, len(by_rank))
        self.by_rank = by_rank

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        torch.testing.assert_close(sent.view(-1), self.by_rank[self.rank].to(sent.dtype).view(-1), rtol=0, atol=0)
        received.view(self.size, -1).copy_(torch.stack(self.by_rank).view(self.size, -1))
        return MagicMock()


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_of_a_softmax_are_exact_on_a_wire_of_bf16(rank: int) -> None:
    """Catches shifts that are rounded on the way: 20.3 becomes 20.25, and all that was summed is scaled by a power of the
    difference; and sums that are not brought to the shift of the largest logit."""
    sums = [torch.tensor([[1.0 + 2**-12, 0.7, 20.0]]), torch.tensor([[0.3, 1.0 - 2**-12, 20.3]])]
    found = ShardedExchange(Wire(rank, sums), dtype=torch.bfloat16).softmax_sums(sums[rank])
    own, other = (x[:, :-1].double() for x in sums)
    scale = 2 ** (sums[0][0, -1].double() - sums[1][0, -1].double())
    torch.testing.assert_close(found.double(), own * scale + other, rtol=3e-7, atol=0)
