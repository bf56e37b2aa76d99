"""The precision policy: which numbers are in half precision, which are not, and the functions that enforce it.

With `trainer.precision: bf16-mixed`, torch's autocast is on, parameters stay in float32 for the optimizer, and:

    in bf16                                             because
    m, z, their updates, biases and operands            they are nearly all of the memory and of its traffic
    what ranks send each other                          it is m, z, a bias or an operand (sums over sequences are float32)
    factors of matrix products, parameters too          tensor cores multiply them exactly and sum in float32

    in float32                                          because
    mean and variance in layer norms                    a variance is a difference of large sums
    attention logits, their softmax and its gradient    a logit of 10 would be off by 0.03; the gradient is a small difference
                                                        of large numbers where values or gradients have a common offset
    sums over rows, sequences and chunks                bf16 loses what is 256 times smaller than the sum
    structure module, the head of pLDDT                 bf16 would misplace atoms by 0.1 Å, as in AF2, and would round off what
                                                        tells residues apart
    losses, confidence, metrics                         they are sums and logarithms of many small numbers
    parameters, their gradients, Adam, moving average   an update is far smaller than a weight's rounding in bf16

A GPU's autocast would not do this by itself: it makes layer norms and sums float32, and one float32 factor (a mask) makes a
product float32. Therefore a mask is cast where it meets an activation, a norm returns the precision of its input, and a sum
over many numbers is taken in float32 and rounded once.

Without autocast everything is in the precision of the parameters, float64 in tests.

`HalfCopies` cast all parameters at once, once a step. The precision in which a GPU multiplies float32 matrices is torch's
setting. torch has an old setting (`torch.set_float32_matmul_precision`, `allow_tf32`) and a new one (`fp32_precision` of
each backend). The old one sets the new one too, and raises when it is read after somebody has set the new one. So only the
new one is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evodsp.config import MatmulPrecision
from evodsp.model.adapters import ADAPTERS, adapted_weights, with_adapters
from evodsp.parallel.dtensor import is_dtensor

# Added to a logit, this removes its key from the softmax. If all keys are masked, the weights are uniform, as in AF2.
MASKED = -1e9


def mask_bias(mask: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch L"]:
    """Additive bias of keys: 0 where the mask is 1, -1e9 where it is 0."""
    return (1.0 - mask) * MASKED


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast is off."""
    return torch.autocast(device.type, enabled=False) if _autocast_is_on(device) else nullcontext()


