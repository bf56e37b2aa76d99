"""How own operators are called: plans are repeated as bodies would launch, and whoever has to see an operator does."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels import triton_kernels
from evodsp.model.kernels.triton import LAUNCHED
from evodsp.model.kernels.triton_kernels import launch, layer_norm
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator, moved, plan_of, run
from scripts.benchmarks.host_time import NoGpu, shifted

Launched = list[tuple[Any, ...]]


class Kernel:
    """Stands for a compiled kernel. Launching it writes down what Triton hands over."""

    def __init__(self, specialisation: str, launched: Launched) -> None:
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
        self.function: object = specialisation
        self.packed_metadata = ("warps", "shared memory")
        self._run = lambda *arguments: launched.append(arguments)

    @property
    def run(self) -> Callable[..., object]:
        """As Triton's."""
        return self._run

    def launch_metadata(self, *_: Any) -> str:
        """As Triton's: for hooks."""
        return "for hooks"


class Driver(NoGpu):
    """Tests choose its stream."""

    stream = 1

    def get_current_stream(self, device: int) -> int:
        """As torch's current stream."""
        return self.stream


@contextmanager
def written_down(patch: pytest.MonkeyPatch) -> Iterator[tuple[Launched, Driver]]:
    """Yields the list of what kernels are launched with, one tuple each, and the driver. Operators begin without plans."""
    import triton
    from triton.runtime import JITFunction
    from triton.runtime import driver as active

    launched: Launched = []
    kernels: dict[str, Kernel] = {}

    def compiled(src: Any, target: Any = None, options: Any = None, **_: Any) -> Kernel:
        """One kernel for each specialisation: what Triton makes of types, constants and divisibility."""
        name = f"{src.fn.__qualname__} {src.signature} {src.constants} {src.attrs} {options}"
        return kernels.setdefault(name, Kernel(name, launched))

    patch.setattr(triton.compiler, "compile", compiled)
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        for function in vars(importlib.import_module(f"{triton_kernels.__name__}.{module.name}")).values():
            if isinstance(function, JITFunction):
                patch.setattr(function, "device_caches", defaultdict(function.create_binder))
    patch.setattr(active, "_active", driver := Driver())
    forget()
    try:
        yield launched, driver
    finally:
        forget()


def forget() -> None:
    """Forget the plans of all operators."""
    for operator in LAUNCHED.values():
        operator.forget()


