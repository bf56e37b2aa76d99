"""Distances as bins, which embeddings of recycled positions and of templates begin with."""

from __future__ import annotations

import pytest
import torch

from evodsp.config import ChannelsConfig, EmbedderConfig, TemplateConfig
from evodsp.model.embedders import RecyclingEmbedder, distance_one_hot, squared_edges
from evodsp.model.templates import TemplateEmbedder


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


def test_the_range_of_distances_is_the_configs() -> None:
    """Catches AlphaFold2's range of bins in a model that has another one."""
    recycling = EmbedderConfig(recycle_bins=5, recycle_min_distance=2.0, recycle_max_distance=10.0)
    templates = TemplateConfig(
        channels=4, blocks=1, distogram_bins=5, distogram_min_distance=2.0, distogram_max_distance=10.0
    )
    edges = torch.tensor([4.0, 16.0, 36.0, 64.0, 100.0])
    torch.testing.assert_close(RecyclingEmbedder(ChannelsConfig(msa=4, pair=4, single=4), recycling).lower, edges)
    torch.testing.assert_close(TemplateEmbedder(4, templates).lower, edges)
