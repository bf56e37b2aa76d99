"""Torch operators made of evodsp's kernels, and the one way in which they are launched.

An operator is written once, as a *body*: a function that allocates its results and passes each grid to a function `launch`.
The body has three uses, which differ in `launch`:

- the operator itself: `launch` runs the grid on the device;
- its fake implementation, for FakeTensorMode and torch.compile: `launch` does nothing, and the results have no numbers;
- its report: `launch` writes the grid down, with the bytes that it moves (`Operator.launches`).

So the grids that are counted and compiled ahead of time are the grids that run. A body runs once for its plan,
which is then repeated.

A *plan* is the launches of a body, recorded once and repeated without running the body, so that the host keeps up with short
kernels.

A body allocates results, makes views and launches grids. All of it follows from shapes, strides and dtypes of
its tensors, from its other arguments, and from `product_precision()`. So a *plan* is made of one run on the meta device:
memory to allocate, and grids with, for each tensor, which memory it is in and where. Only addresses differ from call to
call. A body that does anything else, such as arithmetic on tensors, gets no plan and runs in each call.

Repeating a plan also passes Triton's part of a launch, which looks at each argument to choose a compiled kernel. With all
else fixed, that choice depends only on which addresses are multiples of 16. For each such pattern the first call goes
through Triton, which compiles. The second call records the arguments that Triton passes to its low-level launcher. From the
third call on they are passed again, with other addresses and the current stream. If any of them is not as expected, the plan
is refused, and the body runs and launches in the ordinary way. While launch hooks of Triton are set, plans launch in the
ordinary way too. Triton's settings (`TRITON_...`) are those of the first two calls.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evodsp.model.precision import is_tf32

# Functions that a body may call beside those that return views. The functions of the second set fill the memory with zeros.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
# Largest number of remembered patterns of addresses. As a rule there is one: all addresses are multiples of 16.
_PATTERNS = 64
# Positions of launcher arguments. Before the kernel's own come three sizes of the grid, stream, function, metadata of the
# kernel, metadata of the launch, hooks before and after it.
_STREAM, _LAUNCH, _BEFORE, _AFTER, _FIRST = 3, 6, 7, 8, 9
# Only one thread at a time may record Triton's arguments.
_WRITING = threading.Lock()


class _Memory(NamedTuple):
    """Memory that a body allocates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool


class _View(NamedTuple):
    """A tensor as a view of numbered memory. The inputs' memories are numbered first, then those that the body allocates."""

    memory: int
    offset: int
    """The offset in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bytes: int | None
    """The offset in bytes. None: the tensor has no elements, and its address is 0."""

    def of(self, memories: Sequence[Tensor]) -> Tensor:
        x = memories[self.memory]
        return x.as_strided(self.shape, self.stride, x.storage_offset() + self.offset)


class _Record(NamedTuple):
    """The arguments that Triton passes to the launcher of a compiled kernel."""

    launcher: Callable[..., Any]
    arguments: list[Any]
    addresses: list[tuple[int, int, int]]
    """For each tensor: its position among the arguments, the number of its memory, and its offset in bytes."""
    kernel: Any
    """The compiled kernel, which this reference keeps loaded."""


class Plan:
    """The memory and the grids of a body, for tensors of certain shapes, strides and dtypes on one device."""

    def __init__(
        self,
        device: torch.device,
        made: Sequence[_Memory],
        grids: Sequence[tuple[Launch, dict[str, _View]]],
        results: Sequence[tuple[int, _View | None]],
        single: bool,
        run: Launcher,
    ) -> None:
        """`results`: for each result its memory, and its view if it is not all of that memory. `run`: function that launches
        in the ordinary way.
        """
        self.refused = False
        """Whether Triton differs from the expectations. The body then has to run."""
        self._index = device.index if device.type == "cuda" else None
        self._made, self._grids, self._results, self._single, self._run = made, grids, results, single, run
        self._kernels: dict[tuple[int, ...], list[Any]] = {}
        self._records: dict[tuple[int, ...], list[_Record]] = {}
        self._triton: _Triton | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The body's results for these tensors, which are its arguments in order."""
        memories, like = list(tensors), tensors[0]
        for shape, stride, dtype, zeros in self._made:
            x = like.new_empty_strided(shape, stride, dtype=dtype)
            memories.append(x.zero_() if zeros else x)
        if self._index is None or torch._C._cuda_getDevice() == self._index:
            self._launch(memories)
        else:
            with torch.cuda.device(self._index):
                self._launch(memories)
        if self._single:
            memory, view = self._results[0]
            return memories[memory] if view is None else view.of(memories)
        return tuple([memories[n] if view is None else view.of(memories) for n, view in self._results])

    def _launch(self, memories: list[Tensor]) -> None:
        if not self._grids:
            return
        addresses = [x.data_ptr() for x in memories]
        pattern = tuple([address & 15 for address in addresses])
        records, triton = self._records.get(pattern), self._triton
        if records is None or triton is None or triton.hooked():
            self._ordinary(memories, pattern)
            return
        stream = triton.stream(self._index or 0)
        for launcher, arguments, places, _ in records:
            given = arguments.copy()
            given[_STREAM] = stream
            for position, memory, offset in places:
                given[position] = addresses[memory] + offset
            launcher(*given)

    def _ordinary(self, memories: list[Tensor], pattern: tuple[int, ...]) -> None:
        """Launch through Triton. The second launch is recorded."""
        grids = [_placed(launch, views, memories) for launch, views in self._grids]
        kernels = self._kernels.get(pattern)
        if kernels is None or pattern in self._records:
            kernels = [self._run(launch) for launch, _ in grids]
            if len(self._kernels) >= _PATTERNS:
                self._kernels, self._records = {}, {}
            if None not in kernels:  # Triton's interpreter returns nothing
                self._kernels[pattern] = kernels
            return
        with _WRITING:
            handed = [_handed(self._run, launch, kernel) for (launch, _), kernel in zip(grids, kernels, strict=True)]
        if any(len(calls) > 1 for calls in handed):
            return  # another thread launched the kernel meanwhile, so the next call tries again
        try:
            self._triton = _Triton()
            stream = self._triton.stream(self._index or 0)
            self._records[pattern] = [
                _recorded(kernel, calls[0], launch, places, stream)
                for kernel, calls, (launch, places) in zip(kernels, handed, grids, strict=True)
            ]
        except (_Unexpected, ImportError, AttributeError, IndexError):
            self.refused = True


