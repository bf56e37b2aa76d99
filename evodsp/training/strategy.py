"""Lightning's view of the ranks: a strategy that passes Lightning's questions on to the `World`.

Every rank of a sequence group runs the whole training step on its shards of one sample; the loss is the MEAN of the losses of
the group's ranks. Checkpoints hold whole tensors, so that a run resumes on any mesh.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn

from evodsp.launch.environment import place, under_launcher
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.dtensor import gather_tree, shard_state
from evodsp.training.world import MeshWorld


class LaunchedRank(ClusterEnvironment):
    """Tells Lightning which rank this process is. A launcher has started all ranks already."""

    def __init__(self) -> None:
        self._place = place()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._place.host

    @property
    def main_port(self) -> int:
        return self._place.port

    @staticmethod
    def detect() -> bool:
        return under_launcher()

    def world_size(self) -> int:
        return self._place.ranks

    def set_world_size(self, size: int) -> None:
        """Lightning asks for this; the launcher decides the number of ranks."""

    def global_rank(self) -> int:
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        """Lightning asks for this; the launcher numbers the ranks."""

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        return (
            0 if self._place.local_rank == self._place.rank else 1
        )  # Lightning only asks whether this is the first node


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
        for decorator in (rank_zero_only, utilities_rank_zero_only):
            setattr(decorator, "rank", self.global_rank)  # noqa: B010  (an attribute of a function)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        self.world.place(cast(nn.Module, self.lightning_module.model), self.plan, half)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def on_train_start(self) -> None:
        # Before each batch Lightning broadcasts whether it got SIGTERM, and waits for the answer. Here it never gets it;
        # Lightning 2.6 has no switch for that.
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

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

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 writes full tensors, so that a run on any mesh can read them. All ranks must call this together."""
        super().save_checkpoint(gather_tree(checkpoint, keep=self.is_global_zero), filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(shard_state(state, optimizer))
        _optimizers_to_device(self.optimizers, self.root_device)


def _nothing() -> None:
    """Stands in for a step of Lightning's loop."""


def _restore_sigterm() -> None:
    """Let SIGTERM end this process at once, even while it waits for another rank.

    Lightning's handler, installed by now, broadcasts first. That hangs if two ranks get the signal at different places, or if
    one of them is dead.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
