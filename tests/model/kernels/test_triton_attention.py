"""Triton's attention, computed by Triton's interpreter, against the formula in fp64: results and all gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from evodsp.model.kernels.triton import REPORTS
from evodsp.model.kernels.triton_kernels import attention as kernels
from evodsp.model.kernels.triton_kernels.attention import OPERATORS, attention
from tests.model.kernels.interpreter import check, far_apart, random

Shape = tuple[int, int, int, int, int, int]
MASKED = 1e9


def formula(projected: Tensor, pair_bias: Tensor | None, keys: Tensor, first: int) -> Tensor:
    """The supplement's formula, line by line."""
    q, k, v, gate = projected.unbind(3)
    if pair_bias is not None:
        q, gate = (x[:, :, first : first + pair_bias.shape[2]] for x in (q, gate))
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / q.shape[-1] ** 0.5
    if pair_bias is not None:
        logits = logits + pair_bias.unsqueeze(1)
    logits = logits + ((keys.double() - 1) * MASKED)[:, :, None, None]
    # In fp32, as everywhere in AF2, -1e9 swallows the logits. In fp64 it would not.
    absent = (keys == 0).all(-1)[:, :, None, None, None]
    logits = torch.where(absent, logits - logits.detach().clamp(min=-2 * MASKED), logits)  # -inf stays
    return torch.einsum("bnhqk,bnkhd->bnqhd", logits.softmax(-1), v) * gate.sigmoid()


