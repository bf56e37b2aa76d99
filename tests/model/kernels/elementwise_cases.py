"""What tests of dropout, layer norm and gated operands do inside the interpreting process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton import dropout_add, layer_norm
from evodsp.model.kernels.triton_kernels.gate import gate, gate_gradients, hidden_gradients
from evodsp.model.kernels.triton_kernels.gated_operands import gated_operands, gradient_of_chunk
from evodsp.model.kernels.triton_kernels.layer_norm import norm, norm_again, norm_gradients
from evodsp.model.kernels.triton_kernels.sums import column_sums
from evodsp.rng import Draws
from tests.model.kernels.interpreter import TOLERANCE, check, far_apart, random


def transposed(x: Tensor) -> Tensor:
    """The same numbers; axes 1 and 2 are swapped in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else x


# --- dropout_add: shapes are (B, N1, N2, c) of the whole representation


def streams(batch: int) -> list[Draws]:
    """Two of three keys do not fit a signed 64-bit integer."""
    return [Draws((0x9E3779B97F4A7C15 * (b + 1)) & (2**64 - 1)) for b in range(batch)]


def keys_of(draws: list[Draws]) -> Tensor:
    return torch.tensor([d.key - (1 << 64) if d.key >= 1 << 63 else d.key for d in draws], dtype=torch.int64)


def dropout_formula(
    x: Tensor,
    update: Tensor,
    draw_keys: Tensor,
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: int,
) -> Tensor:
    """From the mask of the whole representation, drawn by evodsp's random generator."""
    batch, n1, n2, c = x.shape
    sizes = [*whole, c]
    sizes[shared_dim - 1] = 1
    positions = torch.arange(sizes[0] * sizes[1] * c).view(sizes)
    keep = torch.stack([d.uniform_at(positions) for d in streams(max(batch, 1))])[:batch] >= rate
    keep = keep.expand(batch, *whole, c)[:, offsets[0] : offsets[0] + n1, offsets[1] : offsets[1] + n2]
    return x + update * keep / (1 - rate)


def dropout_agrees(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    shared_dim: int,
    offsets: tuple[int, int] = (0, 0),
    rate: float = 0.25,
) -> None:
    """The result and gradients; and, exactly, which entries are dropped. Views are transposed."""
    batch, n1, n2, _ = shape
    draw = random(0, dtype)
    tensors = {"x": draw(*shape), "update": draw(*shape)}
    fixed = {
        "draw_keys": keys_of(streams(batch)),
        "rate": rate,
        "offsets": offsets,
        "whole": (offsets[0] + n1 + 2, offsets[1] + n2 + 1),
        "shared_dim": shared_dim,
    }
    check(dropout_add, dropout_formula, tensors, fixed)
    check(dropout_add, dropout_formula, tensors, fixed, lambda name, x: transposed(x))
    zero, one = torch.zeros(shape), torch.ones(shape)
    assert torch.equal(dropout_add(zero, one, **fixed) > 0, dropout_formula(zero, one, **fixed) > 0)


def dropout_far_positions() -> None:
    """A shard that begins beyond position 2^32 of its mask: the second word of the counter is not zero."""
    x, keys = torch.zeros(1, 1, 3, 8), keys_of(streams(1))
    first = (1 << 33) // 8
    got = dropout_add(x, x + 1, keys, 0.5, (0, first), (1, first + 3), 1)[0, 0].flatten() > 0
    expected = streams(1)[0].uniform_at(torch.arange(24) + (1 << 33)) >= 0.5
    assert torch.equal(got, expected)


def dropout_scale_is_exact() -> None:
    """Kept entries of a bf16 update are scaled in fp32 and rounded once."""
    x, update = torch.zeros(1, 4, 4, 8, dtype=torch.bfloat16), torch.ones(1, 4, 4, 8, dtype=torch.bfloat16)
    out = dropout_add(x, update * 3, keys_of(streams(1)), 0.15, (0, 0), (4, 4), 1)
    # The interpreter truncates when it rounds to bf16: 3 / 0.85 lies between these two.
    assert {float(v) for v in out.unique() if v} <= {3.515625, 3.53125}


# --- layer_norm


def norm_formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def norm_agrees(shape: tuple[int, ...], dtype: torch.dtype, parameters: torch.dtype | None = None) -> None:
    """Of a tensor away from zero, contiguous and transposed.

    With three channels, the backward pass subtracts two of the three degrees of freedom: what is left of the gradient can be
    small. There torch's own norm is the measure.
    """
    draw, own = random(0, dtype), random(1, parameters or dtype)
    tensors = {"x": draw(*shape) + 3, "weight": own(shape[-1]), "bias": own(shape[-1])}
    check(layer_norm, norm_formula, tensors, {}, peer=_torch_norm)
    check(lambda **inputs: NormAgain.apply(*inputs.values()), norm_formula, tensors, {}, peer=_torch_norm)
    check(
        lambda **inputs: NormAgain.apply(*inputs.values()),
        norm_formula,
        tensors,
        {},
        lambda name, x: transposed(x),
        peer=_torch_norm,
    )
    assert check(layer_norm, norm_formula, tensors, {}, lambda name, x: transposed(x), peer=_torch_norm).is_contiguous()


