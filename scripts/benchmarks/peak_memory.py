"""Peak memory of a program: counts every tensor's storage from its creation to its release, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evodsp.planner.trace import LiveMemory


class PeakMemory(TorchDispatchMode):
    """Counts the memory of all tensors that are created inside the `with` block.

    A view costs nothing: memory belongs to storages, and a storage counts until its last tensor is released. Tensors that
    existed before (parameters, their gradients, features) are not counted. `current` is what is alive now and `peak` the
    maximum so far, both in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = LiveMemory()

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
            self._register(tensor, counted=False)  # an input seen here for the first time existed before the block
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._register(tensor, counted=True)
        return result

    def _register(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._memory:
            self._memory.add(storage, counted=counted)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
