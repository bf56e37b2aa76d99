"""Parameters for tests. AlphaFold2 starts with zeros in every residual branch, which would hide almost any mistake."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def noisy(model: Model) -> Model:
    """Add noise, of torch's own generator, to every parameter of `model`. Returns the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
