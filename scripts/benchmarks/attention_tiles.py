"""Which tiles, warps and stages suit the kernels of attention on this GPU: times each choice, beside the one that is built in.

    python -m scripts.benchmarks.attention_tiles [--seconds 60] [--only forward ...] [--output FILE]

Every choice is compiled first, by all cores. A choice whose results differ from the built-in one's is listed as wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels import attention
from evodsp.model.kernels.triton_kernels.launch import Launch, tiles

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_bias")
SHAPES = {  # rows, length, heads, width, biased
    "row 512 x 384": (512, 384, 8, 32, True),
    "row 128 x 256": (128, 256, 8, 32, True),
    "column 384 x 512": (384, 512, 8, 32, False),
    "triangle 384": (384, 384, 4, 32, True),
    "triangle 256": (256, 256, 4, 32, True),
    "extra 1280 x 384": (1280, 384, 8, 8, True),
    "row 512 x 381": (512, 381, 8, 32, True),
}
"""Attention of the MSA's rows and columns, of the pair representation and of the extra MSA, and one of an odd length."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Tiles of the program's own positions and of the others, warps, stages, and a limit of registers (0: none)."""

    own: int
    other: int
    warps: int
    stages: int
    registers: int = 0

    def __str__(self) -> str:
        limit = f" r{self.registers}" if self.registers else ""
        return f"{self.own}x{self.other} w{self.warps} s{self.stages}{limit}"


CHOICES = [
    Choice(64, other, 4, stages, registers)
    for other, stages, registers in (
        (32, 2, 0),
        (32, 3, 0),
        (32, 3, 128),
        (32, 4, 0),
        (64, 2, 0),
        (64, 3, 0),
        (64, 3, 128),
    )
]


def launches(rows: int, length: int, heads: int, width: int, biased: bool) -> Iterator[Launch]:
    """The four grids of a call, on random numbers, run in their order when the next one is asked for."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    projected, keys = normal(1, rows, length, 4, heads, width), torch.ones(1, rows, length, device="cuda")
    keys[:, :, -3:] = 0
    bias = normal(1, heads, length, length) if biased else None
    held: list[Launch] = []
    results = attention._forward_body(held.append, projected, keys, bias, 0)
    yield from held
    held.clear()
    attention._backward_body(held.append, normal(*results[0].shape), projected, keys, bias, 0, *results, biased)
    yield from (launch for launch in held if launch.kernel.startswith("attention."))


def changed(launch: Launch, choice: Choice) -> Launch:
    """The grid with other tiles."""
    sizes, constants = launch.arguments, dict(launch.constants)
    keys = launch.kernel == "attention.backward_keys"
    own, other = ("TILE_K", "TILE_Q") if keys else ("TILE_Q", "TILE_K")
    constants |= {own: choice.own, other: choice.other}
    batch, heads = launch.arguments["q"].shape[0], sizes["heads"]
    if launch.kernel == "attention.backward_bias":
        programs = (
            tiles(sizes["queries"], choice.own) * tiles(sizes["length"], choice.other) * batch * heads * sizes["parts"]
        )
    else:
        positions = sizes["length"] if keys else sizes["queries"]
        together = constants["TOGETHER"]
        programs = batch * tiles(sizes["rows"], together) * together * heads * tiles(positions, choice.own)
    return dataclasses.replace(launch, programs=programs, constants=constants, warps=choice.warps, stages=choice.stages)


def run(launch: Launch, registers: int = 0) -> None:
    options: dict[str, Any] = {"maxnreg": registers} if registers else {}
    launch.function[(launch.programs,)](
        **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages, **options
    )


def compile_share(share: int, of: int, wanted: tuple[str, ...]) -> None:
    """Run every choice of a share once, on few rows."""
    families = {
        (width, biased): (16, length, heads, width, biased) for _, length, heads, width, biased in SHAPES.values()
    }
    number = 0
    for shape in families.values():
        for launch in launches(*shape):
            run(launch)
            for choice in CHOICES:
                number += 1
                if number % of == share and launch.kernel.split(".")[1] in wanted:
                    try:
                        run(changed(launch, choice), choice.registers)
                        torch.cuda.synchronize()
                    except Exception as error:  # tiles that do not fit are no choice
                        print(f"{launch.kernel} {choice}: {type(error).__name__}", file=sys.stderr)


def microseconds(launch: Launch, registers: int = 0) -> float:
    """The shortest of three means."""
    run(launch, registers)
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        for _ in range(5):
            run(launch, registers)
        end.record()
        torch.cuda.synchronize()
        found.append(200 * begin.elapsed_time(end))
    return min(found)


def _difference(launch: Launch, expected: dict[str, Tensor]) -> str:
    """What is wrong with the numbers that a grid left; '' if rounding explains it."""
    for name, x in expected.items():
        wrong = float((launch.arguments[name].float() - x.float()).abs().max())
        if not wrong <= 0.02 * float(x.float().abs().max()):
            return f"WRONG {name} by {wrong:.2g}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    of = os.cpu_count() or 1
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=compile_share, args=(n, of, tuple(options.only))) for n in range(of)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = [f"compiled in {time.monotonic() - begin:.0f} s"]
    for name, shape in SHAPES.items():
        for launch in launches(*shape):
            run(launch)  # the next grid reads what this one writes
            kernel = launch.kernel.split(".")[1]
            if kernel not in options.only or time.monotonic() - begin > options.seconds:
                continue
            expected = {key: launch.arguments[key].clone() for key in launch.writes}
            found = [(microseconds(launch), "built in", "")]
            if kernel == "backward_keys" and launch.arguments["bias"] is not None and shape[1] % 16 == 0:
                bias = launch.arguments["bias"].contiguous()
                other = dataclasses.replace(
                    launch, arguments=launch.arguments | {"bias": bias, "bias_strides": bias.stride()}
                )
                found.append((microseconds(other), "bias with keys fastest", _difference(launch, expected)))
            for choice in CHOICES:
                try:
                    other = changed(launch, choice)
                    took = microseconds(other, choice.registers)
                except Exception as error:
                    found.append((1e9, str(choice), type(error).__name__))
                    continue
                found.append((took, str(choice), _difference(launch, expected)))
            run(launch)
            built_in = found[0][0]
            best = ", ".join(f"{what} {took:.0f}{' ' + note if note else ''}" for took, what, note in sorted(found)[:6])
            wrongs = sum("WRONG" in note for _, _, note in found)
            lines.append(
                f"{name:18} {kernel:17} built in {built_in:6.0f} us; {best}{f'; {wrongs} wrong' if wrongs else ''}"
            )
            print(lines[-1], flush=True)
            if options.output:
                options.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
