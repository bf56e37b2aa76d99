"""Runs functions in a process where Triton interprets kernels on the CPU, and compares operators with formulas there.

Triton decides when it is imported whether it interprets, so this cannot be done in the process of the tests.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from tests.ranks import end_with_parent

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python knows from 3.13 on
# The interpreter truncates where it rounds to bf16, and multiplies matrices of bf16 wrongly: only other kernels are tested so.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@contextmanager
def interpreting_process() -> Iterator[Callable[..., Any]]:
    """Yields `call(function, *arguments)`, which runs a module-level function in the interpreting process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _interpret() -> None:
    end_with_parent()
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def check(
    operator: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: dict[str, Tensor | None],
    fixed: dict[str, Any],
    layout: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    peer: Callable[..., Tensor] | None = None,
    least: float = 0.0,
) -> Tensor:
    """Compares the operator's result and the gradients of all `inputs` with the formula's in fp64; returns the result.

    `fixed`: arguments without a gradient. `layout(name, x)`: the same numbers in another layout. `peer`: of torch,
    the same operator, whose error is allowed where it is above the tolerance: some inputs leave fewer digits. `least`: an error
    that is allowed whatever the tolerance.
    """
    given = {n: None if x is None else layout(n, x).detach().requires_grad_() for n, x in inputs.items()}
    exact = {n: None if x is None else x.double().requires_grad_() for n, x in inputs.items()}
    result, expected = operator(**given, **fixed), formula(**exact, **fixed)
    upstream = layout("grad", torch.randn(expected.shape, generator=torch.Generator().manual_seed(99)).to(result.dtype))
    names = [n for n, x in given.items() if x is not None]
    got = torch.autograd.grad(result, [given[n] for n in names], upstream)
    wanted = torch.autograd.grad(expected, [exact[n] for n in names], upstream.double())
    allowed = [max(TOLERANCE[result.dtype], least)] * (1 + len(names))
    if peer is not None:
        own = peer(**given, **fixed)
        found = [own, *torch.autograd.grad(own, [given[n] for n in names], upstream)]
        allowed = [max(limit, _error(a, b)) for limit, a, b in zip(allowed, found, [expected, *wanted], strict=True)]
    for name, a, b, tolerance in zip(["result", *names], [result, *got], [expected, *wanted], allowed, strict=True):
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        error = _error(a, b)
        assert error <= tolerance, f"{name}: error {error:.1e} of the largest element, {tolerance:.0e} is allowed"
    return result.detach()


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    if found.numel() == 0:
        return 0.0
    expected = expected.detach()
    return float((found.detach().double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def random(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of a shape that draws standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def far_apart(x: Tensor, axis: int, stride: int) -> Tensor:
    """The numbers of x, `stride` elements apart along `axis`. The memory between them is never touched."""
    strides = list(x.movedim(axis, 0)[0].contiguous().stride())
    strides.insert(axis, stride)
    elements = (x.shape[axis] - 1) * stride + x.movedim(axis, 0)[0].numel()
    pages = mmap.mmap(-1, elements * x.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)
