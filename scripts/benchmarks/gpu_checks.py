"""Are the operators right on this GPU? Each one's result and all gradients, on what a block gives it, against the formula in
float64; and the same bits in a second run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch

from evodsp.model.kernels.operators import Kernels, Operator, problem_of

from . import gpu_cases, gpu_operators
from .gpu_rows import HALF, SINGLE, Case, Measured, Setup, operators_of, precision_name, why_absent

LIMITS = {SINGLE: 1e-5, HALF: 2e-2}
"""Largest error of a result or gradient, as a share of its largest number."""
OF_FORMULA = 1.5
"""Where the formula in this precision has a larger error, this many times its error is allowed."""


def checks(setup: Setup) -> Iterator[Case]:
    """Every operator of every backend: the self-check of a run's start, and the error on what blocks give it."""
    dtypes = (HALF, SINGLE)
    for backend in setup.backends:
        if absent := why_absent(backend, setup.device):
            yield Case("all", backend, "", partial(_absent, absent))
    for dtype in dtypes:
        for kind, first, residues in setup.sizes.checks:
            for backend in setup.present:
                if backend in ("reference", "flash_attn"):  # the formulas themselves; a package without float32
                    continue
                for operator, function in operators_of(backend).items():
                    yield Case(
                        f"{kind} {first} x {residues}: {operator}", backend, precision_name(dtype),
                        partial(_error, setup, kind, first, residues, dtype, operator, function),
                    )  # fmt: skip
    for dtype in dtypes:
        for backend in setup.present:
            for operator, function in operators_of(backend).items():
                if backend != "flash_attn" or dtype != SINGLE:
                    yield Case(
                        f"self-check: {operator}", backend, precision_name(dtype),
                        partial(_self_check, operator, function, setup.device, dtype),
                    )  # fmt: skip


def _absent(why: str) -> Iterator[Measured]:
    yield Measured("absent", None, note=why)


def _self_check(operator: str, function: Operator, device: torch.device, dtype: torch.dtype) -> Iterator[Measured]:
    if problem := problem_of(operator, function, device, dtype):
        raise ValueError(f"self-check: {problem}")
    yield Measured("self-check", None, note="ok")


def _error(
    setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype, operator: str, function: Operator
) -> Iterator[Measured]:
    """The largest error in any of the block's calls of an operator, and that of the formula in this precision."""
    formula, worst = operators_of("reference")[operator], ""
    found, peer = 0.0, 0.0
    for call in block_calls(setup, kind, first, residues, dtype):
        if call.operator != operator:
            continue
        own, other = gpu_operators.error(call, function), gpu_operators.error(call, formula)
        if not own.largest <= max(LIMITS[dtype], OF_FORMULA * other.largest):  # NaN is no good either
            worst = f"{call.name}: {own} of the largest number; the formula's {other}"
        if not gpu_operators.same_twice(call, function):
            worst = f"{call.name}: a second run gave other bits"
        found, peer = max(found, own.largest), max(peer, other.largest)
    if found:
        yield Measured("error", found, "", f"the formula in this precision: {peer:.1e}")
    if worst:
        raise ValueError(worst)


@cache
def _calls(
    sizes: gpu_cases.Sizes, kind: str, first: int, residues: int, device: torch.device, dtype: torch.dtype
) -> list[gpu_operators.Call]:
    config = gpu_cases.config_of(sizes)
    return gpu_operators.caught(
        lambda kernels: gpu_cases.block(config, kind, first, residues, device, dtype, kernels), Kernels()
    )


def block_calls(setup: Setup, kind: str, first: int, residues: int, dtype: torch.dtype) -> list[gpu_operators.Call]:
    """The different calls of operators in one block."""
    return _calls(setup.sizes, kind, first, residues, setup.device, dtype)
