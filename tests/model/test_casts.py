"""The model in half precision: parameters cast once a step (`evodsp.model.precision`), and by autocast, wherever they are used,
with this device's rules and with a GPU's; and low-rank adapters (`evodsp.model.adapters`), whose sums are cast, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from evodsp.config import ModelConfig
from evodsp.model.adapters import adapted_weights, add_adapters, is_adapter, merged
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import chunked
from evodsp.model.kernels.operators import OPERATORS
from evodsp.model.precision import CastParameters
from evodsp.model.structure_module import StructureModule
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.small_model import config, features, halved, in_float32, tensors

FLOAT32 = ("structure_module", "heads.plddt", "input_embedder.relative_position")
"""Parts that compute in float32 with autocast too."""


def step(model: nn.Module, dtype: torch.dtype, casts: CastParameters | None) -> dict[str, Tensor]:
    """Outputs of the model, under autocast where `dtype` is bf16; the gradients are left in its parameters."""
    own = next(model.parameters()).dtype
    batch = {name: x.to(own) if x.is_floating_point() else x for name, x in features(1).items()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        if casts is not None:
            casts.make()
        found = tensors(model(batch, [Draws.root(0)]))
    torch.stack([value.to(torch.float64).square().mean() for value in found.values()]).sum().backward()
    if casts is not None:
        casts.drop()
    return {name: value.detach() for name, value in found.items()}


def test_outputs_and_gradients_are_those_of_autocast() -> None:
    """Catches copies in the place of other parameters, a layer that is not cast or should not be, gradients that go astray, and
    copies from before an optimizer step, the average's weights of a validation, or a move to another precision.

    Gradients of a parameter that is used several times are added in bf16, so they may differ in the last digit.
    """
    model = halved(config()).float()
    expected = step(model, torch.bfloat16, None)
    gradients = [p.grad for p in model.parameters()]
    casts = CastParameters(model)
    found = step(model, torch.bfloat16, casts)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        if name.startswith(FLOAT32):
            assert torch.equal(parameter.grad, gradient), name
        assert (parameter.grad - gradient).norm() <= 2**-7 * gradient.norm(), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    found, expected = step(model, torch.bfloat16, casts), step(copy.deepcopy(model), torch.bfloat16, None)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_copies_hide_parameters_only_between_make_and_drop() -> None:
    """Catches copies in checkpoints or in the optimizer, copies that outlive their step, and copies without autocast."""
    model = halved(config()).float()
    casts = CastParameters(model)
    before, weights = model.state_dict(), model.evoformer.blocks[0].msa_stack.transition.widen
    with casts:
        assert isinstance(weights.weight, nn.Parameter)
    with torch.autocast("cpu", torch.bfloat16), casts:
        assert weights.weight.dtype == weights.bias.dtype == torch.bfloat16
        assert torch.equal(weights.weight, weights._parameters["weight"].bfloat16())
        hidden = [name for name, module in model.named_modules() if "weight" in module.__dict__]
        assert model.state_dict().keys() == before.keys()
        assert all(x.dtype == torch.float32 for x in model.state_dict().values())
        assert all(x.dtype == torch.float32 for x in model.parameters())
    assert not [name for name in hidden if name.startswith(FLOAT32)]
    assert all(isinstance(module.weight, nn.Parameter) for module in model.modules() if hasattr(module, "weight"))


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
    sizes = config(recompute=False)  # in the backward pass it would run outside of `LikeCuda`
    model, batch = halved(sizes).float(), in_float32(features(1))
    with torch.no_grad():
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


RANK = 2


def chosen(name: str) -> bool:
    """Matrices of modules that compute in half precision, and of some that never do."""
    return name.startswith(("evoformer", "extra_msa_stack.blocks.0.pair_stack", "structure_module.attention"))


def frozen_model() -> AlphaFold:
    return halved(config()).requires_grad_(False)


def adapted_model(model: AlphaFold) -> AlphaFold:
    """A copy with adapters that are not zero."""
    adapted = copy.deepcopy(model)
    add_adapters(adapted, RANK, chosen, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name.endswith("_up"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_a_model_with_adapters_is_that_of_the_sums(dtype: torch.dtype) -> None:
    """Catches an adapter in another place or of another scale, a sum that is not formed in a part that computes in float32, and
    gradients that are not B' = W' A^T, A' = B^T W'. (')"""
    own = torch.float64 if dtype == torch.float64 else torch.float32
    base = frozen_model().to(own)
    adapted = adapted_model(base)
    whole = copy.deepcopy(base)
    whole.load_state_dict(merged(adapted.state_dict()))
    names = {name for name, _ in whole.named_parameters() if chosen(name) and f"{name}_up" in adapted.state_dict()}
    assert len(names) == len(adapted_weights(adapted)) > 30
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name in names)
    found, expected = (step(x, dtype, CastParameters(x)) for x in (adapted, whole))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9) if own == torch.float64 else None
        assert (value.float() - expected[name].float()).norm() <= 2**-7 * expected[name].float().norm(), name
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters()}
    values, allowed = adapted.state_dict(), 1e-9 if own == torch.float64 else 2**-6
    for name in names:
        of_sum = whole.get_parameter(name).grad
        assert gradients[name] is None
        for suffix, expected_one in (
            ("_up", of_sum @ values[f"{name}_down"].T),
            ("_down", values[f"{name}_up"].T @ of_sum),
        ):
            one = gradients[name + suffix]
            assert one.dtype == own
            assert (one - expected_one).norm() <= allowed * expected_one.norm() + 1e-12, name + suffix


