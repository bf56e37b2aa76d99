"""Dropout of an update, scaled and added to the representation, with evodsp's addressed random numbers.

The numbers are those of `evodsp.rng.Draws.uniform_at`, bit for bit: Philox4x32-10 of the position in the WHOLE mask, under a
key per sample. Keys are a tensor, so that a captured graph draws anew when new keys are copied into it. A program draws the
mask of some positions once and applies it to several entries of the shared axis. The backward pass draws it again; it keeps
only the keys.

The kernels' strides are those of samples, the drawn axis, the shared axis, channels. Offsets are 64-bit.

Shape legend: B batch, n1 n2 this rank's shard of the axes of a representation, c channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, no_type_check

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import Launch, Launcher, Operator, tiles


@no_type_check
@triton.jit
def _keeps(key, position, least):
    """Whether the numbers of these positions are at least the rate."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(key, low, high, low * 0, low * 0)
    return (word >> 8).to(tl.int32) >= least


@no_type_check
@triton.jit
def draw(keys, kept, elements, least, TILE: tl.constexpr):
    """The mask [B, e] of a whole representation: elements of the drawn axis and of the channels."""
    chunks = tl.cdiv(elements, TILE)
    sample = (tl.program_id(0) // chunks).to(tl.int64)
    position = tl.cast(tl.program_id(0) % chunks, tl.int64) * TILE + tl.arange(0, TILE)
    keeps = _keeps(tl.load(keys + sample), position, least)
    tl.store(kept + sample * elements + position, keeps, mask=position < elements)


@no_type_check
@triton.jit
def apply(
    x, x_strides, update, update_strides, out, out_strides, keys, drawn, shared, channels, offset, whole, least, scale,
    ADD: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Applies some positions of the mask (drawn axis x channels) to some entries of the shared axis."""
    program = tl.program_id(0)
    chunks, parts = tl.cdiv(drawn * channels, TILE), tl.cdiv(shared, ENTRIES)
    chunk, program = program % chunks, program // chunks
    part, sample = program % parts, (program // parts).to(tl.int64)
    at = chunk * TILE + tl.arange(0, TILE)
    inside = at < drawn * channels
    along, channel = (at // channels).to(tl.int64), (at % channels).to(tl.int64)
    position = (along + offset) * channels + channel
    kept = tl.where(_keeps(tl.load(keys + sample), position, least), scale, 0.0)
    update += sample * update_strides[0] + along * update_strides[1] + channel * update_strides[3]
    out += sample * out_strides[0] + along * out_strides[1] + channel * out_strides[3]
    if ADD:
        x += sample * x_strides[0] + along * x_strides[1] + channel * x_strides[3]
    for i in range(ENTRIES):
        entry = tl.cast(part * ENTRIES + i, tl.int64)
        there = inside & (entry + tl.zeros([TILE], tl.int64) < shared)  # the interpreter mistypes a scalar
        value = tl.load(update + entry * update_strides[2], mask=there, other=0.0).to(tl.float32) * kept
        if ADD:
            value += tl.load(x + entry * x_strides[2], mask=there, other=0.0).to(tl.float32)
        tl.store(out + entry * out_strides[2], value.to(out.dtype.element_ty), mask=there)


# Number of mask elements that a program draws, and number of entries of the shared axis to which it applies them.
_TILE = 512
_ENTRIES = 16


def dropout_add(
    x: Float[Tensor, "B n1 n2 c"],
    update: Float[Tensor, "B n1 n2 c"],
    draw_keys: Int64[Tensor, " B"],
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: Literal[1, 2],
) -> Float[Tensor, "B n1 n2 c"]:
    """x + update * keep / (1 - rate), where keep is 1 if the uniform number of the position is at least `rate`, else 0.

    `draw_keys`: the 64 bits of `Draws.key` of each sample's stream. `offsets`: where this shard begins along axes 1 and 2.
    `whole`: their sizes over all shards. `shared_dim`: axis along which the mask has size 1. Scale and sum are in fp32, the
    result has the dtype of x. It is differentiable once in x and `update`. Raises ValueError if `rate` is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate {rate}, expected 0 <= rate < 1")
    return _forward(x, update, draw_keys, rate, *offsets, *whole, shared_dim)


def draw_mask(draw_keys: Int64[Tensor, " B"], elements: int, rate: float) -> Bool[Tensor, "B e"]:
    """Draw the masks of whole representations, the elements that `dropout_add` keeps, for operators that add updates
    themselves."""
    return _draw(draw_keys, elements, rate)


def _draw_body(launch: Launcher, keys: Tensor, elements: int, rate: float) -> Tensor:
    kept = keys.new_empty(len(keys), elements, dtype=torch.bool)
    given = {"keys": keys, "kept": kept, "elements": elements, "least": _least(rate)}
    launch(Launch("dropout.draw", len(keys) * tiles(elements, _TILE), given, {"TILE": _TILE}, writes=("kept",)))
    return kept


def _launch(
    launch: Launcher,
    x: Tensor | None,
    update: Tensor,
    out: Tensor,
    keys: Tensor,
    rate: float,
    offsets: tuple[int, int],
    whole: tuple[int, int],
    shared_dim: int,
) -> None:
    batch, *sizes, channels = update.shape
    drawn, shared = (sizes[1], sizes[0]) if shared_dim == 1 else (sizes[0], sizes[1])

    def strides(y: Tensor | None) -> tuple[int, int, int, int] | None:
        """Strides of samples, of the drawn axis, of the shared axis and of channels."""
        return None if y is None else (y.stride(0), y.stride(3 - shared_dim), y.stride(shared_dim), y.stride(3))

    launch(
        Launch(
            "dropout.apply",
            batch * tiles(drawn * channels, _TILE) * tiles(shared, _ENTRIES),
            {
                "x": x,
                "x_strides": strides(x),
                "update": update,
                "update_strides": strides(update),
                "out": out,
                "out_strides": strides(out),
                "keys": keys,
                "drawn": drawn,
                "shared": shared,
                "channels": channels,
                "offset": offsets[2 - shared_dim],
                "whole": whole[2 - shared_dim],
                "least": _least(rate),
                "scale": 1.0 / (1.0 - rate),
            },
            {"ADD": x is not None, "TILE": _TILE, "ENTRIES": _ENTRIES},
            writes=("out",),
        )
    )


def _least(rate: float) -> int:
    """The smallest number of 24 bits that is kept. A uniform number is a multiple of 2^-24; torch compares it with the rate in
    fp32.
    """
    return math.ceil(float(torch.tensor(rate, dtype=torch.float32, device="cpu")) * (1 << 24))


def _forward_body(
    launch: Launcher,
    x: Tensor,
    update: Tensor,
    keys: Tensor,
    rate: float,
    o1: int,
    o2: int,
    n1: int,
    n2: int,
    shared: int,
) -> Tensor:
    out = torch.empty_like(x)
    _launch(launch, x, update, out, keys, rate, (o1, o2), (n1, n2), shared)
    return out


def _backward_body(
    launch: Launcher,
    grad: Tensor,
    keys: Tensor,
    rate: float,
    o1: int,
    o2: int,
    n1: int,
    n2: int,
    shared: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the update."""
    out = torch.empty_like(grad, dtype=dtype)
    _launch(launch, None, grad, out, keys, rate, (o1, o2), (n1, n2), shared)
    return out


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    (keys,) = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1]
    return grad, _gradient(grad, keys, *ctx.numbers) if wanted else None, *(None,) * 7


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    return (inputs[2],)


def _note(ctx: Any, inputs: Sequence[Any]) -> None:
    ctx.numbers = (*inputs[3:], inputs[1].dtype)


_forward = Operator(
    "dropout_add",
    "(Tensor x, Tensor update, Tensor keys, float rate, SymInt o1, SymInt o2, SymInt n1, SymInt n2, int shared) -> Tensor",
    _forward_body,
)
_gradient = Operator(
    "dropout_add_backward",
    "(Tensor grad, Tensor keys, float rate, SymInt o1, SymInt o2, SymInt n1, SymInt n2, int shared, ScalarType dtype)"
    " -> Tensor",
    _backward_body,
)
_forward.differentiate(_backward, _keep, _note)
_draw = Operator("dropout_mask", "(Tensor keys, SymInt elements, float rate) -> Tensor", _draw_body)
OPERATORS = (_forward, _gradient, _draw)
