"""evodsp's Triton kernels: one file per kind of operator, with its kernels, and the functions that allocate results and launch
them. Of attention the kernels have a file of their own.

Kernels carry `no_type_check`, so that a type checker that decorates functions (the tests' import hook) leaves them alone:
Triton compiles their source. This is the only place that imports Triton. Without it kernels are plain functions, and all else
works, also on fake tensors. (torch imports Triton, too, where it is installed, as soon as it defines an operator.)
"""

from __future__ import annotations

from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=float)

__all__ = ["tl", "triton"]