def norm_gradients_have_the_dtype_of_the_weight() -> None:
    """For one program and for many."""
    draw = random(0, torch.float32)
    for positions in (3, 3000):
        x, weight = draw(positions, 8), draw(8).half()
        _, *statistics = norm(x, weight, weight)
        gradients = *norm_again(x, x, weight, weight)[2:], *norm_gradients(x, x, weight, *statistics)[1:]
        assert {gradient.dtype for gradient in gradients} == {torch.float16}


class NormAgain(torch.autograd.Function):
    """The norm, whose backward pass is the operator that also forms the result again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = layer_norm(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, out = ctx.saved_tensors
        result, *gradients = norm_again(grad, x, weight, bias)
        # The interpreter adds up tiles of other sizes in another order.
        torch.testing.assert_close(result, out, rtol=TOLERANCE[out.dtype], atol=TOLERANCE[out.dtype])
        return tuple(gradients)


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, 1e-5).to(x.dtype)


# --- gated_operands


def gated_formula(projected: Tensor, mask: Tensor) -> Tensor:
    values, gates = projected.chunk(2, -1)
    both = values * gates.sigmoid() * mask.unsqueeze(-1)
    return both.unflatten(-1, (2, -1)).permute(3, 0, 4, 1, 2)


def gated_agrees(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Contiguous, and transposed with a boolean mask. The last axis of `shape` has the channels of both operands."""
    draw = random(0, dtype)
    tensors = {"projected": draw(*shape[:3], 2 * shape[3])}
    mask = (torch.rand(shape[:3], generator=torch.Generator().manual_seed(0)) < 0.7).to(dtype)
    assert check(gated_operands, gated_formula, tensors, {"mask": mask}).is_contiguous()
    check(gated_operands, gated_formula, tensors, {"mask": transposed(mask > 0)}, lambda name, x: transposed(x))


