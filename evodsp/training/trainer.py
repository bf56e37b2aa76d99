"""Lightning's Trainer as evodsp runs it: the options that are refused, and the messages that are silenced.

evodsp refuses options that Lightning does not check itself, or that mean something else here. It silences messages of
Lightning and PyTorch that come in every run and on which no user can act.

Lightning's view of the ranks is a strategy that passes its questions on to the `World`. Every rank of a sequence group runs
the whole training step on its shards of one sample; the loss is the MEAN of the losses of the group's ranks. Checkpoints
hold whole tensors, so that a run resumes on any mesh.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, Timer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from evodsp.errors import COUNT, POSITIVE, SIZE, Range, SettingError, UserError, check_numbers
from evodsp.launch.environment import place
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.dtensor import gather_tree, shard_state
from evodsp.printing import counted, tell
from evodsp.training.options import Command
from evodsp.training.world import MeshWorld


class LaunchedRank(TorchElasticEnvironment):
    """Tells Lightning which rank this process is, as for torchrun, but whichever program has started all ranks already."""

    def __init__(self) -> None:
        self._place = place()

    def world_size(self) -> int:
        return self._place.ranks

    def global_rank(self) -> int:
        return self._place.rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Lightning is told of one device, this rank's (`evodsp.training.command.build`)."""

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        # Lightning only asks whether this is the first node.
        return 0 if self._place.local_rank == self._place.rank else 1


