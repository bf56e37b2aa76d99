"""Trace of a program on a device: its operators, collectives and memory, one after another, found without a device.

The program is run on tensors without numbers (the meta device). So what is planned cannot differ from what runs: operators
are those of the model, collectives those of the exchange. Each event carries the *place* of the program that it belongs to,
such as ("evoformer", 1); in the backward pass that is the place of the forward operator.

The costs of an operator (FLOPs, logits, bytes) and the shapes of its results follow from tensors without numbers.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels.triton import REPORTS
from evodsp.parallel.group import Kind, Ledger, Phase, Place

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
_TRIANGLES = {
    "evodsp::triangle_operands": (0, 4),
    "evodsp::triangle_output": (0, 2),
    "evodsp::triangle_output_backward": (1, 4),
    "evodsp::triangle_operands_backward": (1, 17),
    "evodsp::triangle_gate_weight_backward": (0, 1),
    "evodsp::triangle_gate_backward": (1, 1),
}
"""Of triangle multiplication: where the pair stands, and products of a position's channels with a weight of as many. The
backward pass forms the operands' projections twice again."""
_FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 10),
}
"""PyTorch's attention, which the meta device has under its CPU name: where the queries stand, and FLOPs as above."""


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


def flops_of(name: str, args: Any, written: list[Tensor]) -> int:
    if name in _PRODUCTS:
        return 2 * written[0].numel() * int(args[_PRODUCTS[name]].shape[-1])
    if name in _ATTENTION:
        projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
        batch, rows, length, _, heads, width = projected.shape
        return _ATTENTION[name] * batch * rows * length * length * heads * width
    if name in _PROJECTIONS:
        first, factor = _PROJECTIONS[name]
        return factor * int(args[first].numel()) * len(args[first + 1])
    if name in _TRIANGLES:
        first, factor = _TRIANGLES[name]
        return 2 * factor * int(args[first].numel()) * int(args[first].shape[-1])
    if name in _FUSED:
        first, factor = _FUSED[name]
        queries, keys = args[first], args[first + 1]  # [B, h, L, d], [B, h, K, d]
        return factor * queries.numel() * int(keys.shape[-2])
    return 0


def logits_of(name: str, args: Any) -> float:
    if name not in _ATTENTION:
        return 0.0
    projected = args[0 if name == "evodsp::attention" else 1]  # [B, N, L, 4, H, D]
    batch, rows, length, _, heads, _ = projected.shape
    return (1.0 if name == "evodsp::attention" else _BACKWARD) * batch * rows * heads * length**2


def in_half(name: str, args: Any) -> bool:
    """Whether the factors of a product are in half precision. Its result may be in float32 all the same."""
    if name in _PRODUCTS:
        return bool(args[_PRODUCTS[name]].element_size() == 2)
    own = (_ATTENTION, _PROJECTIONS, _TRIANGLES, _FUSED)
    return any(name in names for names in own) and bool(args[0].element_size() == 2)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [y for item in x for y in tensors_in(item)]
    if isinstance(x, dict):
        return [y for item in x.values() for y in tensors_in(item)]
    return []


def bytes_of(x: Tensor) -> int:
    """Bytes of memory behind a tensor; an expanded axis counts once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * x.element_size()


Segment = tuple[str, int]
"""A part of the model, and the number of the segment of a stack (0 for other parts)."""

OUTSIDE: Segment = ("other", 0)


@dataclass(slots=True)
class Operation:
    """Kernels that the device runs."""

    place: Segment
    phase: Phase
    name: str
    flops: int
    """FLOPs of matrix products, 2 n m k each."""
    bytes: int
    """Read and written."""
    launches: int
    half: bool
    """Whether the factors of products are in half precision."""
    live: int
    """Bytes that the program has made and still holds while this runs. Parameters and inputs are not among them."""
    logits: float = 0.0
    """Logits of attention by own kernels. A backward pass counts as many logits as a forward pass computes in the same time."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective begins."""

    place: Segment
    phase: Phase
    number: int
    kind: Kind
    bytes: int
    """Bytes as the ledger counts them."""
    operators: int = 1
    """1 if the host launches it, 0 if a CUDA graph does."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The result of a collective is awaited."""

    place: Segment
    phase: Phase
    number: int


Event = Operation | Communication | Wait


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


