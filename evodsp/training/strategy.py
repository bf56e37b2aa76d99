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
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from evodsp.launch.environment import place
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.dtensor import gather_tree, shard_state
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
