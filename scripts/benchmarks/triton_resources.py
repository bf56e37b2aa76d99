"""What our Triton kernels need of a GPU, found without one: each is compiled ahead of time for sm_80, sm_90 and sm_100.

    python -m scripts.benchmarks.triton_resources [--output scripts/benchmarks/results/triton_resources.txt]

The grids are those that the operators launch at the preset's sizes, in bf16. The wheel's own `cuobjdump` tells registers and
spills, `nvdisasm` the tensor-core instructions. "warps" is how many warps fit a multiprocessor (of 64), as limited by registers
and shared memory.

Predicted time of a grid: the largest of four times, because memory and the units overlap where several programs are resident:

    bytes moved once      / (0.9 x memory bandwidth)
    matrix products       / (0.8 x peak of the tensor cores in bf16), padding counted
    exponentials          / (0.8 x 16 per multiprocessor and clock)
    other vector lanes    / (0.8 x 128 per multiprocessor and clock)

times (programs per multiprocessor, rounded up) / (programs per multiprocessor). 0.9 and 0.8 are what good kernels reach. The
roofline of a pass (forward or backward of an operator) is the larger of: bytes of its inputs and results at the full bandwidth,
its products without recomputation at the full peak. "fraction" is the roofline over the predicted time of the pass's grids, on
an H100. It is a prediction, to find kernels that cannot be fast; it says nothing of latencies and launch overheads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator, moved, tiles

from .triton_ahead import compile_for

ARCHITECTURES = (80, 90, 100)
RESULT = Path(__file__).parent / "results" / "triton_resources.txt"

# H100 SXM: bytes per second, bf16 products per second, multiprocessors, clock under load.
BANDWIDTH, PEAK, PROCESSORS, CLOCK = 3.35e12, 989e12, 132, 1.7e9
MEMORY_REACHED, UNITS_REACHED = 0.9, 0.8


@dataclass(frozen=True)
class Work:
    """What a grid computes: floating-point operations of matrix products, exponentials, lanes of other vector instructions."""

    products: float = 0.0
    exponentials: float = 0.0
    vector: float = 0.0


@dataclass(frozen=True)
class Pass:
    """One operator of torch at one size."""

    name: str
    size: str
    launches: list[Launch]
    products: float
    """Floating-point operations of matrix products that the pass cannot do without."""

    @property
    def roofline(self) -> float:
        """Seconds that the device needs at least for the bytes or the products."""
        return max(_necessary_bytes(self.launches) / BANDWIDTH, self.products / PEAK)

    @property
    def fraction(self) -> float:
        return self.roofline / sum(predicted(launch) for launch in self.launches)


def predicted(launch: Launch) -> float:
    """Predicted seconds of a grid on an H100."""
    work, lanes = WORK[launch.kernel](launch), PROCESSORS * CLOCK * UNITS_REACHED
    longest = max(
        launch.bytes_moved / (MEMORY_REACHED * BANDWIDTH),
        work.products / (UNITS_REACHED * PEAK),
        work.exponentials / (16 * lanes),
        work.vector / (128 * lanes),
    )
    return longest * tiles(launch.programs, PROCESSORS) / (launch.programs / PROCESSORS)


def _attention_work(products: int, vector: float) -> Callable[[Launch], Work]:
    """Per logit: one exponential, `vector` other instructions, `products` matrix products of the padded head width."""

    def work(launch: Launch) -> Work:
        a, c = launch.arguments, launch.constants
        queries = tiles(a["queries"], c["TILE_Q"]) * c["TILE_Q"]
        keys = tiles(a["length"], c["TILE_K"]) * c["TILE_K"]
        logits = a["q"].shape[0] * a["rows"] * a["heads"] * queries * keys
        return Work(2 * products * logits * c["PADDED"], logits, vector * logits)

    return work


def _global_work(launch: Launch, products: int, vector: float) -> Work:
    """Per logit, padding heads counted: one exponential, `vector` other instructions, `products` matrix products."""
    a, c = launch.arguments, launch.constants
    logits = launch.programs * tiles(a["sequences"], c["TILE"]) * c["TILE"] * c["HEADS"]
    return Work(2 * products * logits * c["PADDED"], logits, vector * logits)


def _outer_work(launch: Launch, products: float, each: float) -> Work:
    """Tiles are padded. Vector instructions: `products` for each outer product, and `each` for each element of the gradient or
    result."""
    a, c = launch.arguments, launch.constants
    channels = c["CHANNELS"]
    columns, results, deep = (
        tiles(size, c[tile]) * c[tile]
        for size, tile in ((a["columns"], "TILE_J"), (a["results"], "TILE_Z"), (channels**2, "TILE_K"))
    )
    vector = a["rows"] * columns * (products * deep + each * results)
    return Work(products=2.0 * a["rows"] * columns * results * deep, vector=vector)


def _triangle_work(products: int, exponentials: int, vector: int) -> Callable[[Launch], Work]:
    """Per position: products of its channels with a weight of as many; per channel: exponentials and other instructions."""

    def work(launch: Launch) -> Work:
        x = launch.arguments["x"]
        numbers = int(x.numel())
        return Work(2.0 * products * numbers * x.shape[-1], exponentials * numbers, vector * numbers)

    return work


# Vector instructions counted in the source: scale, bias (convert, add), mask, maximum, difference, sums, conversions to bf16.
WORK: dict[str, Callable[[Launch], Work]] = {
    "attention.forward": _attention_work(2, 8.5),
    "attention.backward_queries": _attention_work(4, 9),
    "attention.backward_keys": _attention_work(4, 8),
    "attention.backward_bias": _attention_work(2, 5),
    "attention.lay_out": lambda launch: Work(vector=4 * launch.arguments["target"].numel()),
    "sums.of_parts": lambda launch: Work(vector=2 * launch.arguments["parts"].numel()),
    # Ten rounds of Philox, about 12 instructions each, once for the entries of the shared axis that a program takes together.
    "dropout.apply": lambda launch: Work(
        vector=launch.arguments["out"].numel() * (6 + 120 / launch.constants["ENTRIES"])
    ),
    "layer_norm.forward": lambda launch: Work(vector=9 * launch.arguments["x"].numel()),
    "layer_norm.backward": lambda launch: Work(vector=15 * launch.arguments["x"].numel()),
    "layer_norm.again": lambda launch: Work(vector=21 * launch.arguments["x"].numel()),
    "global_attention.forward": lambda launch: _global_work(launch, 2, 6),
    "global_attention.backward": lambda launch: _global_work(launch, 5, 7),
    # Offsets: three instructions for a run of eight.
    "outer_product.projection": lambda launch: _outer_work(launch, 0.4, 3),
    "outer_product.slope": lambda launch: _outer_work(launch, 2.4, 0.4),
    "outer_product.weight_gradient": lambda launch: _outer_work(launch, 0.4, 0.4),
    "outer_product.scale": lambda launch: Work(vector=6 * launch.arguments["grad"].numel()),
    "gate.hidden_backward": lambda launch: Work(
        products=2.0
        * launch.programs
        * launch.constants["TILE"]
        * launch.constants["TILE_H"]
        * tiles(launch.arguments["channels"], launch.constants["TILE_C"])
        * launch.constants["TILE_C"],
        vector=5 * launch.arguments["hidden"].numel(),
    ),
    "sums.of_columns": lambda launch: Work(vector=2 * launch.arguments["x"].numel()),
    "gate.forward": lambda launch: Work(
        exponentials=2 * launch.arguments["x"].numel(), vector=5 * launch.arguments["x"].numel()
    ),
    "gate.backward": lambda launch: Work(
        exponentials=2 * launch.arguments["x"].numel(), vector=8 * launch.arguments["x"].numel()
    ),
    "gated_operands.forward": lambda launch: Work(
        exponentials=2 * launch.arguments["values"].numel(), vector=7 * launch.arguments["values"].numel()
    ),
    "gated_operands.backward": lambda launch: Work(
        exponentials=2 * launch.arguments["values"].numel(), vector=13 * launch.arguments["values"].numel()
    ),
    "dropout.draw": lambda launch: Work(vector=125 * launch.arguments["kept"].numel()),
    "triangle.operands": _triangle_work(4, 4, 23),
    "triangle.output": _triangle_work(2, 2, 26),
    "triangle.output_backward": _triangle_work(4, 2, 50),
    "triangle.operands_backward": _triangle_work(9, 4, 50),
    # Every group of channels forms the norm again.
    "triangle.weights_backward": lambda launch: _triangle_work(
        8, 4, 26 + 9 * 2 * launch.constants["C"] // launch.constants["TILE_C"]
    )(launch),
    "triangle.gate_weight_backward": _triangle_work(1, 0, 10),
}


def _necessary_bytes(launches: Sequence[Launch]) -> int:
    """Bytes that a pass reads from outside and leaves behind, each once. What it writes and reads again is left out."""
    outside: dict[int, int] = {}
    inside: dict[int, int] = {}
    for launch in launches:
        for name, x in launch.arguments.items():
            if not isinstance(x, Tensor):
                continue
            if name in launch.writes:
                inside[id(x)] = moved(x)
            elif id(x) in inside:
                inside[id(x)] = 0
            else:
                outside[id(x)] = moved(x)
    return sum(outside.values()) + sum(inside.values())


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
    one = 2.0 * rows * heads * length * length * width
    return [
        _pass(forward, size, inputs, 2 * one),
        _pass(backward, size, (out, *inputs, out.clone(), statistics, statistics.clone(), biased), 5 * one),
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
    one = 2.0 * sequences * residues * heads * width
    return [
        _pass(global_attention.OPERATORS[0], size, (q, key_value, mask), 2 * one),
        _pass(global_attention.OPERATORS[1], size, (sums, q, key_value, mask, sums.clone()), 5 * one),
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
    draw, one = dropout.OPERATORS[2], 2.0 * residues**2 * channels**2
    operands, output, of_output, of_operands, of_gate_weight, of_gate = triangle.OPERATORS
    return [
        _pass(draw, size, (_meta(1, dtype=torch.int64), residues * channels, 0.25)),
        _pass(operands, size, before, 4 * one),
        _pass(output, size, after, 2 * one),
        _pass(of_output, size, (x.clone(), *after), 2 * one),
        _pass(of_operands, size, (both, *before, layer, x.clone(), x.clone()), 9 * one),
        _pass(of_gate_weight, size, (x, vector, vector, x.clone()), one),
        _pass(of_gate, size, (x.clone(), x, vector, vector, layer, x.clone()), one),
    ]


def hidden_passes(size: str, positions: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> list[Pass]:
    """The gradient of a transition's hidden layer, four times as wide as the representation."""
    shapes = (positions, channels), (channels, 4 * channels), (positions, 4 * channels)
    inputs = [_meta(*shape, dtype=dtype) for shape in shapes]
    return [_pass(gate.OPERATORS[2], size, (*inputs, dtype), 2.0 * positions * 4 * channels**2)]


