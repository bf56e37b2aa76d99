"""Trains a small model on the meta device, as one process or as rank 0 of two, and says where the host waits.

The meta device has shapes and no numbers, so it runs everything that a GPU would, and nothing that reads a value.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Adam, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from evodsp.config import HeadsConfig, ModelConfig
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.group import Group
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.checkpoints import ExponentialMovingAverage
from evodsp.training.config import DataConfig, TrainingConfig
from evodsp.training.logs import CurveLogger, Throughput, TrainingProgress, Utilisation
from evodsp.training.module import TrainingModule
from evodsp.training.run_end import StopRequest
from evodsp.training.trainer import DSPStrategy
from evodsp.training.world import MeshWorld, World
from tests.builders.host_waits import HostWaits
from tests.builders.labelled_batch import WEIGHTS

META = torch.device("meta")
STEPS = 3


def _adam(parameters: Any, **options: Any) -> Optimizer:
    """There is no fused Adam for the meta device. The one for GPUs keeps even its count of steps there."""
    return Adam(parameters, **{**options, "fused": False})


class OneProcess(World):
    def optimizer(self, parameters: Any, **options: Any) -> Optimizer:
        return _adam(parameters, **options)


class FirstOfTwo(MeshWorld):
    """Rank 0 of a sequence group of two, whose collectives go nowhere. (Batches are compared on the host, by gloo.)"""

    def __init__(self) -> None:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        super().__init__(ParallelConfig(sequence=2))

    def _connected_hosts(self) -> Group:
        return self._readers

    def check_batches(self, found: Any, failures: Any = ()) -> list[Any]:
        return []

    def optimizer(self, parameters: Any, **options: Any) -> Optimizer:
        return _adam(parameters, **options)


class MetaStrategy(DSPStrategy):
    @property
    def root_device(self) -> torch.device:
        return META


class Boundaries(Callback):
    """Notes how many waits there were when a batch began."""

    def __init__(self, seen: HostWaits) -> None:
        self.seen, self.before = seen, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(len(self.seen.waits))


def waits(ranks: int, chains: Path, output: Path) -> list[list[str]]:
    """The waits of each step between the first and the last."""
    torch.set_num_threads(1)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(rank if ranks == 2 else {})
    base = ModelConfig.preset("test")
    heads = HeadsConfig(predicted_aligned_error=True, experimentally_resolved=True)
    sizes = {item.name: getattr(base, item.name) for item in dataclasses.fields(ModelConfig) if item.name != "heads"}
    config = TrainingConfig(**sizes, heads=heads, loss=WEIGHTS, ema_decay=0.9)
    features = dataclasses.replace(DataConfig().train, crop_size=10, msa_clusters=4, extra_msa=4, recycles=1)
    data_config = DataConfig(
        str(chains / "alignments"), str(chains / "mmcif_files"), train=features, samples_per_epoch=8
    )
    world = OneProcess() if ranks == 1 else FirstOfTwo()
    data = ChainDataModule(data_config, find_chains(data_config), 0, world)
    module = TrainingModule(config, world=world, requests=(StopRequest(),))
    throughput = Throughput(module, data, world.waits, Utilisation(module.model.config, "32-true", "highest", 1.0))
    seen = HostWaits()
    boundaries = Boundaries(seen)
    if ranks == 1:
        strategy: Any = SingleDeviceStrategy(META)
    else:
        strategy = MetaStrategy(world)
    with (
        mock.patch.object(TrainingModule, "setup"),  # it compares kernels with their formulas, which needs numbers
        mock.patch.object(CPUAccelerator, "setup_device"),  # it refuses other devices
    ):
        trainer = Trainer(
            max_steps=STEPS, accelerator="cpu", devices=1, strategy=strategy, logger=CurveLogger(output), gradient_clip_val=0.1,
            callbacks=[ExponentialMovingAverage(0.9), TrainingProgress(), boundaries, module.rows, throughput],
            log_every_n_steps=1, limit_val_batches=0,
            enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        with seen:
            trainer.fit(module, datamodule=data)
    # The first batch copies constants to the device; after the last one the run ends.
    steps = zip(boundaries.before[1:], boundaries.before[2:], strict=False)
    return [[wait for wait in seen.waits[first:last] if not _moves_the_batch(wait)] for first, last in steps]


def _moves_the_batch(wait: str) -> bool:
    """The loader has pinned the batch's memory where there are GPUs, so its copies are asynchronous."""
    return wait.startswith("_to_copy lightning/fabric/utilities/apply_func.py")
