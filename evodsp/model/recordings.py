"""One recorded call of a stack: its inputs, the recording, and its results (`evodsp.model.graphs` says when and why).

With gradients a call is two recordings, as `torch.cuda.make_graphed_callables` makes them: the forward pass, and the
backward pass from gradients of the results to those of inputs and parameters. Autograd sees one node. While the two are
recorded, leaves that share the memory of the parameters stand in their places, so that no other part of autograd's graph
takes part.

Before it is recorded a call is launched a few times. `difference` compares the first replay with what was launched last.

A recorder records work on a device once and repeats it: as a CUDA graph or, in tests without a GPU, by computing again.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from evodsp.model.dropout import DropoutKeys
from evodsp.parallel.exchange import Exchange
from evodsp.parallel.group import Entry

Results = Sequence[Tensor | None]


@dataclass(frozen=True)
class Taken:
    """A finished recording."""

    results: Results
    """Tensors that `repeat` fills."""
    repeat: Callable[[], None]
    free: Callable[[], None]
    """Gives the memory back, and lets go of the communicators. It cannot be repeated afterwards."""


class Recorder(ABC):
    """Records what a function does on a device. Repeating it fills the tensors that the function returned when it was recorded.

    The function's inputs must lie at the same addresses when it is repeated; their values may differ.
    """

    device: str
    """Type of device whose work is recorded."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run the function without recording, so that kernels are compiled and libraries have their workspaces."""

    @abstractmethod
    def pool(self) -> Any:
        """Memory for recordings. Recordings that share it may overwrite each other's intermediates, but not results."""

    @abstractmethod
    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        """Record `run`. The tensors that it returns are not filled yet."""

    @abstractmethod
    def holds(self, backend: str) -> bool:
        """Whether collectives of this backend of torch's process groups can be recorded."""


class CudaRecorder(Recorder):
    """CUDA graphs. A recorded function must not wait for the GPU, nor read memory of the host.

    NCCL's collectives are recorded as kernels. torch launches them on a stream of its own, which waits for the one that
    records, so the recording follows them there. A wait for a collective is an edge of the graph and must be in the same
    recording.
    """

    device = "cuda"

    def warm_up(self, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # another stream cannot use memory that the allocator keeps for this one
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def holds(self, backend: str) -> bool:
        return "nccl" in backend

    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        gc.collect()  # frees memory of dead reference cycles, which the recording could not use
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may go on, such as one that locks pages for the next batch.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            torch.cuda.set_stream(stream)  # after an error torch leaves the recording's stream current
            raise
        return Taken(results, graph.replay, graph.reset)


class Rerun(Recorder):
    """Computes again and copies the results into the tensors of the first run: the effect of a graph without its speed.
    Unlike a graph it also reads Python numbers again, and it communicates when it records.
    """

    device = "cpu"

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def pool(self) -> Any:
        return None

    def holds(self, backend: str) -> bool:
        return True

    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        first = [None if x is None else torch.full_like(x.detach(), torch.nan) for x in run()]

        def repeat() -> None:
            for kept, new in zip(first, run(), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new.detach())

        return Taken(first, repeat, lambda: None)


def versions() -> str:
    """State that decides which kernels a recording holds, besides the settings."""
    triton = importlib.util.find_spec("triton")
    named = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": torch.cuda.nccl.version() if torch.cuda.is_available() else None,
        "Triton": importlib.metadata.version("triton") if triton else None,
    }
    return ", ".join(f"{name} {version}" for name, version in named.items())


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest difference of results and gradients, as a fraction of their own root mean square. fp32 allows for TF32."""

_LEAST = 0.1
"""Some gradients of parameters are nothing but rounding errors, such as that of a constant added to all logits. A difference is
a fraction of at least this share of the largest of all parameters' gradients."""

OF_PARAMETER = "the gradient of the parameter "
"""Prefix of the names of parameters' gradients."""


