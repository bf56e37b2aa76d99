"""Times our kernels of sums and products with other tiles than those that they launch, on a GPU, against float64.

    python -m scripts.benchmarks.kernel_variants [--only hidden slope] [--sizes 256 384]

One line a variant: microseconds of one launch between two CUDA events (the median of several replays of a graph of ten), GB/s
of the bytes that it must move, and its error. The first variant of each kernel is what the operator launches.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels import columns, gated_operands, hidden, outer_product
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator, run, tiles

_LAUNCHES, _REPLAYS = 10, 7


@dataclass(frozen=True)
class Variant:
    """What is launched instead: constants, warps, stages."""

    constants: dict[str, int] = field(default_factory=dict)
    warps: int | None = None
    stages: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def of(self, launch: Launch, programs: Callable[[Launch], int]) -> Launch:
        changed = replace(
            launch,
            constants={**launch.constants, **self.constants},
            arguments={**launch.arguments, **self.arguments},
            warps=self.warps or launch.warps,
            stages=self.stages or launch.stages,
        )
        return replace(changed, programs=programs(changed))

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in {**self.constants, **self.arguments}.items()]
        words += [f"{self.warps} warps"] if self.warps else []
        words += [f"{self.stages} stages"] if self.stages else []
        return " ".join(words) or "as launched"


@dataclass(frozen=True)
class Case:
    """A kernel at one size."""

    launch: Launch
    expected: dict[str, Tensor]
    """What it writes, in float64, by the argument's name. Parts are summed before they are compared."""
    programs: Callable[[Launch], int]
    variants: Sequence[Variant]


def launches_of(operator: Operator, *arguments: Any) -> dict[str, Launch]:
    """The grids of a call, with real tensors, by the kernel's name; each has run once."""
    found: dict[str, Launch] = {}

    def note(launch: Launch) -> None:
        found.setdefault(launch.kernel, launch)
        run(launch)

    operator.body(note, *arguments)
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def hidden_cases(residues: int) -> Iterator[Case]:
    sequences = {256: 128, 384: 512}[residues]
    for positions, channels in ((sequences * residues, 256), (residues**2, 128)):
        grad, narrow = random(positions, channels), random(channels, 4 * channels) / channels**0.5
        layer = random(positions, 4 * channels).relu()
        launch = launches_of(hidden.OPERATORS[0], grad, narrow, layer, torch.bfloat16)["hidden.backward"]
        exact = torch.where(layer > 0, grad.double() @ narrow.double(), 0.0)

        def programs(launch: Launch) -> int:
            a, c = launch.arguments, launch.constants
            return tiles(a["positions"], c["TILE"]) * tiles(a["width"], c["TILE_H"])

        yield Case(
            launch,
            {"slope": exact, "sums": exact.sum(0)},
            programs,
            [
                Variant(),
                Variant({"TILE_H": 64}, warps=4),
                Variant({"TILE_H": 64}, warps=8),
                Variant(stages=2),
                Variant(stages=4),
                Variant({"TILE_C": 32}, stages=4),
                Variant({"TILE_H": 256}, warps=8),
                Variant({"TILE": 128, "TILE_H": 128}, warps=4),
            ],
        )


def outer_cases(residues: int, which: str) -> Iterator[Case]:
    c, z = 32, 128
    products, weight = random(residues, c, residues, c), random(z, c * c) / c
    counts = torch.rand(residues, residues, 1, device="cuda") + 1
    grad = random(residues, residues, z)
    found = launches_of(outer_product.OPERATORS[1], grad, products, weight, counts, torch.bfloat16)

    def programs(launch: Launch) -> int:
        a, t = launch.arguments, launch.constants
        if launch.kernel == "outer_product.slope":
            return residues * tiles(residues, t["TILE_J"])
        if launch.kernel == "outer_product.scale":
            return int(a["parts"]) * tiles(z, t["TILE_Z"])
        return int(a["parts"]) * tiles(z, t["TILE_Z"]) * tiles(c * c, t["TILE_K"])

    quotient = grad.double() / counts.double()
    if which == "scale":
        variants = [
            Variant(),
            Variant({"TILE": 32}, warps=4),
            Variant({"TILE": 128}),
            Variant({"TILE": 32}),
        ]
        yield Case(found["outer_product.scale"], {"scaled": quotient, "sums": quotient.sum((0, 1))}, programs, variants)
    elif which == "slope":
        exact = (quotient @ weight.double()).view(residues, residues, c, c).transpose(1, 2)
        variants = [
            Variant(),
            Variant({"TILE_K": 32}),
            Variant({"TILE_K": 128}),
            Variant({"TILE_K": 64}, stages=3),
            Variant({"TILE_J": 64, "TILE_K": 64}, warps=4),
            Variant({"TILE_J": 64, "TILE_K": 128}, warps=4),
            Variant({"TILE_J": 128, "TILE_K": 64}, warps=4),
        ]
        yield Case(found["outer_product.slope"], {"slope": exact}, programs, variants)
    else:
        exact = torch.einsum("ijz,icjd->zcd", quotient, products.double()).flatten(1)
        parts = [33, 66, 132]
        sums = {n: torch.empty(n, z, c * c, device="cuda") for n in parts}
        variants = [
            Variant(),
            Variant({"TILE_J": 32}, stages=4),
            Variant({"TILE_J": 32}, stages=6),
            Variant(stages=4),
            Variant({"TILE_K": 128}, stages=3, arguments={"parts": 33, "sums": sums[33]}),
            Variant({"TILE_K": 128}, stages=4, arguments={"parts": 33, "sums": sums[33]}),
            Variant({"TILE_K": 128}, warps=4, stages=3, arguments={"parts": 33, "sums": sums[33]}),
            Variant({"TILE_K": 128, "TILE_J": 128}, stages=3, arguments={"parts": 16, "sums": sums[33][:16]}),
        ]
        yield Case(found["outer_product.weight_gradient"], {"sums": exact}, programs, variants)


