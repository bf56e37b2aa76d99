"""The precision in which a GPU multiplies float32 matrices: torch's setting, read and set.

torch has an old setting (`torch.set_float32_matmul_precision`, `allow_tf32`) and a new one (`fp32_precision` of each backend).
The old one sets the new one too, and raises when it is read after somebody has set the new one. So only the new one is read
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evodsp.config import MatmulPrecision


@contextmanager
def float32_matmul(precision: MatmulPrecision) -> Iterator[None]:
    """A context in which products of float32 matrices have this precision. The setting is torch's and holds for the whole
    process.
    """
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, mkldnn.fp32_precision
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(_OLD.get(before, "highest"))
        cuda.fp32_precision, mkldnn.fp32_precision = before


_OLD = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
"""The old setting that gives these values of the new one, for CUDA and for CPUs."""


def is_tf32() -> bool:
    """Whether a GPU rounds the factors of float32 products to TF32."""
    precision: str = torch._C._get_fp32_precision_getter(
        "cuda", "matmul"
    )  # of torch.backends.cuda.matmul, without its detour
    return precision == "tf32"
