"""`scripts/benchmarks/gpu_ahead.py`: the kernels that it compiles are those that real blocks launch; it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from evodsp.model.kernels.operators import Kernels
from evodsp.model.kernels.triton import LAUNCHED
from evodsp.model.kernels.triton_kernels import launch
from scripts.benchmarks import gpu_ahead, gpu_cases
from scripts.benchmarks.gpu_rows import operators_of

CASES = (("evoformer", 5, 7), ("extra", 6, 7), ("templates", 2, 7))


@pytest.fixture
def nothing_is_launched(triton_installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators on a CPU allocate their results, and leave them empty."""
    operators = LAUNCHED.values()
    monkeypatch.setattr(launch, "run", lambda _: None)
    for operator in operators:
        operator.forget()
    yield
    for operator in operators:
        operator.forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_kernels_are_those_of_real_blocks(dtype: torch.dtype, nothing_is_launched: None) -> None:
    """Catches a block without numbers that is not the block that runs: another precision, parameters or residual stream."""
    config, kernels = gpu_cases.config_of(gpu_cases.TINY), Kernels(**operators_of("triton"))
    for kind, first, residues in CASES:
        with gpu_ahead.Launches() as planned:
            gpu_ahead.block(config, kind, first, residues, dtype)
        step = gpu_cases.block(config, kind, first, residues, torch.device("cpu"), dtype, kernels)
        with gpu_ahead.Launches() as launched:
            for _ in step():
                pass
        assert planned.calls == launched.calls > 0
        assert planned.found.keys() == launched.found.keys()


def test_shifted_tensors_have_kernels_of_their_own(triton_installed: None) -> None:
    """Catches addresses that are taken for multiples of 16: a kernel for those reads wrong numbers, or none, from others."""
    config = gpu_cases.config_of(gpu_cases.TINY)
    with gpu_ahead.Launches() as aligned:
        gpu_ahead.block(config, *CASES[0], torch.bfloat16)
    with gpu_ahead.Launches(shift=1) as shifted:
        gpu_ahead.block(config, *CASES[0], torch.bfloat16)
    norms = [{key for key in x.found if key.startswith("layer_norm.")} for x in (aligned, shifted)]
    assert norms[0]
    assert not norms[0] & norms[1]


def test_what_cannot_be_compiled_is_said(
    triton_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Catches an error of the compiler that ends the program, and one that nobody sees."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with gpu_ahead.Launches() as launches:
        gpu_ahead.checked("linear", torch.float32)
    [one] = launches.found.values()
    assert gpu_ahead.verdict(one) == ("", 0)
    tile = next(path for path, value in one.constants.items() if isinstance(value, int) and value > 1)
    one.constants[tile] = 3  # no power of two
    problem, _ = gpu_ahead.verdict(one)
    assert problem
