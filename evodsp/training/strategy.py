"""Lightning's strategy for a (data, sequence) mesh: Dynamic Sequence Parallelism and three ways to keep parameters.

Every rank of a sequence group runs the whole training step on its shards of one sample; the MEAN over the group of its ranks'
losses is the loss. The strategy starts the process group, gives the model its exchange and its parameters their place, and
turns what ranks hold into files that any other mesh resumes from. How gradients become one is `evodsp.training.gradients`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, Optimizer

from evodsp.launch import process_group
from evodsp.launch.consensus import check_same
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.mesh import Mesh, init_mesh
from evodsp.training.batch_check import Agreement
from evodsp.training.dtensor import spread_like, whole


class Ranks(ClusterEnvironment):
    """This process's place, in Lightning's words. Somebody else started the ranks."""

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
        pass

    def global_rank(self) -> int:
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        return 0 if self._place.local_rank == self._place.rank else 1  # only whether it is the first is ever asked


class DSPStrategy(ParallelStrategy):
    """One device a rank, ranks in a (data, sequence) mesh. Raises UserError if the mesh does not multiply out."""

    strategy_name = "dsp"

    def __init__(self, config: ParallelConfig, settings: str = "", plan: CommunicationPlan | None = None) -> None:
        """`settings`: the run's, as text; that ranks were given different ones is found when they meet. `plan`: in which way
        the model communicates."""
        super().__init__(cluster_environment=Ranks())
        self.config, self.settings, self.plan = config, settings, plan
        self._mesh: Mesh | None = None
        self._agreement: Agreement | None = None

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("the mesh is made when the run starts")
        return self._mesh

    @property
    def agreement(self) -> Agreement:
        """Compares batches over ranks."""
        if self._agreement is None:
            raise RuntimeError("ranks meet when the run starts")
        return self._agreement

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    def setup_environment(self) -> None:
        super().setup_environment()
        for decorator in (rank_zero_only, utilities_rank_zero_only):
            setattr(decorator, "rank", self.global_rank)  # noqa: B010  (an attribute of a function)
        process_group.start("nccl" if self.root_device.type == "cuda" else "gloo", self.config.timeout)
        check_same("settings", self.settings, Group(dist.distributed_c10d._get_default_group()))
        timeout = process_group.collective_timeout(self.config.timeout)
        self._mesh = init_mesh(self.config.sequence, self.root_device.type, timeout)
        self._agreement = Agreement(self._mesh, timeout)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        _copy_from_first_rank(self.lightning_module)
        if self.mesh.sequence > 1:
            wire = torch.bfloat16 if self.config.wire == "bf16" else None
            exchange = ShardedExchange(self.mesh.sequence_group(), self.config.overlap, wire)
            use_exchange(self.lightning_module, exchange, self.plan)
        if self.config.parameters == "fsdp2":
            spread_parameters(cast(nn.Module, self.lightning_module.model))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def on_train_start(self) -> None:
        _end_when_asked()

    def on_validation_start(self) -> None:
        _end_when_asked()

    def on_test_start(self) -> None:
        _end_when_asked()

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
        """The mean, or the sum, over the ranks of `group` (None: all). A new tensor; what is no tensor comes back as it is."""
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
        """Rank 0 writes the whole of everything, so that any other mesh can read it. All ranks must come here together."""
        super().save_checkpoint(whole(checkpoint, keep=self.is_global_zero), filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_placed(state, optimizer))
        _optimizers_to_device(self.optimizers, self.root_device)


def _end_when_asked() -> None:
    """SIGTERM ends this process at once, even while it waits for another rank.

    Lightning's handler, in place by now, broadcasts: where two ranks are asked at different places, or one is dead, that hangs.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_optimizer(parameters: Iterator[nn.Parameter], strategy: Strategy, **options: Any) -> Optimizer:
    """Adam; where the strategy says `zero1`, each rank keeps the state of its share of the parameters."""
    if isinstance(strategy, DSPStrategy) and strategy.config.parameters == "zero1":
        return ZeroRedundancyOptimizer(parameters, Adam, parameters_as_bucket_view=True, **options)
    return Adam(parameters, **options)


def spread_parameters(model: nn.Module) -> None:
    """FSDP2 over all ranks: each keeps its share of every parameter, and a unit's parameters are gathered while it runs."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for module in list(model.modules()):
        if getattr(module, "gathers_parameters", False):
            fully_shard(module, mesh=mesh)
    # True: between steps every parameter is a share, which the moving average and checkpoints rely on.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _placed(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with each tensor spread as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {name: spread_like(v, parameters[index]) if isinstance(v, Tensor) else v for name, v in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


@torch.no_grad()
def _copy_from_first_rank(module: nn.Module) -> None:
    """Weights that differ from the start would differ for ever. The same seed gives the same; this holds on any hardware."""
    parameters = [parameter.detach() for parameter in module.parameters()]
    if parameters:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        dist.broadcast(flat, 0)
        for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))
