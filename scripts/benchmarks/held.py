"""What a program holds in memory: every tensor's storage from its birth to its death, on any device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Held:
    """A piece of memory, as it was when it came."""

    bytes: int
    shape: tuple[int, ...]
    """Of the first tensor in it."""
    dtype: torch.dtype
    where: str
    """The operator that made it, and with `places` the lines of evodsp that called it."""


class Activations(TorchDispatchMode):
    """Counts, while it is entered, the memory of tensors that came inside of it.

    Memory belongs to storages: views cost nothing, and a storage counts until its last tensor is gone. What existed before
    (parameters, their gradients, features) does not count. `peak` is the most that was held at once, in bytes; with `places`,
    which is slow, `at_peak` says by what.
    """

    def __init__(self, places: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: tuple[Held, ...] = ()
        self._places = places
        self._live: dict[int, Held] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._enter(tensor, None)  # what came from outside
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._enter(tensor, str(function))
        return result

    def _enter(self, tensor: Tensor, operator: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        # A storage's address may be used again once it is dead; its reference dies with it.
        self._known[key] = weakref.ref(storage, lambda _: self._leave(key))
        if operator is None:
            return
        where = f"{operator} {_place()}" if self._places else operator
        self._live[key] = Held(storage.nbytes(), tuple(tensor.shape), tensor.dtype, where)
        self.now += storage.nbytes()
        if self.now > self.peak:
            self.peak = self.now
            if self._places:
                self.at_peak = tuple(self._live.values())

    def _leave(self, key: int) -> None:
        self._known.pop(key, None)
        held = self._live.pop(key, None)
        if held is not None:
            self.now -= held.bytes


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _place() -> str:
    """The innermost lines of evodsp that are being run, innermost first; in a backward pass there may be none."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 3:
        if "/evodsp/" in frame.f_code.co_filename:
            lines.append(f"{frame.f_code.co_filename.rpartition('/evodsp/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
