"""Comparison of a parallel run with one device, in double precision."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-10


def close(found: Tensor, expected: Tensor, name: str) -> None:
    """Assert that both are equal up to `TOLERANCE` of the largest element. `name` says in the message what was compared."""
    # Some gradients are zero except for rounding: a softmax does not see a constant added to its logits.
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=0.1)
    assert error < TOLERANCE, f"{name}: {error:.1e}"
