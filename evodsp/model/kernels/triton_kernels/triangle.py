"""Triangle multiplication in few passes over the pair: operands, product over residues, output with dropout and residual sum.

Norms, projections and gates are formed from x where they are needed, in the forward and in the backward pass, so that nothing
but x, the product and the small mask of dropout is kept. The kernels are for as many channels of an operand as of the pair, 64
or 128.

Shape legend: B batch, I J the pair axes, c channels of the pair and of an operand, cccc = 4 c.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from evodsp.model.kernels.products import multiply_edges, triangle_gradients
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