def test_a_model_begins_as_it_was_and_draws_from_its_seed() -> None:
    """Catches a B that is not zero, draws that differ from rank to rank, and adapters as large as their matrix."""
    base = frozen_model().float()
    first, second = copy.deepcopy(base), copy.deepcopy(base)
    for model in (first, second):
        add_adapters(model, RANK, chosen, torch.Generator().manual_seed(3))
    expected = step(base.requires_grad_(True), torch.float32, CastParameters(base))
    assert all(
        torch.equal(value, expected[name]) for name, value in step(first, torch.float32, CastParameters(first)).items()
    )
    other = second.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in first.state_dict().items())
    for module, name in adapted_weights(first):
        weight = module._parameters[name]
        assert weight is not None
        assert min(weight.shape) > RANK
    assert not any(is_adapter(name) and not chosen(name) for name in first.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_stay_at_their_addresses(dtype: torch.dtype) -> None:
    """Catches sums that a recorded graph would read from a step before, and sums that outlive their step."""
    model = adapted_model(frozen_model().float())
    casts, found = CastParameters(model), []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_up"):
                    parameter.mul_(factor)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), casts:
            found.append([getattr(module, name) for module, name in adapted_weights(model)])
            sums = merged(model.state_dict())
            for name, module in model.named_modules():
                if f"{name}.weight_up" in sums or "weight_up" not in module._parameters:
                    continue
                torch.testing.assert_close(module.weight, sums[f"{name}.weight"].to(module.weight.dtype))
        assert all(isinstance(module.weight, nn.Parameter) for module, _ in adapted_weights(model))
    assert [x.data_ptr() for x in found[0]] == [x.data_ptr() for x in found[1]]


def test_nothing_is_computed_behind_frozen_parameters() -> None:
    """Catches copies in half precision that ask for gradients of frozen parameters: the backward pass of a run that trains the
    heads alone then went through the whole model."""
    counts = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = frozen_model().float()
        model.heads.requires_grad_(True)
        with FlopCounterMode(display=False) as counter:
            step(model, dtype, CastParameters(model))
        counts[dtype] = counter.get_total_flops()
    assert counts[torch.bfloat16] == counts[torch.float32]
