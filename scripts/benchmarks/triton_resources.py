"""What our Triton kernels need of a GPU, found without one: each is compiled ahead of time for sm_80, sm_90 and sm_100.

    python -m scripts.benchmarks.triton_resources

The grids are those that the operators launch at the preset's sizes, in bf16. The wheel's own `cuobjdump` tells registers and
spills, `nvdisasm` the tensor-core instructions. "warps" is how many warps fit a multiprocessor (of 64), as limited by registers
and shared memory.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels import (
    attention,
    dropout,
    gate,
    gated_operands,
    global_attention,
    layer_norm,
    outer_product,
    triangle,
)
from evodsp.model.kernels.triton_kernels import sums as columns
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator

from .triton_ahead import compile_for

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True)
class Pass:
    """One operator of torch at one size."""

    name: str
    size: str
    launches: list[Launch]


def passes() -> list[Pass]:
    """Every operator, forward and backward, at the sizes of initial training and fine-tuning."""
    found = []
    for sequences, residues in ((128, 256), (512, 384)):
        size = f"{sequences}x{residues}"
        found += attention_passes(f"rows {size}", sequences, residues, heads=8, width=32, biased=True)
        found += attention_passes(f"columns {size}", residues, sequences, heads=8, width=32, biased=False)
        found += attention_passes(f"triangle {residues}", residues, residues, heads=4, width=32, biased=True)
        found += global_passes(sequences=1024 if residues == 256 else 5120, residues=residues)
        found += elementwise_passes(f"m {size}", sequences, residues, channels=256)
        found += elementwise_passes(f"z {residues}", residues, residues, channels=128)
        found += gated_passes(f"z {residues}", residues, channels=128)
        found += triangle_passes(f"z {residues}", residues, channels=128)
        found += outer_passes(f"z {residues}", residues, channels=32, results=128)
    return found


def attention_passes(
    size: str, rows: int, length: int, heads: int, width: int, biased: bool, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    projected, keys = _meta(1, rows, length, 4, heads, width, dtype=dtype), _meta(1, rows, length, dtype=dtype)
    out = _meta(1, rows, length, heads, width, dtype=dtype)
    bias = _meta(1, heads, length, length, dtype=dtype) if biased else None
    forward, backward, *_ = attention.OPERATORS
    statistics = _meta(1, rows, heads, length, dtype=torch.float32)
    inputs = (projected, keys, bias, 0)
    return [
        _pass(forward, size, inputs),
        _pass(backward, size, (out, *inputs, out.clone(), statistics, statistics.clone(), biased)),
    ]


def elementwise_passes(size: str, n1: int, n2: int, channels: int) -> list[Pass]:
    """Layer norm and dropout of a representation, and the hidden layer of its transition."""
    x, weight = _meta(1, n1, n2, channels), _meta(channels, dtype=torch.float32)
    mean, inverse = (_meta(1, n1, n2, dtype=torch.float32) for _ in range(2))
    numbers = (_meta(1, dtype=torch.int64), 0.15, 0, 0, n1, n2, 1)
    return [
        *hidden_passes(size, n1 * n2, channels),
        _pass(columns.OPERATORS[0], size, (x.view(-1, channels), x.dtype)),
        _pass(layer_norm.OPERATORS[0], size, (x, weight, weight.clone(), 1e-5)),
        _pass(layer_norm.OPERATORS[1], size, (x, x.clone(), weight, mean, inverse)),
        _pass(layer_norm.OPERATORS[2], size, (x, x.clone(), weight, weight.clone())),
        _pass(dropout.OPERATORS[0], size, (x, x.clone(), *numbers)),
        _pass(dropout.OPERATORS[1], size, (x, *numbers, x.dtype)),
    ]


def global_passes(sequences: int, residues: int) -> list[Pass]:
    """Global column attention of the extra MSA: 8 heads of width 8."""
    heads, width, size = 8, 8, f"extra MSA {sequences}x{residues}"
    q, mask = _meta(1, residues, heads, width), _meta(1, sequences, residues)
    key_value = _meta(1, sequences, residues, 2, width)
    sums = _meta(1, residues, heads, width + 2, dtype=torch.float32)
    return [
        _pass(global_attention.OPERATORS[0], size, (q, key_value, mask)),
        _pass(global_attention.OPERATORS[1], size, (sums, q, key_value, mask, sums.clone())),
    ]


def gated_passes(size: str, residues: int, channels: int) -> list[Pass]:
    """The operands of triangle multiplication, each of `channels` channels, and its gate."""
    inputs = _meta(1, residues, residues, 4 * channels), _meta(1, residues, residues)
    grad, x = _meta(2, 1, channels, residues, residues), _meta(1, residues, residues, channels)
    return [
        _pass(gated_operands.OPERATORS[0], size, inputs),
        _pass(gated_operands.OPERATORS[1], size, (grad, *inputs, x.dtype)),
        _pass(gate.OPERATORS[0], size, (x, x.clone())),
        _pass(gate.OPERATORS[1], size, (x, x.clone(), x.clone())),
    ]


def triangle_passes(size: str, residues: int, channels: int) -> list[Pass]:
    """Triangle multiplication, all but its product over residues, under dropout."""
    x, mask = _meta(1, residues, residues, channels), _meta(1, residues, residues)
    planes, both = _meta(1, channels, residues, residues), _meta(2, 1, channels, residues, residues)
    layer, bias, vector = _meta(channels, channels), _meta(channels), _meta(channels, dtype=torch.float32)
    before = x, mask, vector, vector, _meta(4 * channels, channels), _meta(4 * channels)
    kept = _meta(1, residues * channels, dtype=torch.bool)
    after = x, planes, vector, vector, layer, bias, vector, vector, layer, bias, kept, 1, 1.25
    draw = dropout.OPERATORS[2]
    operands, output, of_output, of_operands, of_gate_weight, of_gate = triangle.OPERATORS
    return [
        _pass(draw, size, (_meta(1, dtype=torch.int64), residues * channels, 0.25)),
        _pass(operands, size, before),
        _pass(output, size, after),
        _pass(of_output, size, (x.clone(), *after)),
        _pass(of_operands, size, (both, *before, layer, x.clone(), x.clone())),
        _pass(of_gate_weight, size, (x, vector, vector, x.clone())),
        _pass(of_gate, size, (x.clone(), x, vector, vector, layer, x.clone())),
    ]


def hidden_passes(size: str, positions: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> list[Pass]:
    """The gradient of a transition's hidden layer, four times as wide as the representation."""
    shapes = (positions, channels), (channels, 4 * channels), (positions, 4 * channels)
    inputs = [_meta(*shape, dtype=dtype) for shape in shapes]
    return [_pass(gate.OPERATORS[2], size, (*inputs, dtype))]


