from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from evodsp.data.dataset import ChainDataset
from evodsp.data.store import FeatureStore
from evodsp.errors import FileFormatError, UserError
from evodsp.training.chains import Chains
from evodsp.training.config import DataConfig
from evodsp.training.datamodule import ChainDataModule
from evodsp.training.loader import BatchLoader, EpochSampler, TrainingLoader, collate_or_error, whole_batches
from evodsp.training.world import World

CHECK = World().check_batch


class Numbers(ChainDataset):
    """Sample i is the number i; `broken` ones are a mistake in a file."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken
        self.keys = ("a",)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self.broken:
            raise FileFormatError("x.a3m", "cut short", line=7)
        return {"aatype": torch.tensor([index])}


def indices(stream: BatchLoader) -> list[int]:
    return [int(i) for batch in stream for i in batch["sample_index"]]


def test_epochs_go_on_where_the_last_one_ended() -> None:
    """Every epoch showing the same samples."""
    stream = TrainingLoader(Numbers(), EpochSampler(2, batches=3), 0, CHECK)
    assert len(stream) == 3
    assert indices(stream) == [0, 1, 2, 3, 4, 5]
    assert indices(stream) == [6, 7, 8, 9, 10, 11]


def test_ranks_share_the_global_indices() -> None:
    """Rank d of D takes the indices that are d modulo D; another rule changes the run with the number of ranks."""
    streams = [TrainingLoader(Numbers(), EpochSampler(2, 2, rank, ranks=3), 0, CHECK) for rank in range(3)]
    batches = [[b["sample_index"].tolist() for b in stream] for stream in streams]
    assert batches == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_a_resume_yields_the_rest_of_the_epoch(taken: int) -> None:
    """A resume that starts the epoch anew, skips a batch, or forgets to end the epoch; both ends of an epoch included."""
    stream = TrainingLoader(Numbers(), EpochSampler(1, batches=3), 0, CHECK)
    seen: list[int] = []
    while len(seen) < taken:
        for batch in stream:
            seen.append(int(batch["sample_index"]))
            if len(seen) == taken:
                break
    other = TrainingLoader(Numbers(), EpochSampler(1, batches=3), 0, CHECK)
    other.load_state_dict(stream.state_dict())
    assert seen + indices(other) == list(range(3 * (taken // 3 + 1)))


def test_epochs_hold_whole_optimizer_steps() -> None:
    """A last accumulation of fewer batches than the others."""
    assert whole_batches(samples=10, batch_size=2, ranks=1, accumulate=1) == 5
    assert whole_batches(samples=10, batch_size=2, ranks=2, accumulate=2) == 4


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.verify)])
def test_a_mistake_in_a_file_comes_out_as_it_was_raised(num_workers: int) -> None:
    """PyTorch wraps an exception of a worker in its traceback, and cannot rebuild one whose constructor takes two arguments."""
    stream = BatchLoader(Numbers(broken=(1,)), EpochSampler(1, batches=3), num_workers, CHECK)
    with pytest.raises(UserError) as caught:
        list(stream)
    assert str(caught.value) == "x.a3m:7: cut short"


def test_workers_give_the_same_samples() -> None:
    """Prefetching that advances the saved position."""
    stream = TrainingLoader(Numbers(), EpochSampler(2, batches=4), 1, CHECK)
    first = next(iter(stream))
    assert first["sample_index"].tolist() == [0, 1]
    assert stream.state_dict() == {"samples": 2}


def test_a_batch_with_a_mistake_is_that_mistake() -> None:
    error = UserError("wrong")
    assert collate_or_error([{"aatype": torch.zeros(1)}, error]) is error


def test_a_resume_within_a_step_repeats_the_step() -> None:
    """Samples of an interrupted step whose gradients are lost must be taken again; those of finished steps must not."""
    chains = Chains(Mock(spec=FeatureStore), None, ["a"], [], [])
    config = DataConfig(batch_size=2, samples_per_epoch=8)
    for taken, expected in ((0, 0), (3, 0), (4, 4), (6, 4), (7, 4), (8, 8)):
        module = ChainDataModule(config, chains)
        module.trainer = Mock(accumulate_grad_batches=2)  # 4 samples per step
        module.load_state_dict({"samples": taken})
        assert module.train_dataloader().indices.samples == expected
