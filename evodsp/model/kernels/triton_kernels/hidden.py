"""The gradient of a transition's hidden layer, before its ReLU: matrix product, ReLU and the gradient of the bias in one pass.

The hidden layer is the widest array of a transition. Three separate operators would write its gradient twice and read it
twice before it is used. This kernel writes it once.

Shape legend: P positions, c channels, h hidden channels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    product_precision,
    product_tile,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts


def hidden_gradients(
    grad: Float[Tensor, "P c"], narrow: Float[Tensor, "c h"], hidden: Float[Tensor, "P h"], dtype: torch.dtype
) -> tuple[Float[Tensor, "P h"], Float[Tensor, " h"]]:
    """grad @ narrow where `hidden`, the result of the ReLU, is positive, else 0; and its sum over positions in `dtype`. Sums
    are taken in fp32.
    """
    return _gradients(grad, narrow, hidden, dtype)


def _body(launch: Launcher, grad: Tensor, narrow: Tensor, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slope = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    (positions, channels), width = grad.shape, narrow.shape[1]
    along, across = product_tile(positions, 128, grad), product_tile(width, 128, grad)
    parts = tiles(positions, along)
    make = grad.new_empty if positions else grad.new_zeros  # an empty grid fills nothing
    sums = make(max(1, parts), width, dtype=torch.float32)
    launch(
        Launch(
            "hidden.backward",
            parts * tiles(width, across),
            {
                "grad": grad,
                "grad_strides": grad.stride(),
                "narrow": narrow,
                "narrow_strides": narrow.stride(),
                "hidden": hidden,
                "hidden_strides": hidden.stride(),
                "slope": slope,
                "sums": sums,
                "positions": positions,
                "channels": channels,
                "width": width,
            },
            {
                "TILE": along,
                "TILE_H": across,
                "TILE_C": product_tile(channels, 64, grad),
                "PRECISION": product_precision(),
            },
            writes=("slope", "sums"),
            warps=8,
            stages=3 if grad.element_size() < 4 else 1,
        )
    )
    return slope, sum_of_parts(launch, sums, dtype)


_gradients = Operator(
    "hidden_backward", "(Tensor grad, Tensor narrow, Tensor hidden, ScalarType dtype) -> (Tensor, Tensor)", _body
)
OPERATORS = (_gradients,)
