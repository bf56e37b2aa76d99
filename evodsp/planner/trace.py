"""What a program would do on a device: its operators, collectives and memory, one after another, seen without a device.

The program is run on tensors without numbers (the meta device). So what is planned cannot differ from what runs: operators are
those of the model, collectives those of the exchange. Each event carries the *place* of the program that it belongs to, such as
("evoformer", 1); in the backward pass that is the place of the forward operator.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels.triton import REPORTS
from evodsp.planner.imagined import Begun

Place = tuple[str, int]
"""A part of the model, and the number of the segment of a stack (0 for other parts)."""
Phase = Literal["forward", "recompute", "backward"]

OUTSIDE: Place = ("other", 0)


@dataclass(slots=True)
class Work:
    """Kernels that the device runs."""

    place: Place
    phase: Phase
    name: str
    flops: int
    """Of matrix products, 2 n m k each."""
    bytes: int
    """Read and written."""
    launches: int
    half: bool
    """Whether the factors of products are in half precision."""
    live: int
    """Bytes that the program has made and still holds while this runs. Parameters and inputs are not among them."""
    logits: float = 0.0
    """Of attention by own kernels, those of a backward pass as so many of a forward one as take as long."""


@dataclass(slots=True)
class Send:
    """A collective begins."""

    place: Place
    phase: Phase
    number: int
    begun: Begun
    live: int


@dataclass(slots=True)
class Await:
    """The result of collective `number` is awaited."""

    place: Place
    phase: Phase
    number: int
    live: int


Event = Work | Send | Await


class Recorder(TorchDispatchMode):
    """Writes down every operator and collective of what runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._places: list[Place] = [OUTSIDE]
        self._starts, self._of_start = [0], [OUTSIDE]
        """Sequence numbers of autograd's nodes at which a place begins, ascending, and these places."""
        self._held: dict[int, weakref.ref[Any]] = {}
        """What is held, by address. A storage that goes takes itself out."""
        self._live = 0
        self._collectives = 0
        self._views: dict[Any, bool] = {}
        self._shapes = Shapes()
        self._reports: dict[tuple[Any, ...], tuple[int, int]] = {}

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Attribute what runs in this context to `place`."""
        self.enter(place)
        try:
            yield
        finally:
            self.leave()

    def enter(self, place: Place) -> None:
        """From now on events belong to `place`, until `leave`."""
        self._places.append(place)
        self._mark()

    def leave(self) -> None:
        """Events belong to the place before the last `enter` again."""
        self._places.pop()
        self._mark()

    def began(self, begun: Begun) -> int:
        """A collective begins. Returns its number."""
        self._collectives += 1
        place, phase = self._where()
        self.events.append(Send(place, phase, self._collectives, begun, self._live))
        return self._collectives

    def waited(self, number: int) -> None:
        """The result of a collective is awaited."""
        place, phase = self._where()
        self.events.append(Await(place, phase, number, self._live))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so PyTorch need not ask its compiler at every operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self._is_view(func):
            return func(*args, **kwargs)
        out = self._shapes.run(func, args, kwargs)
        read, written = _tensors((args, kwargs)), _tensors(out)
        for x in written:
            storage = x.untyped_storage()
            if storage.nbytes() >= _SMALL and storage._cdata not in self._held and not any(x is y for y in read):
                self._hold(storage)
        name = func.overloadpacket.__name__
        if func.namespace != "aten":
            name = f"{func.namespace}::{name}"
        if name in _ONLY_MEMORY or (name == "_to_copy" and args[0].device != out.device):
            return out  # constant tables go to the device once in a process
        overwritten = {id(x) for key, x in kwargs.items() if key.startswith("out")}
        if name in REPORTS:
            launches, moved = self._report(name, args)
        else:
            launches, moved = 1, sum(_bytes(x) for x in read if id(x) not in overwritten) + sum(map(_bytes, written))
        place, phase = self._where()
        flops, half = _flops(name, args, written), _in_half(name, args)
        self.events.append(Work(place, phase, name, flops, moved, launches, half, self._live, _logits(name, args)))
        return out

    @property
    def live(self) -> int:
        """Bytes that the program has made and still holds."""
        return self._live

    def _report(self, name: str, args: tuple[Any, ...]) -> tuple[int, int]:
        """What an own operator launches and moves. Equal blocks ask for the same again and again."""
        key = (name, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args))
        if key not in self._reports:
            self._reports[key] = REPORTS[name](args)
        return self._reports[key]

    def _mark(self) -> None:
        number = torch.autograd._get_sequence_nr()
        if torch._C._current_graph_task_id() == -1 and number >= self._starts[-1]:
            self._starts.append(number)
            self._of_start.append(self._places[-1])

    def _where(self) -> tuple[Place, Phase]:
        """The place and phase of what runs now."""
        if torch._C._current_graph_task_id() == -1:
            return self._places[-1], "forward"
        if len(self._places) > 1:  # a module runs inside of the backward pass
            return self._places[-1], "recompute"
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        if not 0 <= number < 1 << 62:  # of nodes that accumulate gradients
            return OUTSIDE, "backward"
        return self._of_start[bisect.bisect_right(self._starts, number) - 1], "backward"

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._held[key]
            self._live -= size

        self._held[key] = weakref.ref(storage, gone)
        self._live += size

    def _is_view(self, func: Any) -> bool:
        known = self._views.get(func)
        if known is None:
            schema = func._schema
            known = self._views[func] = func.overloadpacket.__name__ in _NO_KERNEL or (
                not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
            )
        return known


class Shapes:
    """Runs operators on tensors without numbers, and remembers the results' shapes: equal blocks ask for the same again.

    PyTorch derives shapes in Python, which takes longer than all else that a plan does.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Any, ...]] | None] = {}
        """By operator and arguments: shapes, strides and types of the results; None if the first argument is the result."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func`, which is no view."""
        writes = func._schema.is_mutable
        if writes and not _writes_its_first(func._schema):
            return func(*args, **kwargs)
        try:
            key = (func, _described(args), _described(kwargs))
            if key in self._known:
                return self._again(key, args)
        except TypeError:  # an argument without a hash
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if writes:
            if out is args[0] and _described(args) == key[1]:
                self._known[key] = None
            return out
        found = out if isinstance(out, tuple) else (out,)
        if all(isinstance(x, Tensor) for x in found):
            self._known[key] = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in found]
        return out

    def _again(self, key: Any, args: tuple[Any, ...]) -> Any:
        known = self._known[key]
        if known is None:
            return args[0]
        new = [torch.empty_strided(shape, stride, dtype=dtype, device=on) for shape, stride, dtype, on in known]
        return new[0] if len(key[0]._schema.returns) == 1 else tuple(new)


