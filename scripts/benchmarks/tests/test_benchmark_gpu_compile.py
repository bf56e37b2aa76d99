"""`scripts.benchmarks.gpu_compile` on a CPU, where nothing is compiled: that each task runs one operator of a backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from evodsp.model.kernels import chunked
from evodsp.model.kernels.operators import OPERATORS
from scripts.benchmarks import gpu_cases, gpu_compile
from scripts.benchmarks.gpu_compile import Task

CPU = torch.device("cpu")


def test_every_block_and_precision_has_its_tasks() -> None:
    """Catches sizes of the GPU programs whose kernels are left to be compiled one after another."""
    found = gpu_compile.tasks(gpu_cases.FULL, OPERATORS)
    assert len(set(found)) == len(found)
    sizes = gpu_cases.FULL
    for block in (*sizes.blocks, *sizes.operators, *sizes.checks, None):
        for operator in OPERATORS:
            assert Task(operator, torch.bfloat16, block) in found
    for block in (sizes.blocks[0], *sizes.checks, None):
        assert Task(next(iter(OPERATORS)), torch.float32, block) in found
    assert found[0].dtype == torch.bfloat16


def test_a_task_runs_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a task that runs the plain implementation, so that nothing would be compiled, or that ends all others."""
    tiny = gpu_cases.TINY
    calls = []

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        raise RuntimeError("no such kernel\nmore of it")

    task = Task("transition", torch.float32, tiny.blocks[0])
    assert gpu_compile.compile_for(task, CPU, tiny, 1.0) == ""
    monkeypatch.setattr(chunked, "transition", counting)
    for block in (tiny.blocks[0], None):
        problem = gpu_compile.compile_for(dataclasses.replace(task, block=block), CPU, tiny, 1.0)
        assert problem == "RuntimeError: no such kernel"
    assert len(calls) == 2