class _Unexpected(Exception):
    """Triton launches kernels in a way that this module does not know."""


class _Triton:
    """The state of Triton that each launch reads."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.runtime import driver

        self.stream: Callable[[int], int] = driver.active.get_current_stream
        """Function from a device's number to the handle of the stream on which torch launches."""
        self._runtime = knobs.runtime
        self._before, self._after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if not (isinstance(self._before.calls, list) and isinstance(self._after.calls, list)):
            raise _Unexpected

    def hooked(self) -> bool:
        """Whether a launch hook is set."""
        before, after, runtime = self._before, self._after, self._runtime
        return bool(
            runtime.launch_enter_hook is not before
            or runtime.launch_exit_hook is not after
            or before.calls
            or after.calls
        )


def _placed(launch: Launch, views: dict[str, _View], memories: Sequence[Tensor]) -> tuple[Launch, dict[int, _View]]:
    """The launch with tensors in these memories, and the view of each tensor by the identity of the tensor."""
    tensors = {name: view.of(memories) for name, view in views.items()}
    placed = dataclasses.replace(launch, arguments={**launch.arguments, **tensors})
    return placed, {id(x): views[name] for name, x in tensors.items()}


def _handed(run: Launcher, launch: Launch, kernel: Any) -> list[tuple[Any, ...]]:
    """Launch in the ordinary way. Returns the arguments that Triton passed to the kernel's launcher, for each of its calls."""
    launcher, handed = getattr(kernel, "_run", None), []

    def note(*arguments: Any) -> Any:
        handed.append(arguments)
        return launcher(*arguments)  # type: ignore[misc]

    if launcher is not None:
        kernel._run = note
    try:
        run(launch)
    finally:
        if launcher is not None:
            kernel._run = launcher
    return handed


def _recorded(kernel: Any, handed: Sequence[Any], launch: Launch, views: dict[int, _View], stream: int) -> _Record:
    """A record that can be launched again. Raises _Unexpected, AttributeError or IndexError if Triton is not as expected."""
    from triton import knobs

    if kernel.metadata.target.backend != "cuda":  # other backends choose a kernel by more than addresses
        raise _Unexpected
    head = (launch.programs, 1, 1, stream, kernel.function, kernel.packed_metadata)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    names = len(launch.arguments) + len(launch.constants)
    if handed[:_LAUNCH] != head or handed[_BEFORE:_FIRST] != hooks or len(handed) != _FIRST + names:
        raise _Unexpected
    arguments: list[Any] = list(handed)
    arguments[_LAUNCH] = arguments[_BEFORE] = arguments[_AFTER] = None
    addresses = []
    for position, x in enumerate(handed[_FIRST:], _FIRST):
        if isinstance(x, Tensor):
            if id(x) not in views:
                raise _Unexpected
            view = views[id(x)]
            arguments[position] = 0
            if view.bytes is not None:
                addresses.append((position, view.memory, view.bytes))
        elif not isinstance(x, bool | int | float | str | tuple | None):
            raise _Unexpected
    return _Record(kernel._run, arguments, addresses, kernel)


