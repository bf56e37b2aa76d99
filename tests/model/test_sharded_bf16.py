"""The rounding error of half precision over several ranks is no larger than on one device.

Errors are differences to double precision: 99th percentile and maximum, over outputs and over parameter gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, Place
from tests.ranks import RankPool

BATCH, SEQUENCES, RESIDUES = 2, 13, 22
SLACK = 1.2
Mode = Literal["bf16", "bf16 on the wire", "bf16-mixed"]


def run(exchange: Exchange, dtype: torch.dtype, mixed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
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
    m = torch.randn(BATCH, SEQUENCES, RESIDUES, config.channels.msa, generator=generator).to(entering)
    z = torch.randn(BATCH, RESIDUES, RESIDUES, config.channels.pair, generator=generator).to(entering)
    masks = torch.ones(BATCH, SEQUENCES, RESIDUES, dtype=dtype), torch.ones(BATCH, RESIDUES, RESIDUES, dtype=dtype)
    stack = stack.to(dtype)
    use_exchange(stack, exchange)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        m, z = stack(exchange.shard(m, "seq"), exchange.shard(z, "j"), *masks)
    assert m.dtype == z.dtype == entering
    ((m.double().square().sum() + z.double().square().sum()) * exchange.ranks).backward()
    gradients = [p.grad.double().flatten() for p in stack.parameters()]
    return m.detach().double(), z.detach().double(), torch.cat(gradients)


def run_rank(handle: Any, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    exchange = ShardedExchange(Group(handle), dtype=torch.bfloat16 if mode == "bf16 on the wire" else None)
    m, z, gradients = run(exchange, torch.bfloat16 if mode == "bf16" else torch.float32, mixed=mode == "bf16-mixed")
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
    exact = run(LocalExchange(), torch.float64)
    mixed = mode == "bf16-mixed"
    serial = run(LocalExchange(), torch.float32 if mixed else torch.bfloat16, mixed)
    found = pool.run(ranks, run_rank, mode)
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
