"""Loaders of batches. The training loader yields an endless sequence of samples, divided into epochs, and can be resumed.

Samples are addressed by global index; the only state is how many of them all ranks together have taken. A run that stops in
the middle of an epoch therefore resumes with the next sample, on any number of ranks with the same global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from evodsp.data.dataset import ChainDataset, Sample, collate
from evodsp.errors import UserError

Batch = dict[str, Tensor]
Check = Callable[[Batch | UserError], None]


class EpochSampler(Sampler[list[int]]):
    """Batches of global sample indices: data rank d of D takes the indices that are d modulo D.

    One iteration yields the rest of the epoch: all `len(self)` batches at its start, fewer after a resume.
    """

    def __init__(self, batch_size: int, batches: int, rank: int = 0, ranks: int = 1) -> None:
        self.batch_size, self.batches, self.rank, self.ranks = batch_size, batches, rank, ranks
        self.samples = 0
        """Samples that all ranks together have taken since the start of training."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one batch on each of the data ranks, together."""
        return self.batch_size * self.ranks

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        taken = self.samples // self.samples_per_step
        for batch in range(taken, (taken // self.batches + 1) * self.batches):
            first = batch * self.samples_per_step + self.rank
            yield list(range(first, first + self.samples_per_step, self.ranks))


def whole_batches(samples: int, batch_size: int, ranks: int, accumulate: int) -> int:
    """Batches per data rank of an epoch of at least `samples` samples, rounded up to whole optimizer steps."""
    return math.ceil(samples / (batch_size * ranks * accumulate)) * accumulate


class IndexedSamples(Dataset[Sample | UserError]):
    """A dataset whose samples carry their index, and which returns a UserError instead of raising it.

    PyTorch wraps an exception of a worker process in its traceback; a returned value reaches the main process unchanged.
    """

    def __init__(self, samples: ChainDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample | UserError:
        try:
            return {**self.samples[index], "sample_index": torch.tensor(index)}
        except UserError as error:
            return UserError(str(error))


def collate_or_error(samples: list[Sample | UserError]) -> Batch | UserError:
    """A batch, or the first UserError among its samples."""
    good = [sample for sample in samples if not isinstance(sample, UserError)]
    return collate(good) if len(good) == len(samples) else next(s for s in samples if isinstance(s, UserError))


class BatchLoader:
    """An iterable of batches, as Lightning's Trainer takes for training or validation."""

    def __init__(self, samples: ChainDataset, sampler: Sampler[list[int]], num_workers: int, check: Check) -> None:
        """`check`: called on every batch, or on the UserError that stands in for it (`World.check_batch`)."""
        self.check = check
        self.indices = sampler  # not named `sampler`: Lightning treats an object with that attribute as a DataLoader
        self.loader = DataLoader(
            IndexedSamples(samples),
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_or_error,
            pin_memory=torch.cuda.is_available(),
            # Not fork: the process has threads by now (logger, progress, OpenMP), and a fork would inherit locks they hold.
            multiprocessing_context="forkserver" if num_workers else None,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.check(batch)
            if isinstance(self.indices, EpochSampler):
                self.indices.samples += self.indices.samples_per_step
            yield batch


class TrainingLoader(BatchLoader):
    """A BatchLoader over an EpochSampler. Lightning calls the two methods below to resume in the middle of an epoch."""

    indices: EpochSampler

    def __init__(self, samples: ChainDataset, sampler: EpochSampler, num_workers: int, check: Check) -> None:
        super().__init__(samples, sampler, num_workers, check)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.indices.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.indices.samples = state["samples"]
