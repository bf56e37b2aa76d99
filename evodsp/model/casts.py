"""Casts all parameters to half precision at once, once a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evodsp.model.precision import activation_dtype
from evodsp.parallel.dtensor import is_dtensor

# Alignment of the copies in elements: 16 bytes, which vectorised kernels need, are 8 elements.
_ALIGNMENT = 32


class CastParameters:
    """Lets the modules of a model compute with copies of their parameters in half precision, all made by one cast.

    Autocast alone casts a parameter wherever it is used, and again where activations are recomputed, and each cast has its
    transpose in the backward pass: 150 launches for an Evoformer block. Here all parameters are cast together, and so
    are the gradients of all copies in the backward pass. The parameters themselves, which the optimizer, the moving average and
    checkpoints see, stay as they are and get their gradients in their own precision.

    From `make` to `drop` an attribute of the same name hides each parameter, so that `module.weight` is the copy.
    Recomputation reads the copy too, so call `drop` after the backward pass. Without a backward pass, use the object as a
    context.

    The copies are in one buffer, and each `make` writes them to the same addresses, which captured graphs
    (`evodsp.model.graphs`) read. Only the copies are there, so the parameters may be moved, loaded or sharded: the buffer is
    made anew if their device, precision or sizes have changed. Between two calls of `make` there must be one backward pass at
    most; autograd refuses a later one, because the copies have been overwritten.

    Not cast: modules with `computes_in_float32`, and sharded parameters, which FSDP2 casts when it gathers them.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(module, name) for module in _half_precision_modules(model) for name in module._parameters]
        places = [(module, name) for module, name in places if module._parameters[name] is not None]
        # Parameters of odd sizes come last: gradients are joined without gaps, and those of the other parameters stay
        # aligned.
        self._places = sorted(places, key=lambda place: _parameter(*place).numel() % _ALIGNMENT != 0)
        self._copies: list[Tensor] = []
        """Tensors that receive the copies: views of one buffer."""

    def make(self) -> None:
        """Make the copies from the parameters as they are now, in autocast's precision. Without autocast, make none."""
        self.drop()
        parameters = [_parameter(*place) for place in self._places]
        dtype = activation_dtype(parameters[0])
        if dtype == parameters[0].dtype or is_dtensor(parameters[0]):
            return
        if not _fit(self._copies, parameters, dtype):
            self._copies = _room(parameters, dtype)
        copies = _Cast.apply(self._copies, *parameters)
        for (module, name), copy in zip(self._places, copies, strict=True):
            module.__dict__[name] = copy

    def drop(self) -> None:
        """Let the modules use their parameters again."""
        for module, name in self._places:
            module.__dict__.pop(name, None)

    def __enter__(self) -> None:
        self.make()

    def __exit__(self, *_: object) -> None:
        self.drop()


class _Cast(torch.autograd.Function):
    """Writes each parameter to its copy. The gradients of all copies are cast together, to the parameters' precision."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.sizes = parameters[0].dtype, [parameter.numel() for parameter in parameters]
        torch._foreach_copy_(copies, parameters)
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(ctx.dtype)
        parts = flat.split(ctx.sizes)
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


def _room(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """An aligned tensor in `dtype` for each parameter, all in one buffer."""
    begins, end = [], 0
    for parameter in parameters:
        begins.append(end)
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    with torch.inference_mode(False):  # the first step may be one of a validation
        buffer = torch.zeros(end, dtype=dtype, device=parameters[0].device)
        return [
            buffer[begin : begin + parameter.numel()].view(parameter.shape)
            for begin, parameter in zip(begins, parameters, strict=True)
        ]


def _fit(copies: Sequence[Tensor], parameters: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether `copies` can hold the parameters in `dtype`."""
    return (
        len(copies) == len(parameters)
        and (copies[0].dtype, copies[0].device) == (dtype, parameters[0].device)
        and all(copy.shape == parameter.shape for copy, parameter in zip(copies, parameters, strict=True))
    )


def _parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter itself, also while a copy hides it."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _half_precision_modules(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and those below it, without those that compute in float32."""
    if not getattr(module, "computes_in_float32", False):
        yield module
        for child in module.children():
            yield from _half_precision_modules(child)
