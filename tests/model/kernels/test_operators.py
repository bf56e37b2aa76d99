"""Which backend is chosen, and what happens to one that is wrong."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.config import KernelsConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import BACKENDS, Backend, chunked, operators, reference
from evodsp.model.kernels.operators import OPERATORS, Kernels, choose, problem_of, summary
from evodsp.model.primitives import Computed, use_kernels
from tests.builders.small_model import config

CPU = torch.device("cpu")


def chosen(settings: KernelsConfig, dtype: torch.dtype = torch.float32) -> tuple[Kernels, dict[str, str], list[str]]:
    """The functions, the backends by operator, and all problems."""
    kernels, choices = choose(settings, CPU, dtype)
    return kernels, {c.operator: c.backend for c in choices}, [p for c in choices for p in c.problems]


def defined_in(module: str) -> set[str]:
    """Names of a module that may need a package that is not installed."""
    tree = ast.parse(Path(*module.split(".")).with_suffix(".py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}


def test_an_operator_is_known_everywhere() -> None:
    """Catches an operator without a setting, and a row of the documentation that is missing or names other operators."""
    assert [field.name for field in dataclasses.fields(KernelsConfig)] == ["backend", *OPERATORS]
    known = {
        name: {one for one in OPERATORS if one in defined_in(backend.module)} for name, backend in BACKENDS.items()
    }
    rows = re.findall(r"^\| `(\w+)` \| (all|`[^|]*`) \|", Path("docs/training.md").read_text(), re.MULTILINE)
    documented = {name: set(OPERATORS) if cell == "all" else set(re.findall(r"\w+", cell)) for name, cell in rows}
    assert {name: names for name, names in documented.items() if name in BACKENDS} == known


NEED_A_GPU = {name for name, backend in BACKENDS.items() if backend.package}
"""Other tests compare these: in Triton's interpreter, or with their packages imitated."""


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in NEED_A_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_backend_of_a_cpu_is_the_formula(name: str, dtype: torch.dtype) -> None:
    """Catches an operator of any backend, also of one that no other test knows, that computes something else."""
    module = importlib.import_module(BACKENDS[name].module)
    found = {one: problem_of(one, getattr(module, one), CPU, dtype) for one in OPERATORS if hasattr(module, one)}
    assert found
    assert not {one: problem for one, problem in found.items() if problem}


def test_an_operator_that_does_not_exist() -> None:
    """Catches a name that is mistyped and without effect."""
    with pytest.raises(TypeError, match="no operator lienar"):
        Kernels(lienar=reference.linear)


@pytest.mark.parametrize("operator", OPERATORS)
def test_examples_are_on_the_device(operator: str) -> None:
    """Catches an example that stays on the CPU: on a GPU the self-check would refuse a right kernel, and a slower one run."""
    inputs = OPERATORS[operator].inputs(torch.device("meta"), torch.float32)
    assert {x.device.type for x in inputs} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_auto_on_a_cpu(dtype: torch.dtype) -> None:
    """Catches a self-check that rejects right results in some precision."""
    kernels, names, problems = chosen(KernelsConfig(), dtype)
    assert set(names.values()) == {"chunked"}
    assert problems == []
    assert kernels == Kernels()


def test_backends_by_name() -> None:
    """Catches a setting of one operator that is ignored, or that changes others."""
    kernels, names, problems = chosen(KernelsConfig(backend="reference", outer_product="chunked", attention="sdpa"))
    assert names == dict.fromkeys(OPERATORS, "reference") | {"outer_product": "chunked", "attention": "sdpa"}
    assert problems == []
    assert kernels.biased_attention is reference.biased_attention


def test_a_backend_that_does_not_exist() -> None:
    """Catches a misspelt name that is taken for auto."""
    message = "kernels.attention is 'chunkd', but must be one of auto, .*chunked.* Did you mean 'chunked'?"
    with pytest.raises(UserError, match=message):
        choose(KernelsConfig(attention="chunkd"), CPU, torch.float32)


def wrong_sign(x: Tensor, *parameters: Tensor) -> Tensor:
    return reference.transition(-x, *parameters)


