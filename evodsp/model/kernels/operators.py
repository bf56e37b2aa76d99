"""The operators with several implementations, each declared once in the table `OPERATORS`; and the choice of an implementation
of each by the device, the installed packages, and a comparison with the formulas.

To add an operator, write its formula in `reference`, its entry here, its field of `KernelsConfig` and a function in
`chunked`, which may be the formula itself. A backend is a module of this folder, with functions named after the operators that
they implement. A new backend is one file, and one line of the table in `kernels/__init__.py`.

`choose` runs once, when a run starts. The model calls the functions that it returns, and knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evodsp.config import KernelsConfig
from evodsp.model.kernels import BACKENDS, Backend, check_names, chunked, reference
from evodsp.parallel.exchange import added_softmax_sums

Operator = Callable[..., Any]
"""A function of tensors and settings that returns one tensor or several."""


class ExampleFactory:
    """Makes the random tensors of an example, the same ones each time."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def random(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def mask(self, *shape: int) -> Tensor:
        """A mask of ones with some zeros."""
        return (torch.rand(shape, generator=self._generator) > 0.2).to(self._device, self._dtype)

    def keys(self) -> Tensor:
        """Dropout keys of two random streams. Their words differ."""
        return torch.tensor([0x0123456789ABCDEF, -0x0123456789ABCDEF], device=self._device)


