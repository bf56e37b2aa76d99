"""Both operands of triangle multiplication, gated and masked, with channels first.

Matrix products over residues, and the all-to-all that sends each rank its channels, need the channels outermost, while the
projections before them leave the channels innermost. A program transposes a tile on the way.

The kernels' offsets are 64-bit, their strides [B, I, J, cc] of values and gates, [B, I, J] of the mask.

Shape legend: B batch, I J this rank's shard of the pair axes, c channels of an operand, cc = 2 c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, tiles
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts


@no_type_check
@triton.jit
def _place(rows, columns, channels, TILE_J: tl.constexpr, TILE_C: tl.constexpr):
    """Sample, row, columns and channels of this program. Tiles of channels vary fastest: they read the same lines of memory."""
    program = tl.program_id(0)
    across = tl.cdiv(channels, TILE_C)
    channel, program = program % across * TILE_C + tl.arange(0, TILE_C), program // across
    along = tl.cdiv(columns, TILE_J)
    column, program = program % along * TILE_J + tl.arange(0, TILE_J), program // along
    return (program // rows).to(tl.int64), (program % rows).to(tl.int64), column.to(tl.int64), channel.to(tl.int64)


@no_type_check
@triton.jit
def _tile(strides, sample, row, column, channel):
    return sample * strides[0] + row * strides[1] + column[:, None] * strides[2] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _present(mask, strides, sample, row, column, columns):
    at = sample * strides[0] + row * strides[1] + column * strides[2]
    return tl.load(mask + at, mask=column < columns, other=0).to(tl.float32)[:, None]


@no_type_check
@triton.jit
def forward(
    values, gates, mask, values_strides, gates_strides, mask_strides, out, batch, rows, columns, channels,
    TILE_J: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile [columns, channels] of one row. `out`: [2, B, c, I, J], contiguous."""
    sample, row, column, channel = _place(rows, columns, channels, TILE_J, TILE_C)
    inside = (column < columns)[:, None] & (channel < channels)[None, :]
    value = tl.load(values + _tile(values_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + _tile(gates_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(gate) * _present(mask, mask_strides, sample, row, column, columns)
    each = channels // 2
    plane = (channel // each * batch + sample) * each + channel % each
    to = out + (plane[:, None] * rows + row) * columns + column[None, :]
    tl.store(to, result.T.to(out.dtype.element_ty), mask=(channel < channels)[:, None] & (column < columns)[None, :])


@no_type_check
@triton.jit
def backward(
    grad, grad_strides, values, gates, mask, values_strides, gates_strides, mask_strides, grad_values, grad_gates,
    sums, batch, rows, columns, channels, TILE_J: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """A tile [columns, channels] of one row. `grad`: [2, B, c, I, J] with strides; results: halves of [B, I, J, 2 cc], and
    `sums` [B I tiles, 2 cc], their sums over a tile's columns."""
    sample, row, column, channel = _place(rows, columns, channels, TILE_J, TILE_C)
    inside = (column < columns)[:, None] & (channel < channels)[None, :]
    value = tl.load(values + _tile(values_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + _tile(gates_strides, sample, row, column, channel), mask=inside, other=0.0).to(tl.float32)
    each = channels // 2
    plane = channel // each * grad_strides[0] + sample * grad_strides[1] + channel % each * grad_strides[2]
    at = grad + plane[:, None] + row * grad_strides[3] + column[None, :] * grad_strides[4]
    upstream = tl.load(at, mask=(channel < channels)[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32).T
    opened = tl.sigmoid(gate)
    through = upstream * opened * _present(mask, mask_strides, sample, row, column, columns)
    to = ((sample * rows + row) * columns + column[:, None]) * (2 * channels) + channel[None, :]
    tl.store(grad_values + to, through.to(grad_values.dtype.element_ty), mask=inside)
    of_gates = through * value * (1.0 - opened)
    tl.store(grad_gates + to, of_gates.to(grad_gates.dtype.element_ty), mask=inside)
    part = (tl.program_id(0) // tl.cdiv(channels, TILE_C)).to(tl.int64)
    to_sums = sums + part * (2 * channels) + channel
    tl.store(to_sums, tl.sum(through, 0), mask=channel < channels)
    tl.store(to_sums + channels, tl.sum(of_gates, 0), mask=channel < channels)


# Tile of positions along J and of channels.
_POSITIONS, _CHANNELS = 64, 64


def gated_operands(
    projected: Float[Tensor, "B I J cccc"], mask: Float[Tensor, "B I J"] | Bool[Tensor, "B I J"] | Int[Tensor, "B I J"]
) -> Float[Tensor, "2 B c I J"]:
    """values * sigmoid(gates) * mask, contiguous. The values are the first half of `projected`, the gates the second one.

    The first c channels of each are the first operand's. `mask` gets no gradient. Arithmetic is fp32, the result has the
    dtype of `projected`. It is differentiable once.
    """
    return _forward(projected, mask)


def _sizes(values: Tensor) -> tuple[int, dict[str, int]]:
    """Number of programs, and the size arguments of the kernels."""
    batch, rows, columns, channels = values.shape
    programs = batch * rows * tiles(columns, _POSITIONS) * tiles(channels, _CHANNELS)
    return programs, {"batch": batch, "rows": rows, "columns": columns, "channels": channels}


def _inputs(values: Tensor, gates: Tensor, mask: Tensor) -> dict[str, Any]:
    named = {"values": values, "gates": gates, "mask": mask}
    return {**named, **{f"{name}_strides": x.stride() for name, x in named.items()}}


def _forward_body(launch: Launcher, projected: Tensor, mask: Tensor) -> Tensor:
    values, gates = projected.chunk(2, -1)
    batch, rows, columns, channels = values.shape
    out = values.new_empty(2, batch, channels // 2, rows, columns)
    programs, sizes = _sizes(values)
    launch(
        Launch(
            "gated_operands.forward",
            programs,
            {**_inputs(values, gates, mask), "out": out, **sizes},
            {"TILE_J": _POSITIONS, "TILE_C": _CHANNELS},
            writes=("out",),
        )
    )
    return out


def _backward_body(
    launch: Launcher, grad: Tensor, projected: Tensor, mask: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of the projections, contiguous, and its sum over positions."""
    values, gates = projected.chunk(2, -1)
    grad_projected = torch.empty_like(projected, memory_format=torch.contiguous_format)
    grad_values, grad_gates = grad_projected.chunk(2, -1)
    programs, sizes = _sizes(values)
    parts = max(1, programs // max(1, tiles(values.shape[-1], _CHANNELS)))
    make = values.new_empty if programs else values.new_zeros  # an empty grid fills nothing
    sums = make(parts, projected.shape[-1], dtype=torch.float32)
    launch(
        Launch(
            "gated_operands.backward",
            programs,
            {
                "grad": grad,
                "grad_strides": grad.stride(),
                **_inputs(values, gates, mask),
                "grad_values": grad_values,
                "grad_gates": grad_gates,
                "sums": sums,
                **sizes,
            },
            {"TILE_J": _POSITIONS, "TILE_C": _CHANNELS},
            writes=("grad_values", "grad_gates", "sums"),
        )
    )
    return grad_projected, sum_of_parts(launch, sums, dtype)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return None if grad is None else _gradients(grad, *ctx.saved_tensors, torch.float32)[0], None


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    return tuple(inputs)


_forward = Operator("gated_operands", "(Tensor projected, Tensor mask) -> Tensor", _forward_body)
_gradients = Operator(
    "gated_operands_backward",
    "(Tensor grad, Tensor projected, Tensor mask, ScalarType dtype) -> (Tensor, Tensor)",
    _backward_body,
)
_forward.differentiate(_backward, _keep)
OPERATORS = (_forward, _gradients)


def operands_of_chunk(
    projected: Float[Tensor, "*chunk I J cccc"], mask: Float[Tensor, "*chunk I J"]
) -> Float[Tensor, "2 *chunk c I J"]:
    """`gated_operands` of some rows of one sample, or of several samples."""
    return _forward(*_batched(projected, mask)).view(
        2, *projected.shape[:-3], projected.shape[-1] // 4, *projected.shape[-3:-1]
    )


def gradient_of_chunk(
    grad: Float[Tensor, "2 *chunk c I J"],
    projected: Float[Tensor, "*chunk I J cccc"],
    mask: Float[Tensor, "*chunk I J"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "positions cccc"], Float[Tensor, " cccc"]]:
    """The gradient of `projected`, a position in each row, and its sum over positions in `dtype`."""
    one = grad if projected.ndim == 4 else grad.unsqueeze(1)
    slope, of_bias = _gradients(one, *_batched(projected, mask), dtype)
    return slope.flatten(0, -2), of_bias


def _batched(projected: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (projected, mask) if projected.ndim == 4 else (projected.unsqueeze(0), mask.unsqueeze(0))