def wrong_gradient(x: Tensor, *parameters: Tensor) -> Tensor:
    return reference.transition(x, *parameters) + (x - x.detach()).sum()


def raises(x: Tensor, *parameters: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available\nsecond line")


PROBLEMS: dict[Any, str] = {
    wrong_sign: "new: the result differs by ",
    wrong_gradient: "new: the gradient of argument 1 differs by ",
    raises: "new: RuntimeError: no kernel image is available",
}


@pytest.mark.parametrize("function", PROBLEMS)
def test_a_backend_that_is_wrong_is_not_used(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a self-check that looks at results only, or lets an exception end the run."""
    module = ModuleType("evodsp_test_backend")
    module.transition = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    everything = {"new": Backend(module.__name__, ("cpu",)), **BACKENDS}
    monkeypatch.setattr(operators, "BACKENDS", everything)
    kernels, names, problems = chosen(KernelsConfig())
    assert kernels.transition is chunked.transition
    assert names["transition"] == "chunked"
    assert sum(problem.startswith(PROBLEMS[function]) for problem in problems) == 1


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError that ends the run."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    _, names, problems = chosen(KernelsConfig(attention="flash_attn"))
    assert names["attention"] == "chunked"
    assert len(problems) == 1
    assert "flash_attn" in problems[0]


def test_a_package_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a missing library of a package that ends the run, and on several ranks leaves the others waiting."""

    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("evodsp.model.kernels.import_module", broken)
    choices = choose(KernelsConfig(attention="flash_attn", backend="sdpa"), CPU, torch.float32)[1]
    assert {choice.backend for choice in choices} == {"chunked"}
    assert choices[0].problems == ("flash_attn: OSError: libcudart.so.12: cannot open shared object file",)


def test_a_backend_that_fails_on_another_rank_is_not_used_here() -> None:
    """Catches ranks of a run that compute by different backends, and a warning that does not name the rank."""

    def with_a_bad_rank(problem: str | None) -> list[str | None]:
        return [problem, problem or "no compiler"]

    choices = choose(KernelsConfig(attention="sdpa"), CPU, torch.float32, on_all_ranks=with_a_bad_rank)[1]
    attention = next(choice for choice in choices if choice.operator == "attention")
    assert attention.backend == "chunked"
    assert attention.problems == ("sdpa: rank 1: no compiler",)


def test_the_chosen_operators_reach_every_module() -> None:
    """Catches a module that keeps calling the default."""
    model = AlphaFold(config())
    kernels, _, _ = chosen(KernelsConfig(backend="reference"))
    use_kernels(model, kernels)
    computed = [module for module in model.modules() if isinstance(module, Computed)]
    assert len(computed) > 10
    assert all(module.kernels is kernels for module in computed)


def test_a_backend_is_asked_for_the_operators_that_it_has() -> None:
    """Catches a warning for each operator that `backend` lacks, and an operator of another backend that is used unnamed."""
    _, names, problems = chosen(KernelsConfig(backend="sdpa"))
    assert names.pop("attention") == "sdpa"
    assert set(names.values()) == {"chunked"}
    assert problems == []
    _, names, problems = chosen(KernelsConfig(transition="sdpa"))
    assert names["transition"] == "chunked"
    assert problems == ["sdpa: it has no transition"]


def test_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a backend that is replaced silently, the same warning once for each operator, and a list of all operators."""
    usual = summary(choose(KernelsConfig(), CPU, torch.float32)[1], CPU)
    assert usual == ["kernels on cpu: chunked (the first that works on cpu)"]
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    lines = summary(choose(KernelsConfig(backend="flash_attn", transition="reference"), CPU, torch.float32)[1], CPU)
    assert len(lines) == 2
    assert lines[0].startswith("kernels on cpu: chunked (instead of flash_attn) for attention, ")
    assert lines[0].endswith("; reference (asked for) for transition")
    assert lines[1].startswith("warning: kernels: flash_attn: ")
    others = ", ".join(name for name in OPERATORS if name != "transition")
    assert lines[1].endswith(f"; chunked is used instead for {others}")
