"""Shard sizes equal torch.tensor_split's for any number of ranks."""

from __future__ import annotations

import torch

from evodsp.parallel.collectives import shard_sizes, shard_slice


def test_shards_are_those_of_tensor_split() -> None:
    """Catches a second rule for uneven shards: neighbouring ranks would exchange the wrong entries."""
    for whole in range(12):
        for ranks in range(1, 8):
            parts = torch.arange(whole).tensor_split(ranks)
            assert shard_sizes(whole, ranks) == tuple(map(len, parts))
            for rank, part in enumerate(parts):
                assert torch.arange(whole)[shard_slice(whole, ranks, rank)].equal(part)