def normal(launched: Launched, inputs: Sequence[Any], results: Tensor | Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Of each launch grid, kernel and arguments. An address is the tensor that it is in, and the distance from its start.

    Memory that is neither an input nor a result gets numbers in the order in which it appears.
    """
    tensors = [*(x for x in inputs if isinstance(x, Tensor)), *([results] if isinstance(results, Tensor) else results)]
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
    others: dict[int, str] = {}

    def place(address: int) -> tuple[Any, ...]:
        for number, (begin, size) in enumerate(ranges):
            if begin <= address < begin + size:
                return number, address - begin
        return others.setdefault(address, f"other {len(others)}"), address % 16

    found = []
    for arguments in launched:
        head, tail = arguments[:3] + arguments[4:6], arguments[9:]
        numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in tail]
        # Sizes are far smaller than addresses.
        found.append((*head, *(place(x) if isinstance(x, int) and x > 1 << 32 else x for x in numbers)))
    return found


def repeated(launched: Launched) -> bool:
    """Whether these launches did not pass Triton, which hands over tensors."""
    return not any(isinstance(x, Tensor) for arguments in launched for x in arguments)


def calls(size: int, width: int, dtype: torch.dtype) -> Iterator[tuple[launch.Operator, list[Any]]]:
    """A call of each operator, on tensors with this many positions and channels."""
    own = {name.removeprefix("evodsp::"): operator for name, operator in LAUNCHED.items()}

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.ones(shape, dtype=of)

    x, weight, fp32 = draw(1, 3, size, width), draw(width, of=torch.float32), torch.float32
    statistics = draw(1, 3, size, of=fp32)
    yield own["layer_norm"], [x.transpose(1, 2), weight, weight, 1e-5]
    yield own["layer_norm_backward"], [x, x, weight, statistics, statistics]
    yield own["layer_norm_again"], [x, x, weight, weight]
    yield own["gate"], [x, x]
    yield own["gate_backward"], [x, x, x]
    numbers = [torch.zeros(1, dtype=torch.int64), 0.15, 0, size, 3, 2 * size, 1]
    yield own["dropout_add"], [x, x, *numbers]
    yield own["dropout_add_backward"], [x, *numbers, dtype]
    yield own["dropout_mask"], [torch.zeros(1, dtype=torch.int64), size * width, 0.15]
    yield from _triangle_calls(own, draw, size, 16 * launch.tiles(width, 16))
    operands = draw(1, 3, size, 4 * width)
    yield own["gated_operands"], [operands, draw(1, 3, size)]
    yield own["gated_operands_backward"], [draw(2, 1, width, 3, size), operands, draw(1, 3, size), fp32]
    yield own["hidden_backward"], [draw(size, width), draw(width, 4), draw(size, 4), dtype]
    products, counts = draw(size, 4, size, 4), draw(size, size, 1, of=fp32)
    yield own["outer_projection"], [products, draw(width, 16), draw(width), counts]
    yield own["outer_projection_backward"], [draw(size, size, width), products, draw(width, 16), None, fp32]
    q, key_value = draw(1, size, 2, width), draw(1, 3, size, 2, width)
    sums = draw(1, size, 2, width + 2, of=fp32)
    yield own["global_attention"], [q, key_value, draw(1, 3, size)]
    yield own["global_attention_backward"], [sums, q, key_value, draw(1, 3, size), sums]
    projected, keys = draw(1, 3, size, 4, 2, width), draw(1, 3, size)
    queries = size // 2
    for first, bias in ((0, None), (queries, draw(1, 2, queries, size))):
        yield own["attention"], [projected, keys, bias, first]
        count = size if bias is None else queries
        out, statistics = draw(1, 3, count, 2, width), draw(1, 3, 2, count, of=fp32)
        more = [projected, keys, bias, first, out, statistics, statistics, bias is not None]
        yield own["attention_backward"], [out, *more]


def _triangle_calls(
    own: dict[str, launch.Operator], draw: Callable[..., Tensor], size: int, width: int
) -> Iterator[tuple[launch.Operator, list[Any]]]:
    x, vector = draw(1, 3, size, width), draw(width, of=torch.float32)
    planes, layer, bias = draw(1, width, 3, size), draw(width, width), draw(width)
    pair = [x, draw(1, 3, size), vector, vector, draw(4 * width, width), draw(4 * width)]
    after = [x, planes, vector, vector, layer, bias, vector, vector, layer, bias]
    yield own["triangle_operands"], pair
    yield own["triangle_operands_backward"], [draw(2, 1, width, 3, size), *pair, layer, x, x]
    yield own["triangle_gate_weight_backward"], [x, vector, vector, x]
    for kept in (draw(1, size * width, of=torch.bool), None):
        yield own["triangle_output"], [*after, kept, 1, 1.25]
        yield own["triangle_output_backward"], [x, *after, kept, 1, 1.25]


Log = tuple[Launched, Driver]
NORM = layer_norm.OPERATORS[0]


@pytest.fixture
def log(triton_installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """What kernels are launched with, and the driver."""
    with written_down(monkeypatch) as found:
        yield found


def ordinary(operator: Operator, arguments: list[Any], launched: Launched) -> list[tuple[Any, ...]]:
    """What is launched if the body runs and Triton chooses the kernels."""
    launched.clear()
    results = operator.body(run, *arguments)
    return normal(launched, arguments, results)


def called(operator: Operator, arguments: list[Any], launched: Launched) -> list[tuple[Any, ...]]:
    """What is launched if the operator is called."""
    launched.clear()
    results = operator(*arguments)
    return normal(launched, arguments, results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_plans_launch_what_triton_would(log: Log, order: tuple[int, int], dtype: torch.dtype) -> None:
    """Catches a kernel for aligned addresses that gets others, sizes of another call, and addresses of another tensor."""
    launched, _ = log
    kernels = set()
    for _ in range(3):  # Triton's launch, the one that is written down, one that is repeated
        for elements in order:
            for size, width in ((16, 16), (14, 6), (32, 16)):
                for operator, arguments in calls(size, width, dtype):
                    given = shifted(arguments, elements)
                    expected = ordinary(operator, given, launched)
                    assert called(operator, given, launched) == expected, (operator.name, elements, size, width)
                    kernels |= {(operator.name, elements, grid[3]) for grid in expected}
    assert repeated(launched)
    names = {name for name, _, _ in kernels}
    for name in names:  # the two kinds of addresses do need kernels of their own
        assert {k for n, e, k in kernels if (n, e) == (name, 0)} != {k for n, e, k in kernels if (n, e) == (name, 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_kernels_hand_on_is_in_fp32(dtype: torch.dtype) -> None:
    """Catches sums of programs and statistics of rows that are rounded to half precision before they are used."""
    inner = {"sums", "mean", "inverse", "largest", "centre", "weight_sums", "bias_sums", "norm_sums"}
    found = {
        (made.kernel, name): made.arguments[name].dtype
        for operator, arguments in calls(5, 6, dtype)
        for made in operator.launches(*arguments)
        for name in inner & set(made.writes)
    }
    assert {name for _, name in found} == inner
    assert set(found.values()) == {torch.float32}, found


def test_some_tensors_are_aligned(log: Log) -> None:
    """Catches a plan that looks at one address only."""
    launched, _ = log
    arguments = next(a for operator, a in calls(16, 16, torch.bfloat16) if operator is NORM)
    for _ in range(3):
        for odd in ({0}, {1}, {2}, {0, 2}, set[int]()):
            given = [shifted([x], int(n in odd))[0] for n, x in enumerate(arguments)]
            expected = ordinary(NORM, given, launched)
            assert called(NORM, given, launched) == expected
    assert repeated(launched)


def test_equal_numbers_of_different_kinds(log: Log) -> None:
    """Catches 1, 1.0 and True that get each other's kernels, and a stride of 1 that gets another's."""
    launched, _ = log
    x, weight = torch.ones(1, 1, 4, 8), torch.ones(8)
    for _ in range(3):
        for eps in (1.0, 0.0, 2.0):
            for y in (x, torch.ones(1, 1, 4, 16)[..., ::2], x.expand(1, 5, 4, 8), torch.ones(1, 1, 4, 1)):
                given = [y, weight, weight, eps]
                expected = ordinary(NORM, given, launched)
                assert called(NORM, given, launched) == expected


def test_the_current_stream(log: Log) -> None:
    """Catches the stream of an earlier call."""
    launched, driver = log
    operator, arguments = next(calls(16, 16, torch.bfloat16))
    for driver.stream in range(5, 10):
        called(operator, arguments, launched)
        assert [grid[3] for grid in launched] == [driver.stream]
    assert repeated(launched)


def test_hooks_see_launches(log: Log) -> None:
    """Catches a profiler's hooks that are not called, and plans that stay slow when hooks are gone."""
    from triton import knobs

    launched, _ = log
    operator, arguments = next(calls(16, 16, torch.bfloat16))
    for _ in range(3):
        called(operator, arguments, launched)
    assert repeated(launched)
    assert not operator.refused

    def hook(metadata: Any) -> None:
        """Of a profiler."""

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        called(operator, arguments, launched)
        assert launched[0][6:9] == ("for hooks", knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    called(operator, arguments, launched)
    assert repeated(launched)


@pytest.mark.parametrize("change", ["order", "backend", "launcher", "metadata"])
def test_another_triton(log: Log, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Catches plans that are repeated although Triton launches in a way that is not known."""
    launched, _ = log
    values: dict[str, Any] = {
        "order": property(lambda kernel: lambda *a: kernel._run(*a[:3], *a[4:])),
        "backend": property(lambda kernel: kernel._run),
        "launcher": property(lambda kernel: lambda *a: launched.append(a)),
        "metadata": property(lambda kernel: lambda *a: kernel._run(*a[:5], object(), *a[6:])),
    }
    monkeypatch.setattr(Kernel, "run", values[change])
    if change == "backend":
        hip = SimpleNamespace(target=SimpleNamespace(backend="hip"))
        monkeypatch.setattr(Kernel, "metadata", property(lambda _: hip, lambda *_: None), raising=False)
    operator, arguments = next(calls(16, 16, torch.bfloat16))
    for _ in range(4):
        called(operator, arguments, launched)
        assert len(launched) == 1
        assert not repeated(launched)
    assert operator.refused


def test_precision_of_products(log: Log) -> None:
    """Catches products that keep the precision of an earlier call, and torch's old setting, which raises after the new one."""
    launched, _ = log
    operator, arguments = next(x for x in calls(16, 16, torch.float32) if x[0].name == "evodsp::attention")
    found, before = [], torch.backends.cuda.matmul.fp32_precision
    try:
        for torch.backends.cuda.matmul.fp32_precision in ("ieee", "tf32", "ieee"):
            for _ in range(3):
                called(operator, arguments, launched)
            assert repeated(launched)
            found.append([x for x in launched[0] if x in ("tf32", "tf32x3")])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert found == [["tf32x3"], ["tf32"], ["tf32x3"]]


class Names(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_has_to_see_an_operator_does(log: Log) -> None:
    """Catches counters, profilers and subclasses of tensors that a plain call goes around."""
    operator, arguments = next(calls(16, 16, torch.bfloat16))
    for _ in range(3):
        operator(*arguments)
    with Names() as names:
        operator(*arguments)
    assert names.names == ["evodsp::layer_norm"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        operator(*arguments)
    assert "evodsp::layer_norm" in {event.name for event in profiler.events() or ()}

    seen: list[Any] = []

    class Seen(Tensor):
        """A subclass that sees what is called."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    operator(arguments[0].as_subclass(Seen), *arguments[1:])
    assert torch.ops.evodsp.layer_norm.default in seen
    on_meta = operator(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
    assert [x.device.type for x in on_meta] == ["meta"] * 3


def test_gradients_are_those_of_the_library(interpreter: Any) -> None:
    """Catches a plain call that keeps other tensors or differentiates otherwise than torch's dispatcher does."""
    interpreter(_equal_gradients)


def _equal_gradients() -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*s, generator=draw, requires_grad=True) for s in ((2, 3, 5, 8), (8,), (8,)))
    upstream = torch.randn(2, 3, 5, 8, generator=draw)
    found = []
    for seen in (False, True):
        with Names() if seen else torch.enable_grad():
            y = NORM(x, weight, bias, 1e-5)[0]
            found.append((y, *torch.autograd.grad(y, (x, weight, bias), upstream)))
            again = NORM(x.detach(), weight, bias, 1e-5)[0]
            (of_weight,) = torch.autograd.grad(again, weight, upstream)
            assert torch.equal(of_weight, found[-1][2])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    y = NORM(x, weight, bias, 1e-5)[0]
    (once,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="autograd"):
        torch.autograd.grad(once.sum(), x)


def _fill(launch: Launch) -> None:
    launch.arguments["out"].fill_(launch.constants["value"])


def _grid(out: Tensor, value: float) -> Launch:
    return Launch("none.none", 1, {"out": out}, {"value": value}, writes=("out",))


def _parts(launch: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results: half of what is allocated, zeros with one row filled, a whole in another shape."""
    half, zeros, whole = x.new_empty(2, *x.shape), torch.zeros_like(x), x.new_empty(1, *x.shape)
    for out, value in ((half, 1.0), (zeros[1], 2.0), (whole, 3.0)):
        launch(_grid(out, value))
    return half[1], zeros, whole[0]


def test_results_of_a_plan() -> None:
    """Catches results that are other views than the body's, and zeros that are left uninitialised. Needs no Triton."""
    x = torch.ones(3, 4).t()
    plan = plan_of(_parts, [x], _fill)
    assert plan is not None
    expected = _parts(_fill, x)
    for _ in range(3):
        found = plan([x])
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert torch.equal(a, b)
            a.fill_(7.0)  # what is freed and allocated again is not zero


def _only(launch: Any, x: Tensor) -> Tensor:
    """The result: all of what is allocated, in another shape."""
    whole = x.new_empty(1, *x.shape)
    launch(_grid(whole, 3.0))
    return whole[0]


def test_a_result_that_is_all_of_its_memory_is_allocated_in_its_shape() -> None:
    """Catches a view that each call of a short kernel makes for nothing. Needs no Triton."""
    x = torch.ones(3, 4)
    plan = plan_of(_only, [x], _fill)
    assert plan is not None
    for found in (plan([x]), plan([x])):
        assert found.shape == x.shape
        assert found._base is None


KEPT: Tensor = torch.empty(2, 3, device="meta")
BODIES: dict[str, Any] = {
    "arithmetic": lambda launch, x: x + 1,
    "a copy": lambda launch, x: launch(_grid(out := x.t().contiguous(), 1.0)) or out,
    "in place": lambda launch, x: torch.empty_like(x).fill_(1.0),
    "its input": lambda launch, x: launch(_grid(x, 1.0)) or x,
    "the same twice": lambda launch, x: (out := torch.empty_like(x), out.view(-1)),
    "another dtype": lambda launch, x: launch(_grid(torch.empty_like(x).view(torch.int32), 1)) or torch.empty_like(x),
    "memory of its own": lambda launch, x: launch(_grid(KEPT, 1.0)) or torch.empty_like(x),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_without_a_plan(body: Any) -> None:
    """Catches plans that leave out what a body does beside launching. Needs no Triton."""
    assert plan_of(body, [torch.ones(2, 3)], _fill) is None


def test_several_devices_have_no_plan() -> None:
    """Catches an address of the host that is given to a GPU. Needs no Triton."""
    assert plan_of(_parts, [torch.ones(2, 3), torch.ones(1, device="meta")], _fill) is None


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.zeros(4, 8), 128),
        (torch.zeros(4, 1).expand(4, 8), 16),
        (torch.zeros(1).expand(3, 5), 4),
        (torch.zeros(4, 8)[:, ::2], 64),
        (torch.zeros(1, 4).expand(0, 4), 0),
        (torch.zeros(4, 8, dtype=torch.bfloat16).mT, 64),
    ],
)
def test_bytes_that_a_kernel_moves(x: Tensor, expected: int) -> None:
    """Catches an expanded axis that counts in full, although its elements are one, and an empty one that counts as one."""
    assert moved(x) == expected
    arguments = {"x": x, "out": torch.zeros(2), "size": 3}
    assert Launch("sums.add", 1, arguments, {}, ("out",)).bytes_moved == expected + 8