def outer_passes(
    size: str, residues: int, channels: int, results: int, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    """The projection of outer products."""
    products = _meta(residues, channels, residues, channels, dtype=dtype)
    weight, bias = _meta(results, channels**2, dtype=dtype), _meta(results, dtype=dtype)
    counts, grad = _meta(residues, residues, 1, dtype=torch.float32), _meta(residues, residues, results, dtype=dtype)
    return [
        _pass(outer_product.OPERATORS[0], size, (products, weight, bias, counts)),
        _pass(outer_product.OPERATORS[1], size, (grad, products, weight, counts, dtype)),
    ]


def _pass(operator: Operator, size: str, arguments: Sequence[Any]) -> Pass:
    return Pass(operator.name.removeprefix("evodsp::"), size, operator.launches(*arguments))


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def table() -> Iterator[str]:
    """A line a kernel; each list of figures is for sm_80 / sm_90 / sm_100."""
    yield f"# triton {importlib.metadata.version('triton')}, torch {torch.__version__}"
    for one in passes():
        yield f"\n{one.name}, {one.size}"
        for launch in one.launches:
            needs = [compile_for(launch, architecture) for architecture in ARCHITECTURES]
            listed = {
                "registers": [str(n.registers) for n in needs],
                "bytes spilled": [str(n.stack) for n in needs],
                "KiB shared": [str(n.shared >> 10) for n in needs],
                "warps": [str(n.warps_resident) for n in needs],
                "products by": ["+".join(n.tensor_cores) or "-" for n in needs],
            }
            found = ", ".join(f"{name} {'/'.join(values)}" for name, values in listed.items())
            yield f"  {launch.kernel}, {launch.programs} x {launch.warps} warps: {found}"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
