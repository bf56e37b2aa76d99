"""Triton's dropout, layer norm and gated operands, computed by Triton's interpreter, against formulas in fp64."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels.triton import REPORTS, dropout_add, layer_norm
from evodsp.model.kernels.triton_kernels.gate import gate, gate_gradients, hidden_gradients
from evodsp.model.kernels.triton_kernels.gated_operands import gated_operands, gradient_of_chunk
from evodsp.model.kernels.triton_kernels.layer_norm import OPERATORS as NORMS
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
    """Catches counters that lose the upper half of a position: a shard that begins beyond 2^32."""
    x, keys = torch.zeros(1, 1, 3, 8), keys_of(streams(1))
    first = (1 << 33) // 8
    got = dropout_add(x, x + 1, keys, 0.5, (0, first), (1, first + 3), 1)[0, 0].flatten() > 0
    expected = streams(1)[0].uniform_at(torch.arange(24) + (1 << 33)) >= 0.5
    assert torch.equal(got, expected)


def dropout_scale_is_exact() -> None:
    """Catches a scale that is rounded to bf16 before it is applied, and an update that is rounded twice."""
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
    """Catches gradients of parameters in fp32 where all positions fit one program, and in their dtype elsewhere."""
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
    """Catches tiles that no program takes where there are more than programs: two each, the last program one."""
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


PRECISIONS = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", PRECISIONS, ids=["fp32", "fp16", "bf16"])
Interpreter = Callable[..., Any]


def _shape(number: int, widths: list[int]) -> tuple[int, int, int, int]:
    draw = Random(number)
    sizes = [1, 2, 3, 5, 7, 16, 17, 33]
    return draw.choice([1, 2]), draw.choice(sizes), draw.choice(sizes), draw.choice(widths)


@pytest.mark.parametrize(
    ("dtype", "shared_dim"),
    [
        (torch.float32, 1),
        (torch.bfloat16, 2),
        *(
            pytest.param(dtype, dim, marks=pytest.mark.verify)
            for dtype, dim in ((torch.float16, 1), (torch.bfloat16, 1), (torch.float32, 2), (torch.float16, 2))
        ),
    ],
    ids=str,
)
def test_dropout_agrees(interpreter: Interpreter, dtype: torch.dtype, shared_dim: int) -> None:
    """Catches numbers that are not evodsp's, a mask of the shard instead of the whole, and the wrong shared axis."""
    interpreter(dropout_agrees, (2, 5, 18, 24), dtype, shared_dim, (3, 7))


def test_dropout_refuses_rates() -> None:
    """Catches a rate of 1, which would scale by infinity."""
    x = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"dropout rate 1\.0"):
        dropout_add(x, x, torch.zeros(1, dtype=torch.int64), 1.0, (0, 0), (1, 1), 1)


_X = torch.empty(2, 3, 5, 16, device="meta")
AXES = [
    (1, _X),
    (1, _X[:1]),
    (1, _X.transpose(0, 1)[:, :1]),  # no axis counts whose size is 1
    (2, _X[:1].transpose(1, 2)),
    (2, _X[:, :2]),
    (3, _X.transpose(1, 2)),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "parameters"),
    [
        *(((2, 5, 7, 24), dtype, dtype) for dtype in PRECISIONS),
        ((33, 64), torch.float32, torch.float32),
        ((2, 2, 1, 3, 8), torch.float32, torch.float32),
        ((3, 5, 16), torch.float16, torch.float32),
    ],
    ids=str,
)
def test_layer_norm_agrees(
    interpreter: Interpreter, shape: tuple[int, ...], dtype: torch.dtype, parameters: torch.dtype
) -> None:
    """Catches a variance that includes padding channels, statistics of other positions, parts that are left out, a result in
    the dtype of the parameters, and gradients of parameters in the dtype of x."""
    interpreter(norm_agrees, shape, dtype, parameters)


