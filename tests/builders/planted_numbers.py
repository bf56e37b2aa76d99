"""Numbers that are not finite, planted into one sample of a training run. The program knows nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from evodsp.data.samples.dataset import Sample, SampleDataset
from evodsp.parallel.dtensor import local
from evodsp.training.module import TrainingModule

BAD = 3
"""The sample that is bad."""


@contextmanager
def in_a_label() -> Iterator[None]:
    """The frames of its first residue."""
    make = SampleDataset.make

    def planted(self: SampleDataset, index: int, key: str) -> Sample:
        sample = make(self, index, key)
        if index == BAD and self.training:
            sample["rigidgroups_gt_frames"][0] = torch.nan
        return sample

    with mock.patch.object(SampleDataset, "make", planted):
        yield


@contextmanager
def in_the_loss() -> Iterator[None]:
    """Of rank 1 alone, which is the loss of a shard."""
    step = TrainingModule.training_step

    def planted(self: TrainingModule, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        if _is_here(self):
            loss = loss + torch.inf
            self._passes[-1].numbers["loss"] = loss.detach()
        return loss

    with mock.patch.object(TrainingModule, "training_step", planted):
        yield


@contextmanager
def in_a_gradient() -> Iterator[None]:
    """One number of one parameter's gradient, on rank 1 alone, with a finite loss."""
    reduce = TrainingModule.on_after_backward

    def planted(self: TrainingModule) -> None:
        if _is_here(self):
            gradient = self.model.get_parameter(PARAMETER).grad
            assert gradient is not None
            local(gradient).view(-1)[1] = torch.nan
        reduce(self)

    with mock.patch.object(TrainingModule, "on_after_backward", planted):
        yield


PARAMETER = "heads.masked_msa.logits.weight"


def _is_here(module: TrainingModule) -> bool:
    return BAD in module._passes[-1].samples and os.environ.get("RANK", "1") == "1"
