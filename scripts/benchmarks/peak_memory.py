"""Peak memory of a program: counts every tensor's storage from its creation to its release, on any device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evodsp.planner.trace import LiveMemory

from .calling_lines import calling_lines


@dataclass(frozen=True)
class Allocation:
    """One storage, as it was when it was created."""

    bytes: int
    shape: tuple[int, ...]
    """Shape of the first tensor that used the storage."""
    dtype: torch.dtype
    origin: str
    """The operator that created it, and the lines of evodsp that called the operator."""


class PeakMemory(TorchDispatchMode):
    """Counts the memory of all tensors that are created inside the `with` block.

    A view costs nothing: memory belongs to storages, and a storage counts until its last tensor is released. Tensors that
    existed before (parameters, their gradients, features) are not counted. `current` is what is alive now and `peak` the
    maximum so far, both in bytes. With `origins`, which is slow, `at_peak` lists the allocations alive at the peak.
    """

    def __init__(self, origins: bool = False) -> None:
        super().__init__()
        self.at_peak: tuple[Allocation, ...] = ()
        self._memory = LiveMemory()
        self._origins: dict[int, Allocation] | None = {} if origins else None
        """What was created, by address, if the origins are asked for."""

    @property
    def current(self) -> int:
        return self._memory.bytes

    @property
    def peak(self) -> int:
        return self._memory.peak

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._register(tensor, None)  # an input seen here for the first time existed before the block
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._register(tensor, str(function))
        return result

    def _register(self, tensor: Tensor, operator: str | None) -> None:
        """Count the tensor's storage if it is new. `operator`: what created it, or None if it is not to be counted."""
        storage = tensor.untyped_storage()
        if storage in self._memory:
            return
        before = self.peak
        self._memory.add(storage, counted=operator is not None)
        if self._origins is None:
            return
        self._origins.pop(storage._cdata, None)  # of a freed storage at the same address
        if operator is not None:
            origin = f"{operator} {_calling_lines()}"
            self._origins[storage._cdata] = Allocation(storage.nbytes(), tuple(tensor.shape), tensor.dtype, origin)
            if self.peak > before:
                alive = self._memory.addresses()
                self.at_peak = tuple(self._origins[address] for address in alive if address in self._origins)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _calling_lines() -> str:
    """Up to three lines of evodsp on the call stack, innermost first. A backward pass may have none."""
    return " < ".join(f"{file}:{line}" for file, line in islice(calling_lines(sys._getframe(1)), 3))
