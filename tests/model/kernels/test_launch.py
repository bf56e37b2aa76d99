"""How own operators are called: plans are repeated as bodies would launch, and whoever has to see an operator does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.kernels.triton_kernels import layer_norm
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator, moved, plan_of, run
from tests.model.kernels import launch_cases as cases

Log = tuple[cases.Launched, cases.Driver]
NORM = layer_norm.OPERATORS[0]


@pytest.fixture
def log(triton_installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """What kernels are launched with, and the driver."""
    with cases.written_down(monkeypatch) as found:
        yield found


def ordinary(operator: Operator, arguments: list[Any], launched: cases.Launched) -> list[tuple[Any, ...]]:
    """What is launched if the body runs and Triton chooses the kernels."""
    launched.clear()
    results = operator.body(run, *arguments)
    return cases.normal(launched, arguments, results)


def called(operator: Operator, arguments: list[Any], launched: cases.Launched) -> list[tuple[Any, ...]]:
    """What is launched if the operator is called."""
    launched.clear()
    results = operator(*arguments)
    return cases.normal(launched, arguments, results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_plans_launch_what_triton_would(log: Log, order: tuple[int, int], dtype: torch.dtype) -> None:
    """Catches a kernel for aligned addresses that gets others, sizes of another call, and addresses of another tensor."""
    launched, _ = log
    kernels = set()
    for _ in range(3):  # Triton's launch, the one that is written down, one that is repeated
        for elements in order:
            for size, width in ((16, 16), (14, 6), (32, 16)):
                for operator, arguments in cases.calls(size, width, dtype):
                    given = cases.shifted(arguments, elements)
                    expected = ordinary(operator, given, launched)
                    assert called(operator, given, launched) == expected, (operator.name, elements, size, width)
                    kernels |= {(operator.name, elements, grid[3]) for grid in expected}
    assert cases.repeated(launched)
    names = {name for name, _, _ in kernels}
    for name in names:  # the two kinds of addresses do need kernels of their own
        assert {k for n, e, k in kernels if (n, e) == (name, 0)} != {k for n, e, k in kernels if (n, e) == (name, 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_kernels_hand_on_is_in_fp32(dtype: torch.dtype) -> None:
    """Catches sums of programs and statistics of rows that are rounded to half precision before they are used."""
    inner = {"sums", "mean", "inverse", "largest", "centre", "weight_sums", "bias_sums", "norm_sums"}
    found = {
        (made.kernel, name): made.arguments[name].dtype
        for operator, arguments in cases.calls(5, 6, dtype)
        for made in operator.launches(*arguments)
        for name in inner & set(made.writes)
    }
    assert {name for _, name in found} == inner
    assert set(found.values()) == {torch.float32}, found


def test_some_tensors_are_aligned(log: Log) -> None:
    """Catches a plan that looks at one address only."""
    launched, _ = log
    arguments = next(a for operator, a in cases.calls(16, 16, torch.bfloat16) if operator is NORM)
    for _ in range(3):
        for odd in ({0}, {1}, {2}, {0, 2}, set[int]()):
            given = [cases.shifted([x], int(n in odd))[0] for n, x in enumerate(arguments)]
            expected = ordinary(NORM, given, launched)
            assert called(NORM, given, launched) == expected
    assert cases.repeated(launched)


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
    operator, arguments = next(cases.calls(16, 16, torch.bfloat16))
    for driver.stream in range(5, 10):
        called(operator, arguments, launched)
        assert [grid[3] for grid in launched] == [driver.stream]
    assert cases.repeated(launched)


def test_hooks_see_launches(log: Log) -> None:
    """Catches a profiler's hooks that are not called, and plans that stay slow when hooks are gone."""
    from triton import knobs

    launched, _ = log
    operator, arguments = next(cases.calls(16, 16, torch.bfloat16))
    for _ in range(3):
        called(operator, arguments, launched)
    assert cases.repeated(launched)

    def hook(metadata: Any) -> None:
        """Of a profiler."""

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        called(operator, arguments, launched)
        assert launched[0][6:9] == ("for hooks", knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    called(operator, arguments, launched)
    assert cases.repeated(launched)


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
    monkeypatch.setattr(cases.Kernel, "run", values[change])
    if change == "backend":
        monkeypatch.setattr(cases.Kernel, "metadata", property(lambda _: _of("hip"), lambda *_: None), raising=False)
    operator, arguments = next(cases.calls(16, 16, torch.bfloat16))
    for _ in range(4):
        called(operator, arguments, launched)
        assert len(launched) == 1
        assert not cases.repeated(launched)
    assert operator.refused


def _of(backend: str) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(target=SimpleNamespace(backend=backend))


def test_precision_of_products(log: Log) -> None:
    """Catches products that keep the precision of an earlier call, and torch's old setting, which raises after the new one."""
    launched, _ = log
    operator, arguments = next(x for x in cases.calls(16, 16, torch.float32) if x[0].name == "evodsp::attention")
    found, before = [], torch.backends.cuda.matmul.fp32_precision
    try:
        for torch.backends.cuda.matmul.fp32_precision in ("ieee", "tf32", "ieee"):
            for _ in range(3):
                called(operator, arguments, launched)
            assert cases.repeated(launched)
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
    operator, arguments = next(cases.calls(16, 16, torch.bfloat16))
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
