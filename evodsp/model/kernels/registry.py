"""Chooses an implementation of each operator by the device, the installed packages, and a comparison with the formulas.

A backend is a module of this folder, with functions named after the operators that they implement. A new backend is one file,
and one line of the table in `backends`.

`choose` runs once, when a run starts. The model calls the functions that it returns, and knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evodsp.config import KernelsConfig
from evodsp.model.kernels import chunked
from evodsp.model.kernels.backends import BACKENDS, Backend, check_names
from evodsp.model.kernels.operators import OPERATORS, Kernels, Operator
from evodsp.model.kernels.self_check import problem_of

OnAllRanks = Callable[[str | None], list[str | None]]


@dataclass(frozen=True)
class Choice:
    """The implementation chosen for one operator."""

    operator: str
    backend: str
    reason: str
    """The reason for the choice, for the log."""
    problems: tuple[str, ...] = ()
    """Problems of the backends that were tried before."""


def summary(choices: Sequence[Choice], device: torch.device) -> list[str]:
    """Lines for the log: the backend of each operator with the reason, and a warning for each problem with another backend."""
    used: dict[tuple[str, str], list[str]] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        used.setdefault((choice.backend, choice.reason), []).append(choice.operator)
        for problem in choice.problems:
            problems.setdefault((problem, choice.backend), []).append(choice.operator)
    parts = [f"{backend} ({reason}) for {', '.join(names)}" for (backend, reason), names in used.items()]
    warnings = [
        f"warning: kernels: {problem}; {backend} is used instead for {', '.join(names)}"
        for (problem, backend), names in problems.items()
    ]
    return [f"kernels on {device.type}: {'; '.join(parts)}", *warnings]


def choose(
    config: KernelsConfig,
    device: torch.device,
    dtype: torch.dtype,
    gradients: bool = True,
    on_all_ranks: OnAllRanks = lambda value: [value],
) -> tuple[Kernels, list[Choice]]:
    """The operators of a run on `device` whose activations have this dtype, and the reason for each choice.

    Each candidate is compared with `reference` on the device, at a small size. With `gradients`, for a training run, the
    backward pass is compared too. A candidate that differs or fails is passed over, and `chunked` takes its place.

    `on_all_ranks` gathers a value of every rank, by rank. A candidate that fails on one rank is passed over on all, so that
    all ranks compute alike. All ranks call this together.

    Raises SettingError for a backend that does not exist.
    """
    check_names(config)
    kernels, choices = Kernels(), []
    for operator in OPERATORS:

        def problem(backend: Backend, operator: str = operator) -> str | None:
            problems = on_all_ranks(_problem(operator, backend, device, dtype, gradients))
            if len(set(problems)) == 1:
                return problems[0]
            return next(f"rank {rank}: {p or f'it has no {operator}'}" for rank, p in enumerate(problems) if p != "")

        function, choice = _chosen(operator, config, device, problem)
        kernels = kernels.replaced(**{operator: function})
        choices.append(choice)
    return kernels, choices


def _problem(operator: str, backend: Backend, device: torch.device, dtype: torch.dtype, gradients: bool) -> str | None:
    """The reason why this rank cannot use a backend's operator: empty if it can, None if the backend lacks the operator."""
    try:
        function = getattr(backend.load(), operator, None)
    except Exception as error:  # the package of an extra may be absent, or broken in any way
        reason = (str(error).splitlines() or [""])[0]
        return reason if isinstance(error, ImportError) else f"{type(error).__name__}: {reason}"
    return problem_of(operator, function, device, dtype, gradients) if function else None


def _chosen(
    operator: str, config: KernelsConfig, device: torch.device, problem: Callable[[Backend], str | None]
) -> tuple[Operator, Choice]:
    """The chosen function of one operator, and the reason. `problem`: `_problem` for all ranks."""
    own = getattr(config, operator)
    wanted = own or config.backend
    candidates = [wanted] if wanted != "auto" else [n for n, b in BACKENDS.items() if device.type in b.devices]
    problems: list[str] = []
    for name in candidates:
        found = problem(BACKENDS[name])
        if found == "":
            reason = "asked for" if name == wanted else f"the first that works on {device.type}"
            function = getattr(BACKENDS[name].load(), operator)
            return function, Choice(operator, name, reason, tuple(problems))
        if found or own:
            problems.append(f"{name}: {found or f'it has no {operator}'}")
    return getattr(chunked, operator), Choice(operator, "chunked", f"instead of {wanted}", tuple(problems))
