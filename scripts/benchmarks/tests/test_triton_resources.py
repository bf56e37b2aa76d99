"""Triton kernels, compiled ahead of time: they fit the GPUs, and no kernel is slow by construction."""

from __future__ import annotations

import pytest
import torch

from evodsp.model.kernels.triton_kernels import triangle
from evodsp.model.kernels.triton_kernels.launch import Launch
from scripts.benchmarks import triton_resources as resources
from scripts.benchmarks.triton_ahead import SHARED_LIMIT

# Kernels that multiply matrices.
PRODUCTS = ("attention.", "global_attention.", "gate.hidden_backward", "outer_product.", "triangle.")
# Bytes that a thread may spill, in tiles that hold the sums of a whole weight: an A100 has no room for all that they need.
# Attention with a bias at a width of 16 in bf16: 16 bytes, though the compiler takes 72 registers only (Triton 3.7.1).
SPILLS = {
    ("attention.forward", 100): 32,
    ("triangle.output_backward", 80): 2048,
    ("triangle.output_backward", 90): 32,
    ("triangle.output_backward", 100): 32,
    ("triangle.operands_backward", 80): 32,
    ("triangle.weights_backward", 90): 32,
}


@pytest.fixture(autouse=True)
def _own_cache(
    triton_installed: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels of this session go into a folder of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def _check(launch: Launch, architecture: int) -> None:
    needs = resources.compile_for(launch, architecture)
    where = f"{launch.kernel} on sm_{architecture}"
    assert needs.stack <= SPILLS.get((launch.kernel, architecture), 0), f"{where} spills {needs.stack} bytes"
    assert needs.shared <= SHARED_LIMIT[architecture], where
    assert needs.shared <= triangle.SHARED_MEMORY or not launch.kernel.startswith("triangle."), where
    assert needs.warps_resident >= 8, f"{where}: {needs.warps_resident} warps"
    multiplies = launch.kernel.startswith(PRODUCTS) and launch.kernel not in (
        "outer_product.scale",
        "attention.lay_out",
    )
    assert bool(needs.tensor_cores) == multiplies, f"{where}: {needs.tensor_cores}"


def test_attention_compiles_for_hopper() -> None:
    """Catches a kernel that the interpreter runs but the compiler refuses, and registers that spill."""
    for one in resources.attention_passes("", rows=128, length=256, heads=8, width=32, biased=True):
        for launch in one.launches[:2]:
            _check(launch, 90)


def test_attention_fits_at_a_length_that_16_does_not_divide() -> None:
    """Catches loads of single numbers of the bias, whose addresses fill a thread's registers, as proteins of most lengths
    made them: so many that the forward pass spilled."""
    for one in resources.attention_passes("", rows=250, length=250, heads=4, width=32, biased=True):
        for launch in one.launches:
            if launch.kernel.startswith("attention."):
                _check(launch, 90)


def test_outer_products_compile_for_hopper() -> None:
    """Catches the same in the kernels of the outer product."""
    for one in resources.outer_passes("", residues=256, channels=32, results=128):
        for launch in one.launches:
            _check(launch, 90)


@pytest.mark.parametrize("channels", triangle.WIDTHS)
def test_triangle_multiplication_compiles_for_hopper(channels: int) -> None:
    """Catches the same in its kernels, at a length that 16 does not divide."""
    for one in resources.triangle_passes("", residues=250, channels=channels):
        for launch in one.launches:
            _check(launch, 90)


@pytest.mark.verify
@pytest.mark.parametrize("architecture", [80, 100])
@pytest.mark.parametrize("channels", triangle.WIDTHS)
@pytest.mark.parametrize("residues", [250, 256])
def test_triangle_multiplication_fits(residues: int, channels: int, architecture: int) -> None:
    """Catches spills, and more shared memory than the operator asks a card for."""
    for one in resources.triangle_passes("", residues, channels):
        for launch in one.launches:
            _check(launch, architecture)


@pytest.mark.verify
@pytest.mark.parametrize("architecture", resources.ARCHITECTURES)
@pytest.mark.parametrize("channels", [8, 12, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_products_fit_at_all_widths(architecture: int, channels: int, dtype: torch.dtype) -> None:
    """Catches tiles that are too large for many channels or for fp32, in kernels of outer products and hidden layers."""
    outer = resources.outer_passes("", residues=40, channels=channels, results=48, dtype=dtype)
    for one in [*outer, *resources.hidden_passes("", positions=300, channels=4 * channels, dtype=dtype)]:
        for launch in one.launches:
            _check(launch, architecture)


@pytest.mark.verify
@pytest.mark.parametrize("architecture", resources.ARCHITECTURES)
def test_kernels_fit_at_the_presets_sizes(architecture: int) -> None:
    """Catches spills, shared memory beyond the GPU's, and products that do not run on tensor cores."""
    for one in resources.passes():
        for launch in one.launches:
            _check(launch, architecture)


@pytest.mark.verify
@pytest.mark.parametrize(("architecture", "length"), [(80, 80), (90, 80), (90, 253), (100, 80)])
@pytest.mark.parametrize("width", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_attention_fits_at_all_head_widths(architecture: int, length: int, width: int, dtype: torch.dtype) -> None:
    """Catches tiles that are too large for wide heads or for fp32."""
    for one in resources.attention_passes("", rows=16, length=length, heads=2, width=width, biased=True, dtype=dtype):
        for launch in one.launches:
            _check(launch, architecture)
