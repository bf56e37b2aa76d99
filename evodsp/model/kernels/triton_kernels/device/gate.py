"""Device code of `gate.py`. Tensors are contiguous. Offsets are 64-bit."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def forward(x, logits, out, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, (value * opened).to(out.dtype.element_ty), mask=inside)


@no_type_check
@triton.jit
def backward(grad, x, logits, grad_x, grad_logits, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32))
    through = upstream * opened
    tl.store(grad_x + at, through.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_logits + at, (through * value * (1.0 - opened)).to(grad_logits.dtype.element_ty), mask=inside)
