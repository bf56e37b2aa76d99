"""Partial sums of several programs, added in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, tiles

_TILE = 512


def sum_of_parts(launch: Launcher, parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of `parts`, fp32 and contiguous, rounded to `dtype` once."""
    if len(parts) == 1:
        return parts[0]
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    launch(
        Launch(
            "sums.sum_of_parts",
            tiles(total.numel(), _TILE),
            {"parts": parts, "total": total, "count": len(parts), "size": total.numel()},
            {"TILE": _TILE},
            writes=("total",),
        )
    )
    return total