@pytest.mark.parametrize(("axes", "x"), AXES, ids=[str(n) for n in range(len(AXES))])
def test_axes_that_layer_norm_tells_apart(axes: int, x: torch.Tensor) -> None:
    """Catches divisions for positions that lie in one row in every tensor. Needs no Triton."""
    weight = torch.empty(x.shape[-1], device="meta")
    grad = torch.empty(x.shape, device="meta")
    for operator, arguments in ((1, (grad, x, weight, x[..., 0], x[..., 0])), (2, (grad, x, weight, weight))):
        assert NORMS[operator].launches(*arguments)[0].constants["AXES"] == axes


@pytest.mark.parametrize(
    "function",
    [
        dropout_far_positions,
        dropout_scale_is_exact,
        norm_gradients_have_the_dtype_of_the_weight,
        column_sums_of_many_rows_agree,
    ],
)
def test_one_operator(interpreter: Interpreter, function: Callable[[], None]) -> None:
    """Catches what each of these functions says."""
    interpreter(function)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*(((2, 3, 5, 8), dtype) for dtype in PRECISIONS), ((1, 2, 70, 130), torch.float16)], ids=str
)
def test_gated_operands_agree(interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Catches operands, channels or samples that land elsewhere, and tails of tiles."""
    interpreter(gated_agrees, shape, dtype)


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2, 70, 130), (0, 2, 3, 8)], ids=str)
def test_gated_operands_sum_the_gradient_of_the_bias(
    interpreter: Interpreter, shape: tuple[int, int, int, int]
) -> None:
    """Catches sums of values and gates in each other's place, tiles that are left out, and sums that nothing fills."""
    interpreter(gated_bias_agrees, shape)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((70, 24, 6), torch.float16), *((s, torch.float32) for s in [(3, 300, 70), (140, 17, 1), (1, 1, 1)])],
    ids=str,
)
def test_hidden_gradients_agree(interpreter: Interpreter, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Catches a gradient where the result is zero, channels or positions that the sum leaves out, strides that are assumed."""
    interpreter(hidden_agrees, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((70, 24), dtype) for dtype in PRECISIONS), *((s, torch.float16) for s in [(3, 300), (0, 5), (5, 0), (1, 1)])],
    ids=str,
)
def test_column_sums_agree(interpreter: Interpreter, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Catches rows or columns that the sum leaves out, strides that are assumed, and a sum that is rounded on the way."""
    interpreter(column_sums_agree, shape, dtype)


@DTYPES
def test_gate_agrees(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Catches the gradients of value and gate in each other's place, tails of tiles, and strides that are assumed."""
    interpreter(gate_agrees, (2, 5, 30, 9), dtype)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8)], ids=str)
def test_empty_shards(interpreter: Interpreter, shape: tuple[int, int, int, int]) -> None:
    """Catches empty grids that are launched, and gradients of parameters that are left uninitialised."""
    interpreter(norm_agrees, shape, torch.float32)
    interpreter(gated_agrees, shape, torch.float32)
    interpreter(gate_agrees, shape, torch.float32)
    interpreter(hidden_agrees, (shape[0] * shape[1] * shape[2], shape[3], 4), torch.float32)
    interpreter(dropout_agrees, shape, torch.float32, 1)


@pytest.mark.parametrize("operator", ["dropout_add", "layer_norm", "gated_operands", "hidden_backward", "column_sums"])
def test_offsets_beyond_32_bits(interpreter: Interpreter, operator: str) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(far_apart_agrees, operator)


@pytest.mark.verify
def test_operators_are_sound_and_compile(interpreter: Interpreter) -> None:
    """Catches graph breaks, keys that are baked into a graph, fake results unlike real ones."""
    interpreter(operators_are_sound)


def test_what_backward_keeps(interpreter: Interpreter) -> None:
    """Catches copies of results, and masks of dropout, that are kept for the backward pass."""
    x = (2, 3, 4, 8)
    assert interpreter(kept_for_backward) == {
        "layer_norm": [x, (8,), x[:-1], x[:-1]],
        "gated_operands": [x, x[:-1]],
        "dropout_add": [(2,)],
    }


