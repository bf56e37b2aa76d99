"""Training, validation and test chains as batches for Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import SampleDataset
from evodsp.data.samples.raw_features import HOST
from evodsp.data.samples.sample_pool import MadeHere, SampleMaker, SamplePool
from evodsp.data.samples.sampling import ChainChoice, ChainDraws, MixedDraws
from evodsp.errors import memory_size
from evodsp.features.batch import with_features
from evodsp.losses.permutation import ENTITIES
from evodsp.rng import Draws
from evodsp.training.chains import Chains
from evodsp.training.config import DataConfig
from evodsp.training.loader import EpochSampler, TrainingLoader, WholeChainLoader
from evodsp.training.quarantine import Quarantine, failures_of
from evodsp.training.recipe import Batching
from evodsp.training.world import World

_READ_BY_THE_HOST = {*HOST, "sample_index", ENTITIES}


class ChainDataModule(LightningDataModule):
    """Turns chains into batches, and gives every data rank its share of them."""

    def __init__(self, config: DataConfig, chains: Chains, seed: int = 0, world: World | None = None) -> None:
        """`world`: the ranks that share the samples; None for one process."""
        super().__init__()
        self.quarantine = Quarantine(config.max_quarantined)
        """The list of chains that are left out; it has no file yet."""
        self.quarantine_is_known = False
        """Whether `quarantine` is that of this run already, so that a checkpoint's copy does not replace it."""
        self.config, self.chains, self.seed = config, chains, seed
        self.world = world or World()
        self._samples_taken = 0
        self._training: TrainingLoader | None = None
        self._makers: list[SampleMaker] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move all tensors but those that only the host reads, then share them with the ranks that read nothing."""
        kept = {name: value for name, value in batch.items() if name in _READ_BY_THE_HOST}
        moved = {name: value for name, value in batch.items() if name not in kept}
        moved = super().transfer_batch_to_device(moved, device, dataloader_idx)
        on_device, on_host = self.world.share(moved, kept, device)
        return {**on_device, **on_host}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make the MSA's features, on the device and in the precision of the run."""
        if self.trainer is None:
            raise RuntimeError("features are made in a run only")
        config = self.config.train if self.trainer.training else self.config.validation
        return self.trainer.precision_plugin.convert_input(with_features(batch, config))

    def train_dataloader(self) -> TrainingLoader:
        config, world = self.config, self.world
        step = Batching(
            world.data_ranks, config.batch_size, self.trainer.accumulate_grad_batches if self.trainer else 1
        )
        # `group`: all samples of one optimizer step run the same number of recycling iterations.
        samples = self._samples(self.chains.train, config.train, training=True, group=step.samples)
        batches = step.batches(config.samples_per_epoch)
        sampler = EpochSampler(config.batch_size, batches, world.data_rank, world.data_ranks)
        # Round down to a whole optimizer step: the gradients of an interrupted step are not saved.
        sampler.samples = self._samples_taken - self._samples_taken % step.samples
        maker, most = self._maker(samples, config.num_workers), memory_size("data.prefetch", config.prefetch)
        self._training = TrainingLoader(
            samples,
            sampler,
            maker,
            world.check_batches,
            self.quarantine,
            lambda size: ahead(config.num_workers, most, size),
            step.accumulate,
        )
        return self._training

    def val_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.validation)

    def test_dataloader(self) -> Iterable[Any]:
        return self._whole_chains(self.chains.test)

    def teardown(self, stage: str) -> None:
        """End the processes that make samples."""
        while self._makers:
            self._makers.pop().close()

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for samples."""
        return 0.0 if self._training is None else self._training.waited_s

    def state_dict(self) -> dict[str, Any]:
        """Lightning restores the state of its loaders only within an epoch; this one is restored between epochs as well."""
        samples = self._training.indices.samples if self._training else self._samples_taken
        return {"samples": samples, "quarantine": self.quarantine.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._samples_taken = state_dict["samples"]
        if not self.quarantine_is_known:
            self.quarantine.restore(failures_of(state_dict.get("quarantine", [])))  # none before version 0.2

    def _samples(self, keys: list[str], config: FeatureConfig, training: bool, group: int = 1) -> SampleDataset:
        chains, draws = self.chains, Draws.root(self.seed).at("data")
        choice: ChainChoice = ChainDraws(draws, keys, chains.weights if training else None)
        if chains.distilled:
            distilled = ChainDraws(draws.at("distillation"), chains.distilled, chains.distilled_weights)
            choice = MixedDraws(draws, choice, distilled, self.config.distillation.fraction)
        # The processes that keep parsed chains: those that read for training, and one for validation.
        processes = max(1, self.config.num_workers) + 1
        memory = memory_size("data.cache", self.config.cache) // processes
        return SampleDataset(
            chains.store,
            keys,
            config,
            self.seed,
            training,
            batch_group=group,
            cache_bytes=memory,
            templates=chains.templates,
            choice=choice,
            distillation=chains.distillation,
            assumed_resolution=self.config.assumed_resolution,
        )

    def _whole_chains(self, keys: list[str]) -> Iterable[Any]:
        """One chain per batch, split among the data ranks; no batches if there are no chains.

        All shares have the same length, or ranks that are done would leave the others waiting: the first chains fill them up.
        """
        if not keys:
            return []
        rank, ranks = self.world.data_rank, self.world.data_ranks
        longest = math.ceil(len(keys) / ranks)
        share = [index % len(keys) for index in range(rank, longest * ranks, ranks)]
        samples = self._samples(keys, self.config.validation, training=False)
        maker = self._maker(samples, min(1, self.config.num_workers))
        # A bad validation chain does not end a training run; `evodsp validate` has nothing else to do.
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        return WholeChainLoader(samples, share, maker, self.world.check_batches, leave_out=fitting)

    def _maker(self, samples: SampleDataset, workers: int) -> SampleMaker | None:
        """The maker of this rank's samples; None if another rank of its sequence group reads them."""
        if not self.world.reads:
            return None
        self._makers.append(SamplePool(samples, workers, self.config.time_limit) if workers else MadeHere(samples))
        return self._makers[-1]


def ahead(workers: int, most_bytes: int, sample_bytes: int) -> int:
    """The number of samples to request ahead: as many as fit into `most_bytes`, at least 1 and at most 16 for each worker."""
    return min(16 * workers, max(workers, most_bytes // max(1, sample_bytes))) if sample_bytes else workers
