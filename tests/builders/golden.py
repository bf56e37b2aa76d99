"""DeepMind's arrays: comparison of a single module with them, and the model of the end-to-end pack."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor, nn

from evodsp.config import ModelConfig


class Holder(nn.Module):
    """Gives a module the name `x`, under which the table of parameter names finds it."""

    def __init__(self, x: nn.Module) -> None:
        super().__init__()
        self.x = x


def close(actual: Tensor | np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Assert equal shapes, and differences up to `tolerance` of the largest element. `what` names the array in the message."""
    actual = np.asarray(actual.detach() if isinstance(actual, Tensor) else actual)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{what}: {error:.2e} of the maximum, allowed {tolerance:.0e}"


CONFIG = dataclasses.replace(
    (PTM := ModelConfig.preset("model_1_ptm")),
    evoformer=dataclasses.replace(PTM.evoformer, blocks=2),
    extra_msa=dataclasses.replace(PTM.extra_msa, blocks=1),
    templates=dataclasses.replace(PTM.templates, blocks=1),
    structure_module=dataclasses.replace(PTM.structure_module, iterations=2),
)