def _writes_its_first(schema: Any) -> bool:
    """Whether an operator changes its first argument, which is its result, and nothing else."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return written[:1] == [True] and not any(written[1:]) and len(schema.returns) == 1


def _described(x: Any) -> Any:
    """Arguments with shape, stride, type and device in place of tensors."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    if isinstance(x, (list, tuple)):
        return tuple(map(_described, x))
    if isinstance(x, dict):
        return tuple((key, _described(value)) for key, value in x.items())
    return type(x), x  # 1 and 1.0 are equal, but make other types


_SMALL = 1 << 16
"""Bytes of a tensor that is too small to matter for memory. Most are smaller, and following each one takes time."""
_NO_KERNEL = {
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
    "view",
    "_reshape_alias",
    "resize_",
    "is_same_size",
    "set_",
    "promote_types",
}
_ONLY_MEMORY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "mv": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
    "_addmm_activation": 1,
    "evodsp::hidden_backward": 0,
}
"""Matrix products, and which argument is the left factor."""
_ATTENTION = {"evodsp::attention": 4, "evodsp::attention_backward": 10}
"""FLOPs of attention in products of R x R x width: two products forward; in the backward pass the logits again and four
gradients. Each multiplication counts twice."""
_BACKWARD = 3.4
"""Time of the backward pass of attention's kernels over the forward pass, measured on an H200
(scripts/benchmarks/results/gpu_h200.csv): 3.2 to 4.0 in blocks of training."""
_PROJECTIONS = {"evodsp::outer_projection": (0, 2), "evodsp::outer_projection_backward": (1, 4)}
"""Of outer products: where they stand, with the weight after them, and FLOPs for each of them and each result."""
_FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 10),
}
"""PyTorch's attention, which the meta device has under its CPU name: where the queries stand, and FLOPs as above."""


def _flops(name: str, args: Any, written: list[Tensor]) -> int:
    if name in _PRODUCTS:
        return 2 * written[0].numel() * int(args[_PRODUCTS[name]].shape[-1])
    if name in _ATTENTION:
        projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
        batch, rows, length, _, heads, width = projected.shape
        return _ATTENTION[name] * batch * rows * length * length * heads * width
    if name in _PROJECTIONS:
        first, factor = _PROJECTIONS[name]
        return factor * int(args[first].numel()) * len(args[first + 1])
    if name in _FUSED:
        first, factor = _FUSED[name]
        queries, keys = args[first], args[first + 1]  # [B, h, L, d], [B, h, K, d]
        return factor * queries.numel() * int(keys.shape[-2])
    return 0


def _logits(name: str, args: Any) -> float:
    if name not in _ATTENTION:
        return 0.0
    projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
    batch, rows, length, _, heads, _ = projected.shape
    return (1.0 if name == "evodsp::attention" else _BACKWARD) * batch * rows * heads * length**2


def _in_half(name: str, args: Any) -> bool:
    """Whether the factors of a product are in half precision. Its result may be in float32 all the same."""
    if name in _PRODUCTS:
        return bool(args[_PRODUCTS[name]].element_size() == 2)
    return (name in _ATTENTION or name in _PROJECTIONS or name in _FUSED) and bool(args[0].element_size() == 2)


def _tensors(x: Any) -> list[Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [y for item in x for y in _tensors(item)]
    if isinstance(x, dict):
        return [y for item in x.values() for y in _tensors(item)]
    return []


def _bytes(x: Tensor) -> int:
    """Bytes of memory behind a tensor; an expanded axis counts once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * x.element_size()
