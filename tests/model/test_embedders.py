"""Distances as bins, which embeddings of recycled positions and of templates begin with."""

from __future__ import annotations

import pytest
import torch

from evodsp.model.embedders import distance_one_hot, squared_edges


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        (0.0, None), (3.25, None), (3.3, 0), (4.4, 0), (4.6, 1), (10.0, 5), (20.7, 13), (20.8, 14), (25.0, 14),
        (120.0, 14), (5000.0, 14),
    ],
)  # fmt: skip
def test_the_bin_of_a_distance(distance: float, expected: int | None) -> None:
    """Catches a last bin with an upper end, which atoms of a large protein lie beyond, a first bin without a lower one, and
    edges of a neighbouring bin."""
    lower = squared_edges(3.25, 20.75, 15)
    found = distance_one_hot(
        torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[0.6 * distance, 0.0, -0.8 * distance]]), lower
    )
    assert found.shape == (1, 1, 15)
    assert found[0, 0].nonzero().flatten().tolist() == ([] if expected is None else [expected])
