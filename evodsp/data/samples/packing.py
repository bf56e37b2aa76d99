"""A sample or a batch in one piece of memory, to be handed to other processes or other ranks at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import UInt8
from torch import Tensor

Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Names, types and shapes of tensors, in the order in which they lie in the memory."""

_ALIGNMENT = 64
"""Bytes: as torch aligns its own tensors."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """How `pack` lays out the tensors."""
    return [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def packed_bytes(layout: Layout) -> int:
    """Size of the memory."""
    return sum(_aligned(_bytes(dtype, shape)) for _, dtype, shape in layout)


def pack(tensors: Mapping[str, Tensor], memory: UInt8[Tensor, " n"]) -> None:
    """Copy the tensors into `memory`, which may be on another device."""
    for value, place in zip(tensors.values(), unpack(layout_of(tensors), memory).values(), strict=True):
        place.copy_(value)


def unpack(layout: Layout, memory: UInt8[Tensor, " n"]) -> dict[str, Tensor]:
    """The tensors in `memory`, as views."""
    tensors, start = {}, 0
    for name, dtype, shape in layout:
        size = _bytes(dtype, shape)
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return tensors


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
