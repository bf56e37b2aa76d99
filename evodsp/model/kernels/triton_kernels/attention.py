"""Gated attention with a key mask and a pair bias. Its logits are never stored in memory.

Forward: each program takes a tile of queries of one row and head, streams over the keys and keeps a running softmax. For the
backward pass it stores, per query, the largest logit and the inverse of the sum of weights. (The logarithm of that sum would
be one number, but where all keys are masked it is -1e9 and the sum is lost in it.)

Backward, in three kernels that recompute the weights, without atomic additions, so that results do not depend on timing:

1. per tile of queries, over keys: gradients of q and gate, and the centre of the softmax's backward, the sum over keys of
   weight x gradient. The centre is accurate in fp32: output x gradient, both rounded, is only a first guess, and its error is
   summed over the keys in the same pass.
2. per tile of keys, over queries: gradients of k and v.
3. per tile of the bias, over rows: its gradient, summed in registers. Where tiles are few, the rows are shared by several
   programs; their sums are added in a fixed order.

Accumulators, logits and softmax are fp32. Shape legend: B batch, N rows, Q queries, K keys, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evodsp.model.kernels.by_chunks import empty_gradient, parts_of
from evodsp.model.kernels.triton_kernels.attention_kernels import (  # noqa: F401, launches name them
    backward_bias,
    backward_keys,
    backward_queries,
    forward,
    lay_out,
)
from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    next_power_of_two,
    product_precision,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts

WIDEST = 64
"""The largest head width."""
# Number of rows whose programs are neighbours and take the same tile of the bias, so that it is read from the cache.
_ROWS_TOGETHER = 16
# Rows and columns of a tile of the bias that is copied.
_COPIED = 64
# Least number of programs of the kernel of the bias's gradient: eight per multiprocessor of an H100.
_ENOUGH_PROGRAMS = 1056


def attention(
    projected: Float[Tensor, "B N L 4 H D"],
    keys: Float[Tensor, "B N L"] | Bool[Tensor, "B N L"] | Int[Tensor, "B N L"],
    pair_bias: Float[Tensor, "B H Q L"] | None = None,
    first: int = 0,
) -> Float[Tensor, "B N Q H D"]:
    """sigmoid(gate) * softmax(q k^T / sqrt(D) + pair_bias + (keys - 1) * 1e9) v, within each row, of projected q, k, v, gate.

    With a bias only the Q positions from `first` on attend. `keys`: 1 where a key is present, 0 where it is absent; it gets
    no gradient. The result is laid out in memory as `projected` is. It is differentiable once in `projected` and
    `pair_bias`. The gradient of `projected` is filled in place: with views of it, autograd would put four gradients
    together by a copy. Raises ValueError for heads wider than 64.
    """
    width = projected.shape[-1]
    if width > WIDEST:
        raise ValueError(
            f"Triton attention: head width {width}, at most {WIDEST} is supported; use another kernels.attention"
        )
    return _forward(projected, keys, _keys_fastest(pair_bias), first)[0]


def _keys_fastest(pair_bias: Tensor | None) -> Tensor | None:
    """The bias with keys varying fastest. The projection leaves heads varying fastest, and then each of the many reads of a
    tile would fetch all heads.
    """
    return pair_bias if pair_bias is None or pair_bias.stride(-1) == 1 else pair_bias.contiguous()


def _in_whole_rows(launch: Launcher, bias: Tensor | None) -> Tensor | None:
    """A view of the same keys whose rows are padded with zeros to a multiple of 16 elements.

    So a thread reads several numbers at once at every length. With one address per number, addresses alone would fill its
    registers.
    """
    if bias is None or all(size % 16 == 0 for size in (bias.shape[3], *bias.stride()[:3])):
        return bias
    return _laid_out(launch, bias)


def _queries_fastest(launch: Launcher, bias: Tensor | None) -> Tensor | None:
    """The bias with queries varying fastest, for programs that take keys by queries: a transposed tile would wait for shared
    memory.
    """
    return None if bias is None else _laid_out(launch, bias.transpose(2, 3)).transpose(2, 3)


def _laid_out(launch: Launcher, x: Float[Tensor, "B H M N"]) -> Float[Tensor, "B H M N"]:
    """A copy whose rows are padded to a multiple of 16 elements."""
    batch, heads, rows, columns = x.shape
    padded = tiles(columns, 16) * 16
    copy = x.new_empty(batch, heads, rows, padded)
    launch(
        Launch(
            "attention.lay_out",
            batch * heads * tiles(rows, _COPIED) * tiles(padded, _COPIED),
            {**_strided(source=x), "target": copy, "heads": heads, "rows": rows, "columns": columns, "padded": padded},
            {"TILE": _COPIED},
            writes=("target",),
        )
    )
    return copy[..., :columns]


def _queries(projected: Tensor, bias: Tensor | None) -> int:
    return projected.shape[2] if bias is None else bias.shape[2]


def _forward_body(
    launch: Launcher, projected: Tensor, keys: Tensor, bias: Tensor | None, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; and for each query the largest logit (base 2) and the inverse of the sum of weights."""
    q, k, v, gate = parts_of(projected, first, _queries(projected, bias))
    out = torch.empty_like(gate)
    largest, inverse = (q.new_empty(_per_query(q), dtype=torch.float32) for _ in range(2))
    tensors = _strided(q=q, k=k, v=v, gate=gate, out=out, keys=keys, bias=_in_whole_rows(launch, bias))
    launch(
        Launch(
            "attention.forward",
            _programs(q, q.shape[2]),
            {**tensors, "largest": largest, "inverse": inverse, **_sizes(q, k)},
            {
                **_constants(q, out, bias),
                "TILE_Q": _tile(q),
                "TILE_K": _other_tile(q),
                "TOGETHER": _ROWS_TOGETHER,
            },
            writes=("out", "largest", "inverse"),
            **_schedule(q),
        )
    )
    return out, largest, inverse