def columns_cases(residues: int) -> Iterator[Case]:
    sequences = {256: 128, 384: 512}[residues]
    m, z = random(sequences * residues, 1024), random(residues**2, 512)
    for x in (m[:, :256].contiguous(), m[:, -256:], z[:, :128].contiguous(), z[:, -128:], m[:, :64].contiguous()):
        launch = launches_of(columns.OPERATORS[0], x, torch.bfloat16)["columns.sums"]
        tile = launch.constants["TILE"]

        def parts(count: int, x: Tensor = x) -> dict[str, Any]:
            return {"parts": count, "total": torch.empty(count, x.shape[1], device="cuda")}

        yield Case(
            launch,
            {"total": x.double().sum(0)},
            lambda launch: int(launch.arguments["parts"]),
            [
                Variant(),
                Variant({"TILE": tile // 2}, arguments=parts(256)),
                Variant({"TILE": tile // 2}, arguments=parts(512)),
                Variant({"TILE": tile // 2}, warps=4, arguments=parts(528)),
                Variant({"TILE": tile // 2}, warps=4, arguments=parts(264)),
                Variant({"TILE": tile // 4}, warps=4, arguments=parts(528)),
                Variant(arguments=parts(132)),
            ],
        )


def gated_cases(residues: int) -> Iterator[Case]:
    channels = 128
    projected, mask = random(1, residues, residues, 4 * channels), torch.ones(1, residues, residues, device="cuda")
    grad = random(2, 1, channels, residues, residues)
    found = launches_of(gated_operands.OPERATORS[1], grad, projected, mask.bfloat16(), torch.bfloat16)
    launch = found["gated_operands.backward"]
    values, gates = (x.double() for x in projected.chunk(2, -1))
    opened, upstream = gates.sigmoid(), grad.double().permute(1, 3, 4, 0, 2).flatten(-2)
    through = upstream * opened
    of_gates = through * values * (1 - opened)

    def programs(launch: Launch) -> int:
        t = launch.constants
        return residues * tiles(residues, t["TILE_J"]) * tiles(2 * channels, t["TILE_C"])

    expected = {"grad_values": through, "grad_gates": of_gates}
    variants = [
        Variant(),
        Variant({"TILE_J": 64, "TILE_C": 64}, warps=8),
        Variant({"TILE_J": 64, "TILE_C": 32}),
        Variant({"TILE_J": 128, "TILE_C": 32}),
        Variant({"TILE_J": 128, "TILE_C": 64}, warps=8),
        Variant({"TILE_J": 64, "TILE_C": 128}, warps=8),
    ]
    if "sums" in launch.arguments:
        sums = torch.empty(residues * tiles(residues, 32), 4 * channels, device="cuda")
        variants = [replace(v, arguments={"sums": sums}) if v.constants else v for v in variants]
    yield Case(launch, expected, programs, variants)


CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "columns": columns_cases,
    "hidden": hidden_cases,
    "scale": lambda residues: outer_cases(residues, "scale"),
    "slope": lambda residues: outer_cases(residues, "slope"),
    "weight_gradient": lambda residues: outer_cases(residues, "weight_gradient"),
    "gated_operands": gated_cases,
}


def compile_all(case: Case) -> None:
    """Run each variant once, so that they are compiled beside each other."""

    def first(variant: Variant) -> None:
        with contextlib.suppress(Exception):  # is named where the variant is timed
            run(variant.of(case.launch, case.programs))

    with ThreadPoolExecutor(len(case.variants)) as pool:
        list(pool.map(first, case.variants))
    torch.cuda.synchronize()


def microseconds(launch: Launch) -> float:
    """Microseconds of one launch, among launches one after another."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            run(launch)
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _LAUNCHES)
    return statistics.median(times)


def error(launch: Launch, expected: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest number."""
    worst = 0.0
    for name, exact in expected.items():
        found = launch.arguments[name]
        if name in ("sums", "total") and found.ndim > exact.ndim:
            found = found.double().sum(0)
        worst = max(worst, float((found.double().view(exact.shape) - exact).abs().max() / exact.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", type=int, choices=(256, 384), default=[256])
    options = parser.parse_args()
    for residues in options.sizes:
        for name in options.only:
            for case in CASES[name](residues):
                shape = next(tuple(x.shape) for x in case.launch.arguments.values() if isinstance(x, Tensor))
                compile_all(case)
                for variant in case.variants:
                    words = f"{case.launch.kernel:30} {residues} {shape!s:22} {_short(variant):60}"
                    try:
                        launch = variant.of(case.launch, case.programs)
                        run(launch)
                        found = error(launch, case.expected)
                        us = microseconds(launch)
                    except Exception as failure:  # the next variant can be timed all the same
                        print(words, f"{type(failure).__name__}: {str(failure).splitlines()[:1]}", flush=True)
                        continue
                    print(
                        words, f"{us:8.1f} us {launch.bytes_moved / us / 1e3:7.0f} GB/s error {found:.1e}", flush=True
                    )


def _short(variant: Variant) -> str:
    shown = {k: v for k, v in variant.arguments.items() if not isinstance(v, Tensor)}
    return str(replace(variant, arguments=shown))


if __name__ == "__main__":
    main()