def test_reports_of_launches_and_bytes() -> None:
    """Catches launches that are not reported, and tensors that are moved but not counted. Needs no Triton."""
    x = torch.empty(1, 128, 256, 256, dtype=torch.bfloat16, device="meta")
    weight, keys = torch.empty(256, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    statistics = torch.empty(1, 128, 256, device="meta")
    unit, per_position = 2 * 128 * 256 * 256, 4 * 128 * 256
    assert REPORTS["evodsp::layer_norm"]((x, weight, weight, 1e-5)) == (1, 2 * unit + 2 * per_position + 2 * 1024)
    parts = 528 * 2 * 1024  # bytes
    assert REPORTS["evodsp::layer_norm_backward"]((x, x, weight, statistics, statistics)) == (
        2,
        3 * unit + 2 * per_position + 1024 + 2 * parts + 2048,  # parts, and their sum in the dtype of the weight
    )
    assert REPORTS["evodsp::layer_norm_again"]((x, x, weight, weight)) == (2, 4 * unit + 2 * 1024 + 2 * parts + 2048)
    assert REPORTS["evodsp::dropout_add"]((x, x, keys, 0.15, 0, 0, 128, 256, 1)) == (1, 3 * unit + 8)
    assert REPORTS["evodsp::dropout_add_backward"]((x, keys, 0.15, 0, 0, 128, 256, 1, x.dtype)) == (1, 2 * unit + 8)
    mask = torch.empty(1, 128, 256, dtype=torch.bfloat16, device="meta")
    projected = torch.empty(1, 128, 256, 512, dtype=torch.bfloat16, device="meta")
    assert REPORTS["evodsp::gated_operands"]((projected, mask)) == (1, 3 * unit + per_position // 2)
    grad = torch.empty(2, 1, 128, 128, 256, dtype=torch.bfloat16, device="meta")
    sums = 128 * 4 * 512 * 4  # of each tile of 64 columns, which are added afterwards
    assert REPORTS["evodsp::gated_operands_backward"]((grad, projected, mask, torch.bfloat16)) == (
        2,
        5 * unit + per_position // 2 + 2 * sums + 2 * 512,
    )
    rows, narrow = x.view(-1, 256), torch.empty(256, 1024, dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(128 * 256, 1024, dtype=torch.bfloat16, device="meta")
    assert REPORTS["evodsp::hidden_backward"]((rows, narrow, hidden, torch.bfloat16)) == (
        2,
        unit + 2 * 4 * unit + 2 * 256 * 1024 + 2 * (256 * 4 * 1024) + 2 * 1024,
    )
    parts = 256 * 4 * 256  # bytes; two tiles of 64 rows each
    assert REPORTS["evodsp::column_sums"]((hidden[:, -256:], torch.bfloat16)) == (2, unit + 2 * parts + 2 * 256)
    assert REPORTS["evodsp::gate"]((x, x)) == (1, 3 * unit)
    assert REPORTS["evodsp::gate_backward"]((x, x, x)) == (1, 5 * unit)


@pytest.mark.verify
@pytest.mark.parametrize("number", range(40))
def test_agree_at_many_shapes(interpreter: Interpreter, number: int) -> None:
    """Catches sizes at which tiles and parts are cut wrong."""
    dtype = PRECISIONS[number % 3]
    interpreter(dropout_agrees, _shape(number, [1, 3, 8, 24, 64]), dtype, 1 + number // 3 % 2, (number % 3, number % 5))
    interpreter(norm_agrees, _shape(number, [1, 3, 8, 24, 64, 130, 384]), dtype)
    interpreter(gated_agrees, _shape(number, [2, 6, 16, 48, 130]), dtype)
    interpreter(gate_agrees, _shape(number, [1, 3, 8, 24, 64]), dtype)
    _, rows, columns, channels = _shape(number, [1, 3, 8, 24, 300])
    if dtype is not torch.bfloat16:
        interpreter(hidden_agrees, (rows * columns, channels, number + 1), dtype)
    interpreter(gated_bias_agrees, _shape(number, [2, 6, 16, 48, 130]))