class LiveMemory:
    """The storages that a program has made and still holds: their bytes now, and at most so far."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        """Storages by address. One that is freed takes itself out, because its address may be used again."""

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def add(self, storage: torch.UntypedStorage, counted: bool = True) -> None:
        """Count a storage until it is freed; or only know it, because it existed before."""
        key, size = storage._cdata, storage.nbytes() if counted else 0

        def gone(_: Any) -> None:
            del self._known[key]
            self.bytes -= size

        self._known[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def addresses(self) -> list[int]:
        """The addresses of all storages that are known and not freed."""
        return list(self._known)


class ProgramRecorder(TorchDispatchMode):
    """Writes down every operator and collective of what runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._places: list[Segment] = [OUTSIDE]
        self._starts, self._of_start = [0], [OUTSIDE]
        """Sequence numbers of autograd's nodes at which a place begins, ascending, and these places."""
        self._memory = LiveMemory()
        self._collectives = 0
        self._views: dict[Any, bool] = {}
        self._shapes = Shapes()
        self._reports: dict[tuple[Any, ...], tuple[int, int]] = {}

    @contextmanager
    def at(self, place: Segment) -> Iterator[None]:
        """Attribute what runs in this context to `place`."""
        self.enter(place)
        try:
            yield
        finally:
            self.leave()

    def enter(self, place: Segment) -> None:
        """From now on events belong to `place`, until `leave`."""
        self._places.append(place)
        self._mark()

    def leave(self) -> None:
        """Events belong to the place before the last `enter` again."""
        self._places.pop()
        self._mark()

    def began(self, kind: Kind, counted: int) -> int:
        """A collective of `counted` bytes begins. Returns its number."""
        self._collectives += 1
        self.events.append(Communication(*self._where(), self._collectives, kind, counted))
        return self._collectives

    def waited(self, number: int) -> None:
        """The result of a collective is awaited."""
        self.events.append(Wait(*self._where(), number))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so PyTorch need not ask its compiler at every operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self._is_view(func):
            return func(*args, **kwargs)
        out = self._shapes.run(func, args, kwargs)
        read, written = tensors_in((args, kwargs)), tensors_in(out)
        for x in written:
            storage = x.untyped_storage()
            if storage.nbytes() >= _SMALL and storage not in self._memory and not any(x is y for y in read):
                self._memory.add(storage)
        name = func.overloadpacket.__name__
        if func.namespace != "aten":
            name = f"{func.namespace}::{name}"
        if name in _ONLY_MEMORY or (name == "_to_copy" and args[0].device != out.device):
            return out  # constant tables go to the device once in a process
        overwritten = {id(x) for key, x in kwargs.items() if key.startswith("out")}
        if name in REPORTS:
            launches, moved = self._report(name, args)
        else:
            launches, moved = (
                1,
                sum(bytes_of(x) for x in read if id(x) not in overwritten) + sum(map(bytes_of, written)),
            )
        place, phase = self._where()
        flops, half = flops_of(name, args, written), in_half(name, args)
        self.events.append(
            Operation(place, phase, name, flops, moved, launches, half, self._memory.bytes, logits_of(name, args))
        )
        return out

    def _report(self, name: str, args: tuple[Any, ...]) -> tuple[int, int]:
        """Launches and bytes of an own operator. They are remembered, because equal blocks ask for the same."""
        key = (name, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args))
        if key not in self._reports:
            self._reports[key] = REPORTS[name](args)
        return self._reports[key]

    def _mark(self) -> None:
        number = torch.autograd._get_sequence_nr()
        if torch._C._current_graph_task_id() == -1 and number >= self._starts[-1]:
            self._starts.append(number)
            self._of_start.append(self._places[-1])

    def _where(self) -> tuple[Segment, Phase]:
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

    def _is_view(self, func: Any) -> bool:
        known = self._views.get(func)
        if known is None:
            schema = func._schema
            known = self._views[func] = func.overloadpacket.__name__ in _NO_KERNEL or (
                not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
            )
        return known


class Arrival:
    """A collective whose result can be awaited."""

    def __init__(self, number: int, recorder: ProgramRecorder) -> None:
        self._number, self._recorder = number, recorder

    def wait(self) -> None:
        self._recorder.waited(self._number)


class ImaginedGroup(Place):
    """Rank `rank` of `size`, for tensors without numbers. The exchange and the collectives that use it are the real ones."""

    def __init__(self, rank: int, size: int, recorder: ProgramRecorder, ledger: Ledger) -> None:
        super().__init__(rank, size, ledger)
        self._recorder = recorder

    def all_to_all(self, received: Tensor, sent: Tensor, arriving: Sequence[int], leaving: Sequence[int]) -> Any:
        return self._begin("all-to-all", sent)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self._begin("all-gather", received)

    def reduce_scatter(self, received: Tensor, sent: Tensor) -> Any:
        return self._begin("reduce-scatter", sent)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Any:
        return self._begin("all-reduce", x, times=2)

    def broadcast(self, x: Tensor, root: int) -> Any:
        return self._begin("broadcast", x)

    def reduce(self, x: Tensor, root: int) -> Any:
        return self._begin("reduce", x)

    def begin(self, kind: Kind, counted: int) -> Arrival:
        """Write down a collective of `counted` bytes."""
        return Arrival(self._recorder.began(kind, counted), self._recorder)

    def _begin(self, kind: Kind, buffer: Tensor, times: int = 1) -> Arrival:
        return self.begin(kind, times * buffer.numel() * buffer.element_size())
