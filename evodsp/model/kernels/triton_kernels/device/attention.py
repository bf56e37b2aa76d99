"""Device code of `attention.py`.

Every tensor comes with its strides: [B, N, L, H, D] for q, k, v, gate, their gradients and the output, [B, N, K] for the key
mask, [B, H, Q, K] for the bias, whose rows go on to the next multiple of 16 keys, with zeros. Statistics of queries are
contiguous [B, N, H, Q]. Logits are in base 2. Offsets are 64-bit. EIGHTS: all strides of [B, N, L, H, D] but the last one are
multiples of 8.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(1.4426950408889634e9)


@no_type_check
@triton.jit
def _place(rows, heads, positions, TILE: tl.constexpr, TOGETHER: tl.constexpr):
    """Sample, row, head and tile of this program. Rows of a group vary fastest, then tiles, heads, groups, samples."""
    program = tl.program_id(0)
    row, program = program % TOGETHER, program // TOGETHER
    count = tl.cdiv(positions, TILE)
    tile, program = program % count, program // count
    head, program = program % heads, program // heads
    groups = tl.cdiv(rows, TOGETHER)
    row += program % groups * TOGETHER
    return (program // groups).to(tl.int64), row.to(tl.int64), head.to(tl.int64), tile


@no_type_check
@triton.jit
def _offsets(strides, positions, PADDED: tl.constexpr, EIGHTS: tl.constexpr):
    """Offsets of a tile [positions, D] within a row and head."""
    rows = positions.to(tl.int64)[:, None] * strides[2]
    if EIGHTS:
        rows = tl.multiple_of(rows, (1, 8))
    return rows + tl.arange(0, PADDED)[None, :] * strides[4]


@no_type_check
@triton.jit
def _inside(positions, length, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Which elements of a tile [positions, D] exist."""
    inside = (positions < length)[:, None]
    if WIDTH < PADDED:
        inside = inside & (tl.arange(0, PADDED) < WIDTH)[None, :]
    return inside


@no_type_check
@triton.jit
def _start(strides, sample, row, head, EIGHTS: tl.constexpr):
    """Offset of a row and head. Of strides that are multiples of 8 and not of 16, Triton knows nothing, unless it is told."""
    start = sample * strides[0] + row * strides[1] + head * strides[3]
    return tl.multiple_of(start, 8) if EIGHTS else start


@no_type_check
@triton.jit
def _tile(strides, sample, row, head, positions, PADDED: tl.constexpr, EIGHTS: tl.constexpr):
    """Offsets of a tile [positions, D]."""
    return _start(strides, sample, row, head, EIGHTS) + _offsets(strides, positions, PADDED, EIGHTS)


@no_type_check
@triton.jit
def _mask_bias(keys, columns, stride, length):
    """What the mask adds to the logits of some keys: 0 or -1e9, and -inf beyond the last key."""
    present = tl.load(keys + columns.to(tl.int64) * stride, mask=columns < length, other=0).to(tl.float32)
    return tl.where(columns < length, (present - 1.0) * MASKED, float("-inf"))


@no_type_check
@triton.jit
def _biased(columns, length):
    """Which keys have a bias in memory: of 16 neighbours all or none, so that a thread reads several at once."""
    return columns < tl.cdiv(length, 16) * 16


