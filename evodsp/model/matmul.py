"""How precisely a GPU multiplies float32 matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evodsp.config import MatmulPrecision


@contextmanager
def float32_matmul(precision: MatmulPrecision) -> Iterator[None]:
    """Within this context products of float32 matrices have this precision; torch keeps the setting for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
