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
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

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
