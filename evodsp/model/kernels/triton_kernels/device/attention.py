"""Device code of `attention.py`.

Every tensor comes with its strides: [B, N, L, H, D] for q, k, v, gate, their gradients and the output, [B, N, K] for the key
mask, [B, H, Q, K] for the bias, whose rows go on to the next multiple of 16 keys, with zeros; for gradients of keys its columns
go on to the next multiple of 16 queries. Statistics of queries are contiguous [B, N, H, Q]. Logits are in base 2. Offsets are
64-bit. EIGHTS: all strides of [B, N, L, H, D] but the last one are multiples of 8.
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
    """Mask of the elements of a tile [positions, D] that exist."""
    inside = (positions < length)[:, None]
    if WIDTH < PADDED:
        inside = inside & (tl.arange(0, PADDED) < WIDTH)[None, :]
    return inside


@no_type_check
@triton.jit
def _start(strides, sample, row, head, EIGHTS: tl.constexpr):
    """Offset of a row and head. The hint is needed because Triton does not detect strides that are multiples of 8 and not of
    16.
    """
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
    """The mask's bias of the logits of some keys: 0 or -1e9, and -inf beyond the last key."""
    present = tl.load(keys + columns.to(tl.int64) * stride, mask=columns < length, other=0).to(tl.float32)
    return tl.where(columns < length, present * MASKED - MASKED, float("-inf"))


@no_type_check
@triton.jit
def _biased(columns, length):
    """Mask of the positions with a bias in memory: all or none of 16 neighbours, so that a thread reads several at once."""
    return columns < tl.cdiv(length, 16) * 16


