"""Device code of `dropout.py`. Strides are those of samples, the drawn axis, the shared axis, channels. Offsets are 64-bit."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


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
def dropout_add(
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
