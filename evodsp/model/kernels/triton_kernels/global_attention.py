"""Attention of one query per column and head over the sequences of a shard (the core of algorithm 19; operator 6).

The softmax runs over all sequences, which several ranks may share. So a shard's result is a sum that is not yet divided, the
sum of its weights, and the logit that both are relative to; the caller rescales and adds those of all ranks. Logits are never
in memory; the backward pass computes them again and keeps one number per column and head beside the inputs.

Shape legend: B batch, s sequences of the shard, r columns (residues), H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two

# Sequences that a program takes at a time.
_TILE = 128


def global_attention(
    q: Float[Tensor, "B r H D"],
    k: Float[Tensor, "B s r D"],
    v: Float[Tensor, "B s r D"],
    keys: Float[Tensor, "B s r"] | Bool[Tensor, "B s r"] | Int[Tensor, "B s r"],
) -> tuple[Float32[Tensor, "B r H D"], Float32[Tensor, "B r H"], Float32[Tensor, "B r H"]]:
    """(numerator, denominator, largest): sums over sequences of w v and of w, w = 2^(logit - largest).

    logit = log2(e) (q k / sqrt(D) + (keys - 1) * 1e9), so that w is exp of the usual one. `largest` is the largest of them, or
    fp32's smallest number if there are no sequences. One head of keys and values serves all queries. Differentiable once in
    q, k and v; `largest` counts as a constant, which is right for any quotient of the sums.
    """
    return _forward(q, k, v, keys)


def _arguments(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both kernels take, and their constants. Matrix products need 16 heads and channels at least."""
    _, columns, heads, width = q.shape
    tensors: dict[str, Any] = {}
    for name, x in {"q": q, "k": k, "v": v, "keys": keys}.items():
        tensors |= {name: x, f"{name}_strides": x.stride()}
    sizes = {"sequences": k.shape[1], "columns": columns, "heads": heads, "width": width, "scale": width**-0.5}
    constants = {
        "TILE": _TILE,
        "HEADS": max(16, next_power_of_two(heads)),
        "WIDTH": max(16, next_power_of_two(width)),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",  # matters for fp32 only
    }
    return {**tensors, **sizes}, constants


def _forward_body(launch: Launcher, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numerator = q.new_empty(q.shape, dtype=torch.float32)
    denominator, largest = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    arguments, constants = _arguments(q, k, v, keys)
    results = {"numerator": numerator, "denominator": denominator, "largest": largest}
    programs = q.shape[0] * q.shape[1]
    launch(Launch("global_attention.forward", programs, {**arguments, **results}, constants, writes=tuple(results)))
    return numerator, denominator, largest


def _backward_body(
    launch: Launcher,
    grad_numerator: Tensor,
    grad_denominator: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    largest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    arguments, constants = _arguments(q, k, v, keys)
    results: dict[str, Any] = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    tensors = {"grad_numerator": grad_numerator, "grad_denominator": grad_denominator} | results
    strides = {f"{name}_strides": x.stride() for name, x in tensors.items()}
    launch(
        Launch(
            "global_attention.backward",
            q.shape[0] * q.shape[1],
            {**arguments, **tensors, **strides, "largest": largest},
            constants,
            writes=tuple(results),
        )
    )
    return grad_q, grad_k, grad_v


def _backward(ctx: Any, numerator: Tensor | None, denominator: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if numerator is None and denominator is None:
        return (None,) * 4
    q, _, _, _, largest = ctx.saved_tensors
    numerator = torch.zeros_like(q, dtype=torch.float32) if numerator is None else numerator
    denominator = torch.zeros_like(largest) if denominator is None else denominator
    return *_gradients(numerator, denominator, *ctx.saved_tensors), None


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    return (*inputs, output[2])


_forward = Operator(
    "global_attention", "(Tensor q, Tensor k, Tensor v, Tensor keys) -> (Tensor, Tensor, Tensor)", _forward_body
)
_gradients = Operator(
    "global_attention_backward",
    "(Tensor grad_numerator, Tensor grad_denominator, Tensor q, Tensor k, Tensor v, Tensor keys, Tensor largest) "
    "-> (Tensor, Tensor, Tensor)",
    _backward_body,
)
_forward.differentiate(_backward, _keep)
OPERATORS = (_forward, _gradients)
