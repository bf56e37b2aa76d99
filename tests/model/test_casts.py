"""Parameters cast to half precision once a step (`evodsp.model.precision`), and by autocast, wherever they are used."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from evodsp.model.alphafold import AlphaFold
from evodsp.model.precision import CastParameters
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from tests.builders.small_model import config, features, tensors

FLOAT32 = ("structure_module", "heads.plddt", "input_embedder.relative_position")
"""Parts that compute in float32 with autocast too."""


def small_model() -> AlphaFold:
    """All parts of the model in float32, with parameters small enough for bf16. Activations are recomputed."""
    model = dense(AlphaFold(config())).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def step(model: nn.Module, casts: CastParameters | None) -> dict[str, Tensor]:
    """Outputs of the model under bf16 autocast; the gradients are left in its parameters."""
    batch = {name: x.float() if x.is_floating_point() else x for name, x in features(1).items()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        if casts is not None:
            casts.make()
        found = tensors(model(batch, [Draws.root(0)]))
    torch.stack([value.float().square().mean() for value in found.values()]).sum().backward()
    if casts is not None:
        casts.drop()
    return {name: value.detach() for name, value in found.items()}


def test_outputs_and_gradients_are_those_of_autocast() -> None:
    """Catches copies in the place of other parameters, a layer that is not cast or should not be, and gradients that go astray.

    Gradients of a parameter that is used several times are added in bf16, so they may differ in the last digit.
    """
    model = small_model()
    expected = step(model, None)
    gradients = [p.grad for p in model.parameters()]
    found = step(model, CastParameters(model))
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        if name.startswith(FLOAT32):
            assert torch.equal(parameter.grad, gradient), name
        assert (parameter.grad - gradient).norm() <= 2**-7 * gradient.norm(), name


def test_each_step_casts_the_parameters_of_that_step() -> None:
    """Catches copies from before an optimizer step, the average's weights of a validation, or a move to another precision."""
    model = small_model()
    casts = CastParameters(model)
    step(model, casts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    found = step(model, casts)
    expected = step(copy.deepcopy(model), None)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_copies_hide_parameters_only_between_make_and_drop() -> None:
    """Catches copies in checkpoints or in the optimizer, copies that outlive their step, and copies without autocast."""
    model = small_model()
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
