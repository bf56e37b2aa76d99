"""The endless stream of training samples, cut into epochs, that knows where it is.

Samples are addressed by global index; the only state is how many of them all ranks together have taken. A run that stops in
the middle of an epoch therefore goes on with the very next sample, on any number of ranks with the same global batch.
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


class StreamSampler(Sampler[list[int]]):
    """Batches of global sample indices: rank d of D takes those that are d modulo D.

    One iteration yields what is left of the epoch: at its start all `len(self)` batches, after a resume fewer.
    """

    def __init__(self, batch_size: int, batches: int, rank: int = 0, ranks: int = 1) -> None:
        self.batch_size, self.batches, self.rank, self.ranks = batch_size, batches, rank, ranks
        self.samples = 0
        """Samples that all ranks together have taken since the start of training."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one batch on every rank."""
        return self.batch_size * self.ranks

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        taken = self.samples // self.samples_per_step
        for batch in range(taken, (taken // self.batches + 1) * self.batches):
            first = batch * self.samples_per_step + self.rank
            yield list(range(first, first + self.samples_per_step, self.ranks))


def whole_batches(samples: int, batch_size: int, ranks: int, accumulate: int) -> int:
    """Batches of each rank for an epoch of at least `samples` samples, a whole number of optimizer steps."""
    return math.ceil(samples / (batch_size * ranks * accumulate)) * accumulate


class IndexedSamples(Dataset[Sample | UserError]):
    """A dataset whose samples carry their index, and whose mistakes of the user's come out as values.

    An exception in a loader's worker process would be wrapped in its traceback on the way out; a value is not.
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
    """A batch, or the first mistake among its samples."""
    good = [sample for sample in samples if not isinstance(sample, UserError)]
    return collate(good) if len(good) == len(samples) else next(s for s in samples if isinstance(s, UserError))


def raise_mistake(batch: Batch | UserError) -> None:
    """The check of one process: the mistake that came instead of a batch is raised."""
    if isinstance(batch, UserError):
        raise batch


class BatchStream:
    """An iterable of batches whose position can be saved: what a Trainer takes as its training or validation loader."""

    def __init__(
        self, samples: ChainDataset, sampler: Sampler[list[int]], num_workers: int, check: Check | None = None
    ) -> None:
        """`check`: called on every batch (or mistake met instead of one); None raises mistakes, and that is all."""
        self.check = check or raise_mistake
        self.indices = sampler  # not `sampler`: Lightning takes what has one for a DataLoader
        self.loader = DataLoader(
            IndexedSamples(samples),
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_or_error,
            pin_memory=torch.cuda.is_available(),
            # Not fork: by now the process has threads (logger, progress, OpenMP), whose locks a fork would inherit held.
            multiprocessing_context="forkserver" if num_workers else None,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            self.check(batch)
            if isinstance(self.indices, StreamSampler):
                self.indices.samples += self.indices.samples_per_step
            yield batch


class TrainingStream(BatchStream):
    """A BatchStream over a StreamSampler. Lightning finds the two methods below and resumes in the middle of an epoch."""

    indices: StreamSampler

    def __init__(
        self, samples: ChainDataset, sampler: StreamSampler, num_workers: int, check: Check | None = None
    ) -> None:
        super().__init__(samples, sampler, num_workers, check)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.indices.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.indices.samples = state["samples"]
