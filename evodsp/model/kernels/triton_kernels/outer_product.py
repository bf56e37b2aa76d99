"""Projection of outer products in the layout in which one matrix product computes them (algorithm 10).

The products of rows I with columns J are one matrix product over the sequences, [I c, S] x [S, J c]. With torch, the
projection after it is a matrix product only once the outer products are copied to [I J, c c]: this copy is a third of the
operator's traffic, and the backward pass makes it twice. These kernels read and write them where they are: [I, c, J, c], in
which a pair's c x c numbers are c runs of c.

In kernels products and their gradient are contiguous [I, c, J, c]. Offsets are 64-bit.

Strides: [I, J] of the counts, [z, k] of the weight, [I, J, z] of the gradient. The scaled gradient is contiguous [I J, z].

Shape legend: I J residues, c channels of an operand, z channels of the result, k one of c x c products.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.model.kernels.by_chunks import Sums
from evodsp.model.kernels.triton_kernels import tl, triton
from evodsp.model.kernels.triton_kernels.launch import (
    Launch,
    Launcher,
    Operator,
    next_power_of_two,
    product_precision,
    product_tile,
    tiles,
)
from evodsp.model.kernels.triton_kernels.sums import sum_of_parts


@no_type_check
@triton.jit
def _runs(row, column, product, columns, CHANNELS: tl.constexpr):
    """Offsets of a tile [columns, products] of one row. The c runs of a pair are c products long each, and the runs of all
    columns follow each other.
    """
    first, second = product // CHANNELS, product % CHANNELS
    return ((row * CHANNELS + first[None, :]) * columns + column[:, None]) * CHANNELS + second[None, :]


@no_type_check
@triton.jit
def projection(
    products, weight, weight_strides, bias, counts, counts_strides, out, rows, columns, results,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [columns, results] of one row. `out`: [I, J, z], contiguous."""
    program = tl.program_id(0)
    across = tl.cdiv(results, TILE_Z)
    result, program = (program % across * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // across
    along = tl.cdiv(columns, TILE_J)
    column, row = (program % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64), (program // along).to(tl.int64)
    total = tl.zeros([TILE_J, TILE_Z], tl.float32)
    for start in range(0, CHANNELS * CHANNELS, TILE_K):
        product = start + tl.arange(0, TILE_K)
        some = product < CHANNELS * CHANNELS
        factor = tl.load(
            products + _runs(row, column, product, columns, CHANNELS),
            mask=(column < columns)[:, None] & some[None, :], other=0.0,
        )  # fmt: skip
        at = product[:, None] * weight_strides[1] + result[None, :] * weight_strides[0]
        slopes = tl.load(weight + at, mask=some[:, None] & (result < results)[None, :], other=0.0)
        total = tl.dot(factor, slopes, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + result, mask=result < results, other=0.0).to(tl.float32)[None, :]
    if counts is not None:
        at = row * counts_strides[0] + column * counts_strides[1]
        number = tl.load(counts + at, mask=column < columns, other=1.0).to(tl.float32)
        total *= (1.0 / number)[:, None]
    to = out + (row * columns + column[:, None]) * results + result[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (result < results)[None, :])


@no_type_check
@triton.jit
def scale(
    grad, grad_strides, counts, counts_strides, scaled, sums, positions, columns, results, parts,
    TILE: tl.constexpr, TILE_Z: tl.constexpr,
):  # fmt: skip
    """gradient / counts, of every `parts`-th tile of positions. `scaled`: [I J, z], contiguous; `sums`: [parts, z]."""
    program = tl.program_id(0)
    across = tl.cdiv(results, TILE_Z)
    result, part = (program % across * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // across
    own = tl.zeros([TILE, TILE_Z], tl.float32)
    for tile in range(part, tl.cdiv(positions, TILE), parts):
        position = tile * TILE + tl.arange(0, TILE)
        inside = (position < positions)[:, None] & (result < results)[None, :]
        row, column = (position // columns).to(tl.int64), (position % columns).to(tl.int64)
        at = row[:, None] * grad_strides[0] + column[:, None] * grad_strides[1] + result[None, :] * grad_strides[2]
        upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if counts is not None:
            at = row * counts_strides[0] + column * counts_strides[1]
            number = tl.load(counts + at, mask=position < positions, other=1.0).to(tl.float32)
            upstream *= (1.0 / number)[:, None]
        own += upstream
        to = scaled + position.to(tl.int64)[:, None] * results + result[None, :]
        tl.store(to, upstream.to(scaled.dtype.element_ty), mask=inside)
    tl.store(sums + part.to(tl.int64) * results + result, tl.sum(own, 0), mask=result < results)


@no_type_check
@triton.jit
def _scaled(scaled, row, column, result, columns, results):
    """A tile [columns, results] of one row of the scaled gradient."""
    at = (row * columns + column[:, None]) * results + result[None, :]
    return tl.load(scaled + at, mask=(column < columns)[:, None] & (result < results)[None, :], other=0.0)


@no_type_check
@triton.jit
def _slopes(weight, weight_strides, result, product, results, CHANNELS: tl.constexpr):
    """A tile [results, products] of the weight."""
    at = result.to(tl.int64)[:, None] * weight_strides[0] + product[None, :] * weight_strides[1]
    inside = (result < results)[:, None] & (product < CHANNELS * CHANNELS)[None, :]
    return tl.load(weight + at, mask=inside, other=0.0)


@no_type_check
@triton.jit
def slope(
    scaled, weight, weight_strides, slope, rows, columns, results,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, ONE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of all products of a tile of columns of one row: scaled gradient @ weight.

    `ONE`: whether all results are in one tile; the gradient is then read once. The weight stays in the cache.
    """
    program = tl.program_id(0)
    along = tl.cdiv(columns, TILE_J)
    column, row = (program % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64), (program // along).to(tl.int64)
    result = tl.arange(0, TILE_Z)
    if ONE:
        upstream = _scaled(scaled, row, column, result, columns, results)
    for start in range(0, CHANNELS * CHANNELS, TILE_K):
        product = start + tl.arange(0, TILE_K)
        if ONE:
            slopes = _slopes(weight, weight_strides, result, product, results, CHANNELS)
            total = tl.dot(upstream, slopes, input_precision=PRECISION)
        else:
            total = tl.zeros([TILE_J, TILE_K], tl.float32)
            for first in range(0, results, TILE_Z):
                some = _scaled(scaled, row, column, first + result, columns, results)
                slopes = _slopes(weight, weight_strides, first + result, product, results, CHANNELS)
                total = tl.dot(some, slopes, total, input_precision=PRECISION)
        inside = (column < columns)[:, None] & (product < CHANNELS * CHANNELS)[None, :]
        tl.store(slope + _runs(row, column, product, columns, CHANNELS), total.to(slope.dtype.element_ty), mask=inside)


@no_type_check
@triton.jit
def weight_gradient(
    scaled, products, sums, rows, columns, results, parts,
    CHANNELS: tl.constexpr, TILE_J: tl.constexpr, TILE_Z: tl.constexpr, TILE_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [results, products] of the weight's gradient, summed over every `parts`-th tile of columns of all rows. `sums`:
    [parts, z, cc]."""
    program = tl.program_id(0)
    across = tl.cdiv(CHANNELS * CHANNELS, TILE_K)
    product, program = program % across * TILE_K + tl.arange(0, TILE_K), program // across
    blocks = tl.cdiv(results, TILE_Z)
    result, part = (program % blocks * TILE_Z + tl.arange(0, TILE_Z)).to(tl.int64), program // blocks
    some = product < CHANNELS * CHANNELS
    along = tl.cdiv(columns, TILE_J)
    total = tl.zeros([TILE_Z, TILE_K], tl.float32)
    for piece in range(part, rows * along, parts):
        row = (piece // along).to(tl.int64)
        column = (piece % along * TILE_J + tl.arange(0, TILE_J)).to(tl.int64)
        upstream = _scaled(scaled, row, column, result, columns, results)
        factor = tl.load(
            products + _runs(row, column, product, columns, CHANNELS),
            mask=(column < columns)[:, None] & some[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(upstream.T, factor, total, input_precision=PRECISION)
    size = CHANNELS * CHANNELS * results
    to = sums + part.to(tl.int64) * size + result[:, None] * (CHANNELS * CHANNELS) + product[None, :]
    tl.store(to, total, mask=(result < results)[:, None] & some[None, :])


# Largest number of programs that sum the gradient of the weight: one per multiprocessor of an H100. Each writes a partial
# sum.
_PROCESSORS = 132
# Largest number of programs that scale the gradient, elements of their tiles, and results of a tile.
_PROGRAMS, _NUMBERS, _RESULTS = 264, 1 << 13, 256


def form(left: Float[Tensor, "S I c"], right: Float[Tensor, "S J c"]) -> Float[Tensor, "I c J c2"]:
    """Outer products of all rows with all columns, summed over sequences."""
    (_, i, c), j = left.shape, right.shape[1]
    return (left.flatten(1).T @ right.flatten(1)).view(i, c, j, c)


def project(
    products: Float[Tensor, "I c J c2"],
    weight: Float[Tensor, "z cc"],
    bias: Float[Tensor, " z"] | None,
    counts: Float[Tensor, "I J 1"] | None,
) -> Float[Tensor, "I J z"]:
    """(products weight + bias) / counts, summed and divided in fp32. It is not differentiable; `project_backward` is its
    backward step.
    """
    return _forward(products, weight, bias, counts)


def project_backward(
    grad: Float[Tensor, "I J z"],
    products: Float[Tensor, "I c J c2"],
    weight: Float[Tensor, "z cc"],
    counts: Float[Tensor, "I J 1"] | None,
    sums: Sums,
) -> Float[Tensor, "Ic Jc"]:
    """The gradient of the products. The gradients of weight and bias are added to the first two of `sums`."""
    slope, of_weight, of_bias = _gradients(grad, products, weight, counts, sums.dtype(0))
    sums.add(0, of_weight)
    sums.add(1, of_bias)
    return slope.flatten(2).flatten(0, 1)


def _arguments(products: Tensor, weight: Tensor, counts: Tensor | None) -> dict[str, Any]:
    return {
        "products": products,
        "weight": weight,
        "weight_strides": weight.stride(),
        "counts": counts,
        "counts_strides": None if counts is None else counts.stride()[:2],
        **_sizes(products, weight),
    }


def _sizes(products: Tensor, weight: Tensor) -> dict[str, int]:
    return {"rows": products.shape[0], "columns": products.shape[2], "results": len(weight)}


def _grid(products: Tensor, weight: Tensor, columns: int, results: int, deep: int, stages: int) -> dict[str, Any]:
    """Sizes of tiles, number of warps and of stages. `columns`, `results` and `deep`: sizes of a tile in half precision.

    Two groups of four warps of a Hopper GPU multiply 128 rows at a time.
    """
    constants = {
        "CHANNELS": products.shape[1],
        "TILE_J": product_tile(products.shape[2], columns, products),
        "TILE_Z": product_tile(len(weight), results, products),
        "TILE_K": product_tile(weight.shape[1], deep, products),
        "PRECISION": product_precision(),
    }
    return {"constants": constants, "warps": 8, "stages": stages if products.element_size() < 4 else 1}


def _tiles_of(products: Tensor, weight: Tensor, grid: dict[str, Any], *axes: str) -> int:
    """Number of tiles that cover these axes."""
    sizes = {"TILE_J": products.shape[2], "TILE_Z": len(weight), "TILE_K": weight.shape[1]}
    return math.prod(tiles(sizes[axis], grid["constants"][axis]) for axis in axes)


def _forward_body(
    launch: Launcher, products: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None
) -> Tensor:
    rows, _, columns, _ = products.shape
    out = products.new_empty(rows, columns, len(weight))
    grid = _grid(products, weight, columns=128, results=128, deep=64, stages=3)
    launch(
        Launch(
            "outer_product.projection",
            rows * _tiles_of(products, weight, grid, "TILE_J", "TILE_Z"),
            {**_arguments(products, weight, counts), "bias": bias, "out": out},
            writes=("out",),
            **grid,
        )
    )
    return out


def _scale(
    launch: Launcher, grad: Tensor, counts: Tensor | None, dtype: torch.dtype
) -> tuple[Float[Tensor, "I J z"], Float[Tensor, " z"]]:
    """gradient / counts, contiguous, and its sum over all positions."""
    rows, columns, results = grad.shape
    scaled = torch.empty_like(grad, memory_format=torch.contiguous_format)
    width = min(_RESULTS, next_power_of_two(results))
    tile = _NUMBERS // width
    along, across = tiles(rows * columns, tile), tiles(results, width)
    parts = tiles(along, tiles(along * across, _PROGRAMS)) if along else 1
    make = grad.new_empty if along else grad.new_zeros  # an empty grid fills nothing
    sums = make(parts, results, dtype=torch.float32)
    launch(
        Launch(
            "outer_product.scale",
            parts * across if along else 0,
            {
                "grad": grad,
                "grad_strides": grad.stride(),
                "counts": counts,
                "counts_strides": None if counts is None else counts.stride()[:2],
                "scaled": scaled,
                "sums": sums,
                "positions": rows * columns,
                "columns": columns,
                "results": results,
                "parts": parts,
            },
            {"TILE": tile, "TILE_Z": width},
            writes=("scaled", "sums"),
            warps=8,
        )
    )
    return scaled, sum_of_parts(launch, sums, dtype)


def _slope(launch: Launcher, scaled: Tensor, products: Tensor, weight: Tensor) -> Float[Tensor, "I c J c2"]:
    """The gradient of the products."""
    slope = torch.empty_like(products)
    grid = _grid(products, weight, columns=128, results=128, deep=64, stages=2)
    grid["constants"]["ONE"] = len(weight) <= grid["constants"]["TILE_Z"]
    launch(
        Launch(
            "outer_product.slope",
            len(products) * _tiles_of(products, weight, grid, "TILE_J"),
            {
                "scaled": scaled,
                "weight": weight,
                "weight_strides": weight.stride(),
                "slope": slope,
                **_sizes(products, weight),
            },
            writes=("slope",),
            **grid,
        )
    )
    return slope


def _weight_gradient(
    launch: Launcher, scaled: Tensor, products: Tensor, weight: Tensor, dtype: torch.dtype
) -> Float[Tensor, "z cc"]:
    grid = _grid(products, weight, columns=64, results=128, deep=256, stages=3)
    blocks = _tiles_of(products, weight, grid, "TILE_K", "TILE_Z")
    pieces = len(products) * _tiles_of(products, weight, grid, "TILE_J")
    parts = max(1, min(pieces, _PROCESSORS // blocks))
    sums = products.new_empty(parts, *weight.shape, dtype=torch.float32)
    launch(
        Launch(
            "outer_product.weight_gradient",
            parts * blocks,
            {"scaled": scaled, "products": products, "sums": sums, **_sizes(products, weight), "parts": parts},
            writes=("sums",),
            **grid,
        )
    )
    return sum_of_parts(launch, sums, dtype)


def _backward_body(
    launch: Launcher, grad: Tensor, products: Tensor, weight: Tensor, counts: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the products, and of weight and bias in `dtype`."""
    scaled, of_bias = _scale(launch, grad, counts, dtype)
    slope = _slope(launch, scaled, products, weight)
    return slope, _weight_gradient(launch, scaled, products, weight, dtype), of_bias


_forward = Operator(
    "outer_projection",
    "(Tensor products, Tensor weight, Tensor? bias, Tensor? counts) -> Tensor",
    _forward_body,
)
_gradients = Operator(
    "outer_projection_backward",
    "(Tensor grad, Tensor products, Tensor weight, Tensor? counts, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _backward_body,
)
OPERATORS = (_forward, _gradients)
