"""Attention to parts of the keys, and Ring Attention in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from evodsp.parallel import Ledger
from scripts.paper.methods.attention_kernel import attend, attend_backward, attend_formula, attend_formula_backward
from scripts.paper.methods.base import RingGroup
from scripts.paper.methods.ring import RingAttention
from tests.ranks import RankPool

pytestmark = pytest.mark.verify


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output: 3 rows, 2 heads, 4 queries, 12 keys of width 8."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, length, 8, generator=generator).to(dtype) for length in (4, 12, 12, 4)]


@pytest.mark.parametrize("functions", [(attend, attend_backward), (attend_formula, attend_formula_backward)])
def test_gradients_of_parts_add_up(functions: Any) -> None:
    """Catches a wrong scale or sum of exponentials. The formula runs on a GPU only, where no other test sees it."""
    forward, backward = functions
    q, k, v, gradient = (x.requires_grad_() for x in inputs(torch.float64))
    expected = F.scaled_dot_product_attention(q, k, v)
    to_q, to_k, to_v = torch.autograd.grad(expected, (q, k, v), gradient)
    parts = [(k[..., part, :].detach(), v[..., part, :].detach()) for part in (slice(0, 5), slice(5, 12))]
    lse = torch.stack([forward(q.detach(), *part)[1] for part in parts]).logsumexp(0)
    found = [backward(gradient.detach(), q.detach(), *part, expected.detach(), lse) for part in parts]
    torch.testing.assert_close(found[0][0] + found[1][0], to_q)
    torch.testing.assert_close(torch.cat([found[0][1], found[1][1]], -2), to_k)
    torch.testing.assert_close(torch.cat([found[0][2], found[1][2]], -2), to_v)


def test_calls_of_the_gpu_kernel_are_well_formed() -> None:
    """Catches wrong arguments of the fused kernel on a GPU, which no test here runs: torch checks them on shapes."""
    with FakeTensorMode():
        q, k, v, gradient = (torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in inputs(torch.float32))
        out, lse = attend(q, k, v)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
        assert [x.shape for x in attend_backward(gradient, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


def ring_in_half_precision(handle: Any) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """Output and gradients of this rank's shard, and (phase, bytes a number) of each ring."""
    ledger = Ledger()
    group = RingGroup(handle, ledger)
    q, k, v, gradient = (
        (x if x.shape[-2] == 12 else x.repeat(1, 1, 3, 1))
        .tensor_split(group.size, -2)[group.rank]
        .contiguous()
        .requires_grad_()
        for x in inputs(torch.bfloat16)
    )
    out = RingAttention(group).attend(q, k, v)
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.detach())]
    return results, [(entry.phase, entry.bytes // entry.elements) for entry in ledger.entries]


def test_a_ring_in_half_precision_merges_in_full_precision(pool: RankPool) -> None:
    """Catches sums over ranks in bf16, which lose digits with each rank, and results in another precision than the inputs."""
    q, k, v, gradient = inputs(torch.bfloat16)
    q, gradient = q.repeat(1, 1, 3, 1), gradient.repeat(1, 1, 3, 1)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*exact)
    expected = [out, *torch.autograd.grad(out, exact, gradient.double())]
    found, rings = zip(*pool.run(4, ring_in_half_precision), strict=True)
    for shards, whole in zip(zip(*found, strict=True), expected, strict=True):
        assert shards[0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat(shards, -2).double(), whole, rtol=0.02, atol=0.02)
    keys_and_values, gradients = [("backward", 2)] * 2, [("backward", 4)] * 2
    assert rings[0] == [("forward", 2)] * 2 + keys_and_values + gradients
