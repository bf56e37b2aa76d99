"""One rank of a sequence group gives its batch to the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.config import ParallelConfig
from evodsp.training.world import MeshWorld
from tests.ranks import RankPool


def batch_of(number: int) -> dict[str, Tensor]:
    """Tensors of several types, whose bytes are no multiple of a type's; one is empty, one a scalar, one a view."""
    return {
        "letters": torch.arange(13, dtype=torch.int8) + number,
        "kept": torch.tensor([True, False, True]),
        "keys": torch.tensor([[-(1 << 62), number]]).expand(2, 2),
        "cells": torch.zeros(0, dtype=torch.int32),
        "positions": torch.linspace(0, number, 14, dtype=torch.float64).view(2, 7).T,
        "resolution": torch.tensor(float(number)),
    }


def shared(group: Any, sequence: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    world = MeshWorld(ParallelConfig(sequence=sequence))
    on_device = batch_of(10 + world.data_rank) if world.reads else {}
    return world.share(on_device, {"sample_index": torch.tensor([dist.get_rank(group)])}, torch.device("cpu"))


def texts(group: Any, sequence: int) -> list[str]:
    return MeshWorld(ParallelConfig(sequence=sequence)).of_sample(f"rank {dist.get_rank(group)}")


def test_ranks_of_a_sample_hear_each_other(pool: RankPool) -> None:
    """Catches texts of another sample's ranks, and texts in another order than the ranks."""
    for sequence in (1, 2, 4):
        for rank, found in enumerate(pool.run(4, texts, sequence)):
            first = rank - rank % sequence
            assert found == [f"rank {number}" for number in range(first, first + sequence)]


def test_all_ranks_of_a_group_hold_what_one_read(pool: RankPool) -> None:
    """A batch of another group, values at the wrong bytes, and a rank that keeps its own."""
    for sequence in (1, 2, 4):
        for rank, (found, host) in enumerate(pool.run(4, shared, sequence)):
            wanted = batch_of(10 + rank // sequence)
            assert found.keys() == wanted.keys()
            for name, values in wanted.items():
                assert found[name].dtype == values.dtype
                assert torch.equal(found[name], values), name
            assert host["sample_index"].tolist() == [rank - rank % sequence]
