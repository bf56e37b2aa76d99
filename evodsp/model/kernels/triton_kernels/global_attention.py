"""Attention of one query per column and head over the sequences of a shard (the core of algorithm 19).

The softmax runs over all sequences, which several ranks may share. So a shard's result is the weighted sum, the sum of its
weights, and the logit to which both are relative; the caller rescales and adds the results of all ranks. Logits are never
stored in memory: the backward pass recomputes them from the inputs and the result, which are kept.

The kernels' strides are [B, r, H, D] of q, [B, s, r, D] of k and v, [B, s, r] of the mask.

A program takes one column. Logits are in base 2, sequences x heads. Offsets are 64-bit. The width is known to the compiler, so
that a thread reads all channels of a sequence at once.

Shape legend: B batch, s sequences of the shard, r columns (residues), H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, next_power_of_two, product_precision

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(1.4426950408889634e9)
SMALLEST = tl.constexpr(-3.4028234663852886e38)


@no_type_check
@triton.jit
def _small(strides, sample, column, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of a tile [heads, D] of a column."""
    head, channel = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, PADDED).to(tl.int64)
    return sample * strides[0] + column * strides[1] + head[:, None] * strides[2] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _long(strides, sample, column, sequence, PADDED: tl.constexpr):
    """Offsets of a tile [sequences, D] of a column."""
    channel = tl.arange(0, PADDED).to(tl.int64)
    return sample * strides[0] + column * strides[2] + sequence[:, None] * strides[1] + channel[None, :] * strides[3]


@no_type_check
@triton.jit
def _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION: tl.constexpr):
    at = sample * keys_strides[0] + column * keys_strides[2] + sequence * keys_strides[1]
    present = tl.load(keys + at, mask=sequence < sequences, other=0).to(tl.float32)
    masked = tl.where(sequence < sequences, (present - 1.0) * MASKED, float("-inf"))
    return tl.dot(some_k, own_q.T, input_precision=PRECISION) * (scale * LOG2_E) + masked[:, None]


@no_type_check
@triton.jit
def forward(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, sums,
    sequences, columns, heads, scale,
    TILE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, column = program // columns, program % columns
    head, channel = tl.arange(0, HEADS), tl.arange(0, PADDED)
    cell = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    own_q = tl.load(q + _small(q_strides, sample, column, HEADS, PADDED), mask=cell, other=0.0)
    top = tl.full([HEADS], SMALLEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, sequences, TILE):
        sequence = (start + tl.arange(0, TILE)).to(tl.int64)
        inside = (sequence < sequences)[:, None] & (channel < WIDTH)[None, :]
        some_k = tl.load(k + _long(k_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        some_v = tl.load(v + _long(v_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        logits = _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION)
        new_top = tl.maximum(top, tl.max(logits, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[None, :])
        total = total * fade + tl.sum(weights, 0)
        weighted = tl.dot(weights.to(some_v.dtype).T, some_v, weighted * fade[:, None], input_precision=PRECISION)
        top = new_top
    to_sums = sums + (program * heads + head) * (WIDTH + 2)
    tl.store(to_sums[:, None] + channel[None, :], weighted, mask=cell)
    tl.store(to_sums + WIDTH, total, mask=head < heads)
    tl.store(to_sums + WIDTH + 1, top, mask=head < heads)


@no_type_check
@triton.jit
def backward(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, sequences, columns, heads, scale,
    grad_sums, grad_sums_strides, grad_q, grad_q_strides, grad_k, grad_k_strides, grad_v, grad_v_strides, sums,
    TILE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sample, column = program // columns, program % columns
    head, channel = tl.arange(0, HEADS), tl.arange(0, PADDED)
    cell = (head < heads)[:, None] & (channel < WIDTH)[None, :]
    own_q = tl.load(q + _small(q_strides, sample, column, HEADS, PADDED), mask=cell, other=0.0)
    from_above = grad_sums + _small(grad_sums_strides, sample, column, HEADS, PADDED)
    above = tl.load(from_above, mask=cell, other=0.0).to(own_q.dtype)
    at = sample * grad_sums_strides[0] + column * grad_sums_strides[1] + head.to(tl.int64) * grad_sums_strides[2]
    constant = tl.load(grad_sums + at + WIDTH * grad_sums_strides[3], mask=head < heads, other=0.0)
    # Heads that do not exist get no weight.
    at_top = (program * heads + head) * (WIDTH + 2) + WIDTH + 1
    top = tl.load(sums + at_top, mask=head < heads, other=float("inf"))
    slope_k = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, sequences, TILE):
        sequence = (start + tl.arange(0, TILE)).to(tl.int64)
        inside = (sequence < sequences)[:, None] & (channel < WIDTH)[None, :]
        some_k = tl.load(k + _long(k_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        some_v = tl.load(v + _long(v_strides, sample, column, sequence, PADDED), mask=inside, other=0.0)
        logits = _logits(some_k, own_q, keys, keys_strides, sample, column, sequence, sequences, scale, PRECISION)
        weights = tl.exp2(logits - top[None, :])
        slope = weights * (tl.dot(some_v, above.T, input_precision=PRECISION) + constant[None, :])
        of_k = tl.dot(slope.to(own_q.dtype), own_q, input_precision=PRECISION) * scale
        of_v = tl.dot(weights.to(own_q.dtype), above, input_precision=PRECISION)
        to_k = grad_k + _long(grad_k_strides, sample, column, sequence, PADDED)
        to_v = grad_v + _long(grad_v_strides, sample, column, sequence, PADDED)
        tl.store(to_k, of_k.to(grad_k.dtype.element_ty), mask=inside)
        tl.store(to_v, of_v.to(grad_v.dtype.element_ty), mask=inside)
        slope_k = tl.dot(slope.to(some_k.dtype).T, some_k, slope_k, input_precision=PRECISION)
    to_q = grad_q + _small(grad_q_strides, sample, column, HEADS, PADDED)
    tl.store(to_q, (slope_k * scale).to(grad_q.dtype.element_ty), mask=cell)


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
