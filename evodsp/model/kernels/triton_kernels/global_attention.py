"""Attention of one query per column and head over the sequences of a shard (the core of algorithm 19).

The softmax runs over all sequences, which several ranks may share. So a shard's result is the weighted sum, the sum of its
weights, and the logit to which both are relative; the caller rescales and adds the results of all ranks. Logits are never
stored in memory: the backward pass recomputes them from the inputs and the result, which are kept.

Shape legend: B batch, s sequences of the shard, r columns (residues), H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two, product_precision


def global_attention(
    q: Float[Tensor, "B r H D"],
    key_value: Float[Tensor, "B s r 2 D"],
    keys: Float[Tensor, "B s r"] | Bool[Tensor, "B s r"] | Int[Tensor, "B s r"],
) -> Float32[Tensor, "B r H D2"]:
    """For each column and head: the sums over sequences of w v [D] and of w, with w = 2^(logit - largest); then `largest`.

    logit = log2(e) (q k / sqrt(D) + (keys - 1) * 1e9), so that w is the exponential of the usual logit. `largest` is the
    largest of them, or fp32's smallest number if there are no sequences. One head of keys and values serves all queries. It
    is differentiable once in q and key_value; `largest` counts as a constant, which is right for any quotient of the sums.
    """
    return _forward(q, key_value, keys)


def _schedule(q: Tensor, backward: bool) -> tuple[int, int]:
    """Number of sequences that a program takes at a time, and of its warps: as many as the registers hold.

    Each step of the forward pass ends with a sum over all warps, so larger steps are faster.
    """
    if q.element_size() == 4:
        return 64, 4
    return (256, 8) if q.shape[-1] <= 16 and not backward else (128, 4)


def _arguments(q: Tensor, key_value: Tensor, keys: Tensor, tile: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants of both kernels. Tensor cores need at least 16 heads and channels."""
    _, columns, heads, width = q.shape
    tensors: dict[str, Any] = {}
    k, v = key_value.unbind(-2)
    for name, x in {"q": q, "k": k, "v": v, "keys": keys}.items():
        tensors |= {name: x, f"{name}_strides": x.stride()}
    sizes = {"sequences": k.shape[1], "columns": columns, "heads": heads, "scale": width**-0.5}
    constants = {
        "TILE": tile,
        "HEADS": max(16, next_power_of_two(heads)),
        "WIDTH": width,
        "PADDED": max(16, next_power_of_two(width)),
        "PRECISION": product_precision(),
    }
    return {**tensors, **sizes}, constants


def _forward_body(launch: Launcher, q: Tensor, key_value: Tensor, keys: Tensor) -> Tensor:
    sums = q.new_empty(*q.shape[:3], q.shape[3] + 2, dtype=torch.float32)
    tile, warps = _schedule(q, backward=False)
    arguments, constants = _arguments(q, key_value, keys, tile)
    launch(
        Launch(
            "global_attention.forward",
            q.shape[0] * q.shape[1],
            {**arguments, "sums": sums},
            constants,
            writes=("sums",),
            warps=warps,
        )
    )
    return sums


def _backward_body(
    launch: Launcher, grad_sums: Tensor, q: Tensor, key_value: Tensor, keys: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of q and key_value."""
    grad_q, grad_key_value = torch.empty_like(q), torch.empty_like(key_value)
    tile, warps = _schedule(q, backward=True)
    arguments, constants = _arguments(q, key_value, keys, tile)
    grad_k, grad_v = grad_key_value.unbind(-2)
    results = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    tensors = {"grad_sums": grad_sums, **results}
    strides = {f"{name}_strides": x.stride() for name, x in tensors.items()}
    launch(
        Launch(
            "global_attention.backward",
            q.shape[0] * q.shape[1],
            {**arguments, **tensors, **strides, "sums": sums},
            constants,
            writes=tuple(results),
            warps=warps,
        )
    )
    return grad_q, grad_key_value


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if grad is None else (*_gradients(grad, *ctx.saved_tensors), None)


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    return (*inputs, output)


_forward = Operator("global_attention", "(Tensor q, Tensor key_value, Tensor keys) -> Tensor", _forward_body)
_gradients = Operator(
    "global_attention_backward",
    "(Tensor grad_sums, Tensor q, Tensor key_value, Tensor keys, Tensor sums) -> (Tensor, Tensor)",
    _backward_body,
)
_forward.differentiate(_backward, _keep)
OPERATORS = (_forward, _gradients)