@no_type_check
@triton.jit
def lay_out(source, source_strides, target, heads, rows, columns, padded, TILE: tl.constexpr):
    """Copies [B, H, rows, columns] into rows of `padded` elements, contiguous; zeros fill them up."""
    program = tl.program_id(0)
    tiles_c, tiles_r = tl.cdiv(padded, TILE), tl.cdiv(rows, TILE)
    column = program % tiles_c * TILE + tl.arange(0, TILE)
    row = program // tiles_c % tiles_r * TILE + tl.arange(0, TILE)
    plane = (program // (tiles_c * tiles_r)).to(tl.int64)
    source += plane // heads * source_strides[0] + plane % heads * source_strides[1]
    source += row.to(tl.int64)[:, None] * source_strides[2] + column.to(tl.int64)[None, :] * source_strides[3]
    there = (row < rows)[:, None]
    x = tl.load(source, mask=there & (column < columns)[None, :], other=0.0)
    target += (plane * rows + row)[:, None] * padded + column[None, :]
    tl.store(target, x, mask=there & (column < padded)[None, :])


@no_type_check
@triton.jit
def _rows_of(x, positions, length, LAST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile [positions, D]. LAST: some of the positions do not exist."""
    if LAST:
        tile = tl.load(x, mask=_inside(positions, length, WIDTH, PADDED), other=0.0)
    elif WIDTH < PADDED:
        tile = tl.load(x, mask=(tl.arange(0, PADDED) < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(x)
    return tile


@no_type_check
@triton.jit
def _logits_of_keys(
    own_q, some_k, keys, keys_stride, bias, key, length, scale, LAST: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits of a tile of queries and some keys, in base 2. `bias`: pointers to its tile. LAST: some of the keys do not
    exist."""
    if LAST:
        masked = _mask_bias(keys, key, keys_stride, length)
    else:
        masked = tl.load(keys + key.to(tl.int64) * keys_stride).to(tl.float32) * MASKED - MASKED
    logits = tl.dot(own_q, some_k.T, input_precision=PRECISION) * (scale * LOG2_E) + masked[None, :]
    if BIASED:
        some = tl.load(bias, mask=_biased(key, length)[None, :], other=0.0) if LAST else tl.load(bias)
        logits += some.to(tl.float32) * LOG2_E
    return logits


@no_type_check
@triton.jit
def _over_keys(
    own_q, k, v, keys, keys_stride, bias, start, length, scale, top, total, mean,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax and mean of the forward pass after the keys from `start` on. LAST: some of them do not exist."""
    key = start + tl.arange(0, TILE_K)
    some_k = _rows_of(k, key, length, LAST, WIDTH, PADDED)
    some_v = _rows_of(v, key, length, LAST, WIDTH, PADDED)
    logits = _logits_of_keys(own_q, some_k, keys, keys_stride, bias, key, length, scale, LAST, BIASED, PRECISION)
    new_top = tl.maximum(top, tl.max(logits, 1))
    fade = tl.exp2(top - new_top)
    weights = tl.exp2(logits - new_top[:, None])
    total = total * fade + tl.sum(weights, 1)
    mean = tl.dot(weights.to(some_v.dtype), some_v, mean * fade[:, None], input_precision=PRECISION)
    return new_top, total, mean


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
    key = tl.arange(0, TILE_K)
    k += _tile(k_strides, sample, row, head, key, PADDED, EIGHTS)
    v += _tile(v_strides, sample, row, head, key, PADDED, EIGHTS)
    keys += sample * keys_strides[0] + row * keys_strides[1]
    if BIASED:  # queries that do not exist read the last one's bias, which is in memory
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias += tl.minimum(query, queries - 1).to(tl.int64)[:, None] * bias_strides[2] + key[None, :] * bias_strides[3]
    top = tl.full([TILE_Q], float("-inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    mean = tl.zeros([TILE_Q, PADDED], tl.float32)
    if own_q.dtype == tl.float32 and PADDED > 16:  # one loop, because two would not fit into the registers
        for start in range(0, length, TILE_K):
            top, total, mean = _over_keys(
                own_q, k, v, keys, keys_strides[2], bias, start, length, scale, top, total, mean,
                True, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
            k += TILE_K * k_strides[2]
            v += TILE_K * v_strides[2]
            if BIASED:
                bias += TILE_K * bias_strides[3]
    else:
        whole = length // TILE_K * TILE_K
        for start in range(0, whole, TILE_K):
            top, total, mean = _over_keys(
                own_q, k, v, keys, keys_strides[2], bias, start, length, scale, top, total, mean,
                False, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
            k += TILE_K * k_strides[2]
            v += TILE_K * v_strides[2]
            if BIASED:
                bias += TILE_K * bias_strides[3]
        if whole < length:
            top, total, mean = _over_keys(
                own_q, k, v, keys, keys_strides[2], bias, whole, length, scale, top, total, mean,
                True, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
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
def _slopes_over_keys(
    own_q, above, k, v, keys, keys_stride, bias, start, length, scale, top, guess, missed, slope_k, mean_k,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of `backward_queries` after the keys from `start` on. LAST: some of them do not exist."""
    key = start + tl.arange(0, TILE_K)
    some_k = _rows_of(k, key, length, LAST, WIDTH, PADDED)
    some_v = _rows_of(v, key, length, LAST, WIDTH, PADDED)
    logits = _logits_of_keys(own_q, some_k, keys, keys_stride, bias, key, length, scale, LAST, BIASED, PRECISION)
    weights = tl.exp2(logits - top[:, None])
    slope = weights * (tl.dot(above, some_v.T, input_precision=PRECISION) - guess[:, None])
    missed += tl.sum(slope, 1)
    slope_k = tl.dot(slope.to(some_k.dtype), some_k, slope_k, input_precision=PRECISION)
    mean_k = tl.dot(weights.to(some_k.dtype), some_k, mean_k, input_precision=PRECISION)
    return missed, slope_k, mean_k


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
    key = tl.arange(0, TILE_K)
    k += _tile(k_strides, sample, row, head, key, PADDED, EIGHTS)
    v += _tile(v_strides, sample, row, head, key, PADDED, EIGHTS)
    keys += sample * keys_strides[0] + row * keys_strides[1]
    if BIASED:
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias += tl.minimum(query, queries - 1).to(tl.int64)[:, None] * bias_strides[2] + key[None, :] * bias_strides[3]
    missed = tl.zeros([TILE_Q], tl.float32)
    slope_k = tl.zeros([TILE_Q, PADDED], tl.float32)
    mean_k = tl.zeros([TILE_Q, PADDED], tl.float32)
    if own_q.dtype == tl.float32 and PADDED > 16:  # one loop, because two would not fit into the registers
        for start in range(0, length, TILE_K):
            missed, slope_k, mean_k = _slopes_over_keys(
                own_q, above, k, v, keys, keys_strides[2], bias, start, length, scale, top, guess, missed, slope_k, mean_k,
                True, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
            k += TILE_K * k_strides[2]
            v += TILE_K * v_strides[2]
            if BIASED:
                bias += TILE_K * bias_strides[3]
    else:
        whole = length // TILE_K * TILE_K
        for start in range(0, whole, TILE_K):
            missed, slope_k, mean_k = _slopes_over_keys(
                own_q, above, k, v, keys, keys_strides[2], bias, start, length, scale, top, guess, missed, slope_k, mean_k,
                False, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
            k += TILE_K * k_strides[2]
            v += TILE_K * v_strides[2]
            if BIASED:
                bias += TILE_K * bias_strides[3]
        if whole < length:
            missed, slope_k, mean_k = _slopes_over_keys(
                own_q, above, k, v, keys, keys_strides[2], bias, whole, length, scale, top, guess, missed, slope_k, mean_k,
                True, BIASED, WIDTH, PADDED, TILE_K, PRECISION,
            )  # fmt: skip
    tl.store(
        grad_q + _tile(grad_q_strides, sample, row, head, query, PADDED, EIGHTS),
        ((slope_k - (missed * of_sum)[:, None] * mean_k) * scale).to(grad_q.dtype.element_ty), mask=inside,
    )  # fmt: skip
    tl.store(centre + at, guess + missed * of_sum, mask=query < queries)


@no_type_check
@triton.jit
def _slopes_over_queries(
    own_k, own_v, masked, q, upstream, largest, centre, bias, start, queries, scale, slope_q, sum_v,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE_Q: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of `backward_keys` after the queries from `start` on. LAST: some of them do not exist."""
    query = start + tl.arange(0, TILE_Q)
    some_q = _rows_of(q, query, queries, LAST, WIDTH, PADDED)
    above = _rows_of(upstream, query, queries, LAST, WIDTH, PADDED)
    if LAST:
        top = tl.load(largest + query, mask=query < queries, other=float("inf"))
        middle = tl.load(centre + query, mask=query < queries, other=0.0)
    else:
        top, middle = tl.load(largest + query), tl.load(centre + query)
    logits = tl.dot(own_k, some_q.T, input_precision=PRECISION) * (scale * LOG2_E) + masked[:, None]
    if BIASED:
        some = tl.load(bias, mask=_biased(query, queries)[None, :], other=0.0) if LAST else tl.load(bias)
        logits += some.to(tl.float32) * LOG2_E
    weights = tl.exp2(logits - top[None, :])
    sum_v = tl.dot(weights.to(above.dtype), above, sum_v, input_precision=PRECISION)
    slope = weights * (tl.dot(own_v, above.T, input_precision=PRECISION) - middle[None, :])
    slope_q = tl.dot(slope.to(some_q.dtype), some_q, slope_q, input_precision=PRECISION)
    return slope_q, sum_v


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
    query = tl.arange(0, TILE_Q)
    q += _tile(q_strides, sample, row, head, query, PADDED, EIGHTS)
    upstream += _tile(upstream_strides, sample, row, head, query, PADDED, EIGHTS)
    if BIASED:  # keys that do not exist read the last one's bias, which is in memory
        bias += sample * bias_strides[0] + head * bias_strides[1]
        bias += tl.minimum(key, length - 1).to(tl.int64)[:, None] * bias_strides[3] + query[None, :] * bias_strides[2]
    first = ((sample * rows + row) * heads + head) * queries
    largest += first
    centre += first
    slope_q = tl.zeros([TILE_K, PADDED], tl.float32)
    sum_v = tl.zeros([TILE_K, PADDED], tl.float32)
    if own_k.dtype == tl.float32:
        for start in range(0, queries, TILE_Q):
            slope_q, sum_v = _slopes_over_queries(
                own_k, own_v, masked, q, upstream, largest, centre, bias, start, queries, scale, slope_q, sum_v,
                True, BIASED, WIDTH, PADDED, TILE_Q, PRECISION,
            )  # fmt: skip
            q += TILE_Q * q_strides[2]
            upstream += TILE_Q * upstream_strides[2]
            if BIASED:
                bias += TILE_Q * bias_strides[2]
    else:
        whole = queries // TILE_Q * TILE_Q
        for start in range(0, whole, TILE_Q):
            slope_q, sum_v = _slopes_over_queries(
                own_k, own_v, masked, q, upstream, largest, centre, bias, start, queries, scale, slope_q, sum_v,
                False, BIASED, WIDTH, PADDED, TILE_Q, PRECISION,
            )  # fmt: skip
            q += TILE_Q * q_strides[2]
            upstream += TILE_Q * upstream_strides[2]
            if BIASED:
                bias += TILE_Q * bias_strides[2]
        if whole < queries:
            slope_q, sum_v = _slopes_over_queries(
                own_k, own_v, masked, q, upstream, largest, centre, bias, whole, queries, scale, slope_q, sum_v,
                True, BIASED, WIDTH, PADDED, TILE_Q, PRECISION,
            )  # fmt: skip
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