def inputs(
    shape: Shape, dtype: torch.dtype, biased: bool, seed: int
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Tensors with gradients; the key mask, with 70 % of keys present and none in the very first row, and the first query.

    The last Q of the K positions attend.
    """
    b, n, q, k, h, d = shape
    draw = random(seed, dtype)
    tensors: dict[str, Tensor | None] = {"projected": draw(b, n, k, 4, h, d)}
    tensors["pair_bias"] = draw(b, h, q, k) if biased else None
    keys = (torch.rand(b, n, k, generator=torch.Generator().manual_seed(seed)) < 0.7).to(dtype)
    keys[:1, :1] = 0
    return tensors, {"keys": keys, "first": k - q}


def agrees(shape: Shape, dtype: torch.dtype, biased: bool, seed: int = 0) -> None:
    check(attention, formula, *inputs(shape, dtype, biased, seed))


def agrees_with_runs(dtype: torch.dtype, length: int, width: int) -> None:
    """Rows of keys that are all present, lack the last one, those from 32 on, one in the middle, the first one, or all; and a
    kernel of the bias's gradient of few programs, each with several rows."""
    tensors, fixed = inputs((2, 12, 40, length, 1, width), dtype, True, 8)
    keys = torch.ones_like(fixed["keys"])
    absences = [*[slice(0)] * 3, slice(-1, None), slice(32, None), slice(40, 41), slice(1), slice(None)]
    for row, absent in enumerate(absences):
        keys[0, row, absent] = 0
        keys[1, 11 - row, absent] = 0
    with patch.object(kernels, "_ENOUGH_PROGRAMS", 8):
        check(attention, formula, tensors, fixed | {"keys": keys})


def agrees_with_large_logits(dtype: torch.dtype, width: int, biased: bool) -> None:
    """Logits of a hundred and more, whose exponentials exceed fp32, and biases of -inf. Rows of keys: none present (with small
    logits, because -1e9 leaves large ones few digits), the first tiles absent, holes in the first tile and in the last, all
    present, one present, the last tile absent.

    Of a row the backward pass keeps one number, the log of its sum: p = 2^(logit - log). Rounding `log`, as large as the
    largest logit, makes a relative error in p of that logit's spacing in fp32, which is allowed.
    """
    queries = 67 if biased else 131
    tensors, fixed = inputs((1, 7, queries, 131, 1, width), dtype, biased, 9)
    keys = torch.ones_like(fixed["keys"])
    absences = [slice(0, None), slice(0, 64), slice(3, 9), slice(129, 130), slice(0), slice(1, None), slice(96, None)]
    for row, absent in enumerate(absences):
        keys[0, row, absent] = 0
    projected, bias = tensors["projected"], tensors["pair_bias"]
    projected[:, 1:, :, 0] *= 30
    if bias is not None:
        bias *= 7
        bias[..., 0:131:13] = float("-inf")
        bias[..., 0] = 0  # the only key of a row
    q, k = projected[:, 1:, -queries:, 0], projected[:, 1:, :, 1]
    largest = torch.einsum("bnqhd,bnkhd->bnhqk", q, k).abs().max() / width**0.5
    spacing = float(largest / math.log(2)) * torch.finfo(torch.float32).eps
    check(attention, formula, tensors, fixed | {"keys": keys}, least=spacing)


def agrees_strided(dtype: torch.dtype) -> None:
    """The projection of the transposed MSA, the bias with heads fastest, keys out of a larger mask."""
    b, n, length, h, d = 2, 3, 17, 2, 8
    tensors, fixed = inputs((b, n, length, length, h, d), dtype, True, 1)
    mask = torch.zeros(b, length, n + 1, dtype=torch.bool)
    mask[:, :, 1:] = fixed["keys"].transpose(1, 2) > 0

    def layout(name: str, x: Tensor) -> Tensor:
        if name == "pair_bias":
            return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    result = check(attention, formula, tensors, {"keys": mask[:, :, 1:].transpose(1, 2), "first": 0}, layout)
    assert result.transpose(1, 2).is_contiguous(), "the result should be laid out as the projection is"


def agrees_far_apart(axis: int) -> None:
    """The last element of the projection and the upstream gradient lies beyond 2^31 elements; strides alone are below 2^31."""
    shape = [1, 4, 2, 2, 8] if axis == 1 else [1, 1, 4, 2, 8]
    b, n, length, h, d = shape
    tensors, fixed = inputs((b, n, length, length, h, d), torch.float16, True, 2)

    def layout(name: str, x: Tensor) -> Tensor:
        return x if name == "pair_bias" else far_apart(x, axis, (1 << 30) - 16)

    check(attention, formula, tensors, fixed, layout)


def error_with_offset() -> tuple[float, float]:
    """Relative errors of grad_q in fp16, with values around 0 and around 10: a common offset changes no exact gradient of q."""
    errors = []
    for offset in (0.0, 10.0):
        tensors, fixed = inputs((1, 2, 40, 40, 2, 32), torch.float16, True, 3)
        tensors["projected"][:, :, :, 2] += offset
        tensors |= {n: x.requires_grad_() for n, x in tensors.items()}
        exact = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
        upstream = random(4, torch.float16)(1, 2, 40, 2, 32)
        (got,) = torch.autograd.grad(attention(**tensors, **fixed), tensors["projected"], upstream)
        (wanted,) = torch.autograd.grad(formula(**exact, **fixed), exact["projected"], upstream.double())
        got, wanted = got[:, :, :, 0], wanted[:, :, :, 0]
        errors.append(float((got - wanted).norm() / wanted.norm()))
    return errors[0], errors[1]


def compiles() -> None:
    """One graph under torch.compile, with the numbers of the operator itself."""
    tensors, fixed = inputs((1, 2, 5, 7, 2, 8), torch.float32, True, 5)

    def step(projected: Tensor, pair_bias: Tensor, keys: Tensor, first: int) -> Tensor:
        return attention(projected * 2, keys, pair_bias, first).square().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        total = function(**given, **fixed)
        results.append([total, *torch.autograd.grad(total, list(given.values()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def operators_are_sound() -> None:
    """torch's own checks: nothing is modified or aliased, and fake results have the shapes, strides and dtypes of real ones."""
    tensors, fixed = inputs((1, 2, 5, 7, 2, 8), torch.float32, True, 6)
    projected = tensors["projected"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(
        torch.ops.evodsp.attention.default,
        (projected, fixed["keys"], tensors["pair_bias"].requires_grad_(), fixed["first"]),
        test_utils=("test_schema", "test_faketensor"),
    )


def kept_for_backward() -> dict[str, int]:
    """Bytes that autograd keeps, by what they are."""
    tensors, fixed = inputs((1, 2, 16, 16, 2, 8), torch.float16, True, 7)
    named = {x.untyped_storage().data_ptr(): n for n, x in {**tensors, "keys": fixed["keys"]}.items()}
    kept: Counter[str] = Counter()

    def pack(x: Tensor) -> Tensor:
        kept[named.get(x.untyped_storage().data_ptr(), "result")] += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(**{n: x.requires_grad_() for n, x in tensors.items()}, **fixed)
    return dict(kept)


def _shapes(count: int) -> list[Shape]:
    draw = Random(0)
    widths = [8, 16, 24, 32, 48, 64]
    shapes = []
    for _ in range(count):
        many_rows = draw.random() < 0.3
        sizes = [1, 2, 3, 5] if many_rows else [1, 15, 16, 17, 31, 33, 63, 64, 65, 70, 97]
        batch, rows = draw.choice([1, 2]), draw.choice([16, 17, 20] if many_rows else [1, 2, 3])
        shapes.append((batch, rows, *sorted(draw.choices(sizes, k=2)), draw.choice([1, 2]), draw.choice(widths)))
    return shapes


@pytest.mark.verify_but("(2, 2, 5, 7, 2, 8)-torch.float16-True", "(1, 17, 2, 3, 1, 64)-*", "(1, 2, 33, 33*", "*0, *")
@pytest.mark.parametrize(
    ("shape", "dtype", "biased"),
    [
        *(
            (shape, dtype, True)
            for shape in [(2, 2, 5, 7, 2, 8), (1, 3, 65, 67, 1, 24), (1, 1, 5, 253, 1, 8)]
            for dtype in (torch.float32, torch.float16)
        ),
        ((1, 17, 2, 3, 1, 64), torch.float16, True),
        ((1, 2, 33, 33, 2, 16), torch.float32, False),
        *((shape, torch.float32, True) for shape in [(1, 0, 3, 3, 2, 8), (2, 3, 0, 0, 2, 8), (1, 2, 0, 5, 1, 8)]),
    ],
    ids=str,
)
def test_agrees_with_the_formula(
    interpreter: Callable[..., Any], shape: Shape, dtype: torch.dtype, biased: bool
) -> None:
    """Catches wrong arithmetic, tails of tiles that leak in, all keys masked not being uniform, samples or rows mixed up,
    gradients of k and v in each other's place, column attention reading or differentiating a bias that is not there, empty
    grids that are launched, and gradients that are left uninitialised where a position does not attend or nothing is summed."""
    interpreter(agrees, shape, dtype, biased)


@pytest.mark.verify
@pytest.mark.parametrize("number", range(37))
def test_agrees_at_many_shapes(interpreter: Callable[..., Any], number: int) -> None:
    """Catches sizes at which tiles, groups of rows or parts of the bias's gradient are cut wrong."""
    dtype = torch.float32 if number % 2 else torch.float16
    batch, rows, queries, *others = _shapes(37)[number]
    biased = number % 5 != 0  # without a bias every position attends
    shape = (batch, rows, queries if biased else others[0], *others)
    interpreter(agrees, shape, dtype, biased, number)


@pytest.mark.verify_but("dtype1-64-8")
@pytest.mark.parametrize(
    ("dtype", "length", "width"), [(torch.float16, 67, 32), (torch.float16, 64, 8), (torch.float32, 67, 8)]
)
def test_keys_that_are_present_in_a_row(
    interpreter: Callable[..., Any], dtype: torch.dtype, length: int, width: int
) -> None:
    """Catches an absent key in a loop without masks, a last tile with keys that do not exist taken as whole, a scale that the
    two loops of a kernel apply differently, and rows of the bias's gradient that are left out or summed twice."""
    interpreter(agrees_with_runs, dtype, length, width)


@pytest.mark.verify
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_logits(interpreter: Callable[..., Any], dtype: torch.dtype, width: int, biased: bool) -> None:
    """Catches exponentials that overflow in either loop, a maximum that does not pass from one loop to the other, and tiles and
    rows without a key that are not numbers."""
    interpreter(agrees_with_large_logits, dtype, width, biased)


@pytest.mark.verify
def test_strided_views(interpreter: Callable[..., Any]) -> None:
    """Catches strides that are assumed: a transposed projection, and masks of booleans."""
    interpreter(agrees_strided, torch.float32)


@pytest.mark.parametrize("axis", [1, 2], ids=["rows", "positions"])
def test_offsets_beyond_32_bits(interpreter: Callable[..., Any], axis: int) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(agrees_far_apart, axis)


def test_offset_of_values_does_not_hurt_the_gradient(interpreter: Callable[..., Any]) -> None:
    """Catches a centre of the softmax's backward that is computed from the rounded output."""
    without, with_offset = interpreter(error_with_offset)
    assert without < 1e-3
    assert with_offset < 1.5e-3


@pytest.mark.verify
def test_compiles_as_one_graph(interpreter: Callable[..., Any]) -> None:
    """Catches graph breaks, and fake results that differ from real ones in shape or layout."""
    interpreter(compiles)
    interpreter(operators_are_sound)


def test_what_backward_keeps(interpreter: Callable[..., Any]) -> None:
    """Catches logits, weights or copies of inputs that are kept: beside inputs only the output and 8 bytes a query."""
    kept = interpreter(kept_for_backward)
    one = 2 * 16 * 2 * 8 * 2  # bytes of q: N L H D in fp16
    queries = 2 * 16 * 2
    assert kept == {
        "projected": 4 * one,
        "keys": 2 * 16 * 2,
        "pair_bias": 2 * 16 * 16 * 2,
        "result": one + 2 * 4 * queries,
    }


def test_report_of_launches_and_bytes() -> None:
    """Catches launches that are not reported, and tensors that are moved but not counted. Needs no Triton."""
    n, length, h, d = 128, 256, 8, 32
    projected = torch.empty(1, n, length, 4, h, d, dtype=torch.bfloat16, device="meta")
    out = torch.empty(1, n, length, h, d, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, n, length, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, h, length, length, dtype=torch.bfloat16, device="meta")
    queries = torch.empty(1, n, h, length, device="meta")
    unit, mask, pairs, per_query = 2 * n * length * h * d, 2 * n * length, 2 * h * length**2, 4 * n * h * length
    assert REPORTS["evodsp::attention"]((projected, keys, bias, 0)) == (1, 5 * unit + mask + pairs + 2 * per_query)
    launches, moved = REPORTS["evodsp::attention_backward"](
        (out, projected, keys, bias, 0, out, queries, queries, True)
    )
    parts = 5  # of the bias's gradient, in fp32
    kernels = (9 * unit, 6 * unit, 4 * unit)
    assert launches == 5  # the first one copies the bias with its queries fastest
    assert moved == sum(kernels) + 3 * (mask + pairs) + (3 + 2 + 2) * per_query + 2 * (2 * pairs * parts) + 3 * pairs


@pytest.mark.parametrize(("width", "first", "eights"), [(8, 0, True), (12, 0, False), (8, 4, False)])
def test_kernels_are_told_the_truth_of_strides(width: int, first: int, eights: bool) -> None:
    """Catches a promise of aligned strides that does not hold, on which a GPU would trap and which the interpreter ignores.
    Needs no Triton."""
    memory = torch.empty(1, 3, 5, 4, 2, width + first, dtype=torch.bfloat16, device="meta")
    inputs = memory[..., first:], memory[..., 0, 0, 0], None, 0
    out = torch.empty(1, 3, 5, 2, width, dtype=torch.bfloat16, device="meta")
    statistics = torch.empty(1, 3, 2, 5, device="meta")
    forward, backward = OPERATORS
    launches = forward.launches(*inputs) + backward.launches(out, *inputs, out, statistics, statistics, False)
    assert [launch.constants["EIGHTS"] for launch in launches] == [eights] * 3


@pytest.mark.parametrize("length", [16, 17])
def test_rows_of_the_bias_are_whole(length: int) -> None:
    """Catches rows of the bias that end within 16 elements, which kernels read to their end, and copies without need. Needs
    no Triton."""
    projected = torch.empty(1, 3, length, 4, 2, 8, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 2, length, length, dtype=torch.bfloat16, device="meta")
    *copies, launch = OPERATORS[0].launches(projected, projected[..., 0, 0, 0], bias, 0)
    assert [copy.kernel for copy in copies] == ["attention.lay_out"] * (length == 17)
    assert launch.arguments["bias_strides"] == ((2 * 17 * 32, 17 * 32, 32, 1) if length == 17 else bias.stride())


def test_refuses_wide_heads() -> None:
    """Catches head widths that would not fit the registers being accepted."""
    with pytest.raises(ValueError, match="head width 65"):
        attention(torch.empty(1, 1, 2, 4, 1, 65), torch.ones(1, 1, 2))
