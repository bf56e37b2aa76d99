"""Device code of `triangle.py`. Tensors are contiguous, and offsets are 64-bit.

x, the result, and gradients of the result and of the gate: [B, I, J, C]. Planes have channels before the pair: operands
[2, B, C, I, J], product [B, C, I, J]; with LAST, as ranks send it, [B, I, J, C]. `w` holds the layers of values,
then of gates: [4 C, C]. A row is one of B x I.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@no_type_check
@triton.jit
def _place(tile, columns, TILE: tl.constexpr):
    """Row, columns and positions of a tile, and which of them exist."""
    along = tl.cdiv(columns, TILE)
    row, column = (tile // along).to(tl.int64), tile % along * TILE + tl.arange(0, TILE)
    return row, column, row * columns + column, column < columns


@no_type_check
@triton.jit
def _vector(x, channel):
    return tl.load(x + channel).to(tl.float32)


@no_type_check
@triton.jit
def _offsets(at, C: tl.constexpr):
    """[positions, C] in [B, I, J, C]."""
    return at[:, None] * C + tl.arange(0, C)[None, :]


@no_type_check
@triton.jit
def _planes(row, column, rows, columns, C: tl.constexpr, LAST: tl.constexpr):
    """[C, positions] in [B, C, I, J], or with LAST in [B, I, J, C]."""
    if LAST:
        return (row * columns + column)[None, :] * C + tl.arange(0, C)[:, None]
    plane = (row // rows * C + tl.arange(0, C)) * rows + row % rows
    return plane[:, None] * columns + column[None, :]


@no_type_check
@triton.jit
def _operand_planes(first, row, column, batch, rows, columns, C: tl.constexpr, TILE_C: tl.constexpr):
    """[channels, positions] in [2, B, C, I, J], for TILE_C of both operands' channels from `first` on."""
    plane = (first // C * batch + row // rows) * C + first % C
    return (
        (plane * rows + row % rows) * columns
        + tl.arange(0, TILE_C).to(tl.int64)[:, None] * (rows * columns)
        + column[None, :]
    )


@no_type_check
@triton.jit
def _tile(x, offsets, there):
    """A tile [positions, C] in fp32."""
    return tl.load(x + offsets, mask=there[:, None], other=0.0).to(tl.float32)


@no_type_check
@triton.jit
def _norm(tile, nw, nb, eps, C: tl.constexpr):
    """The layer norm of positions before weight and bias, with them, and 1 / deviation."""
    channel = tl.arange(0, C)
    centred = tile - (tl.sum(tile, 1) / C)[:, None]
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    normal = centred * inverse[:, None]
    return normal, normal * _vector(nw, channel)[None, :] + _vector(nb, channel)[None, :], inverse


@no_type_check
@triton.jit
def _product_norm(product, pw, pb, planes, there, eps, C: tl.constexpr):
    """As `_norm`, of planes: [C, positions]."""
    channel = tl.arange(0, C)
    tile = tl.load(product + planes, mask=there[None, :], other=0.0).to(tl.float32)
    centred = tile - (tl.sum(tile, 0) / C)[None, :]
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    normal = centred * inverse[None, :]
    return normal, normal * _vector(pw, channel)[:, None] + _vector(pb, channel)[:, None], inverse


@no_type_check
@triton.jit
def _transposed(weight, channel, C: tl.constexpr):
    """Some rows of a weight [_, C], transposed: [C, rows]."""
    return tl.load(weight + channel[None, :] * C + tl.arange(0, C)[:, None])


@no_type_check
@triton.jit
def _keeps(kept, row, column, there, rows, columns, C: tl.constexpr, SHARED: tl.constexpr):
    """Whether dropout keeps an update, [positions, C]. `kept`: [B, J, C], or [B, I, C] where it is constant along J."""
    at = row // rows * columns + column if SHARED == 1 else row + column * 0
    return tl.load(kept + _offsets(at, C), mask=there[:, None], other=0)


@no_type_check
@triton.jit
def operands(
    x, nw, nb, w, bias, mask, out, batch, rows, columns, eps,
    C: tl.constexpr, TILE: tl.constexpr, TILE_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Norm, projections, gates and mask of a tile of positions, a few channels after the other."""
    row, column, at, there = _place(tl.program_id(0), columns, TILE)
    _, y, _ = _norm(_tile(x, _offsets(at, C), there), nw, nb, eps, C)
    y = y.to(w.dtype.element_ty)
    present = tl.load(mask + at, mask=there, other=0).to(tl.float32)
    for c in range(0, 2 * C, TILE_C):
        channel = c + tl.arange(0, TILE_C)
        gate = channel + 2 * C
        value = tl.dot(y, _transposed(w, channel, C), input_precision=PRECISION) + _vector(bias, channel)[None, :]
        logit = tl.dot(y, _transposed(w, gate, C), input_precision=PRECISION) + _vector(bias, gate)[None, :]
        result = (value * tl.sigmoid(logit) * present[:, None]).to(out.dtype.element_ty)
        to = out + _operand_planes(c, row, column, batch, rows, columns, C, TILE_C)
        tl.store(to, result.T, mask=there[None, :])


@no_type_check
@triton.jit
def output(
    x, nw, nb, product, pw, pb, ow, ob, gw, gb, kept, out, rows, columns, eps, scale,
    C: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + dropout((LN(product) ow^T + ob) * sigmoid(LN(x) gw^T + gb)). SHARED: axis along which the mask of dropout is
    constant; 0: none.
    """
    row, column, at, there = _place(tl.program_id(0), columns, TILE)
    channel = tl.arange(0, C)
    _, q, _ = _product_norm(product, pw, pb, _planes(row, column, rows, columns, C, LAST), there, eps, C)
    update = tl.dot(q.to(ow.dtype.element_ty).T, _transposed(ow, channel, C), input_precision=PRECISION)
    update += _vector(ob, channel)[None, :]  # at once, so that both products use the same shared memory
    own = _tile(x, _offsets(at, C), there)
    _, y, _ = _norm(own, nw, nb, eps, C)
    logit = tl.dot(y.to(gw.dtype.element_ty), _transposed(gw, channel, C), input_precision=PRECISION)
    update *= tl.sigmoid(logit + _vector(gb, channel)[None, :])
    if SHARED:
        update = tl.where(_keeps(kept, row, column, there, rows, columns, C, SHARED), update * scale, 0.0)
    tl.store(out + _offsets(at, C), (own + update).to(out.dtype.element_ty), mask=there[:, None])


@no_type_check
@triton.jit
def output_backward(
    grad, x, nw, nb, product, pw, pb, ow, ob, gw, gb, kept, grad_product, grad_gate, weight_sums, bias_sums, norm_sums,
    all_rows, rows, columns, eps, scale, parts,
    C: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the product and of the gate's logits of every `parts`-th tile; their sums of those of ow, of ob and gb, and
    of pw and pb.
    """
    part = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, C)
    weight, gate_weight = _transposed(ow, channel, C), _transposed(gw, channel, C)  # [c, o]
    of_weight = tl.zeros([C, C], tl.float32)
    of_bias, of_gate_bias = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    of_scale, of_shift = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for tile in range(tl.program_id(0), all_rows * tl.cdiv(columns, TILE), parts):
        row, column, at, there = _place(tile, columns, TILE)
        planes = _planes(row, column, rows, columns, C, LAST)
        normal, q, inverse = _product_norm(product, pw, pb, planes, there, eps, C)
        q = q.to(weight.dtype)
        update = tl.dot(q.T, weight, input_precision=PRECISION) + _vector(ob, channel)[None, :]
        _, y, _ = _norm(_tile(x, _offsets(at, C), there), nw, nb, eps, C)
        logit = tl.dot(y.to(gate_weight.dtype), gate_weight, input_precision=PRECISION)
        opened = tl.sigmoid(logit + _vector(gb, channel)[None, :])
        through = _tile(grad, _offsets(at, C), there) * opened
        if SHARED:
            through = tl.where(_keeps(kept, row, column, there, rows, columns, C, SHARED), through * scale, 0.0)
        of_logit = through * update * (1.0 - opened)
        of_bias += tl.sum(through, 0)
        of_gate_bias += tl.sum(of_logit, 0)
        tl.store(grad_gate + _offsets(at, C), of_logit.to(grad_gate.dtype.element_ty), mask=there[:, None])
        slope = through.to(weight.dtype)
        of_q = tl.dot(weight, slope.T, input_precision=PRECISION)  # [c, positions]
        of_weight = tl.dot(slope.T, q.T, of_weight, input_precision=PRECISION)
        of_scale += tl.sum(of_q * normal, 1)
        of_shift += tl.sum(of_q, 1)
        of_q *= _vector(pw, channel)[:, None]
        mean, along = tl.sum(of_q, 0) / C, tl.sum(of_q * normal, 0) / C
        result = (of_q - mean[None, :] - normal * along[None, :]) * inverse[None, :]
        tl.store(grad_product + planes, result.to(grad_product.dtype.element_ty), mask=there[None, :])
    tl.store(weight_sums + (part * C + channel[:, None]) * C + channel[None, :], of_weight)
    tl.store(bias_sums + part * 2 * C + channel, of_bias)
    tl.store(bias_sums + (part * 2 + 1) * C + channel, of_gate_bias)
    tl.store(norm_sums + part * 2 * C + channel, of_scale)
    tl.store(norm_sums + (part * 2 + 1) * C + channel, of_shift)


@no_type_check
@triton.jit
def _slopes(grad, y, values, gates, bias, channel, present, planes, there, C: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients [positions, channels] of the values and of the gates' logits of some channels of the operands."""
    value = tl.dot(y, values, input_precision=PRECISION) + _vector(bias, channel)[None, :]
    logit = tl.dot(y, gates, input_precision=PRECISION) + _vector(bias, channel + 2 * C)[None, :]
    opened = tl.sigmoid(logit)
    upstream = tl.load(grad + planes, mask=there[None, :], other=0.0).to(tl.float32).T
    of_value = upstream * opened * present[:, None]
    return of_value, of_value * value * (1.0 - opened)


@no_type_check
@triton.jit
def operands_backward(
    grad, x, nw, nb, w, bias, mask, gw, grad_gate, grad_sum, grad_x, norm_sums, batch, rows, columns, eps,
    C: tl.constexpr, TILE: tl.constexpr, TILE_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x from those of the operands, of the gate's logits, and of the sum of x and its update, those that exist;
    and a tile's sums of the gradients of nw and nb.
    """
    row, column, at, there = _place(tl.program_id(0), columns, TILE)
    channels, to = tl.arange(0, C), _offsets(at, C)
    normal, y, inverse = _norm(_tile(x, to, there), nw, nb, eps, C)
    if grad_gate is None:
        of_y = tl.zeros([TILE, C], tl.float32)
    else:
        of_gate = tl.load(grad_gate + to, mask=there[:, None], other=0.0)
        of_y = tl.dot(of_gate, tl.load(gw + _offsets(channels, C)), input_precision=PRECISION)
    if grad is not None:
        y = y.to(w.dtype.element_ty)
        present = tl.load(mask + at, mask=there, other=0).to(tl.float32)
        for c in range(0, 2 * C, TILE_C):
            channel = c + tl.arange(0, TILE_C)
            values, gates = _transposed(w, channel, C), _transposed(w, channel + 2 * C, C)
            planes = _operand_planes(c, row, column, batch, rows, columns, C, TILE_C)
            of_value, of_logit = _slopes(grad, y, values, gates, bias, channel, present, planes, there, C, PRECISION)
            of_y = tl.dot(of_value.to(y.dtype), values.T, of_y, input_precision=PRECISION)
            of_y = tl.dot(of_logit.to(y.dtype), gates.T, of_y, input_precision=PRECISION)
    sums = norm_sums + tl.program_id(0).to(tl.int64) * 2 * C + channels
    tl.store(sums, tl.sum(of_y * normal, 0))
    tl.store(sums + C, tl.sum(of_y, 0))
    of_y *= _vector(nw, channels)[None, :]
    mean, along = tl.sum(of_y, 1) / C, tl.sum(of_y * normal, 1) / C
    result = (of_y - mean[:, None] - normal * along[:, None]) * inverse[:, None]
    if grad_sum is not None:
        result += _tile(grad_sum, to, there)
    tl.store(grad_x + to, result.to(grad_x.dtype.element_ty), mask=there[:, None])


@no_type_check
@triton.jit
def weights_backward(
    grad, x, nw, nb, w, bias, mask, weight_sums, bias_sums, batch, rows, columns, eps, parts,
    C: tl.constexpr, TILE: tl.constexpr, TILE_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over every `parts`-th tile of the gradients of `w` and `bias`, for some channels and their gates. Programs of other
    channels read the same tiles at the same time.
    """
    groups: tl.constexpr = 2 * C // TILE_C
    first = tl.program_id(0) // groups
    c = tl.program_id(0) % groups * TILE_C
    channel = c + tl.arange(0, TILE_C)
    values, gates = _transposed(w, channel, C), _transposed(w, channel + 2 * C, C)
    of_bias, of_gate_bias = tl.zeros([TILE_C], tl.float32), tl.zeros([TILE_C], tl.float32)
    of_values, of_gates = tl.zeros([TILE_C, C], tl.float32), tl.zeros([TILE_C, C], tl.float32)
    for tile in range(first, batch * rows * tl.cdiv(columns, TILE), parts):
        row, column, at, there = _place(tile, columns, TILE)
        _, y, _ = _norm(_tile(x, _offsets(at, C), there), nw, nb, eps, C)
        y = y.to(values.dtype)
        present = tl.load(mask + at, mask=there, other=0).to(tl.float32)
        planes = _operand_planes(c, row, column, batch, rows, columns, C, TILE_C)
        of_value, of_logit = _slopes(grad, y, values, gates, bias, channel, present, planes, there, C, PRECISION)
        of_bias += tl.sum(of_value, 0)
        of_gate_bias += tl.sum(of_logit, 0)
        of_values = tl.dot(of_value.to(y.dtype).T, y, of_values, input_precision=PRECISION)
        of_gates = tl.dot(of_logit.to(y.dtype).T, y, of_gates, input_precision=PRECISION)
    to = first.to(tl.int64) * 4 * C + channel
    tl.store(weight_sums + _offsets(to, C), of_values)
    tl.store(weight_sums + _offsets(to + 2 * C, C), of_gates)
    tl.store(bias_sums + to, of_bias)
    tl.store(bias_sums + to + 2 * C, of_gate_bias)


@no_type_check
@triton.jit
def gate_weight_backward(
    x, nw, nb, grad_gate, weight_sums, positions, eps, parts,
    C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over every `parts`-th tile of the gradient of the output gate's weight."""
    part = tl.program_id(0).to(tl.int64)
    total = tl.zeros([C, C], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(positions, TILE), parts):
        at = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        there = at < positions
        _, y, _ = _norm(_tile(x, _offsets(at, C), there), nw, nb, eps, C)
        slope = tl.load(grad_gate + _offsets(at, C), mask=there[:, None], other=0.0)
        total = tl.dot(slope.T, y.to(slope.dtype), total, input_precision=PRECISION)
    tl.store(weight_sums + _offsets(part * C + tl.arange(0, C), C), total)