def autocast_of_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which autocast is as it is now. A backward pass has none of its own."""
    if not _autocast_is_on(device):
        return partial(without_autocast, device)
    cached = torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type), cache_enabled=cached)


def activation_dtype(like: Tensor) -> torch.dtype:
    """Precision of m and z in a model with a tensor `like`: autocast's if it is on, otherwise that of `like`."""
    return torch.get_autocast_dtype(like.device.type) if _autocast_is_on(like.device) else like.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Precision of sums of numbers of this dtype: float32 for half precision, otherwise the same dtype."""
    # torch.promote_types(dtype, torch.float32) gives the same, but would go through the dispatcher, 1,755 times a block.
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def wide_product(a: Float[Tensor, "*batch n k"], b: Float[Tensor, "*batch k m"]) -> Float[Tensor, "*batch n m"]:
    """a @ b, summed and returned in float32 at least. `b` has the precision of the factors; `a` may be wider.

    A GPU rounds `a` to the precision of `b`, for its tensor cores; a CPU multiplies in float32. It is not differentiable;
    call it without autocast.
    """
    dtype = wide(b.dtype)
    # Tensors of the meta device take the GPU's branch, because the planner follows a GPU's program with them.
    if b.dtype == dtype or b.device.type not in ("cuda", "meta"):
        return a.to(dtype) @ b.to(dtype)
    batch = a.shape[:-2]
    a, b = a.to(b.dtype).reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    return torch.bmm(a, b, out_dtype=dtype).view(*batch, a.shape[-2], b.shape[-1])


def _autocast_is_on(device: torch.device) -> bool:
    # The meta device has no autocast. torch.amp.is_autocast_available would tell, but torch 2.11 cannot compile it.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


Place = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""

# Alignment of the copies in elements: 16 bytes, which vectorised kernels need, are 8 elements.
_ALIGNMENT = 32


class CastParameters:
    """Lets the modules of a model compute with copies of their parameters in half precision, all made by one cast; and with the
    sums of weights and their adapters (`evodsp.model.adapters`), which are formed there.

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

    Not cast: modules with `computes_in_float32`, and sharded parameters, which FSDP2 casts when it gathers them. Copies of
    frozen parameters have no gradient, so that a backward pass ends where no trained parameter is left.
    """

    def __init__(self, model: nn.Module) -> None:
        places = [(module, name) for module in _half_precision_modules(model) for name in module._parameters]
        places = [place for place in places if place[0]._parameters[place[1]] is not None and place[1] not in ADAPTERS]
        # Parameters of odd sizes come last: gradients are joined without gaps, and those of the other parameters stay
        # aligned.
        self._places = sorted(places, key=lambda place: _parameter(*place).numel() % _ALIGNMENT != 0)
        self._adapted = adapted_weights(model) if any(ADAPTERS[0] in x._parameters for x in model.modules()) else []
        self._copies: dict[torch.dtype, list[Tensor]] = {}
        """Tensors that receive the copies, by their precision: views of one buffer each."""

    def make(self) -> None:
        """Make the copies from the parameters as they are now, in autocast's precision. Without autocast, make those of weights
        with adapters alone."""
        self.drop()
        first = _parameter(*self._places[0])
        dtype = activation_dtype(first)
        if dtype == first.dtype or is_dtensor(first):
            dtype, places = first.dtype, []
        else:
            places = self._places
        sums = dict(zip(self._adapted, with_adapters(self._adapted), strict=True)) if self._adapted else {}
        self._copy(places, dtype, sums)
        if sums:
            self._copy([place for place in self._adapted if place[1] not in place[0].__dict__], first.dtype, sums)

    def _copy(self, places: Sequence[Place], dtype: torch.dtype, sums: Mapping[Place, Tensor]) -> None:
        """Hide the parameters at `places` behind copies, or behind copies of their `sums` with adapters."""
        if not places:
            return
        sources = [sums[place] if place in sums else _parameter(*place) for place in places]
        if not _fit(self._copies.get(dtype, []), sources, dtype):
            self._copies[dtype] = _room(sources, dtype)
        copies = self._copies[dtype]
        trained = [number for number, source in enumerate(sources) if source.requires_grad]
        if len(trained) < len(places):
            frozen = [number for number, source in enumerate(sources) if not source.requires_grad]
            torch._foreach_copy_([copies[number] for number in frozen], [sources[number] for number in frozen])
        for (module, name), copy in zip(places, copies, strict=True):
            module.__dict__[name] = copy
        if trained:
            cast = _Cast.apply([copies[number] for number in trained], *(sources[number] for number in trained))
            for number, copy in zip(trained, cast, strict=True):
                places[number][0].__dict__[places[number][1]] = copy

    def drop(self) -> None:
        """Let the modules use their parameters again."""
        for module, name in (*self._places, *self._adapted):
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


@contextmanager
def float32_matmul(precision: MatmulPrecision) -> Iterator[None]:
    """A context in which products of float32 matrices have this precision. The setting is torch's and holds for the whole
    process.
    """
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, mkldnn.fp32_precision
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(_OLD.get(before, "highest"))
        cuda.fp32_precision, mkldnn.fp32_precision = before


_OLD = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
"""The old setting that gives these values of the new one, for CUDA and for CPUs."""


def is_tf32() -> bool:
    """Whether a GPU rounds the factors of float32 products to TF32."""
    precision: str = torch._C._get_fp32_precision_getter(
        "cuda", "matmul"
    )  # of torch.backends.cuda.matmul, without its detour
    return precision == "tf32"
