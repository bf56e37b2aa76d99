"""The modules of `scripts/paper/adaptability` on one device: each against a plain formula, position by position."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evodsp.parallel.testing import dense
from scripts.paper.adaptability import attention
from scripts.paper.adaptability.attention import Attention, CrossAttention
from scripts.paper.adaptability.flash_stand_in import flash_attn_func
from scripts.paper.adaptability.recurrence import DepthwiseConvolution, SelectiveScan, TimeMixing, scan
from tests.builders.comparison import close

pytestmark = pytest.mark.verify

WIDTH, HEADS, TIME, SPACE = 8, 4, 5, 7


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def x() -> Tensor:
    """[B, T, S, C]"""
    return numbers(2, TIME, SPACE, WIDTH)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Attention of [..., Q, C] to [..., K, C], head by head."""
    parts = []
    for one_q, one_k, one_v in zip(*(y.chunk(heads, -1) for y in (q, k, v)), strict=True):
        parts.append((one_q @ one_k.mT * one_q.shape[-1] ** -0.5).softmax(-1) @ one_v)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_shared_heads_of_keys_and_values(key_heads: int, dim: int) -> None:
    """Catches query heads that read another head's keys: heads 0 and 1 share the first of two."""
    module = dense(Attention(WIDTH, HEADS, dim, key_heads))
    sequences = x().movedim(dim, -2)
    keys, values = module.keys_values(sequences).chunk(2, -1)
    repeated = [
        y.unflatten(-1, (key_heads, -1)).repeat_interleave(HEADS // key_heads, -2).flatten(-2) for y in (keys, values)
    ]
    expected = module.out(softmax_attention(module.queries(sequences), *repeated, HEADS)).movedim(-2, dim)
    close(module(x()), expected, f"{key_heads} heads of keys")


@pytest.mark.parametrize("kernel", [attention.sdpa, attention.fused, attention.flash])
def test_kernels_agree(kernel: attention.Kernel) -> None:
    """Catches heads and positions that are confused: flash-attn has [N, Q, H, D], torch's attention [N, H, Q, D]."""
    q, k, v = numbers(3, TIME, HEADS, 6), numbers(3, SPACE, 2, 6), 2 * numbers(3, SPACE, 2, 6).flip(1)
    joined = [y.repeat_interleave(HEADS // y.shape[2], 2).flatten(2) for y in (q, k, v)]
    close(kernel(q, k, v).flatten(2), softmax_attention(*joined, HEADS), "attention")


def test_the_fused_kernel_is_the_one_that_runs() -> None:
    """Catches a fallback to the plain formula, which would show nothing about fused kernels."""
    q = numbers(1, 2, HEADS, 4).requires_grad_()
    y = attention.fused(q, q, q)
    node, names = y.grad_fn, []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert any("FlashAttention" in name for name in names), names


@pytest.mark.parametrize("queries", [3, 5, 7])
def test_the_stand_in_aligns_causal_masks_at_the_end(queries: int) -> None:
    """Catches a causal mask aligned at the beginning, where flash-attn 2.1 and later have the last query see all keys."""
    q, k, v = (numbers(2, n, HEADS, 6) for n in (queries, 5, 5))
    found = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True)
    seen = torch.ones(queries, 5, dtype=torch.bool).tril(5 - queries)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=seen, scale=0.3)
    close(found.nan_to_num(), expected.transpose(1, 2).nan_to_num(), "causal attention")
    with pytest.raises(ValueError, match="dropout_p=0"):
        flash_attn_func(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("dim", [1, 2])
def test_cross_attention(dim: int) -> None:
    """Catches a context that goes to another sample or moment."""
    module = dense(CrossAttention(WIDTH, HEADS, dim))
    shared, own = numbers(2, 6, WIDTH), numbers(2, TIME, 6, WIDTH)
    for context in (shared, own) if dim == 2 else (shared,):
        found = module(x(), context)
        for sample in range(2):
            for moment in range(TIME):
                seen = context[sample] if context is shared else context[sample, moment]
                q, (k, v) = module.queries(x()[sample, moment]), module.keys_values(seen).chunk(2, -1)
                expected = module.out(softmax_attention(q, k, v, HEADS))
                close(found[sample, moment], expected, f"sample {sample}, moment {moment}")


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_scan(length: int) -> None:
    """Catches windows that overlap or leave a gap, and lengths that are no power of two."""
    decay, inputs = numbers(3, length, 2), numbers(2, 3, length, 2)[0]
    state, states = torch.zeros(3, 2, dtype=torch.float64), []
    for t in range(length):
        state = decay[:, t] * state + inputs[:, t]
        states.append(state)
    close(scan(decay, inputs), torch.stack(states, 1), f"{length} positions")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [3, 4])
def test_depthwise_convolution(size: int, causal: bool) -> None:
    """Catches a convolution that mixes channels, or that sees later positions although it is causal."""
    module = dense(DepthwiseConvolution(WIDTH, size, 1, causal))
    before = size - 1 if causal else size // 2
    for t in range(TIME):
        expected = module.bias + sum(
            module.weight[:, 0, n] * x()[:, t + n - before] for n in range(size) if 0 <= t + n - before < TIME
        )
        close(module(x())[:, t], expected, f"moment {t}")


def test_selective_scan() -> None:
    """Catches step size, input and output weights that are confused, or taken from another position."""
    module = dense(SelectiveScan(WIDTH, 3, 2))
    found = module(x())
    for sample, moment in ((0, 0), (1, TIME - 1)):
        u, gate = module.inner(x()[sample, moment]).chunk(2, -1)  # [S, C]
        state = torch.zeros(WIDTH, 3, dtype=torch.float64)
        for s in range(SPACE):
            taps = range(max(0, s - 3), s + 1)
            mixed = F.silu(
                module.convolution.bias + sum(module.convolution.weight[:, 0, 3 - s + n] * u[n] for n in taps)
            )
            step, into, out_of = module.select(mixed).split([WIDTH, 3, 3])
            step = (1 + step.exp()).log()
            a, b = torch.exp(torch.outer(step, torch.ones(3)) * -module.rates.exp()), torch.outer(step * mixed, into)
            state = a * state + b
            y = (state @ out_of + module.skip * mixed) * F.silu(gate[s])
            close(found[sample, moment, s], module.out(y), f"position {s}")


def test_time_mixing() -> None:
    """Catches a decay that begins one position early or late, a bonus for other positions, and exponentials that overflow."""
    module = dense(TimeMixing(WIDTH, 1))
    with torch.no_grad():
        module.keys.weight.mul_(300.0)  # exp of such keys is infinite
    found = module(x())
    decay = module.decay.exp()
    line = x()[1, :, 3]  # [T, C]
    earlier = torch.cat([torch.zeros(1, WIDTH), line[:-1]])
    keys, values, gates = (
        linear(earlier + mixture * (line - earlier))
        for linear, mixture in zip((module.keys, module.values, module.gates), module.mixtures, strict=True)
    )
    assert keys.max() > 720
    for t in range(TIME):
        logits = torch.stack([keys[i] - (t - 1 - i) * decay for i in range(t)] + [keys[t] + module.bonus])
        read = (logits.softmax(0) * values[: t + 1]).sum(0)
        close(found[1, t, 3], module.out(gates[t].sigmoid() * read), f"moment {t}")
