"""Triangle multiplication in few passes over the pair: operands, product over residues, output with dropout and residual sum.

Norms, projections and gates are formed from x where they are needed, in the forward and in the backward pass, so that nothing
but x, the product and the small mask of dropout is kept. The kernels are for as many channels of an operand as of the pair, 64
or 128.

In kernels tensors are contiguous, and offsets are 64-bit.

x, the result, and gradients of the result and of the gate: [B, I, J, C]. Planes have channels before the pair: operands
[2, B, C, I, J], product [B, C, I, J]; with LAST, as ranks send it, [B, I, J, C]. `w` holds the layers of values,
then of gates: [4 C, C]. A row is one of B x I.

Shape legend: B batch, I J the pair axes, c channels of the pair and of an operand, cccc = 4 c.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.products import multiply_edges, triangle_gradients
from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    product_precision,
    product_tile,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts
from evodsp.model.precision import activation_dtype


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


WIDTHS = (64, 128)
"""Numbers of channels for which there are kernels."""
SHARED_MEMORY = 150 << 10
"""Bytes of shared memory that a program may need: A100 has 163 KiB, H100 and B200 have 227, cards for graphics 99."""
_EPS = 1e-5
# Largest number of programs that sum the gradient of a weight: one per multiprocessor of an H100. Each writes a partial sum.
_PROCESSORS = 132
# Channels of the operands that a program projects at a time.
_CHANNELS = 32
_WARPS = 8


def fits(x: Float[Tensor, "B I J z"], weight: Float[Tensor, "_ z"]) -> bool:
    """Whether there are kernels for x and the layer of both operands' values, and x's device has the shared memory that they
    need. They take half precision only: in single precision their tiles would not fit.
    """
    return len(weight) == 2 * x.shape[-1] and _fits(x)


def output_fits(x: Float[Tensor, "B I J z"], product: Float[Tensor, "B I J c"]) -> bool:
    """As `fits`, for x and a product of operands."""
    return product.shape[-1] == x.shape[-1] and _fits(x)


def _fits(x: Tensor) -> bool:
    dtype = activation_dtype(x)
    if x.shape[-1] not in WIDTHS or dtype != x.dtype or dtype.itemsize != 2 or x.numel() == 0:
        return False
    return x.device.type != "cuda" or _shared_memory(x.device) >= SHARED_MEMORY


@torch.compiler.assume_constant_result
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have on a GPU of NVIDIA; others do not tell."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


class FusedTriangles(torch.autograd.Function):
    """(outgoing, shared axis, scale, x [B I J c], mask [B I J], kept, parameters) -> x plus its update. Differentiable once.

    `kept` [B n c]: what dropout keeps of the update, with n positions of the pair axis that is not shared, and scales; None: no
    dropout. Parameters: weight and bias of the norm of x, of both operands' layers of values and gates together [cccc c], of
    the output gate, of the norm of the product, and of the output. Arithmetic is fp32 between products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outgoing: bool,
        shared: int,
        scale: float,
        x: Tensor,
        mask: Tensor,
        kept: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        x, mask = x.contiguous(), mask.contiguous()
        norm, layers, after = parameters[:2], parameters[2:4], parameters[4:]
        a, b = _operands(x, mask, *norm, *layers)
        product = multiply_edges(a, b, outgoing)
        ctx.settings = outgoing, shared, scale
        ctx.save_for_backward(x, mask, kept, product, *parameters)
        return _output(x, product, *norm, *after, kept, shared, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        outgoing, shared, scale = ctx.settings
        x, mask, kept, product, *parameters = ctx.saved_tensors
        norm, layers, after = parameters[:2], parameters[2:4], parameters[4:]
        grad = grad.contiguous()
        slope, of_gate, *sums = _output_gradients(grad, x, product, *norm, *after, kept, shared, scale)
        a, b = _operands(x, mask, *norm, *layers)
        both = triangle_gradients(slope, a, b, outgoing)
        del slope, a, b
        of_x, of_norm, *of_layers = _gradients(both, x, mask, *norm, *layers, after[0], of_gate, grad)
        of_weight, (of_bias, of_gate_bias), of_product_norm = sums
        of_after = _gate_weight_gradient(x, *norm, of_gate), of_gate_bias, *of_product_norm, of_weight, of_bias
        return None, None, None, of_x, None, None, *of_norm, *of_layers, *of_after


class FusedOutput(torch.autograd.Function):
    """(shared axis, scale, x [B I J c], product [B c I J], kept, parameters) -> x plus its update, on a shard.

    The product's channels lie first or last in memory. Parameters: weight and bias of the norm of x, of the output gate, of the
    norm of the product, and of the output. It keeps what it gets.
    """

    @staticmethod
    def forward(
        ctx: Any, shared: int, scale: float, x: Tensor, product: Tensor, kept: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        x = x.contiguous()
        if not product.is_contiguous(memory_format=torch.channels_last):
            product = product.contiguous()
        ctx.settings = shared, scale
        ctx.save_for_backward(x, product, kept, *parameters)
        return _output(x, product, *parameters, kept, shared, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, product, kept, *parameters = ctx.saved_tensors
        norm, grad = parameters[:2], grad.contiguous()
        slope, of_gate, *sums = _output_gradients(grad, x, product, *parameters, kept, *ctx.settings)
        of_weight, (of_bias, of_gate_bias), of_product_norm = sums
        of_x, of_norm = _gate_gradients(grad, x, *norm, parameters[2], of_gate)
        of_after = _gate_weight_gradient(x, *norm, of_gate), of_gate_bias, *of_product_norm, of_weight, of_bias
        return None, None, of_x, slope, None, *of_norm, *of_after


class FusedOperands(torch.autograd.Function):
    """(x [B I J c], mask [B I J], weight and bias of the norm and of both operands' layers) -> operands [2 B c I J]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, *parameters: Tensor) -> Tensor:
        x, mask = x.contiguous(), mask.contiguous()
        ctx.save_for_backward(x, mask, *parameters)
        return _operands(x, mask, *parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_norm, *of_layers = _gradients(grad.contiguous(), *ctx.saved_tensors, None, None, None)
        return of_x, None, *of_norm, *of_layers


def _grid(x: Tensor, most: int, **more: int) -> tuple[int, dict[str, Any]]:
    """Number of tiles of at most `most` positions of a row, and the constants of a kernel."""
    tile = product_tile(x.shape[2], most, x)
    constants = {"C": x.shape[-1], "TILE": tile, **more, "PRECISION": product_precision()}
    return x.shape[0] * x.shape[1] * tiles(x.shape[2], tile), constants


def _sums(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(*shape, dtype=torch.float32)


def _before(x: Tensor, mask: Tensor, nw: Tensor, nb: Tensor, w: Tensor, bias: Tensor) -> dict[str, Any]:
    """Arguments of the kernels of the operands."""
    sizes = {"batch": x.shape[0], "rows": x.shape[1], "columns": x.shape[2], "eps": _EPS}
    return {"x": x, "mask": mask, "nw": nw, "nb": nb, "w": w, "bias": bias, **sizes}


def _operands_body(launch: Launcher, x: Tensor, *others: Tensor) -> Tensor:
    batch, rows, columns, channels = x.shape
    out = x.new_empty(2, batch, channels, rows, columns)
    count, constants = _grid(x, 128, TILE_C=_CHANNELS)
    given = {**_before(x, *others), "out": out}
    launch(Launch("triangle.operands", count, given, constants, writes=("out",), warps=_WARPS))
    return out


def _after(x: Tensor, product: Tensor, *others: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and constants of the kernels of the output."""
    names = ("nw", "nb", "gw", "gb", "pw", "pb", "ow", "ob", "kept", "shared", "scale")
    given = {"x": x, "product": product, **dict(zip(names, others, strict=True))}
    shared = given.pop("shared")
    constants = {"SHARED": 0 if given["kept"] is None else shared, "LAST": product.stride(1) == 1}
    return {**given, "rows": x.shape[1], "columns": x.shape[2], "eps": _EPS}, constants


def _output_body(launch: Launcher, x: Tensor, *others: Any) -> Tensor:
    out = torch.empty_like(x)
    given, more = _after(x, *others)
    count, constants = _grid(x, 64, **more)
    launch(Launch("triangle.output", count, {**given, "out": out}, constants, writes=("out",), warps=_WARPS))
    return out


def _output_backward_body(
    launch: Launcher, grad: Tensor, x: Tensor, product: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Gradients of the product, of the gate's logits, of the output's weight, of the biases of output and gate, and of weight
    and bias of the product's norm.
    """
    given, more = _after(x, product, *others)
    count, constants = _grid(x, 32, **more)
    parts, c = min(_PROCESSORS, count), x.shape[-1]
    filled = {
        "grad_product": torch.empty_like(product),
        "grad_gate": torch.empty_like(x),
        "weight_sums": _sums(x, parts, c, c),
        "bias_sums": _sums(x, parts, 2, c),
        "norm_sums": _sums(x, parts, 2, c),
    }
    given |= {"grad": grad, **filled, "all_rows": x.shape[0] * x.shape[1], "parts": parts}
    launch(Launch("triangle.output_backward", parts, given, constants, writes=tuple(filled), warps=_WARPS))
    of_product, of_gate, *partial = filled.values()
    dtypes = given["ow"].dtype, given["ob"].dtype, given["pw"].dtype
    return of_product, of_gate, *(sum_of_parts(launch, *one) for one in zip(partial, dtypes, strict=True))


def _gradients_body(launch: Launcher, grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of weight and bias of its norm, and of both operands' layers and their biases."""
    *before, gw, of_gate, of_sum = others
    given, c = {"grad": grad, **_before(x, *before)}, x.shape[-1]
    of_x, of_norm = _of_x(launch, given, gw, of_gate, of_sum)
    # Numbers of the planes are loaded one by one where 16 does not divide a row: addresses of 64 positions would spill.
    count, constants = _grid(x, 64 if x.shape[2] % 16 == 0 else 32, TILE_C=_CHANNELS)
    groups = 2 * c // _CHANNELS
    parts = min(_PROCESSORS // groups, count)
    weight_sums, bias_sums = _sums(x, parts, 4 * c, c), _sums(x, parts, 4 * c)
    more = {"weight_sums": weight_sums, "bias_sums": bias_sums, "parts": parts}
    writes = ("weight_sums", "bias_sums")
    launch(
        Launch("triangle.weights_backward", parts * groups, {**given, **more}, constants, writes=writes, warps=_WARPS)
    )
    of_weight, of_bias = (sum_of_parts(launch, sums, given["w"].dtype) for sums in (weight_sums, bias_sums))
    return of_x, of_norm, of_weight, of_bias


def _of_x(launch: Launcher, given: dict[str, Any], gw: Any, of_gate: Any, of_sum: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias of its norm."""
    x = given["x"]
    count, constants = _grid(x, 64, TILE_C=_CHANNELS)
    of_x, norm_sums = torch.empty_like(x), _sums(x, count, 2, x.shape[-1])
    more = {"gw": gw, "grad_gate": of_gate, "grad_sum": of_sum, "grad_x": of_x, "norm_sums": norm_sums}
    writes = ("grad_x", "norm_sums")
    launch(Launch("triangle.operands_backward", count, {**given, **more}, constants, writes=writes, warps=_WARPS))
    return of_x, sum_of_parts(launch, norm_sums, given["nw"].dtype)


def _gate_body(
    launch: Launcher, of_sum: Tensor, x: Tensor, nw: Tensor, nb: Tensor, gw: Tensor, of_gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of weight and bias of its norm, where other operators make the operands."""
    sizes = {"batch": x.shape[0], "rows": x.shape[1], "columns": x.shape[2], "eps": _EPS}
    without = dict.fromkeys(("grad", "mask", "w", "bias"))
    return _of_x(launch, {"x": x, "nw": nw, "nb": nb, **sizes, **without}, gw, of_gate, of_sum)


def _gate_weight_body(launch: Launcher, x: Tensor, nw: Tensor, nb: Tensor, of_gate: Tensor) -> Tensor:
    """The gradient of the weight of the output gate."""
    positions, c = x[..., 0].numel(), x.shape[-1]
    tile = product_tile(positions, 64, x)
    parts = min(_PROCESSORS, tiles(positions, tile))
    sums = _sums(x, parts, c, c)
    given = {"x": x, "nw": nw, "nb": nb, "grad_gate": of_gate, "weight_sums": sums, "positions": positions}
    constants = {"C": c, "TILE": tile, "PRECISION": product_precision()}
    given |= {"eps": _EPS, "parts": parts}
    launch(Launch("triangle.gate_weight_backward", parts, given, constants, writes=("weight_sums",), warps=_WARPS))
    return sum_of_parts(launch, sums, of_gate.dtype)


_BEFORE = "Tensor mask, Tensor nw, Tensor nb, Tensor w, Tensor bias"
_AFTER = (
    "Tensor product, Tensor nw, Tensor nb, Tensor gw, Tensor gb, Tensor pw, Tensor pb, Tensor ow, Tensor ob, Tensor? kept, "
    "int shared, float scale"
)
_operands = Operator("triangle_operands", f"(Tensor x, {_BEFORE}) -> Tensor", _operands_body)
_output = Operator("triangle_output", f"(Tensor x, {_AFTER}) -> Tensor", _output_body)
_output_gradients = Operator(
    "triangle_output_backward",
    f"(Tensor grad, Tensor x, {_AFTER}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _output_backward_body,
)
_gradients = Operator(
    "triangle_operands_backward",
    f"(Tensor grad, Tensor x, {_BEFORE}, Tensor? gw, Tensor? of_gate, Tensor? of_sum) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients_body,
)
_gate_weight_gradient = Operator(
    "triangle_gate_weight_backward", "(Tensor x, Tensor nw, Tensor nb, Tensor of_gate) -> Tensor", _gate_weight_body
)
_gate_gradients = Operator(
    "triangle_gate_backward",
    "(Tensor of_sum, Tensor x, Tensor nw, Tensor nb, Tensor gw, Tensor of_gate) -> (Tensor, Tensor)",
    _gate_body,
)
OPERATORS = (_operands, _output, _output_gradients, _gradients, _gate_weight_gradient, _gate_gradients)