class _Watch(TorchDispatchMode):
    """Records the functions that a body calls."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, bool]] = []
        self.understood = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs, out))):
            return out  # numbers of the host
        name, schema = func.overloadpacket.__name__, func._schema
        if name in _EMPTY or name in _ZEROS:
            self.made.append((out, name in _ZEROS))
        elif schema.is_mutable or not any(result.alias_info for result in schema.returns):
            self.understood = False
        return out


def plan_of(body: Callable[..., Any], arguments: Sequence[Any], run: Launcher) -> Plan | None:
    """The plan of a body for arguments like these, or None if the body has to run in each call. `run` launches a grid in the
    ordinary way.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    devices = {x.device for x in tensors}
    if len(devices) != 1 or tensors[0].is_meta:
        return None
    given = [on_meta(x) for x in arguments]
    launches: list[Launch] = []
    with torch.no_grad(), _Watch() as watch:
        returned = body(launches.append, *given)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    memories = [x for x in given if isinstance(x, Tensor)] + [x for x, _ in watch.made]
    numbers = {x.untyped_storage()._cdata: n for n, x in enumerate(memories)}

    def view(x: Tensor) -> _View:
        number = numbers[x.untyped_storage()._cdata]
        if x.dtype != memories[number].dtype:
            raise KeyError(number)
        offset = int(x.storage_offset())
        return _View(number, offset, x.shape, x.stride(), offset * x.element_size() if x.numel() else None)

    try:
        grids = [
            (launch, {name: view(x) for name, x in launch.arguments.items() if isinstance(x, Tensor)})
            for launch in launches
            if launch.programs
        ]
        views = [view(x) for x in results]
    except KeyError:  # memory from elsewhere, or memory read as another dtype
        return None
    made = [_Memory(x.shape, x.stride(), x.dtype, zeros) for x, zeros in watch.made]
    places = [_place(x, made, len(tensors)) for x in views]
    alone = len({x.memory for x in views}) == len(views) and min((x.memory for x in views), default=0) >= len(tensors)
    if not (watch.understood and alone and len(numbers) == len(memories)):
        return None
    return Plan(tensors[0].device, made, grids, places, isinstance(returned, Tensor), run)


def _place(view: _View, made: list[_Memory], inputs: int) -> tuple[int, _View | None]:
    """The memory of a result, and its view if it is not all of that memory. Memory that is all one result is allocated in its
    shape.
    """
    number = view.memory - inputs
    if number >= 0:
        x = made[number]
        if view.offset == 0 and torch.Size(view.shape).numel() == torch.Size(x.shape).numel():
            made[number] = x._replace(shape=view.shape, stride=view.stride)
        if (view.offset, view.shape, view.stride) == (0, made[number].shape, made[number].stride):
            return view.memory, None
    return view.memory, view


