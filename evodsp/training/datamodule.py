"""Training, validation and test chains as batches for Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, Sampler

from evodsp.config import FeatureConfig
from evodsp.data.dataset import ChainDataset
from evodsp.training.chains import Chains
from evodsp.training.config import DataConfig
from evodsp.training.loader import BatchLoader, EpochSampler, TrainingLoader, whole_batches
from evodsp.training.world import World


class ChainDataModule(LightningDataModule):
    """Turns chains into batches, and gives every data rank its share of them."""

    def __init__(self, config: DataConfig, chains: Chains, seed: int = 0, world: World | None = None) -> None:
        """`world`: the ranks that share the samples; None for one process."""
        super().__init__()
        self.config, self.chains, self.seed = config, chains, seed
        self.world = world or World()
        self._samples_taken = 0
        self._training: TrainingLoader | None = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """All but the sample numbers, which only the host reads."""
        moved = {name: value for name, value in batch.items() if name != "sample_index"}
        moved = super().transfer_batch_to_device(moved, device, dataloader_idx)
        return {**moved, "sample_index": batch["sample_index"]}

    def train_dataloader(self) -> TrainingLoader:
        config, world, accumulate = self.config, self.world, self._accumulate
        batches = whole_batches(config.samples_per_epoch, config.batch_size, world.data_ranks, accumulate)
        samples_per_step = config.batch_size * world.data_ranks * accumulate
        # `group`: all samples of one optimizer step run the same number of recycling iterations.
        samples = self._samples(self.chains.train, config.train, training=True, group=samples_per_step)
        sampler = EpochSampler(config.batch_size, batches, world.data_rank, world.data_ranks)
        # Round down to a whole optimizer step: the gradients of an interrupted step are not saved.
        sampler.samples = self._samples_taken - self._samples_taken % samples_per_step
        self._training = TrainingLoader(samples, sampler, config.num_workers, world.check_batch)
        return self._training

    def val_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.validation)

    def test_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.test)

    def state_dict(self) -> dict[str, Any]:
        """Lightning restores the state of its loaders only within an epoch; this one is restored between epochs as well."""
        return {"samples": self._training.indices.samples if self._training else self._samples_taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_taken = state_dict["samples"]

    def _samples(self, keys: list[str], config: FeatureConfig, training: bool, group: int = 1) -> ChainDataset:
        chains = self.chains
        return ChainDataset(chains.store, keys, config, self.seed, training, group, templates=chains.templates)

    def _whole_chains(self, keys: list[str]) -> Iterable[Any]:
        """One chain per batch, split among the data ranks; no batches if there are no chains.

        All shares have the same length, or ranks that are done would leave the others waiting: the first chains fill them up.
        """
        if not keys:
            return []
        rank, ranks = self.world.data_rank, self.world.data_ranks
        longest = math.ceil(len(keys) / ranks)
        share = [index % len(keys) for index in range(rank, longest * ranks, ranks)]
        batches: Sampler[list[int]] = BatchSampler(share, batch_size=1, drop_last=False)
        samples = self._samples(keys, self.config.validation, training=False)
        return BatchLoader(samples, batches, min(1, self.config.num_workers), self.world.check_batch)

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1