def gated_bias_agrees(shape: tuple[int, int, int, int]) -> None:
    """The sum of the projections' gradient over all positions is that of what is returned beside it."""
    draw = random(5, torch.float32)
    projected, mask = draw(*shape[:3], 2 * shape[3]), (draw(*shape[:3]) > -0.5).float()
    slope, of_bias = gradient_of_chunk(draw(2, shape[0], shape[3] // 2, *shape[1:3]), projected, mask, torch.float32)
    torch.testing.assert_close(of_bias, slope.double().sum(0).float(), rtol=1e-5, atol=1e-4)


# --- hidden layers


class Hidden(torch.autograd.Function):
    """A bias, a ReLU and a product, with the operator in their backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, narrow: Tensor) -> Tensor:
        hidden = (x + bias).relu()
        ctx.save_for_backward(hidden, narrow)
        return hidden @ narrow.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, narrow = ctx.saved_tensors
        return *hidden_gradients(grad, narrow, hidden, dtype=grad.dtype), grad.T @ hidden


def hidden_agrees(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of (positions, hidden channels, channels): contiguous, and with the gradient and the weight transposed."""
    positions, width, channels = shape
    draw = random(0, dtype)
    scale = max(1, positions) ** -0.5  # gradients of bias and weight are sums over positions
    tensors = {"x": draw(positions, width), "bias": draw(width), "narrow": draw(channels, width) / width**0.5}

    def formula(x: Tensor, bias: Tensor, narrow: Tensor) -> Tensor:
        return (x + bias).relu() @ narrow.T * scale

    def operator(x: Tensor, bias: Tensor, narrow: Tensor) -> Tensor:
        return Hidden.apply(x, bias, narrow) * scale

    check(operator, formula, tensors, {})
    check(operator, formula, tensors, {}, lambda name, x: x.T.contiguous().T)


# --- column sums


def column_sums_agree(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a matrix, the last columns of a wider one, and a transposed one; rounded to the matrix's precision, and not."""
    x = random(0, dtype)(*shape)
    wide = torch.nn.functional.pad(x, (16, 0), value=7.0)[:, 16:]
    for own in (x, wide, x.T.contiguous().T):
        for result in (dtype, torch.float32):
            found, expected = column_sums(own, result), x.double().sum(0)
            assert (found.dtype, found.shape) == (result, expected.shape)
            assert torch.allclose(found.double(), expected, rtol=TOLERANCE[result], atol=TOLERANCE[result] * 10)
    assert torch.equal(column_sums(x, torch.float32), column_sums(wide, torch.float32))


def column_sums_of_many_rows_agree() -> None:
    """Programs take two tiles of rows each, the last one a single one."""
    x = random(1, torch.float32)(9000, 130)
    torch.testing.assert_close(column_sums(x, x.dtype), x.double().sum(0).float(), rtol=1e-5, atol=1e-4)


# --- gate


class Gate(torch.autograd.Function):
    """The two operators as one that autograd differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(x, logits)
        return gate(x, logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gate_gradients(grad, *ctx.saved_tensors)


def gate_agrees(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contiguous and transposed."""
    draw = random(0, dtype)
    tensors = {"x": draw(*shape), "logits": draw(*shape)}

    def formula(x: Tensor, logits: Tensor) -> Tensor:
        return x * logits.sigmoid()

    check(lambda x, logits: Gate.apply(x, logits), formula, tensors, {})
    check(lambda x, logits: Gate.apply(x, logits), formula, tensors, {}, lambda name, x: transposed(x))


# --- all


def far_apart_agrees(operator: str) -> None:
    """Elements lie beyond 2^31 elements; the pages between them are never touched."""
    draw = random(3, torch.float16)
    stride = (1 << 30) - 16

    def layout(name: str, x: Tensor) -> Tensor:
        return far_apart(x, 1, stride) if x.ndim == 4 and name != "grad" else x

    if operator == "hidden_backward":
        grad, narrow, hidden = draw(4, 3), draw(3, 6), draw(4, 6)
        near = hidden_gradients(grad, narrow, hidden, torch.float32)
        away = hidden_gradients(*(far_apart(x, 0, stride) for x in (grad, narrow, hidden)), torch.float32)
        assert all(map(torch.equal, near, away))
    elif operator == "column_sums":
        x = draw(4, 9)
        assert torch.equal(column_sums(x, x.dtype), column_sums(far_apart(x, 0, stride), x.dtype))
    elif operator == "layer_norm":
        check(layer_norm, norm_formula, {"x": draw(1, 4, 3, 8), "weight": draw(8), "bias": draw(8)}, {}, layout)
    elif operator == "gated_operands":
        tensors = {"projected": draw(1, 4, 3, 8)}
        check(gated_operands, gated_formula, tensors, {"mask": torch.ones(1, 4, 3)}, layout)
    else:
        for shared_dim in (1, 2):
            fixed = {"draw_keys": keys_of(streams(1)), "rate": 0.25, "offsets": (0, 0), "whole": (4, 3)}
            tensors = {"x": draw(1, 4, 3, 8), "update": draw(1, 4, 3, 8)}
            check(dropout_add, dropout_formula, tensors, {**fixed, "shared_dim": shared_dim}, layout)


def operators_are_sound() -> None:
    """torch's own checks of the operators, and one graph under torch.compile with the same numbers."""
    draw = random(4, torch.float32)
    x, y, weight, bias = transposed(draw(2, 3, 4, 8)), draw(2, 3, 4, 8), draw(8), draw(8)
    x, y, weight, bias = (t.requires_grad_() for t in (x, y, weight, bias))
    keys, mask, ops = keys_of(streams(2)), torch.ones(2, 3, 4), torch.ops.evodsp
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.layer_norm.default, (x, weight, bias, 1e-5), test_utils=checks)
    torch.library.opcheck(ops.gated_operands.default, (x, mask), test_utils=checks)
    torch.library.opcheck(ops.gate.default, (y.detach(), y.detach()), test_utils=checks)
    hidden = draw(3, 8), draw(8, 5), draw(3, 5), torch.float32
    torch.library.opcheck(ops.hidden_backward.default, hidden, test_utils=checks)
    torch.library.opcheck(ops.column_sums.default, (draw(70, 5), torch.float16), test_utils=checks)
    upstream, projected = draw(2, 2, 2, 3, 4), x.detach()
    torch.library.opcheck(
        ops.gated_operands_backward.default, (upstream, projected, mask, torch.float32), test_utils=checks
    )
    torch.library.opcheck(ops.dropout_add.default, (x, y, keys, 0.25, 0, 0, 3, 4, 1), test_utils=checks)

    def step(x: Tensor, y: Tensor, keys: Tensor) -> Tensor:
        z = dropout_add(x, layer_norm(y, weight, bias), keys, 0.25, (0, 0), (3, 4), 1)
        return gated_operands(z, mask).square().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for some in (keys, keys + 1):  # another key in the same graph draws other numbers
        results = [torch.autograd.grad(f(x, y, some), (x, y, weight)) for f in (step, compiled)]
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def kept_for_backward() -> dict[str, list[tuple[int, ...]]]:
    """Shapes of what autograd keeps, by operator."""
    x, y, weight, bias = (torch.ones(s).requires_grad_() for s in ((2, 3, 4, 8), (2, 3, 4, 8), (8,), (8,)))
    calls = {
        "layer_norm": lambda: layer_norm(x, weight, bias),
        "gated_operands": lambda: gated_operands(x, torch.ones(2, 3, 4)),
        "dropout_add": lambda: dropout_add(x, y, keys_of(streams(2)), 0.25, (0, 0), (3, 4), 1),
    }
    kept: dict[str, list[tuple[int, ...]]] = {name: [] for name in calls}
    for name, call in calls.items():

        def pack(t: Tensor, name: str = name) -> Tensor:
            kept[name].append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call()
    return kept
