"""Comparison of a parallel run with one device, in double precision."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-10


def close(found: Tensor, expected: Tensor, name: str) -> None:
    """Assert equal shapes, and differences below `TOLERANCE` of the largest element.

    `name` names the tensor in the message.
    """
    assert found.shape == expected.shape, f"{name}: shape {list(found.shape)}, expected {list(expected.shape)}"
    # The clamp is for gradients that are zero up to rounding: a constant added to its logits leaves a softmax unchanged.
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=0.1)
    assert error < TOLERANCE, f"{name}: {error:.1e}"
