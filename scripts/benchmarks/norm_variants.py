"""Tile sizes, warps and programs of layer norm's kernels and of sums of parts, timed on a CUDA GPU and checked in float64.

    python -m scripts.benchmarks.norm_variants [--seconds 15]

One line each: kernel, shape, layout, variant, microseconds, GB/s, share of a copy's speed, worst error over the largest number.
The first variant of each kernel is what the package does. All of these come first, then the others until the time is over.
Before each run the GPU's cache is overwritten; sums of parts find their input in it, as they do in a block.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels import layer_norm, sums
from evodsp.model.kernels.triton_kernels.launch import Launch, run

SIZES = [(32768, 256), (65536, 128), (196608, 256), (147456, 128), (1966080, 64)]
"""Positions and channels."""
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.unflatten(0, (-1, 128)).transpose(0, 1).contiguous().transpose(0, 1),
    "planes": lambda x: x.T.contiguous().T.unflatten(0, (-1, 128)),
}
"""How the input of the norm lies; its gradient is contiguous."""
CASES = [("contiguous", size) for size in SIZES] + [
    ("transposed", SIZES[0]),
    ("planes", SIZES[1]),
    ("planes", SIZES[3]),
]
GRADIENTS = [
    {"_VECTORS": 2, "_WARPS": 4, "_PARTS": 528},
    {"_VECTORS": 1, "_WARPS": 4, "_PARTS": 792},
    {"_VECTORS": 1, "_WARPS": 4, "_PARTS": 924},
    {"_VECTORS": 1, "_WARPS": 8, "_PARTS": 396},
    {"_VECTORS": 2, "_WARPS": 4, "_PARTS": 1056},
    {"_VECTORS": 2, "_WARPS": 8, "_PARTS": 264},
]
FORWARD = [{"_TILE": 4096}, {"_TILE": 2048}, {"_TILE": 8192}]
SUMS = [
    {"_TILE": 4096, "_PARTS": 1024, "_RESULTS": 8},
    {"_TILE": 4096, "_PARTS": 512, "_RESULTS": 8},
    {"_TILE": 4096, "_PARTS": 256, "_RESULTS": 8},
    {"_TILE": 2048, "_PARTS": 64, "_RESULTS": 8},
]
SUMMED = [(528, 512), (528, 256), (256, 1024), (1536, 1024), (2304, 512)]
"""Parts, results."""
RUNS, REPEATS = 7, 20
_FLUSHED = 256 << 20


@contextmanager
def _set(module: Any, values: dict[str, int]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def microseconds(work: Callable[[], object], flushed: Tensor | None, repeats: int = 1) -> float:
    """Median of a few runs. The GPU sleeps before each, so that it does not wait for the host."""
    found = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flushed is not None:
            flushed.zero_()
        torch.cuda._sleep(400_000 + 200_000 * repeats)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / repeats)
    return median(found)


def _formulas(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The results of all kernels, in float64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    out = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
    of_x, of_weight, of_bias = torch.autograd.grad(out, (x, weight, bias), grad.double())
    return {"out": out.detach(), "grad_x": of_x, "total": torch.stack((of_weight, of_bias))}


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double().view_as(expected) - expected).abs().max() / expected.abs().max())


def norms(
    kernel: str, layout: str, size: tuple[int, int], variants: list[dict[str, int]], device: str
) -> Iterator[tuple[str, str, dict[str, int], Launch, float]]:
    """A launch of each variant, which has run once, and its worst error."""
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(size, device=device).bfloat16())
    grad = torch.randn(x.shape, device=device).bfloat16()
    weight, bias = 1 + torch.randn(2, size[1], device=device) / 4
    expected = _formulas(x, grad, weight, bias)
    x4, grad4 = (t.reshape(1, -1, *t.shape[-2:]) if t.ndim == 2 else t.unsqueeze(0) for t in (x, grad))
    variance, mean = torch.var_mean(x4.float(), -1, correction=0)
    bodies: dict[str, tuple[Any, ...]] = {
        "forward": (layer_norm._forward_body, x4, weight, bias, 1e-5),
        "backward": (layer_norm._backward_body, grad4, x4, weight, mean, (variance + 1e-5).rsqrt()),
        "again": (layer_norm._again_body, grad4, x4, weight, bias),
    }
    body, *arguments = bodies[kernel]
    for variant in variants:
        with _set(layer_norm, variant):
            launches: list[Launch] = []
            body(launches.append, *arguments)
        results: dict[str, Tensor] = {}
        for launch in launches:
            run(launch)
            results |= {name: launch.arguments[name] for name in launch.writes if name in expected}
        yield kernel, layout, variant, launches[0], max(_error(x, expected[n]) for n, x in results.items())


def all_sums(variants: list[dict[str, int]], device: str) -> Iterator[tuple[str, str, dict[str, int], Launch, float]]:
    for size in SUMMED:
        parts = torch.randn(size, device=device)
        for variant in variants:
            with _set(sums, variant):
                launches: list[Launch] = []
                total = sums.sum_of_parts(launches.append, parts, torch.float32)
            run(launches[0])
            yield "sum_of_parts", f"{size}", variant, launches[0], _error(total, parts.double().sum(0))


def rows(device: str) -> Iterator[tuple[str, str, dict[str, int], Launch, float]]:
    """What the package does first."""
    for of in (slice(0, 1), slice(1, None)):
        for layout, size in CASES:
            kernels = {
                "contiguous": ("again", "backward", "forward"),
                "transposed": ("again",),
                "planes": ("backward",),
            }
            for kernel in kernels[layout]:
                if of.start and (layout != "contiguous" or size in SIZES[3:]) and kernel == "forward":
                    continue
                yield from norms(kernel, layout, size, (FORWARD if kernel == "forward" else GRADIENTS)[of], device)
        yield from all_sums(SUMS[of], device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=15.0)
    seconds = parser.parse_args().seconds
    start = time.perf_counter()
    flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    source, target = torch.randint(256, (2, _FLUSHED), dtype=torch.uint8, device="cuda")
    copy = 2 * _FLUSHED / microseconds(lambda: target.copy_(source), flushed) / 1e3
    empty = microseconds(lambda: None, None)
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, nothing {empty:.1f} us", flush=True)
    for kernel, case, variant, launch, error in rows("cuda"):
        hot = kernel == "sum_of_parts"
        took = microseconds(partial(run, launch), None if hot else flushed, REPEATS if hot else 1)
        speed = launch.bytes_moved / took / 1e3
        shape = "" if hot else str(tuple(launch.arguments["x"].shape))
        print(
            f"{kernel:12} {shape:20} {case:12} {' '.join(f'{k[1:].lower()} {v}' for k, v in variant.items()):32} "
            f"{took:8.1f} us {speed:6.0f} GB/s {speed / copy:5.2f}  error {error:.1e}",
            flush=True,
        )
        if time.perf_counter() - start > seconds:
            print("the time is over")
            break
    print(f"{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