@no_type_check
@triton.jit
def forward(
    q, q_strides, k, k_strides, v, v_strides, gate, gate_strides, out, out_strides, keys, keys_strides, bias, bias_strides,
    largest, inverse, rows, queries, length, heads, scale,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one row and head, over all keys."""
    sample, row, head, tile = _place(rows, heads, queries, TILE_Q, TOGETHER)
    if row >= rows:
        return
    query = tile * TILE_Q + tl.arange(0, TILE_Q)
    inside = _inside(query, queries, WIDTH, PADDED)
    own_q = tl.load(q + _tile(q_strides, sample, row, head, query, PADDED, EIGHTS), mask=inside, other=0.0)
    k += _start(k_strides, sample, row, head, EIGHTS)
    v += _start(v_strides, sample, row, head, EIGHTS)
    keys += sample * keys_strides[0] + row * keys_strides[1]
    if BIASED:
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias_rows = bias + query.to(tl.int64)[:, None] * bias_strides[2]
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    mean = tl.zeros([TILE_Q, PADDED], tl.float32)
    for start in range(0, length, TILE_K):
        key = start + tl.arange(0, TILE_K)
        there = _inside(key, length, WIDTH, PADDED)
        some_k = tl.load(k + _offsets(k_strides, key, PADDED, EIGHTS), mask=there, other=0.0)
        masked = _mask_bias(keys, key, keys_strides[2], length)[None, :]
        logits = tl.dot(own_q, some_k.T, input_precision=PRECISION) * (scale * LOG2_E) + masked
        if BIASED:
            within = (query < queries)[:, None] & _biased(key, length)[None, :]
            logits += (
                tl.load(bias_rows + key[None, :] * bias_strides[3], mask=within, other=0.0).to(tl.float32) * LOG2_E
            )
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[:, None])
        total = total * fade + tl.sum(weights, 1)
        some_v = tl.load(v + _offsets(v_strides, key, PADDED, EIGHTS), mask=there, other=0.0)
        mean = tl.dot(weights.to(some_v.dtype), some_v, mean * fade[:, None], input_precision=PRECISION)
        top = new_top
    of_sum = tl.where(total > 0, 1.0 / total, 0.0)  # without keys the output is 0
    logit = tl.load(gate + _tile(gate_strides, sample, row, head, query, PADDED, EIGHTS), mask=inside, other=0.0).to(
        tl.float32
    )
    result = mean * of_sum[:, None] * tl.sigmoid(logit)
    tl.store(
        out + _tile(out_strides, sample, row, head, query, PADDED, EIGHTS),
        result.to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
    at = ((sample * rows + row) * heads + head) * queries + query
    tl.store(largest + at, top, mask=query < queries)
    tl.store(inverse + at, of_sum, mask=query < queries)


@no_type_check
@triton.jit
def backward_queries(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, upstream, upstream_strides,
    grad, grad_strides, gate, gate_strides, out, out_strides, grad_q, grad_q_strides, grad_gate, grad_gate_strides,
    largest, inverse, centre, rows, queries, length, heads, scale,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and of its gate, its `upstream` gradient before the gate, and its `centre`.

    Weights are not normalised here and in the next kernels; `upstream` and `centre` carry the factor 1 / (sum of weights).
    """
    sample, row, head, tile = _place(rows, heads, queries, TILE_Q, TOGETHER)
    if row >= rows:
        return
    query = tile * TILE_Q + tl.arange(0, TILE_Q)
    inside = _inside(query, queries, WIDTH, PADDED)
    own_grad = tl.load(grad + _tile(grad_strides, sample, row, head, query, PADDED, EIGHTS), mask=inside, other=0.0).to(
        tl.float32
    )
    own_out = tl.load(out + _tile(out_strides, sample, row, head, query, PADDED, EIGHTS), mask=inside, other=0.0).to(
        tl.float32
    )
    opened = tl.sigmoid(
        tl.load(
            gate + _tile(gate_strides, sample, row, head, query, PADDED, EIGHTS),
            mask=inside,
            other=0.0,
        ).to(tl.float32)
    )
    guess = tl.sum(own_grad * own_out, 1)
    tl.store(
        grad_gate + _tile(grad_gate_strides, sample, row, head, query, PADDED, EIGHTS),
        (own_grad * own_out * (1.0 - opened)).to(grad_gate.dtype.element_ty), mask=inside,
    )  # fmt: skip
    at = ((sample * rows + row) * heads + head) * queries + query
    top = tl.load(largest + at, mask=query < queries, other=float("inf"))
    of_sum = tl.load(inverse + at, mask=query < queries, other=0.0)
    guess *= of_sum
    above = (own_grad * opened * of_sum[:, None]).to(upstream.dtype.element_ty)
    tl.store(
        upstream + _tile(upstream_strides, sample, row, head, query, PADDED, EIGHTS),
        above,
        mask=inside,
    )
    own_q = tl.load(q + _tile(q_strides, sample, row, head, query, PADDED, EIGHTS), mask=inside, other=0.0)
    k += _start(k_strides, sample, row, head, EIGHTS)
    v += _start(v_strides, sample, row, head, EIGHTS)
    keys += sample * keys_strides[0] + row * keys_strides[1]
    if BIASED:
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias_rows = bias + query.to(tl.int64)[:, None] * bias_strides[2]
    missed = tl.zeros([TILE_Q], tl.float32)
    slope_k = tl.zeros([TILE_Q, PADDED], tl.float32)
    mean_k = tl.zeros([TILE_Q, PADDED], tl.float32)
    for start in range(0, length, TILE_K):
        key = start + tl.arange(0, TILE_K)
        there = _inside(key, length, WIDTH, PADDED)
        some_k = tl.load(k + _offsets(k_strides, key, PADDED, EIGHTS), mask=there, other=0.0)
        some_v = tl.load(v + _offsets(v_strides, key, PADDED, EIGHTS), mask=there, other=0.0)
        masked = _mask_bias(keys, key, keys_strides[2], length)[None, :]
        logits = tl.dot(own_q, some_k.T, input_precision=PRECISION) * (scale * LOG2_E) + masked
        if BIASED:
            within = (query < queries)[:, None] & _biased(key, length)[None, :]
            logits += (
                tl.load(bias_rows + key[None, :] * bias_strides[3], mask=within, other=0.0).to(tl.float32) * LOG2_E
            )
        weights = tl.exp2(logits - top[:, None])
        slope = weights * (tl.dot(above, some_v.T, input_precision=PRECISION) - guess[:, None])
        missed += tl.sum(slope, 1)
        slope_k = tl.dot(slope.to(some_k.dtype), some_k, slope_k, input_precision=PRECISION)
        mean_k = tl.dot(weights.to(some_k.dtype), some_k, mean_k, input_precision=PRECISION)
    tl.store(
        grad_q + _tile(grad_q_strides, sample, row, head, query, PADDED, EIGHTS),
        ((slope_k - (missed * of_sum)[:, None] * mean_k) * scale).to(grad_q.dtype.element_ty), mask=inside,
    )  # fmt: skip
    tl.store(centre + at, guess + missed * of_sum, mask=query < queries)


@no_type_check
@triton.jit
def backward_keys(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, upstream, upstream_strides,
    grad_k, grad_k_strides, grad_v, grad_v_strides, largest, centre, rows, queries, length, heads, scale,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and of their values. Logits are transposed: keys x queries."""
    sample, row, head, tile = _place(rows, heads, length, TILE_K, TOGETHER)
    if row >= rows:
        return
    key = tile * TILE_K + tl.arange(0, TILE_K)
    inside = _inside(key, length, WIDTH, PADDED)
    own_k = tl.load(k + _tile(k_strides, sample, row, head, key, PADDED, EIGHTS), mask=inside, other=0.0)
    own_v = tl.load(v + _tile(v_strides, sample, row, head, key, PADDED, EIGHTS), mask=inside, other=0.0)
    masked = _mask_bias(keys + sample * keys_strides[0] + row * keys_strides[1], key, keys_strides[2], length)
    q += _start(q_strides, sample, row, head, EIGHTS)
    upstream += _start(upstream_strides, sample, row, head, EIGHTS)
    if BIASED:
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias_columns = bias + key.to(tl.int64)[:, None] * bias_strides[3]
    first = ((sample * rows + row) * heads + head) * queries
    slope_q = tl.zeros([TILE_K, PADDED], tl.float32)
    sum_v = tl.zeros([TILE_K, PADDED], tl.float32)
    for start in range(0, queries, TILE_Q):
        query = start + tl.arange(0, TILE_Q)
        there = _inside(query, queries, WIDTH, PADDED)
        some_q = tl.load(q + _offsets(q_strides, query, PADDED, EIGHTS), mask=there, other=0.0)
        above = tl.load(upstream + _offsets(upstream_strides, query, PADDED, EIGHTS), mask=there, other=0.0)
        top = tl.load(largest + first + query, mask=query < queries, other=float("inf"))
        middle = tl.load(centre + first + query, mask=query < queries, other=0.0)
        logits = tl.dot(own_k, some_q.T, input_precision=PRECISION) * (scale * LOG2_E) + masked[:, None]
        if BIASED:
            within = _biased(key, length)[:, None] & (query < queries)[None, :]
            columns = bias_columns + query.to(tl.int64)[None, :] * bias_strides[2]
            logits += tl.load(columns, mask=within, other=0.0).to(tl.float32) * LOG2_E
        weights = tl.exp2(logits - top[None, :])
        sum_v = tl.dot(weights.to(above.dtype), above, sum_v, input_precision=PRECISION)
        slope = weights * (tl.dot(own_v, above.T, input_precision=PRECISION) - middle[None, :])
        slope_q = tl.dot(slope.to(some_q.dtype), some_q, slope_q, input_precision=PRECISION)
    tl.store(
        grad_k + _tile(grad_k_strides, sample, row, head, key, PADDED, EIGHTS),
        (slope_q * scale).to(grad_k.dtype.element_ty), mask=inside,
    )  # fmt: skip
    tl.store(
        grad_v + _tile(grad_v_strides, sample, row, head, key, PADDED, EIGHTS),
        sum_v.to(grad_v.dtype.element_ty), mask=inside,
    )  # fmt: skip


@no_type_check
@triton.jit
def backward_bias(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, upstream, upstream_strides,
    largest, centre, sums, rows, queries, length, heads, scale, parts,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of the bias, summed over a part of the rows. `sums`: [parts, B, H, Q, K], contiguous."""
    program = tl.program_id(0)
    part, program = program % parts, program // parts
    tiles_k, tiles_q = tl.cdiv(length, TILE_K), tl.cdiv(queries, TILE_Q)
    key = program % tiles_k * TILE_K + tl.arange(0, TILE_K)
    query = program // tiles_k % tiles_q * TILE_Q + tl.arange(0, TILE_Q)
    program = program // (tiles_k * tiles_q)
    head, sample = (program % heads).to(tl.int64), (program // heads).to(tl.int64)
    within = (query < queries)[:, None] & (key < length)[None, :]
    inside_q, inside_k = _inside(query, queries, WIDTH, PADDED), _inside(key, length, WIDTH, PADDED)
    bias += sample * bias_strides[0] + head * bias_strides[1]
    cells = query.to(tl.int64)[:, None] * bias_strides[2] + key.to(tl.int64)[None, :] * bias_strides[3]
    biased = (query < queries)[:, None] & _biased(key, length)[None, :]
    own_bias = tl.load(bias + cells, mask=biased, other=0.0)
    q += _offsets(q_strides, query, PADDED, EIGHTS)
    k += _offsets(k_strides, key, PADDED, EIGHTS)
    v += _offsets(v_strides, key, PADDED, EIGHTS)
    upstream += _offsets(upstream_strides, query, PADDED, EIGHTS)
    keys += sample * keys_strides[0]
    total = tl.zeros([TILE_Q, TILE_K], tl.float32)
    for row in range(part, rows, parts):
        wide = tl.cast(row, tl.int64)
        at = ((sample * rows + wide) * heads + head) * queries + query
        top = tl.load(largest + at, mask=query < queries, other=float("inf"))
        middle = tl.load(centre + at, mask=query < queries, other=0.0)
        some_q = tl.load(q + _start(q_strides, sample, wide, head, EIGHTS), mask=inside_q, other=0.0)
        some_k = tl.load(k + _start(k_strides, sample, wide, head, EIGHTS), mask=inside_k, other=0.0)
        some_v = tl.load(v + _start(v_strides, sample, wide, head, EIGHTS), mask=inside_k, other=0.0)
        above = tl.load(upstream + _start(upstream_strides, sample, wide, head, EIGHTS), mask=inside_q, other=0.0)
        masked = _mask_bias(keys + wide * keys_strides[1], key, keys_strides[2], length)[None, :]
        logits = tl.dot(some_q, some_k.T, input_precision=PRECISION) * (scale * LOG2_E) + masked
        logits += own_bias.to(tl.float32) * LOG2_E
        weights = tl.exp2(logits - top[:, None])
        total += weights * (tl.dot(above, some_v.T, input_precision=PRECISION) - middle[:, None])
    samples = tl.num_programs(0) // (tiles_k * tiles_q * heads * parts)
    sums += ((part.to(tl.int64) * samples + sample) * heads + head) * queries * length
    tl.store(
        sums + query.to(tl.int64)[:, None] * length + key[None, :], total.to(sums.dtype.element_ty), mask=within
    )  # fmt: skip
