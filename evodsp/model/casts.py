"""Casts of parameters to half precision: all of them at once, once a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from evodsp.model.precision import activation_dtype
from evodsp.parallel.dtensor import is_dtensor

# In elements: matrices that start at a multiple of this are multiplied by vectorised kernels.
_ALIGNMENT = 32


class CastParameters:
    """Lets the modules of a model compute with copies of their parameters in half precision, all made by one cast.

    Autocast alone casts a parameter wherever it is used, and again where activations are recomputed, and each cast has its
    transpose in the backward pass: 150 launches for an Evoformer block. Here the parameters are concatenated and cast, and so
    are the gradients of all copies in the backward pass. The parameters themselves, which the optimizer, the moving average and
    checkpoints see, stay as they are and get their gradients in their own precision.

    From `make` to `drop` an attribute of the same name hides each parameter, so that `module.weight` is the copy. Recomputation
    reads it too; therefore `drop` comes after the backward pass. Used as a context where there is none.

    Not cast: modules with `computes_in_float32`, and sharded parameters, which FSDP2 casts when it gathers them.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(module, name) for module in _half_precision_modules(model) for name in module._parameters]
        places = [(module, name) for module, name in places if module._parameters[name] is not None]
        # Parameters of odd sizes last, so that those before them are aligned.
        self._places = sorted(places, key=lambda place: _parameter(*place).numel() % _ALIGNMENT != 0)

    def make(self) -> None:
        """Make the copies from the parameters as they are now, in autocast's precision. Without autocast, make none."""
        self.drop()
        parameters = [_parameter(*place) for place in self._places]
        dtype = activation_dtype(parameters[0])
        if dtype == parameters[0].dtype or is_dtensor(parameters[0]):
            return
        flat = torch.cat([p.reshape(-1) for p in parameters]).to(dtype)
        copies = flat.split([p.numel() for p in parameters])
        for (module, name), copy, parameter in zip(self._places, copies, parameters, strict=True):
            module.__dict__[name] = copy.view_as(parameter)

    def drop(self) -> None:
        """Let the modules use their parameters again."""
        for module, name in self._places:
            module.__dict__.pop(name, None)

    def __enter__(self) -> None:
        self.make()

    def __exit__(self, *_: object) -> None:
        self.drop()


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