def upstream(x: Tensor) -> Tensor:
    """Numbers from -1 to 2 in the shape of `x`: gradients with which every entry of a result counts."""
    return torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape)


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are equal. NaN is equal to NaN."""
    return found.keys() == expected.keys() and all(
        x.shape == found[name].shape and bool(((x == found[name]) | (x.isnan() & found[name].isnan())).all())
        for name, x in expected.items()
    )


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The first tensor that differs by more than rounding, in words; '' if none does. The keys say what each tensor is."""
    if missing := sorted(expected.keys() ^ found.keys()):
        return f"{missing[0]} was computed once only"
    sizes = {name: _size(x) for name, x in expected.items()}
    least = _LEAST * max((size for name, size in sizes.items() if name.startswith(OF_PARAMETER)), default=0.0)
    tolerance = max(_TOLERANCE[x.dtype] for x in expected.values())
    for name, x in expected.items():
        if found[name].shape != x.shape:
            return f"{name} has shape {list(found[name].shape)} instead of {list(x.shape)}"
        whole = max(sizes[name], least if name.startswith(OF_PARAMETER) else 0.0)
        off = _size(found[name].to(x.dtype) - x)
        if not off <= tolerance * whole:  # NaN is no good either
            share = f"{off / whole:.1e} of its size" if whole else f"{off:.1e} from zero"
            return f"{name} differs by {share}, more than {tolerance:.0e}"
    return ""


def _size(x: Tensor) -> float:
    """The root mean square."""
    if not x.numel():
        return 0.0
    return float(x.to(torch.promote_types(x.dtype, torch.float32)).square().mean().sqrt())


class ParameterPlace(NamedTuple):
    """A parameter of a stack."""

    module: nn.Module
    name: str
    """Name within the module."""
    path: str
    """Name within the stack."""


class NotRecorded(Exception):
    """A call could not be recorded. The ranks of a sample may still be told: while it records, nobody communicates."""


class RecordedPart:
    """A recorded function, and the collectives that it launches. The ledger counts those of a replay like launched ones.
    A recording itself communicates nothing, and so it enters nothing.
    """

    def __init__(self, recorder: Recorder, exchange: Exchange, run: Callable[[], Results], pool: Any) -> None:
        with exchange.recording() as entries:
            try:
                self._taken = recorder.record(run, pool)
            except Exception as error:
                raise NotRecorded from error
        self._exchange, self._entries = exchange, list[Entry](entries)
        self.results, self.free = self._taken.results, self._taken.free

    def repeat(self) -> None:
        """Fill the results anew."""
        with self._exchange.recording():
            self._taken.repeat()
        self._exchange.repeated(self._entries)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call: tensors and dropout keys."""

    tensors: list[Tensor]
    keys: tuple[DropoutKeys | None, ...]
    """For each argument, the dropout keys, or None if it is a tensor."""
    kind: Hashable
    """A key that is equal for calls which one recording can replay."""

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> CallArguments | None:
        """The inputs of a call. Returns None if an argument is neither a tensor nor dropout keys."""
        if not all(isinstance(x, Tensor | DropoutKeys) for x in arguments):
            return None
        keys = tuple(x if isinstance(x, DropoutKeys) else None for x in arguments)
        tensors = [x.flat if isinstance(x, DropoutKeys) else x for x in arguments]
        kinds = (
            None if x is None else (x.shape, x.dtype, x.device, x.requires_grad and torch.is_grad_enabled())
            for x in tensors
        )
        places = (None if x is None else x.places for x in keys)
        return cls([x for x in tensors if x is not None], keys, (*kinds, *places))

    @property
    def device(self) -> str:
        return self.tensors[0].device.type if self.tensors else ""

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments of the call with other tensors."""
        left = iter(tensors)
        return [next(left) if key is None else key if key.flat is None else key.moved(next(left)) for key in self.keys]


