"""Adds the partial sums of several programs in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, next_power_of_two, tiles

# Elements of a tile [parts, results], its largest number of parts, and its smallest number of results: a sector of memory. As
# many parts as possible are loaded at once, because a step of the loop costs the latency of memory.
_TILE, _PARTS, _RESULTS = 4096, 1024, 8


def sum_of_parts(launch: Launcher, parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first axis of `parts`, fp32 and contiguous, rounded to `dtype` once."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    at_once = min(_PARTS, next_power_of_two(len(parts)))
    width = max(_RESULTS, _TILE // at_once)
    launch(
        Launch(
            "sums.sum_of_parts",
            tiles(total.numel(), width),
            {"parts": parts, "total": total, "count": len(parts), "size": total.numel()},
            {"TILE_P": at_once, "TILE": width},
            writes=("total",),
            warps=8,
        )
    )
    return total