def on_meta(x: Any) -> Any:
    """A meta tensor with the shape, strides and dtype of a tensor; anything else unchanged."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


@dataclass(frozen=True)
class Launch:
    """One grid of one kernel."""

    kernel: str
    """`module.function` in this folder."""
    programs: int
    """Number of programs; the grid has one axis. An empty grid is not launched."""
    arguments: dict[str, Any]
    """Tensors, numbers, and tuples of strides, by the names of the kernel's parameters. The kernel does not read a None."""
    constants: dict[str, Any]
    """Compile-time constants: tile sizes and variants."""
    writes: tuple[str, ...]
    """Names of the tensors that the kernel fills. It reads the others."""
    warps: int = 4
    stages: int = 2
    """Depth of the software pipeline of loads."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, if every element of every tensor is moved once."""
        return sum(moved(x) for x in self.arguments.values() if isinstance(x, Tensor))

    @property
    def function(self) -> Any:
        """The kernel, as Triton's decorator returned it."""
        module, name = self.kernel.split(".")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def moved(x: Tensor) -> int:
    """Bytes of the elements of x; an axis that was expanded (stride 0) is read once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride != 0 or size == 0 else 1
    return numel * x.element_size()


Launcher = Callable[[Launch], Any]
# Largest number of plans that an operator remembers: proteins of many lengths make many plans.
_PLANS = 1024
_UNKNOWN: Any = object()
_PLAIN = frozenset({Tensor, Parameter, type(None), bool, int, float, torch.dtype})


def run(launch: Launch) -> Any:
    """Launch the grid on the device of its tensors (or in Triton's interpreter, where TRITON_INTERPRET=1 is set).

    Returns the compiled kernel, or None of an empty grid and of the interpreter.
    """
    if launch.programs == 0:
        return None
    device = next(x.device for x in launch.arguments.values() if isinstance(x, Tensor))
    with torch.get_device_module(device).device(device) if device.type != "cpu" else torch.no_grad():
        return launch.function[(launch.programs,)](
            **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )


class Operator:
    """A body as a torch operator, `evodsp::<name>`. The operator does not modify its tensors, and its results do not alias
    them.

    A plain call repeats the body's plan at once: torch's dispatcher costs more than a short kernel takes. A call
    goes through the dispatcher if something has to see the operator: modes such as FakeTensorMode, torch.compile, functorch,
    tracing, a profiler, subclasses of tensors.
    """

    def __init__(self, name: str, schema: str, body: Callable[..., Any]) -> None:
        """`schema`: torch's notation of the arguments and results, without the name. `body`: function that takes `launch`,
        then the arguments of the schema.
        """
        self.name, self.body = f"evodsp::{name}", body
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._with_gradients: Any = None
        self._call = torch.library.custom_op(self.name, self._repeat, mutates_args=(), schema=schema)
        self._call.register_fake(functools.partial(body, _ignore))

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _seen() or not _PLAIN.issuperset(map(type, arguments)):
            return self._call(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            function = self._with_gradients
            return self._call(*arguments) if function is None else function.apply(*arguments)
        plan, tensors = self._look_up(arguments)
        return self._call(*arguments) if plan is None else plan(tensors)

    @property
    def differentiable(self) -> bool:
        """Whether `differentiate` was called."""
        return self._with_gradients is not None

    @property
    def refused(self) -> bool:
        """Whether Triton differed from a plan's expectations, so that the body runs in each call."""
        return any(plan is not None and plan.refused for plan in self._plans.values())

    def forget(self) -> None:
        """Forget all plans, as before the first call."""
        self._plans = {}

    def _repeat(self, *arguments: Any) -> Any:
        """Run the operator on its device, by a plan if there is one."""
        plan, tensors = self._look_up(arguments)
        return self.body(run, *arguments) if plan is None else plan(tensors)

    def _look_up(self, arguments: Sequence[Any]) -> tuple[Plan | None, list[Tensor]]:
        """The plan for arguments like these, if there is one, and the tensors among them."""
        # The key begins with the settings behind `product_precision`, and holds everything on which a body may depend.
        key: list[Any] = [is_tf32()]
        tensors = []
        for x in arguments:
            if isinstance(x, Tensor):
                tensors.append(x)
                key += (x.shape, x.stride(), x.dtype, x.device)
            else:
                key.append(x)
        complete = tuple(key)
        plan = self._plans.get(complete, _UNKNOWN)
        if plan is _UNKNOWN:
            if len(self._plans) >= _PLANS:
                self._plans = {}
            plan = self._plans[complete] = plan_of(self.body, arguments, run)
        return (None if plan is None or plan.refused else plan), tensors

    def differentiate(
        self,
        backward: Callable[..., Any],
        keep: Callable[[Sequence[Any], Any], tuple[Tensor | None, ...]],
        note: Callable[[Any, Sequence[Any]], None] = lambda ctx, inputs: None,
    ) -> None:
        """Make the operator differentiable once.

        `keep(inputs, output)` returns the tensors to keep for the backward pass. `backward(ctx, *gradients)` returns the
        gradients of the inputs; a gradient that is not needed arrives as None. `note(ctx, inputs)` puts plain numbers for the
        backward pass on `ctx`.
        """

        def set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*keep(inputs, output))
            note(ctx, inputs)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self._repeat(*inputs)
            set_up(ctx, inputs, output)
            return output

        self._call.register_autograd(backward, setup_context=set_up)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._with_gradients = type(self.name, (torch.autograd.Function,), methods)

    def launches(self, *arguments: Any) -> list[Launch]:
        """The grids that a call launches, without launching them. Only the shapes, strides and dtypes of tensors are used."""
        grids: list[Launch] = []
        self.body(grids.append, *(on_meta(x) for x in arguments))
        return [launch for launch in grids if launch.programs > 0]

    def report(self, arguments: Sequence[Any], *_: Any) -> tuple[int, int]:
        """Number of grids that a call launches, and the bytes they move. A counter may pass the keywords and the result of
        the call too; they are ignored.
        """
        grids = self.launches(*arguments)
        return len(grids), sum(launch.bytes_moved for launch in grids)


def _ignore(launch: Launch) -> None:
    pass


def _seen() -> bool:
    """Whether something has to see the torch operators that are called."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch.autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def tiles(size: int, tile: int) -> int:
    """Number of tiles that cover `size` elements."""
    return -(-size // tile)


def product_tile(size: int, limit: int, factor: Tensor) -> int:
    """The edge of a tile of a matrix product: at most `limit`, or half of it in single precision. Tensor cores need at least
    16.
    """
    most = limit if factor.element_size() < 4 else limit // 2
    return max(16, min(most, next_power_of_two(max(1, size))))


def product_precision() -> str:
    """The precision in which kernels multiply float32 factors: torch's current one."""
    return "tf32" if is_tf32() else "tf32x3"
