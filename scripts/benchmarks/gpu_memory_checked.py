"""One small block of each stack, forward and backward, by the Triton kernels: a program for a memory checker to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
      python3 -m scripts.benchmarks.gpu_memory_checked          # on a GPU; --cpu runs the blocks by the formulas

Without torch's cache of memory each tensor is an allocation of its own, so that a read or write beyond its end is seen.
Sizes are odd, and multiples of 16. Prints a line `result: KIND SIZES PRECISION ok` for each block. The exit code is that of
the checker.
"""

from __future__ import annotations

import sys

import torch

from evodsp.model.kernels.operators import Kernels

from . import gpu_cases
from .gpu_clock import drain
from .gpu_peers import FORMULAS

SIZES = (
    ("evoformer", 5, 19),
    ("evoformer", 16, 32),
    ("extra", 7, 19),
    ("extra", 32, 16),
    ("templates", 2, 19),
)


def main(words: list[str]) -> int:
    device = torch.device("cpu" if words == ["--cpu"] else "cuda")
    kernels = FORMULAS
    if device.type == "cuda":
        from evodsp.model.kernels import triton

        kernels = Kernels.of(triton)
    config = gpu_cases.config_of(gpu_cases.FULL)
    for dtype, name in ((torch.bfloat16, "bf16-mixed"), (torch.float32, "fp32")):
        for kind, first, residues in SIZES:
            drain(gpu_cases.block(config, kind, first, residues, device, dtype, kernels))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            print(f"result: {kind} {first} x {residues} {name} ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