def _plainly(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    return function(*tensors, **settings)


@dataclass(frozen=True)
class Spec:
    """One operator: its formula, and the inputs on which implementations are compared with it."""

    formula: Operator
    examples: Callable[[ExampleFactory], list[Tensor]]
    """Function that makes small inputs: sizes differ and do not divide, some keys are masked, strides are as in the model."""
    mask: int | None = None
    """Index of the input without gradient: a mask, or counts. Integers have none either."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are not tensors."""
    call_with: Callable[[Operator, Sequence[Tensor], Mapping[str, Any]], Any] = _plainly
    """Function that calls an implementation with the tensors of `examples`."""

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The tensors of the example."""
        return self.examples(ExampleFactory(device, dtype))

    def differentiable(self, inputs: Sequence[Tensor]) -> list[int]:
        """Indices of the inputs that get gradients."""
        return [n for n, x in enumerate(inputs) if n != self.mask and x.is_floating_point()]

    def call(self, function: Operator, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results of an implementation for tensors like those of `examples`."""
        result = self.call_with(function, tensors, self.settings)
        return result if isinstance(result, tuple) else (result,)


def _heads(make: ExampleFactory) -> list[Tensor]:
    rows, length, heads, width = 5, 37, 3, 16
    keys = make.mask(2, rows, length)
    keys[0, 0] = 0  # a row without keys
    return [make.random(2, length, rows, 4, heads, width).transpose(1, 2), keys]  # strides as in column attention


def _operands(make: ExampleFactory) -> list[Tensor]:
    norm = [make.random(9), make.random(9)]
    layers = [make.random(12, 9), make.random(12), make.random(12, 9), make.random(12)]
    return [make.random(2, 7, 7, 9), make.mask(2, 7, 7), *norm, *layers]


def _triangles(make: ExampleFactory) -> list[Tensor]:
    """AlphaFold2's width, for which a GPU has fused kernels. Weights are scaled so that gates do not saturate."""
    c = 128
    norms = [[make.random(c), make.random(c)] for _ in range(2)]
    layers = [[make.random(out, c) / 11, make.random(out)] for out in (2 * c, 2 * c, c, c)]
    before, after = layers[:3], layers[3]
    parameters = *norms[0], *(x for layer in before for x in layer), *norms[1], *after
    return [make.random(2, 7, 7, c), make.mask(2, 7, 7), *parameters, make.keys()]


def _products(make: ExampleFactory) -> list[Tensor]:
    """A shard of the pair and of the product, of AlphaFold2's width as above."""
    c = 128
    norms = [[make.random(c), make.random(c)] for _ in range(2)]
    gate, layer = ([make.random(c, c) / 11, make.random(c)] for _ in range(2))
    return [make.random(2, 5, 7, c), make.random(2, 5, 7, c), *norms[0], *gate, *norms[1], *layer, make.keys()]


def _under_dropout(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    *tensors, keys = tensors
    return function(*tensors, drawn=keys, **settings)


def _queries_of_columns(make: ExampleFactory) -> list[Tensor]:
    mask = make.mask(2, 37, 7)
    mask[0, :, 0] = 0  # a column without keys
    return [make.random(2, 7, 5, 8), make.random(2, 37, 7, 2, 8), mask]


def _two_shards(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Call global attention on two shards, one of them small. Their shifts differ, and the result must not depend on them."""
    q, *sharded = tensors
    shards = zip(*(x.split([x.shape[1] - 2, 2], 1) for x in sharded), strict=True)
    sums = added_softmax_sums(torch.stack([function(q, *shard, **settings) for shard in shards]))
    return sums[..., :-1] / sums[..., -1:]


def _three_layers(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    x, weight, bias, w1, w2, b2, w3 = tensors
    return function(x, weight, bias, [w1, w2, w3], [None, b2, None], **settings)


def _two_layers(function: Operator, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> Any:
    x, mask, weight, bias, w1, w2, b2 = tensors
    return function(x, mask, weight, bias, [w1, w2], [None, b2], **settings)


OPERATORS: dict[str, Spec] = {
    "attention": Spec(reference.attention, _heads, mask=1),
    "biased_attention": Spec(
        reference.biased_attention,
        # Not every position has a query.
        lambda make: [*_heads(make), make.random(2, 28, 37, 3).permute(0, 3, 1, 2)],
        mask=1,
        settings={"first": 6},
    ),
    "dropout_add": Spec(
        reference.dropout_add,
        lambda make: [make.random(2, 5, 7, 12), make.random(2, 5, 7, 12), make.keys()],
        settings={"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
    ),
    "gated_linear": Spec(
        reference.gated_linear,
        lambda make: [make.random(2, 1, 7, 9), make.random(2, 5, 7, 9), make.random(6, 9), make.random(6)],
    ),
    "gated_output": Spec(
        reference.gated_output,
        _products,
        settings={"rate": 0.25, "offsets": (2, 0), "whole": (9, 7), "shared_dim": 2},
        call_with=_under_dropout,
    ),
    "gated_projection": Spec(reference.gated_projection, _operands, mask=1),
    "global_attention": Spec(reference.global_attention, _queries_of_columns, mask=2, call_with=_two_shards),
    "layer_norm": Spec(
        reference.layer_norm, lambda make: [make.random(2, 5, 7, 9), make.random(9), make.random(9)]
    ),
    "linear": Spec(reference.linear, lambda make: [make.random(2, 5, 7, 9), make.random(6, 9), make.random(6)]),
    "outer_product": Spec(
        reference.outer_product,
        lambda make: [
            make.random(2, 9, 5, 8), make.random(2, 9, 7, 8), make.random(6, 64), make.random(6),
            make.random(2, 5, 7, 1).abs() + 1,
        ],
        mask=4,
    ),
    "pooled_projections": Spec(
        reference.pooled_projections,
        lambda make: [
            make.random(2, 5, 7, 9), make.mask(2, 5, 7), make.random(9), make.random(9),
            make.random(12, 9), make.random(6, 9), make.random(6),
        ],
        mask=1,
        call_with=_two_layers,
    ),
    "projections": Spec(
        reference.projections,
        lambda make: [
            make.random(2, 5, 7, 9), make.random(9), make.random(9),
            make.random(12, 9), make.random(6, 9), make.random(4), make.random(3, 9),
        ],
        settings={"planes": 1},
        call_with=_three_layers,
    ),
    "transition": Spec(
        reference.transition,
        lambda make: [
            make.random(2, 5, 7, 9), make.random(9), make.random(9),
            make.random(20, 9), make.random(20), make.random(9, 20), make.random(9),
        ],
    ),
    "triangle_multiplication": Spec(
        reference.triangle_multiplication,
        _triangles,
        mask=1,
        settings={"outgoing": True, "rate": 0.25},
        call_with=_under_dropout,
    ),
}  # fmt: skip
"""All operators by name."""


class Kernels:
    """The implementation of each operator, by its name. `chunked` implements the operators that are not given."""

    def __init__(self, **chosen: Operator) -> None:
        if unknown := chosen.keys() - OPERATORS.keys():
            raise TypeError(f"there is no operator {', '.join(sorted(unknown))}; there are {', '.join(OPERATORS)}")
        for name in OPERATORS:
            setattr(self, name, chosen.get(name, getattr(chunked, name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Operator: ...

    @classmethod
    def of(cls, backend: ModuleType) -> Kernels:
        """The operators of a backend. `chunked` implements the operators that it lacks."""
        return cls(**{name: getattr(backend, name) for name in OPERATORS if hasattr(backend, name)})

    def replaced(self, **chosen: Operator) -> Kernels:
        """These operators with some implementations replaced."""
        return Kernels(**{**vars(self), **chosen})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernels) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest allowed difference, as a fraction of the largest number of each result. The limit for fp32 allows for products in
TF32, that for fp64 for rows without keys, whose logits of -1e9 keep few digits."""


def problem_of(
    operator: str, function: Operator, device: torch.device, dtype: torch.dtype, gradients: bool = True
) -> str:
    """The reason why the function cannot be used for the operator on this device; '' if it agrees with the formula.

    `gradients`: whether to compare the backward pass too. Any exception counts as a problem: a kernel that does not compile
    must not end a run that another backend can do. A process compares a function that agrees once, and one that does not
    whenever it is asked, because memory may have been short.
    """
    try:
        _compare(operator, function, device, dtype, gradients)
    except _DiffersError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


class _DiffersError(Exception):
    """The function is not the formula."""


@cache
def _compare(operator: str, function: Operator, device: torch.device, dtype: torch.dtype, gradients: bool) -> None:
    """Raise an exception unless the function agrees with the formula. `cache` forgets calls that raise one."""
    spec = OPERATORS[operator]
    inputs = spec.inputs(device, dtype)
    found = _results(spec, function, inputs, gradients)
    wide = torch.promote_types(dtype, torch.float32)
    exact = [x.to(wide) if x.is_floating_point() else x for x in inputs]
    expected = _results(spec, spec.formula, exact, gradients)
    wanted = spec.differentiable(inputs)
    results = len(expected) - (len(wanted) if gradients else 0)
    names = [f"result {n + 1}" if results > 1 else "the result" for n in range(results)]
    names += [f"the gradient of argument {n + 1}" for n in wanted]
    for name, x, y in zip(names, found, expected, strict=False):  # without gradients only results are compared
        if x.shape != y.shape:
            raise _DiffersError(f"{name} has shape {list(x.shape)} instead of {list(y.shape)}")
        difference = float((x.to(y.dtype) - y).abs().max() / y.abs().max())
        if not difference <= TOLERANCE[dtype]:  # this condition rejects NaN too
            limit = f"{TOLERANCE[dtype]:.0e}"
            raise _DiffersError(f"{name} differs by {difference:.1e} of its largest number, more than {limit}")


def _results(spec: Spec, function: Operator, inputs: list[Tensor], gradients: bool) -> list[Tensor]:
    """The results of the function and, with `gradients`, the gradients of all inputs but the mask."""
    arguments = [x.detach() for x in inputs]
    wanted = [arguments[n].requires_grad_(gradients) for n in spec.differentiable(inputs)]
    outputs = spec.call(function, arguments)
    if not gradients:
        return list(outputs)
    weights = [torch.linspace(-1, 2, x.numel(), device=x.device).to(x.dtype).view(x.shape) for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, wanted, weights)]


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
    places = [f" for {', '.join(names)}" if len(used) > 1 else "" for names in used.values()]
    parts = [f"{backend} ({reason}){place}" for (backend, reason), place in zip(used, places, strict=True)]
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