def outer_passes(
    size: str, residues: int, channels: int, results: int, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    """The projection of outer products."""
    products = _meta(residues, channels, residues, channels, dtype=dtype)
    weight, bias = _meta(results, channels**2, dtype=dtype), _meta(results, dtype=dtype)
    counts, grad = _meta(residues, residues, 1, dtype=torch.float32), _meta(residues, residues, results, dtype=dtype)
    one = 2.0 * products.numel() * results
    return [
        _pass(outer_product.OPERATORS[0], size, (products, weight, bias, counts), one),
        _pass(outer_product.OPERATORS[1], size, (grad, products, weight, counts, dtype), 2 * one),
    ]


def _pass(operator: Operator, size: str, arguments: Sequence[Any], products: float = 0.0) -> Pass:
    return Pass(operator.name.removeprefix("evodsp::"), size, operator.launches(*arguments), products)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def table() -> list[str]:
    """The lines of the result file."""
    versions = f"triton {importlib.metadata.version('triton')}, torch {torch.__version__}"
    lines = [
        f"# python -m scripts.benchmarks.triton_resources ({versions})",
        "# One line a kernel: registers and bytes spilled a thread, KiB of shared memory, resident warps, tensor-core",
        "# instructions, each for sm_80 / sm_90 / sm_100; bytes moved and time predicted on an H100.",
        "# One line a pass: its roofline and the predicted fraction of it. The formula is in the script's docstring.",
    ]
    for one in passes():
        lines.append("")
        lines.append(f"{one.name}, {one.size}: roofline {one.roofline * 1e6:.0f} us, fraction {one.fraction:.2f}")
        for launch in one.launches:
            needs = [compile_for(launch, architecture) for architecture in ARCHITECTURES]
            constants = " ".join(f"{k}={v}" for k, v in launch.constants.items() if "TILE" in k)
            columns = [
                "/".join(str(n.registers) for n in needs),
                "/".join(str(n.stack) for n in needs),
                "/".join(str(n.shared >> 10) for n in needs),
                "/".join(str(n.warps_resident) for n in needs),
                "/".join("+".join(n.tensor_cores) or "-" for n in needs),
            ]
            lines.append(
                f"  {launch.kernel:28} {launch.programs:7d} programs x {launch.warps} warps, {constants:20} "
                f"registers {columns[0]:11} spilled {columns[1]:5} shared {columns[2]:8} warps {columns[3]:8} "
                f"{columns[4]:24} {launch.bytes_moved / 1e6:6.0f} MB {predicted(launch) * 1e6:5.0f} us"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULT)
    output = parser.parse_args().output
    output.write_text("\n".join(table()) + "\n")
    print(output.read_text())


if __name__ == "__main__":
    main()
