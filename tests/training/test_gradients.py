"""From backward passes to what the optimizer takes, on one process and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.training.gradients import FlatGradients, PlainGradients

SAMPLES = 4


def toy() -> nn.Module:
    """Two layers, of which a sample uses the second one only where its number is odd."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 5), "second": nn.Linear(5, 2)}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def loss_of(model: nn.Module, sample: int) -> Tensor:
    """Of very different size from sample to sample: some gradients are clipped, some are not."""
    hidden = model["first"](torch.arange(3.0, dtype=torch.float64) + sample)  # type: ignore[index]
    return (model["second"](hidden) if sample % 2 else hidden).square().sum() * 10.0 ** -(2 * sample)  # type: ignore[index]


def loop_over_samples(clip: float) -> tuple[list[Tensor], list[float]]:
    """AF2's rule, written out: each sample's gradient by itself, clipped, then the mean."""
    model = toy()
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    norms = []
    for sample in range(SAMPLES):
        gradients = torch.autograd.grad(loss_of(model, sample), list(model.parameters()), allow_unused=True)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients if g is not None), torch.zeros(())).double())
        norms.append(float(norm))
        for sums, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                sums += gradient * min(1.0, clip / (float(norm) + 1e-6)) / SAMPLES
    return total, norms


def test_clipping_per_sample_is_a_loop_over_samples() -> None:
    """Clipping the accumulated gradient, forgetting that the loss was divided, or a parameter that one sample does not use."""
    clip = 0.1
    expected, norms = loop_over_samples(clip)
    assert min(norms) < clip < max(norms), "some must be clipped and some not"
    model = toy()
    gradients = FlatGradients(model.parameters(), None, clip, per_sample=True)
    for _ in range(2):  # a second step starts anew
        gradients.begin()
        for sample in range(SAMPLES):
            (loss_of(model, sample) / SAMPLES).backward()
            gradients.add(SAMPLES)
        norm = gradients.finish()
        assert float(norm) == pytest.approx(sum(norms) / SAMPLES)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("clip", [None, 0.1, 1e6])
def test_clipping_by_batch_is_pytorchs(clip: float | None) -> None:
    reference = toy()
    sum((loss_of(reference, sample) / SAMPLES for sample in range(SAMPLES)), torch.zeros(())).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf"))
    for kind in ("flat", "plain"):
        model = toy()
        parameters = list(model.parameters())
        gradients: Any = (
            FlatGradients(parameters, None, clip, per_sample=False)
            if kind == "flat"
            else PlainGradients(parameters, clip)
        )
        gradients.begin()
        for sample in range(SAMPLES):
            (loss_of(model, sample) / SAMPLES).backward()
            gradients.add(SAMPLES)
        assert float(gradients.finish()) == pytest.approx(float(norm))
        for parameter, other in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_gradients_survive_a_zero_grad_elsewhere() -> None:
    """Lightning sets gradients to None before a validation; autograd would then put them beside the flat tensor."""
    model = toy()
    gradients = FlatGradients(model.parameters(), None, None, per_sample=False)
    model.zero_grad(set_to_none=True)
    gradients.begin()
    loss_of(model, 1).backward()
    assert float(gradients.finish()) > 0
