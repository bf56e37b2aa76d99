"""Sets the precision in which a GPU multiplies float32 matrices."""

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
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