def _backward_body(
    launch: Launcher,
    grad: Tensor,
    projected: Tensor,
    keys: Tensor,
    bias: Tensor | None,
    first: int,
    out: Tensor,
    largest: Tensor,
    inverse: Tensor,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the projection and of the bias (without elements if it is not wanted)."""
    queries = _queries(projected, bias)
    q, k, v, gate = parts_of(projected, first, queries)
    grad_projected = empty_gradient(projected, queries)
    grad_q, grad_k, grad_v, grad_gate = parts_of(grad_projected, first, queries)
    # Gradient of the output before the gate, divided by the sum of weights.
    upstream = torch.empty_like(gate)
    centre = torch.empty_like(largest)
    sizes, constants, other = _sizes(q, k), _constants(q, grad, bias), _other_tile(q)
    shared = _strided(q=q, k=k, v=v, keys=keys, bias=_in_whole_rows(launch, bias), upstream=upstream)
    by_keys = shared | _strided(bias=_queries_fastest(launch, bias))
    statistics = {"largest": largest, "centre": centre}
    launch(
        Launch(
            "attention.backward_queries",
            _programs(q, q.shape[2]),
            {
                **shared,
                **_strided(grad=grad, gate=gate, out=out, grad_q=grad_q, grad_gate=grad_gate),
                **statistics,
                "inverse": inverse,
                **sizes,
            },
            {**constants, "TILE_Q": _tile(q), "TILE_K": other, "TOGETHER": _ROWS_TOGETHER},
            writes=("upstream", "grad_q", "grad_gate", "centre"),
            **_schedule(q),
        )
    )
    launch(
        Launch(
            "attention.backward_keys",
            _programs(q, k.shape[2]),
            {**by_keys, **_strided(grad_k=grad_k, grad_v=grad_v), **statistics, **sizes},
            {**constants, "TILE_K": _tile(q), "TILE_Q": other, "TOGETHER": _ROWS_TOGETHER},
            writes=("grad_k", "grad_v"),
            **_schedule(q),
        )
    )
    if bias is None or not bias_gradient:
        return grad_projected, q.new_empty(0)
    cells = tiles(q.shape[2], _tile(q)) * tiles(k.shape[2], other) * q.shape[0] * q.shape[3]
    parts = max(1, min(q.shape[1], tiles(_ENOUGH_PROGRAMS, cells) if cells else 1))
    sums = bias.new_empty((parts, *bias.shape), dtype=torch.float32 if parts > 1 else bias.dtype)
    launch(
        Launch(
            "attention.backward_bias",
            cells * parts,
            {**shared, **statistics, "sums": sums, **sizes, "parts": parts},
            {**constants, "TILE_Q": _tile(q), "TILE_K": other},
            writes=("sums",),
            **_schedule(q),
        )
    )
    return grad_projected, sum_of_parts(launch, sums, bias.dtype)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    projected, keys, bias, *results = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2]
    of_projected, of_bias = _gradients(grad, projected, keys, bias, ctx.first, *results, wanted)
    return of_projected, None, of_bias if wanted else None, None


def _keep(inputs: Sequence[Any], output: Any) -> tuple[Tensor | None, ...]:
    return (*inputs[:3], *output)


def _note(ctx: Any, inputs: Sequence[Any]) -> None:
    ctx.first = inputs[3]


_forward = Operator(
    "attention",
    "(Tensor projected, Tensor keys, Tensor? bias, SymInt first) -> (Tensor, Tensor, Tensor)",
    _forward_body,
)
_gradients = Operator(
    "attention_backward",
    "(Tensor grad, Tensor projected, Tensor keys, Tensor? bias, SymInt first, Tensor out, Tensor largest, Tensor inverse, "
    "bool bias_gradient) -> (Tensor, Tensor)",
    _backward_body,
)
_forward.differentiate(_backward, _keep, _note)
OPERATORS = (_forward, _gradients)


def _per_query(q: Tensor) -> tuple[int, int, int, int]:
    batch, rows, queries, heads, _ = q.shape
    return batch, rows, heads, queries


def _programs(q: Tensor, positions: int) -> int:
    """Grid of one program per sample, row, head and tile; rows are rounded up to whole groups."""
    batch, rows, _, heads, _ = q.shape
    return batch * tiles(rows, _ROWS_TOGETHER) * _ROWS_TOGETHER * heads * tiles(positions, _tile(q))


def _strided(**tensors: Tensor | None) -> dict[str, Any]:
    """Kernel arguments `x` and `x_strides` for each tensor."""
    named: dict[str, Any] = {}
    for name, x in tensors.items():
        named[name] = x
        named[f"{name}_strides"] = None if x is None else x.stride()
    return named


def _sizes(q: Tensor, k: Tensor) -> dict[str, Any]:
    return {
        "rows": q.shape[1],
        "queries": q.shape[2],
        "length": k.shape[2],
        "heads": q.shape[3],
        "scale": q.shape[4] ** -0.5,
    }


def _constants(q: Tensor, other: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """Compile-time constants. `other`: a tensor whose strides may differ from those of the projection."""
    width = q.shape[-1]
    return {
        "BIASED": bias is not None,
        "WIDTH": width,
        "PADDED": max(16, next_power_of_two(width)),  # tensor cores need at least 16
        "EIGHTS": all(stride % 8 == 0 for x in (q, other) for stride in (width, *x.stride()[:4])),
        "PRECISION": product_precision(),
    }


def _tile(q: Tensor) -> int:
    """Number of queries per program (keys, for the gradient of keys). Four warps of a Hopper GPU multiply 64 at a time."""
    return 32 if q.element_size() == 4 else 64


def _other_tile(q: Tensor) -> int:
    """Number of keys that a program takes at a time against a tile of queries, or queries against keys: as many as fit the
    registers of every GPU.
    """
    return 16 if q.element_size() == 4 else 32


def _schedule(q: Tensor) -> dict[str, int]:
    """Number of warps, and depth of the pipeline of loads. Operands in fp32 take twice the registers.

    On an H200 three tiles under way took 0.69 to 0.95 of two's time, and tiles of 32 were faster than those of 64 and 128
    (`scripts/benchmarks/results/attention_tiles_h200.txt`).
    """
    if q.element_size() == 4:
        return {"warps": 8, "stages": 1}
    # With three stages or more, registers spill on sm_100 at a width of 24 (Triton 3.7.1), which no published model has.
    stages = 3 if q.shape[-1] == next_power_of_two(q.shape[-1]) else 2
    return {"warps": 4, "stages": stages}
