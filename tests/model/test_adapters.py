"""Low-rank adapters (`evodsp.model.adapters`) beside a model whose weights are W + B A."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from evodsp.model.adapters import adapted_weights, add_adapters, is_adapter, merged
from evodsp.model.alphafold import AlphaFold
from evodsp.model.precision import CastParameters
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.small_model import config, features, tensors

RANK = 2


def chosen(name: str) -> bool:
    """Matrices of modules that compute in half precision, and of some that never do."""
    return name.startswith(("evoformer", "extra_msa_stack.blocks.0.pair_stack", "structure_module.attention"))


def frozen_model() -> AlphaFold:
    model = dense(AlphaFold(config()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model.requires_grad_(False)


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


def step(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    batch = {
        name: x.to(next(model.parameters()).dtype) if x.is_floating_point() else x for name, x in features(1).items()
    }
    casts = CastParameters(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        casts.make()
        found = tensors(model(batch, [Draws.root(0)]))
    torch.stack([value.to(torch.float64).square().mean() for value in found.values()]).sum().backward()
    casts.drop()
    return {name: value.detach() for name, value in found.items()}


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
    found, expected = step(adapted, dtype), step(whole, dtype)
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
    expected = step(base.requires_grad_(True))
    assert all(torch.equal(value, expected[name]) for name, value in step(first).items())
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
            step(model, dtype)
        counts[dtype] = counter.get_total_flops()
    assert counts[torch.bfloat16] == counts[torch.float32]
