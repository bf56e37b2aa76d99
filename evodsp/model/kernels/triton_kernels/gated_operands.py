"""Both operands of triangle multiplication, gated and masked, with channels first.

Matrix products over residues, and the all-to-all that sends each rank its channels, need the channels outermost, while the
projections before them leave the channels innermost. A program transposes a tile on the way.

Shape legend: B batch, I J this rank's shard of the pair axes, c channels of an operand, cc = 2 c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, tiles
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts

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
