"""The backward pass of a ReLU with the gradient of the bias before it, in one pass over memory.

Shape legend: P positions, h hidden channels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two, tiles
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts

# Elements of a tile [positions, channels], and its channels at most.
_TILE, _CHANNELS = 4096, 256
# Programs at most: each leaves a sum of the bias's gradient.
_PROGRAMS = 528


def relu_gradients(
    grad: Float[Tensor, "P h"], hidden: Float[Tensor, "P h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "P h"], Float[Tensor, " h"]]:
    """The gradient where `hidden`, the result of the ReLU, is positive, contiguous; its sum over positions in `dtype`."""
    return _gradients(grad.contiguous(), hidden.contiguous(), dtype)


def _body(launch: Launcher, grad: Tensor, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slope, (positions, channels) = torch.empty_like(grad), grad.shape
    width = min(_CHANNELS, next_power_of_two(max(1, channels)))
    across = tiles(channels, width)
    parts = max(1, min(tiles(positions, _TILE // width), _PROGRAMS // max(1, across)))
    sums = grad.new_empty(parts, channels, dtype=torch.float32)
    launch(
        Launch(
            "relu.backward",
            parts * across,
            {
                "grad": grad,
                "hidden": hidden,
                "slope": slope,
                "sums": sums,
                "positions": positions,
                "channels": channels,
                "parts": parts,
            },
            {"TILE": _TILE // width, "WIDTH": width},
            writes=("slope", "sums"),
        )
    )
    return slope, sum_of_parts(launch, sums, dtype)


_gradients = Operator("relu_backward", "(Tensor grad, Tensor hidden, ScalarType dtype) -> (Tensor, Tensor)", _body)
OPERATORS = (_gradients,)