class Recording(ABC):
    """A recorded call."""

    def __init__(
        self, recorder: Recorder, exchange: Exchange, inputs: CallArguments, parameters: Sequence[Tensor]
    ) -> None:
        self.recorder, self.exchange, self.addresses = recorder, exchange, addresses_of(parameters)
        self.parts: list[RecordedPart] = []
        self.launched: list[dict[str, Tensor]] = []
        """Results and gradients of the launched runs before it was recorded, by what they are; empty once they are compared."""
        gradients = torch.is_grad_enabled()
        self.inputs = [x.detach().clone().requires_grad_(x.requires_grad and gradients) for x in inputs.tensors]
        self._tree: TreeSpec | None = None
        """Structure of a result's tensors."""

    @property
    def waits(self) -> bool:
        """Whether a backward pass still needs the results of the last replay."""
        return False

    @abstractmethod
    def __call__(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
        """The results of the call for these inputs. `parameters`: the parameters with which it was recorded."""

    @abstractmethod
    def _replayed(self) -> dict[str, Tensor]:
        """Results and gradients of a replay for the recording's own inputs."""

    def difference(self) -> str:
        """Difference of the first replay from the last launched run, in words; '' if there is none. Where the launched runs
        have the same bits, a replay must have them too; otherwise it may differ by rounding.
        """
        launched, self.launched = self.launched, []
        if not launched:
            return ""
        found, expected = self._replayed(), launched[-1]
        if same_bits(found, expected):
            return ""
        if (text := difference(found, expected)) or len(launched) < 2 or not same_bits(launched[-2], expected):
            return text
        other = next(name for name, x in expected.items() if not same_bits({name: found[name]}, {name: x}))
        return f"{other} has other bits"

    def free(self) -> None:
        """Give the memory of the recording back. It cannot be replayed afterwards."""
        for part in self.parts:
            part.free()
        self.parts = []

    def computed(self, run: Callable[..., Any], inputs: CallArguments) -> list[Tensor]:
        """The results of the call for the recording's own inputs."""
        with _uncached_autocast(inputs.device):
            results, self._tree = tree_flatten(run(*inputs.arguments(self.inputs)))
        return results

    def take(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, list(tensors))

    def given(self, results: Sequence[Tensor]) -> Any:
        assert self._tree is not None
        return tree_unflatten(list(results), self._tree)


class Forward(Recording):
    """A call without gradients."""

    def __init__(
        self,
        recorder: Recorder,
        exchange: Exchange,
        warm_ups: int,
        run: Callable[..., Any],
        inputs: CallArguments,
        parameters: Sequence[Tensor],
        pool: Any,
    ) -> None:
        super().__init__(recorder, exchange, inputs, parameters)
        self._first: list[Tensor] | None = None
        """The results of the replay that was compared. They are those of the call that was recorded."""
        for _ in range(warm_ups):
            recorder.warm_up(lambda: self.launched.append(_named(self.computed(run, inputs))))
        self.parts = [RecordedPart(recorder, exchange, lambda: self.computed(run, inputs), pool)]

    def __call__(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
        results, self._first = self._first, None
        if results is None:
            self.take(tensors)
            results = self._repeated()
        return self.given(results)

    def _repeated(self) -> list[Tensor]:
        self.parts[0].repeat()
        return _copied([x for x in self.parts[0].results if x is not None])

    def _replayed(self) -> dict[str, Tensor]:
        self._first = self._repeated()
        return _named(self._first)


class WithGradient(Recording):
    """A call and its backward pass, in memory of their own: other recordings are replayed between the two."""

    def __init__(
        self,
        recorder: Recorder,
        exchange: Exchange,
        warm_ups: int,
        run: Callable[..., Any],
        inputs: CallArguments,
        places: Sequence[ParameterPlace],
        parameters: Sequence[Tensor],
    ) -> None:
        super().__init__(recorder, exchange, inputs, parameters)
        self._paths = [place.path for place in places]
        self._number = 0
        """Number of the last replay."""
        self._use: weakref.ref[_Use] | None = None
        """The last replay, if its backward pass has not run yet. Counts of references let it go, so the ranks of a sample,
        which run one program, find it gone at the same calls."""
        self._made: list[Tensor] = []
        """Results of the running recording, with their autograd graph."""

        def forward() -> list[Tensor]:
            self._made = self.computed(run, inputs)
            return self._made

        def launch() -> None:
            results = forward()
            gradients = self._gradients(results, [upstream(x) for x in results])
            self.launched.append({**_named(results), **self._named_gradients(gradients)})

        for _ in range(warm_ups):
            with _in_place_of_parameters(places, self._fresh_leaves(parameters)):
                self.recorder.warm_up(launch)
            self._made = []
        leaves = self._fresh_leaves(parameters)
        with _in_place_of_parameters(places, leaves):  # until the backward pass has read them for a recomputation
            pool = self.recorder.pool()
            forwards = RecordedPart(recorder, exchange, forward, pool)
            self.results = [x.detach() for x in forwards.results if x is not None]
            self.differentiable = [x.requires_grad for x in self._made]
            self.arriving = [torch.zeros_like(x) for x in self.results]
            self._found: list[torch.dtype | None] = []
            backwards = RecordedPart(recorder, exchange, self._backward, pool)
        self.parts = [forwards, backwards]
        self._repeat, self._repeat_backward = forwards.repeat, backwards.repeat
        if self.recorder.device == "cuda":
            self._made = []  # the graphs need no other memory than their pool
        else:
            self._repeat, self._repeat_backward = (_with_leaves(part.repeat, places, leaves) for part in self.parts)

    @property
    def waits(self) -> bool:
        return self._use is not None and self._use() is not None

    def __call__(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
        return self.given(_Replay.apply(self, len(tensors), *tensors, *parameters))

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], _Use]:
        """The results, and an object to hold until the backward pass."""
        self.take(tensors)
        self._repeat()
        self._number += 1
        use = _Use(self._number)
        self._use = weakref.ref(use)
        return _copied(self.results), use

    def backward(self, use: _Use, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and parameters. `arriving`: gradients of the results."""
        if use.number != self._number:
            raise RuntimeError("the activations of this backward pass were overwritten by a later call of the stack")
        pairs = list(zip(self.arriving, arriving, strict=True))
        if given := [(own, new) for own, new in pairs if new is not None]:
            torch._foreach_copy_([own for own, _ in given], [new for _, new in given])
        if absent := [own for own, new in pairs if new is None]:
            torch._foreach_zero_(absent)
        self._repeat_backward()
        self._use = None
        results = self.parts[1].results
        copies = iter(_copied([x for x in results if x is not None]))
        return self._parted([None if x is None else next(copies) for x in results])

    def _replayed(self) -> dict[str, Tensor]:
        with torch.no_grad():
            results, use = self.forward(self.inputs)
            gradients = self.backward(use, [upstream(x) for x in results])
        wanted = [x for x, is_wanted in zip(gradients, self._is_wanted, strict=True) if is_wanted]
        return {**_named(results), **self._named_gradients(wanted)}

    def _named_gradients(self, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Gradients of what requires one, by what they are; without those that are zero because nothing reads the parameter."""
        inputs = [f"the gradient of input {n + 1}" for n in range(len(self.inputs))]
        names = [*inputs, *(OF_PARAMETER + path for path in self._paths)]
        wanted = [name for name, is_wanted in zip(names, self._is_wanted, strict=True) if is_wanted]
        return {name: x for name, x in zip(wanted, gradients, strict=True) if x is not None}

    def _fresh_leaves(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """New leaves of autograd's graph in the memory of the inputs and of the parameters; returns the latter.

        Autograd remembers the stream on which a leaf was first used, and a recording must not wait for another one.
        """
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in parameters]
        self._is_wanted = [x.requires_grad for x in (*self.inputs, *leaves)]
        self._wanted = [x for x in (*self.inputs, *leaves) if x.requires_grad]
        return leaves

    def _gradients(self, results: Sequence[Tensor], arriving: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of all inputs and parameters that require one. Autocast is off, as in a usual backward pass."""
        pairs = [(x, gradient) for x, gradient in zip(results, arriving, strict=True) if x.requires_grad]
        with torch.autocast(self.recorder.device, enabled=False):
            return list(
                torch.autograd.grad([x for x, _ in pairs], self._wanted, [g for _, g in pairs], allow_unused=True)
            )

    def _backward(self) -> list[Tensor | None]:
        """The gradients of the inputs, then one flat tensor for each precision with the gradients of the parameters."""
        gradients = self._gradients(self._made, self.arriving)
        inputs = sum(self._is_wanted[: len(self.inputs)])
        of_parameters = gradients[inputs:]
        self._shapes = [None if x is None else x.shape for x in of_parameters]
        self._found = [None if x is None else x.dtype for x in of_parameters]
        flat = [
            torch.cat([x.reshape(-1) for x in of_parameters if x is not None and x.dtype == dtype])
            for dtype in self._dtypes
        ]
        return [*gradients[:inputs], *flat]

    @property
    def _dtypes(self) -> list[torch.dtype]:
        return list(dict.fromkeys(dtype for dtype in self._found if dtype is not None))

    def _parted(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One gradient for each input and parameter, from what `_backward` returns."""
        inputs = sum(self._is_wanted[: len(self.inputs)])
        parts: dict[torch.dtype, Iterator[Tensor]] = {}
        for dtype, flat in zip(self._dtypes, gradients[inputs:], strict=True):
            assert flat is not None
            shapes = [s for s, found in zip(self._shapes, self._found, strict=True) if s is not None and found == dtype]
            pieces = flat.split([shape.numel() for shape in shapes])
            parts[dtype] = (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
        found = [*gradients[:inputs], *(None if dtype is None else next(parts[dtype]) for dtype in self._found)]
        left = iter(found)
        return [next(left) if wanted else None for wanted in self._is_wanted]


class _Use:
    """A token of a replay. It lives as long as a backward pass may follow."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Replay(torch.autograd.Function):
    """A replayed call as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, recording: WithGradient, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recording = recording
        results, ctx.use = recording.forward(tensors[:number])
        ctx.mark_non_differentiable(
            *(x for x, differentiable in zip(results, recording.differentiable, strict=True) if not differentiable)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.backward(ctx.use, arriving)


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in memory of their own, by one launch for each precision."""
    copies = [torch.empty_like(x) for x in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def _named(results: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"result {n + 1}": x.detach() for n, x in enumerate(results)}


def addresses_of(parameters: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() for x in parameters]


def _uncached_autocast(device: str) -> torch.autocast:
    """The current autocast mode without its cache: a cached cast would not be recorded, and would hold old parameters."""
    return torch.autocast(
        device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device), cache_enabled=False
    )


@contextmanager
def _in_place_of_parameters(places: Sequence[ParameterPlace], leaves: Sequence[Tensor]) -> Iterator[None]:
    """A context in which `leaves` stand in the places of the modules' parameters, or of their copies (`model/precision.py`)."""
    before = [module.__dict__.get(name) for module, name, _ in places]
    for (module, name, _), leaf in zip(places, leaves, strict=True):
        module.__dict__[name] = leaf
    try:
        yield
    finally:
        for (module, name, _), hidden in zip(places, before, strict=True):
            if hidden is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = hidden


def _with_leaves(
    repeat: Callable[[], None], places: Sequence[ParameterPlace], leaves: Sequence[Tensor]
) -> Callable[[], None]:
    def repeated() -> None:
        with _in_place_of_parameters(places, leaves), torch.enable_grad():
            repeat()

    return repeated
