"""The kernels of `attention.py`.

Every tensor comes with its strides: [B, N, L, H, D] for q, k, v, gate, their gradients and the output, [B, N, K] for the key
mask, [B, H, Q, K] for the bias, whose rows go on to the next multiple of 16 keys, with zeros; for gradients of keys its columns
go on to the next multiple of 16 queries. Statistics of queries are contiguous [B, N, H, Q]. Logits are in base 2. Offsets are
64-bit. EIGHTS: all strides of [B, N, L, H, D] but the last one are multiples of 8.

Masks are left out where all keys are present: a loop has a first part without masks, up to a tile that lacks a key, and a rest.
The device finds the border (`_complete`), because the host would have to wait for the mask. In the first part logits are in
base e, and one multiply-add scales and shifts them inside the exponential. The bias is added to the scaled product in fp32. (A
product that is added to the bias needs it divided by the scale, and earlier: Triton loads no tile of an accumulator ahead.)
"""

from __future__ import annotations

from typing import no_type_check

from evodsp.model.kernels.triton_kernels import tl, triton

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
def _complete(keys, own, there, stride, count, BLOCK: tl.constexpr):
    """Number of positions, of `count` that lie `stride` apart, before the first one that lacks a key.

    `own`: offsets of the keys of a position. One that is not `there` counts as absent. The loop carries the result: Triton 3.7
    and 3.9 forget alignments of what follows from a reduction alone, and then load no tile ahead.
    """
    first = count
    for start in range(0, count, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = there[:, None] & (position < count)[None, :]
        present = tl.load(keys + own[:, None] + position.to(tl.int64)[None, :] * stride, mask=inside, other=0)
        absent = tl.where(present.to(tl.float32) == 1.0, count, position[None, :])
        first = tl.minimum(first, tl.min(tl.min(absent, 1), 0))
    return first


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
def _from(x, strides, begin, EIGHTS: tl.constexpr):
    """Pointers to the tile [positions, D] that begins `begin` positions after that of x."""
    step = tl.cast(begin, tl.int64) * strides[2]
    return x + (tl.multiple_of(step, 8) if EIGHTS else step)


@no_type_check
@triton.jit
def _rows_of(x, positions, length, LAST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile [positions, D]. LAST: some of the positions may not exist."""
    if LAST:
        tile = tl.load(x, mask=_inside(positions, length, WIDTH, PADDED), other=0.0)
    elif WIDTH < PADDED:
        tile = tl.load(x, mask=(tl.arange(0, PADDED) < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(x)
    return tile


@no_type_check
@triton.jit
def _logits(
    own, other, bias, position, length, scale, LAST: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr
):
    """Logits of a tile before the mask, in base e. `bias`: pointers to its tile, whose columns belong to `position`. LAST: some
    of these may not exist.
    """
    logits = tl.dot(own, other.T, input_precision=PRECISION) * scale
    if BIASED:
        some = tl.load(bias, mask=_biased(position, length)[None, :], other=0.0) if LAST else tl.load(bias)
        logits += some.to(tl.float32)
    return logits


@no_type_check
@triton.jit
def _over_keys(
    own_q, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, begin, end, length, scale, top, total, mean,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax and mean of the forward pass after the keys from `begin` to `end`. LAST: some of them may not exist
    or be absent.
    """
    k, v = _from(k, k_strides, begin, EIGHTS), _from(v, v_strides, begin, EIGHTS)
    if BIASED:
        bias += begin * bias_strides[3]
    for start in range(begin, end, TILE_K):
        key = start + tl.arange(0, TILE_K)
        some_k = _rows_of(k, key, length, LAST, WIDTH, PADDED)
        some_v = _rows_of(v, key, length, LAST, WIDTH, PADDED)
        logits = _logits(own_q, some_k, bias, key, length, scale, LAST, BIASED, PRECISION)
        if LAST:
            logits = logits * LOG2_E + _mask_bias(keys, key, keys_strides[2], length)[None, :]
            new_top = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(logits, 1) * LOG2_E)
            weights = tl.exp2(logits * LOG2_E - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        mean = tl.dot(weights.to(some_v.dtype), some_v, mean * fade[:, None], input_precision=PRECISION)
        top = new_top
        k += TILE_K * k_strides[2]
        v += TILE_K * v_strides[2]
        if BIASED:
            bias += TILE_K * bias_strides[3]
    return top, total, mean


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
    whole = 0
    if own_q.dtype != tl.float32 or PADDED <= 16:  # otherwise two loops would not fit into the registers
        whole = _complete(keys, tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1), keys_strides[2], length, 256)
        whole = whole // TILE_K * TILE_K
    top, total, mean = _over_keys(
        own_q, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, 0, whole, length, scale, top, total, mean,
        False, BIASED, WIDTH, PADDED, EIGHTS, TILE_K, PRECISION,
    )  # fmt: skip
    top, total, mean = _over_keys(
        own_q, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, whole, length, length, scale, top, total,
        mean, True, BIASED, WIDTH, PADDED, EIGHTS, TILE_K, PRECISION,
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
    own_q, above, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, begin, end, length, scale, top, guess,
    missed, slope_k, mean_k,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr,
    TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of `backward_queries` after the keys from `begin` to `end`. LAST: some of them may not exist or be absent."""
    k, v = _from(k, k_strides, begin, EIGHTS), _from(v, v_strides, begin, EIGHTS)
    if BIASED:
        bias += begin * bias_strides[3]
    for start in range(begin, end, TILE_K):
        key = start + tl.arange(0, TILE_K)
        some_k = _rows_of(k, key, length, LAST, WIDTH, PADDED)
        some_v = _rows_of(v, key, length, LAST, WIDTH, PADDED)
        logits = _logits(own_q, some_k, bias, key, length, scale, LAST, BIASED, PRECISION) * LOG2_E
        if LAST:
            logits += _mask_bias(keys, key, keys_strides[2], length)[None, :]
        weights = tl.exp2(logits - top[:, None])
        slope = weights * (tl.dot(above, some_v.T, input_precision=PRECISION) - guess[:, None])
        missed += tl.sum(slope, 1)
        slope_k = tl.dot(slope.to(some_k.dtype), some_k, slope_k, input_precision=PRECISION)
        mean_k = tl.dot(weights.to(some_k.dtype), some_k, mean_k, input_precision=PRECISION)
        k += TILE_K * k_strides[2]
        v += TILE_K * v_strides[2]
        if BIASED:
            bias += TILE_K * bias_strides[3]
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
    whole = 0
    if own_q.dtype != tl.float32 or PADDED <= 16:  # otherwise two loops would not fit into the registers
        whole = _complete(keys, tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1), keys_strides[2], length, 256)
        whole = whole // TILE_K * TILE_K
    missed, slope_k, mean_k = _slopes_over_keys(
        own_q, above, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, 0, whole, length, scale, top, guess,
        missed, slope_k, mean_k, False, BIASED, WIDTH, PADDED, EIGHTS, TILE_K, PRECISION,
    )  # fmt: skip
    missed, slope_k, mean_k = _slopes_over_keys(
        own_q, above, k, k_strides, v, v_strides, keys, keys_strides, bias, bias_strides, whole, length, length, scale, top,
        guess, missed, slope_k, mean_k, True, BIASED, WIDTH, PADDED, EIGHTS, TILE_K, PRECISION,
    )  # fmt: skip
    tl.store(
        grad_q + _tile(grad_q_strides, sample, row, head, query, PADDED, EIGHTS),
        ((slope_k - (missed * of_sum)[:, None] * mean_k) * scale).to(grad_q.dtype.element_ty), mask=inside,
    )  # fmt: skip
    tl.store(centre + at, guess + missed * of_sum, mask=query < queries)


@no_type_check
@triton.jit
def _slopes_over_queries(
    own_k, own_v, masked, q, q_strides, upstream, upstream_strides, largest, centre, bias, bias_strides, begin, end, queries,
    scale, slope_q, sum_v,
    LAST: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr,
    TILE_Q: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of `backward_keys` after the queries from `begin` to `end`. LAST: some queries or keys may not exist, or keys
    may be absent.
    """
    q, upstream = _from(q, q_strides, begin, EIGHTS), _from(upstream, upstream_strides, begin, EIGHTS)
    if BIASED:
        bias += begin * bias_strides[2]
    for start in range(begin, end, TILE_Q):
        query = start + tl.arange(0, TILE_Q)
        some_q = _rows_of(q, query, queries, LAST, WIDTH, PADDED)
        above = _rows_of(upstream, query, queries, LAST, WIDTH, PADDED)
        if LAST:
            top = tl.load(largest + query, mask=query < queries, other=float("inf"))
            middle = tl.load(centre + query, mask=query < queries, other=0.0)
        else:
            top, middle = tl.load(largest + query), tl.load(centre + query)
        logits = _logits(own_k, some_q, bias, query, queries, scale, LAST, BIASED, PRECISION) * LOG2_E
        if LAST:
            logits += masked[:, None]
        weights = tl.exp2(logits - top[None, :])
        sum_v = tl.dot(weights.to(above.dtype), above, sum_v, input_precision=PRECISION)
        slope = weights * (tl.dot(own_v, above.T, input_precision=PRECISION) - middle[None, :])
        slope_q = tl.dot(slope.to(some_q.dtype), some_q, slope_q, input_precision=PRECISION)
        q += TILE_Q * q_strides[2]
        upstream += TILE_Q * upstream_strides[2]
        if BIASED:
            bias += TILE_Q * bias_strides[2]
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
    whole = 0
    if own_k.dtype != tl.float32 and tl.min(masked, 0) == 0.0:  # in fp32 two loops would not fit into the registers
        whole = queries // TILE_Q * TILE_Q
    slope_q, sum_v = _slopes_over_queries(
        own_k, own_v, masked, q, q_strides, upstream, upstream_strides, largest, centre, bias, bias_strides, 0, whole, queries,
        scale, slope_q, sum_v, False, BIASED, WIDTH, PADDED, EIGHTS, TILE_Q, PRECISION,
    )  # fmt: skip
    slope_q, sum_v = _slopes_over_queries(
        own_k, own_v, masked, q, q_strides, upstream, upstream_strides, largest, centre, bias, bias_strides, whole, queries,
        queries, scale, slope_q, sum_v, True, BIASED, WIDTH, PADDED, EIGHTS, TILE_Q, PRECISION,
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
def _slopes_over_rows(
    q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, own_bias, upstream, upstream_strides, largest, centre,
    sample, head, query, key, begin, end, step, rows, queries, length, heads, scale, total,
    LAST: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EIGHTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum of `backward_bias` after each `step`-th row from `begin` to `end`. LAST: keys may not exist or be absent."""
    inside_q, inside_k = _inside(query, queries, WIDTH, PADDED), _inside(key, length, WIDTH, PADDED)
    for row in range(begin, end, step):
        wide = tl.cast(row, tl.int64)
        at = ((sample * rows + wide) * heads + head) * queries + query
        top = tl.load(largest + at, mask=query < queries, other=float("inf"))
        middle = tl.load(centre + at, mask=query < queries, other=0.0)
        some_q = tl.load(q + _start(q_strides, sample, wide, head, EIGHTS), mask=inside_q, other=0.0)
        some_k = tl.load(k + _start(k_strides, sample, wide, head, EIGHTS), mask=inside_k, other=0.0)
        some_v = tl.load(v + _start(v_strides, sample, wide, head, EIGHTS), mask=inside_k, other=0.0)
        above = tl.load(upstream + _start(upstream_strides, sample, wide, head, EIGHTS), mask=inside_q, other=0.0)
        logits = (tl.dot(some_q, some_k.T, input_precision=PRECISION) * scale + own_bias) * LOG2_E
        if LAST:
            logits += _mask_bias(keys + wide * keys_strides[1], key, keys_strides[2], length)[None, :]
        weights = tl.exp2(logits - top[:, None])
        total += weights * (tl.dot(above, some_v.T, input_precision=PRECISION) - middle[:, None])
    return total


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
    bias += sample * bias_strides[0] + head * bias_strides[1]
    cells = query.to(tl.int64)[:, None] * bias_strides[2] + key.to(tl.int64)[None, :] * bias_strides[3]
    biased = (query < queries)[:, None] & _biased(key, length)[None, :]
    own_bias = tl.load(bias + cells, mask=biased, other=0.0).to(tl.float32)
    q += _offsets(q_strides, query, PADDED, EIGHTS)
    k += _offsets(k_strides, key, PADDED, EIGHTS)
    v += _offsets(v_strides, key, PADDED, EIGHTS)
    upstream += _offsets(upstream_strides, query, PADDED, EIGHTS)
    keys += sample * keys_strides[0]
    total = tl.zeros([TILE_Q, TILE_K], tl.float32)
    whole = part
    # Otherwise two loops would not fit into the registers: of sm_90 in fp32, of sm_80 at 24 channels, of sm_100 at 64.
    if q.dtype.element_ty != tl.float32 and (WIDTH <= 16 or WIDTH == 32):
        first, along = keys + part.to(tl.int64) * keys_strides[1], tl.cast(parts, tl.int64) * keys_strides[1]
        count = tl.cdiv(rows - part, parts)
        whole += parts * _complete(first, key.to(tl.int64) * keys_strides[2], key < length, along, count, 32)
    total = _slopes_over_rows(
        q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, own_bias, upstream, upstream_strides, largest, centre,
        sample, head, query, key, part, whole, parts, rows, queries, length, heads, scale, total,
        False, WIDTH, PADDED, EIGHTS, PRECISION,
    )  # fmt: skip
    total = _slopes_over_rows(
        q, q_strides, k, k_strides, v, v_strides, keys, keys_strides, own_bias, upstream, upstream_strides, largest, centre,
        sample, head, query, key, whole, rows, parts, rows, queries, length, heads, scale, total,
        True, WIDTH, PADDED, EIGHTS, PRECISION,
    )  # fmt: skip
    samples = tl.num_programs(0) // (tiles_k * tiles_q * heads * parts)
    sums += ((part.to(tl.int64) * samples + sample) * heads + head) * queries * length
    tl.store(
        sums + query.to(tl.int64)[:, None] * length + key[None, :], total.to(sums.dtype.element_ty), mask=within
    )  # fmt: skip
