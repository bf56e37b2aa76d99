"""Counts where a program would make the host wait for a GPU, on a machine without one: the meta device stands for the GPU."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.benchmarks.calling_lines import calling_lines


class HostWaits(TorchDispatchMode):
    """Lists the operators that make the host wait, as 'operator file:line' of the package's innermost frames.

    They are copies between host and device (also with `non_blocking`, which needs pinned memory to mean anything), `item`,
    `tolist`, `if` and `float` of a device tensor, and operators on the device that take an array from the host. All of these
    pass the dispatcher for a meta tensor, while on a CPU tensor `tolist` and `cpu` do not. Values that are read are ones. Lists
    of numbers (`x[[0, 1]]`, `x.new_tensor([1.0])`) are found before the dispatcher, which gets them as a finished tensor.

    Operators whose result size depends on data (`nonzero`, a boolean index) need no entry: the meta device refuses them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._lists = _Lists(self)

    def __enter__(self) -> HostWaits:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in given if x.device.type == "meta"]
        if name == "_local_scalar_dense" and on_device:
            self.add(name)
            return torch.ones((), dtype=given[0].dtype).item()
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if on_device and any(x.device.type == "cpu" and x.dim() > 0 for x in given):
            self.add(name)
        return func(*args, **kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        source = args[1] if name == "copy_" else args[0]
        to = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if {source.device.type, to.type} != {"cpu", "meta"}:
            return func(*args, **kwargs)
        self.add(name)
        if to.type == "meta":
            return func(*args, **kwargs)
        return (
            args[0].fill_(1) if name == "copy_" else torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        )

    def add(self, name: str) -> None:
        lines = islice(calling_lines(sys._getframe(2), "lightning"), 2)
        self.waits.append(f"{name} {' < '.join(f'{file}:{line}' for file, line in lines)}")


class _Lists(TorchFunctionMode):
    """Tells `HostWaits` of Python lists that become tensors on the device."""

    def __init__(self, seen: HostWaits) -> None:
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._seen.waits)
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        indexed = name in ("__getitem__", "__setitem__") and args[0].device.type == "meta"
        listed = indexed and any(
            isinstance(part, list) for part in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        made = name in ("tensor", "as_tensor", "new_tensor") and result.device.type == "meta"
        if (listed or made) and len(self._seen.waits) == before:
            self._seen.add(name)
        return result
