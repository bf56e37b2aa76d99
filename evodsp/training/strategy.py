"""Lightning's strategy for a (data, sequence) mesh: Dynamic Sequence Parallelism with three ways to keep parameters.

Every rank of a sequence group runs the whole training step on its shards of one sample; the loss is the MEAN of the losses of
the group's ranks. The strategy gives the model its exchange, places the parameters, and gathers sharded tensors into
checkpoints that resume on any mesh. How gradients are reduced is in `evodsp.training.gradients`.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from evodsp.launch import process_group
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.exchange import ShardedExchange
from evodsp.training.dtensor import gather_tree, shard_like
from evodsp.training.world import MeshWorld


class LaunchedRank(ClusterEnvironment):
    """Tells Lightning which rank this process is. A launcher has started all ranks already."""

    def __init__(self) -> None:
        self._place = process_group.place()

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
        return process_group.under_launcher()

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
        """`plan`: how the model communicates where there is more than one way."""
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
        config, mesh = self.world.config, self.world.mesh
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        broadcast_weights(self.lightning_module)
        if mesh.sequence > 1:
            wire = torch.bfloat16 if config.wire == "bf16" else None
            exchange = ShardedExchange(mesh.sequence_group(waits=self.world.waits), config.overlap, wire)
            use_exchange(self.lightning_module, exchange, self.plan)
        if config.parameters == "fsdp2":
            half = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
            shard_parameters(cast(nn.Module, self.lightning_module.model), half)
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
            optimizer.load_state_dict(_shard_state(state, optimizer))
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


def shard_parameters(model: nn.Module, half: torch.dtype | None = None) -> None:
    """Shard every parameter over all ranks with FSDP2. A module that `gathers_parameters` gathers its own while it runs.

    `half`: the precision of activations under autocast. Those modules gather their parameters in it, so that each is cast once
    and half the bytes are sent; gradients are summed over ranks in the parameters' own precision.
    """
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
    )
    for module in list(model.modules()):
        if getattr(module, "gathers_parameters", False):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # True: between steps every parameter is sharded, which the moving average and checkpoints rely on.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _shard_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with each tensor sharded as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {name: shard_like(v, parameters[index]) if isinstance(v, Tensor) else v for name, v in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


@torch.no_grad()
def broadcast_weights(module: nn.Module) -> None:
    """Broadcast rank 0's weights; initial differences would persist.

    The same seed gives the same weights on the same hardware only.
    """
    parameters = [parameter.detach() for parameter in module.parameters()]
    if parameters:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        dist.broadcast(flat, 0)
        for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))
