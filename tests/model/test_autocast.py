"""The model under bf16 autocast, with this device's rules and with a GPU's.

A GPU's autocast runs more operations in float32 than a CPU's (softmax, sums, layer norms). `LikeCuda` does so on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import chunked
from evodsp.model.kernels.operators import OPERATORS
from evodsp.model.structure_module import StructureModule
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.small_model import config, features, tensors

# The operations in PyTorch's list "CUDA ops that autocast to float32" that models and losses use; `square` is a `pow`.
WIDENED = {
    "softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod", "norm", "layer_norm", "exp", "expm1", "log", "log1p", "log2",
    "log10", "pow", "__pow__", "__rpow__", "square", "rsqrt", "reciprocal", "__rtruediv__", "__rdiv__", "softplus", "cdist",
    "nll_loss", "cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "acos", "asin", "tan",
}  # fmt: skip


class LikeCuda(TorchFunctionMode):
    """Under the CPU's autocast, casts to float32 the inputs of operations that a GPU's autocast would cast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widened(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x

        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in WIDENED:
            args, kwargs = tree_map(widened, (args, kwargs))
        return func(*args, **kwargs)


DEVICES = pytest.mark.parametrize("device", [nullcontext, LikeCuda], ids=["cpu", "like cuda"])
Device = Callable[[], AbstractContextManager[Any]]


@DEVICES
def test_attention(device: Device) -> None:
    """Catches a product of float32 weights and bf16 values written into a given output tensor: an error on GPUs only."""
    inputs = OPERATORS["biased_attention"].inputs(torch.device("cpu"), torch.bfloat16)
    leaves = [x.requires_grad_() for n, x in enumerate(inputs) if n != 1]
    expected = chunked.biased_attention(*(x.float() for x in inputs))
    with device(), torch.autocast("cpu", torch.bfloat16):
        found = chunked.biased_attention(*inputs)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    found.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in leaves)


@DEVICES
def test_whole_model(device: Device) -> None:
    """Catches dtypes that disagree only on GPUs, and parameters without a gradient.

    torch before 2.11 reuses, in the last pass, casts that were made in a pass without gradients.
    """
    sizes = config()
    off = {"checkpoint": False}  # recomputation in the backward pass runs outside of `LikeCuda`
    sizes = dataclasses.replace(
        sizes,
        templates=dataclasses.replace(sizes.templates, **off),
        evoformer=dataclasses.replace(sizes.evoformer, **off),
        extra_msa=dataclasses.replace(sizes.extra_msa, **off),
    )
    model = dense(AlphaFold(sizes)).float()
    batch = {name: x.float() if x.is_floating_point() else x for name, x in features(1).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        exact = tensors(model(batch, [Draws.root(0)]))
    with device(), torch.autocast("cpu", torch.bfloat16):
        found = tensors(model(batch, [Draws.root(0)]))
    for name, value in found.items():
        error = (value.float() - exact[name]).norm() / exact[name].norm()
        assert error < 0.03, f"{name}: {error:.1e}"
    torch.stack([value.float().square().mean() for value in found.values()]).sum().backward()
    without_gradient = [name for name, p in model.named_parameters() if p.grad is None]
    assert without_gradient == []


@DEVICES
def test_coordinates_are_not_rounded(device: Device) -> None:
    """Catches a structure module in bf16, whose spacing at 50 Å is 0.25 Å. AF2 runs it in single precision."""
    sizes = ModelConfig.preset("test")
    channels = sizes.channels
    module = dense(StructureModule(channels.single, channels.pair, sizes.structure_module)).float()
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(2, 9, channels.single, generator=generator)
    z = torch.randn(2, 9, 9, channels.pair, generator=generator)
    aatype, mask = torch.randint(20, (2, 9), generator=generator), torch.ones(2, 9)
    exact = module(s.bfloat16().float(), z, aatype, mask)
    with device(), torch.autocast("cpu", torch.bfloat16):
        found = module(s.bfloat16(), z, aatype, mask)
    assert found.positions.dtype == torch.float32
    torch.testing.assert_close(found.positions, exact.positions, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.angles, exact.angles, rtol=1e-5, atol=1e-4)
