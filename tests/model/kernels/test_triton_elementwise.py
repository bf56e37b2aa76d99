"""Triton's dropout, layer norm and gated operands, computed by Triton's interpreter, against formulas in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evodsp.model.kernels.triton import REPORTS, dropout_add
from evodsp.model.kernels.triton_kernels.layer_norm import OPERATORS as NORMS
from tests.model.kernels import elementwise_cases as cases

PRECISIONS = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", PRECISIONS, ids=["fp32", "fp16", "bf16"])
Interpreter = Callable[..., Any]


def _shape(number: int, widths: list[int]) -> tuple[int, int, int, int]:
    draw = random.Random(number)
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
    interpreter(cases.dropout_agrees, (2, 5, 18, 24), dtype, shared_dim, (3, 7))


def test_dropout_of_far_positions(interpreter: Interpreter) -> None:
    """Catches counters that lose the upper half of a position."""
    interpreter(cases.dropout_far_positions)


def test_dropout_scales_in_fp32(interpreter: Interpreter) -> None:
    """Catches a scale that is rounded to bf16 before it is applied."""
    interpreter(cases.dropout_scale_is_exact)


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


@DTYPES
@pytest.mark.parametrize("shape", [(2, 5, 7, 24), (33, 64), (2, 2, 1, 3, 8)], ids=str)
def test_layer_norm_agrees(interpreter: Interpreter, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches a variance that includes padding channels, statistics of other positions, and parts that are left out."""
    interpreter(cases.norm_agrees, shape, dtype)


@pytest.mark.parametrize(("axes", "x"), AXES, ids=[str(n) for n in range(len(AXES))])
def test_axes_that_layer_norm_tells_apart(axes: int, x: torch.Tensor) -> None:
    """Catches divisions for positions that lie in one row in every tensor. Needs no Triton."""
    weight = torch.empty(x.shape[-1], device="meta")
    grad = torch.empty(x.shape, device="meta")
    for operator, arguments in ((1, (grad, x, weight, x[..., 0], x[..., 0])), (2, (grad, x, weight, weight))):
        assert NORMS[operator].launches(*arguments)[0].constants["AXES"] == axes


def test_the_sum_of_one_part_is_rounded(interpreter: Interpreter) -> None:
    """Catches gradients of parameters in fp32 where all positions fit one program, and in their dtype elsewhere."""
    interpreter(cases.norm_gradients_have_the_dtype_of_the_weight)


def test_layer_norm_of_half_with_parameters_in_fp32(interpreter: Interpreter) -> None:
    """Catches a result in the dtype of the parameters, and gradients of parameters in the dtype of x."""
    interpreter(cases.norm_agrees, (3, 5, 16), torch.float16, torch.float32)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2, 70, 130)], ids=str)
def test_gated_operands_agree(interpreter: Interpreter, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Catches operands, channels or samples that land elsewhere, and tails of tiles."""
    interpreter(cases.gated_agrees, shape, dtype)


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2, 70, 130), (0, 2, 3, 8)], ids=str)
def test_gated_operands_sum_the_gradient_of_the_bias(
    interpreter: Interpreter, shape: tuple[int, int, int, int]
) -> None:
    """Catches sums of values and gates in each other's place, tiles that are left out, and sums that nothing fills."""
    interpreter(cases.gated_bias_agrees, shape)


@pytest.mark.parametrize("dtype", PRECISIONS[:2], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(70, 24, 6), (3, 300, 70), (140, 17, 1), (1, 1, 1)], ids=str)
def test_hidden_gradients_agree(interpreter: Interpreter, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Catches a gradient where the result is zero, channels or positions that the sum leaves out, strides that are assumed."""
    interpreter(cases.hidden_agrees, shape, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(70, 24), (3, 300), (0, 5), (5, 0), (1, 1)], ids=str)
def test_column_sums_agree(interpreter: Interpreter, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Catches rows or columns that the sum leaves out, strides that are assumed, and a sum that is rounded on the way."""
    interpreter(cases.column_sums_agree, shape, dtype)


def test_column_sums_of_many_rows_agree(interpreter: Interpreter) -> None:
    """Catches tiles that no program takes where there are more of them than programs."""
    interpreter(cases.column_sums_of_many_rows_agree)


@DTYPES
def test_gate_agrees(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Catches the gradients of value and gate in each other's place, tails of tiles, and strides that are assumed."""
    interpreter(cases.gate_agrees, (2, 5, 30, 9), dtype)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8)], ids=str)
def test_empty_shards(interpreter: Interpreter, shape: tuple[int, int, int, int]) -> None:
    """Catches empty grids that are launched, and gradients of parameters that are left uninitialised."""
    interpreter(cases.norm_agrees, shape, torch.float32)
    interpreter(cases.gated_agrees, shape, torch.float32)
    interpreter(cases.gate_agrees, shape, torch.float32)
    interpreter(cases.hidden_agrees, (shape[0] * shape[1] * shape[2], shape[3], 4), torch.float32)
    interpreter(cases.dropout_agrees, shape, torch.float32, 1)


@pytest.mark.parametrize("operator", ["dropout_add", "layer_norm", "gated_operands", "hidden_backward", "column_sums"])
def test_offsets_beyond_32_bits(interpreter: Interpreter, operator: str) -> None:
    """Catches offsets that wrap at 2^31 elements (a crash, or another row's numbers)."""
    interpreter(cases.far_apart_agrees, operator)


@pytest.mark.verify
def test_operators_are_sound_and_compile(interpreter: Interpreter) -> None:
    """Catches graph breaks, keys that are baked into a graph, fake results unlike real ones."""
    interpreter(cases.operators_are_sound)


def test_what_backward_keeps(interpreter: Interpreter) -> None:
    """Catches copies of results, and masks of dropout, that are kept for the backward pass."""
    x = (2, 3, 4, 8)
    assert interpreter(cases.kept_for_backward) == {
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
    interpreter(
        cases.dropout_agrees, _shape(number, [1, 3, 8, 24, 64]), dtype, 1 + number // 3 % 2, (number % 3, number % 5)
    )
    interpreter(cases.norm_agrees, _shape(number, [1, 3, 8, 24, 64, 130, 384]), dtype)
    interpreter(cases.gated_agrees, _shape(number, [2, 6, 16, 48, 130]), dtype)
    interpreter(cases.gate_agrees, _shape(number, [1, 3, 8, 24, 64]), dtype)
    _, rows, columns, channels = _shape(number, [1, 3, 8, 24, 300])
    if dtype is not torch.bfloat16:
        interpreter(cases.hidden_agrees, (rows * columns, channels, number + 1), dtype)
    interpreter(cases.gated_bias_agrees, _shape(number, [2, 6, 16, 48, 130]))
