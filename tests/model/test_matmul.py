"""torch's settings of float32 products, of which the old one cannot be read after somebody has set the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from evodsp.model.graphs import _modes
from evodsp.model.precision import float32_matmul, is_tf32
from evodsp.planner.measure import tflops

CUDA, MKLDNN = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
BEFORE: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "the old setting": lambda: torch.set_float32_matmul_precision("high"),
    "the old setting of CPUs": lambda: torch.set_float32_matmul_precision("medium"),
    "the new setting": lambda: setattr(CUDA, "fp32_precision", "tf32"),
    "the new setting of CPUs": lambda: setattr(MKLDNN, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    CUDA.fp32_precision = MKLDNN.fp32_precision = "none"


def settings() -> list[str]:
    """The new setting, and the old one or that it cannot be read."""
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "cannot be read"
    return [CUDA.fp32_precision, MKLDNN.fp32_precision, old]


@pytest.mark.parametrize("name", BEFORE)
def test_what_the_user_has_set_stays(name: str) -> None:
    """Catches an error because a notebook has set torch's new setting, and any setting that is another one afterwards."""
    BEFORE[name]()
    before = settings()
    for precision, tf32 in (("high", True), ("highest", False)):
        with float32_matmul(precision):
            assert torch.get_float32_matmul_precision() == precision
            assert is_tf32() == tf32
            assert _modes("cpu")[-1] == tf32
        assert settings() == before
    assert tflops(torch.float32, on_gpu=False) > 0
    assert settings() == before