class DSPStrategy(ParallelStrategy):
    """One device per rank, ranks in the mesh of `world`. The ranks must have met (`MeshWorld.meet`) before the trainer runs."""

    strategy_name = "dsp"

    def __init__(self, world: MeshWorld, plan: CommunicationPlan | None = None) -> None:
        """`plan`: the choice of communication where the model has more than one way."""
        super().__init__(cluster_environment=LaunchedRank())
        self.world, self.plan = world, plan

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Lightning calls this once the module is on its device, before it makes the optimizers."""
        half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        self.world.place(cast(nn.Module, model.model), self.plan, half)
        return model

    def on_train_start(self) -> None:
        # Before each batch Lightning broadcasts whether it got SIGTERM, and waits for the answer. Here it never gets it;
        # Lightning 2.6 has no switch for that.
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_validation_start(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:  # a training run has its own (`StopRequest`)
            _restore_sigterm()

    def on_test_start(self) -> None:
        _restore_sigterm()

    def teardown(self) -> None:
        self.world.release()  # here, because Lightning calls the module's `teardown` only after a run that succeeds
        super().teardown()

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum over the ranks of `group` (None: all), as a new tensor. Other objects are returned unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG, None)
        total = tensor.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
        return total / dist.get_world_size(group) if mean else total

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes full tensors, so that a run on any mesh can read them. All ranks must call this together."""
        super().save_checkpoint(gather_tree(checkpoint, keep=self.is_global_zero), filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pairs = zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        super().load_optimizer_state_dict({"optimizer_states": [shard_state(*pair) for pair in pairs]})


def _restore_sigterm() -> None:
    """Let SIGTERM end this process at once, even while it waits for another rank.

    Lightning's handler, installed by now, broadcasts first. That hangs if two ranks get the signal at different places, or if
    one of them is dead.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


RANGES = {
    "accumulate_grad_batches": SIZE,
    "check_val_every_n_epoch": SIZE,
    "gradient_clip_val": COUNT,
    "log_every_n_steps": COUNT,
    "min_epochs": COUNT,
    "min_steps": COUNT,
    "num_nodes": SIZE,
    "num_sanity_val_steps": Range(-1),
}
"""Numbers that Lightning accepts although they stop a run with a traceback or mean nothing."""


_MUST_BE: dict[str, tuple[Any, str]] = {
    "barebones": (
        False,
        "it forbids checkpoints, logs and progress; to have none, set trainer.enable_checkpointing, trainer.logger and "
        "trainer.enable_progress_bar to false",
    ),
    "limit_train_batches": (None, "an epoch has data.samples_per_epoch samples; set that"),
    "overfit_batches": (0, "each epoch draws other samples; to learn a few chains, name them in data.train_chains"),
    "reload_dataloaders_every_n_epochs": (0, "a new loader would begin with sample 0 again"),
}
"""Options whose names would mislead in evodsp: the value that every run has, and the reason."""


_NOT_CALLBACKS = {
    BatchSizeFinder: "data.batch_size",
    GradientAccumulationScheduler: "global_batch",
    LearningRateFinder: "model.optimizer.lr",
    Timer: "trainer.max_time",
}
"""Callbacks of Lightning that cannot work, and the setting that serves. A `Timer`'s run would exit as if it were finished."""


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for an option that stops a run with a traceback, trains nothing, or does not do what its name says.

    `trainer`: all options, by name.
    """
    check_numbers(trainer, RANGES, "trainer.")
    for name, (value, reason) in _MUST_BE.items():
        if trainer[name] != value:
            raise SettingError(f"trainer.{name}", json.dumps(trainer[name]), f"{json.dumps(value)}: {reason}")
    for name in ("max_steps", "max_epochs"):
        if (most := trainer[name]) is not None and most < 1 and most != -1:
            raise SettingError(f"trainer.{name}", most, "at least 1, or -1 for no limit")
    check_least("min_epochs", trainer, -1 if trainer["max_epochs"] is None else trainer["max_epochs"])
    interval = trainer["val_check_interval"]
    if isinstance(interval, int | float) and interval not in POSITIVE:
        raise SettingError("trainer.val_check_interval", interval, "above 0")
    if str(trainer["strategy"]).endswith(("_spawn", "_fork", "_notebook")):
        raise SettingError("trainer.strategy", trainer["strategy"], "auto: evodsp starts ranks itself")


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raise UserError for a callback of Lightning that stops a run with a traceback, or changes what evodsp counts."""
    for callback in callbacks:
        for kind, setting in _NOT_CALLBACKS.items():
            if isinstance(callback, kind):
                raise UserError(f"trainer.callbacks: {kind.__name__} does not work with evodsp; set {setting} instead")


def check_least(name: str, trainer: Mapping[str, Any], last: int) -> None:
    """Raise UserError if the option `name` asks for more steps or epochs than the `last`; -1: there is no last one."""
    if (least := trainer[name]) is not None and 0 <= last < least:
        raise SettingError(f"trainer.{name}", least, f"at most {last}, after which the run ends")


def check_interval(trainer: Mapping[str, Any], batches: int) -> None:
    """Raise UserError if validations are further apart than the `batches` of an epoch, which Lightning counts anew in each."""
    interval = trainer["val_check_interval"]
    counts_anew = trainer["check_val_every_n_epoch"] is not None and trainer["limit_val_batches"] != 0
    if isinstance(interval, int) and interval > batches and counts_anew:
        raise SettingError(
            "trainer.val_check_interval",
            interval,
            f"at most {batches}, the batches of an epoch; to count over epochs, set trainer.check_val_every_n_epoch to null",
        )


def check_scored(command: Command, trainer: Mapping[str, Any], batches: int) -> None:
    """Raise UserError if the limit on the `batches` of a validation or test is a share of them that is less than one.

    `validate` and `test`, which do nothing else, must score one.
    """
    name = "limit_test_batches" if command == "test" else "limit_val_batches"
    limit = trainer[name]
    if command != "fit" and limit == 0:
        raise SettingError(f"trainer.{name}", limit, "above 0: nothing would be scored")
    if isinstance(limit, float) and 0 < limit < 1 and int(limit * batches) < 1 <= batches:
        share = f"a share of {counted(batches, 'batch')} that is at least one"
        raise SettingError(f"trainer.{name}", limit, f"a number, or {share}")


def count_devices(devices: Any) -> int | None:
    """Lightning's `devices` as a number; None for all devices. Raises UserError unless it is one."""
    if devices in ("auto", -1, "-1"):
        return None
    if str(devices).isdecimal() and int(devices) > 0:
        return int(devices)
    chosen = devices.split(",") if isinstance(devices, str) and "," in devices else devices
    chosen = [str(index).strip() for index in chosen] if isinstance(chosen, list | tuple) else []
    chosen = [index for index in chosen if index]  # Lightning writes GPU 0 as "0,"
    if not chosen or not all(index.isdecimal() for index in chosen):
        raise SettingError(
            "trainer.devices", devices, "a number of at least 1, the number of a GPU in a list, -1 or auto"
        )
    if len(chosen) > 1:
        raise UserError(
            f"trainer.devices is {devices}; to choose GPUs for several ranks set CUDA_VISIBLE_DEVICES={','.join(chosen)} and "
            f"trainer.devices to {len(chosen)}"
        )
    return 1


_HUSHED = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*You are trying to `self.log.*",
    ".*FSDP2-wrapped module .* returned a view tensor.*",  # it is never modified in place
    ".*It is recommended to use `self.log.*sync_dist=True.*",  # logged values are equal on all ranks already
    ".*No `val_dataloader`.*|.*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Total length of .* across ranks is zero.*",  # no validation chains
    ".*The `lightning.pytorch.loops.*",
    ".*GPU available but not used.*",
    ".*could not find the monitored key.*",
    ".*The dirpath has changed from.*",
)


def hush() -> None:
    """Silence the messages of Lightning and PyTorch that do not help the user."""
    for message in _HUSHED:
        warnings.filterwarnings("ignore", message=message)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Where a profiler without a file says its table.
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's stdout is not
        sys.stdout.reconfigure(line_buffering=True)


@rank_zero_only
def tell_first(line: str) -> None:
    """Say a line on standard error, on the first rank only."""
    tell(line)
