"""The ranks of a run: who they are, what they tell each other, and how they hold parameters and reduce gradients.

A `World` answers everything that depends on the number of ranks. The training module and the data module ask it, and
Lightning's strategy passes Lightning's questions on to it. `World` itself is a single process; `MeshWorld` is a mesh of ranks,
which exists once they have met.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, Optimizer

from evodsp.data.samples.dataset import layout_of, pack, packed_bytes, unpack
from evodsp.errors import UserError
from evodsp.launch import process_group
from evodsp.launch.consensus import Members, all_of, check_same, from_first
from evodsp.model.graphs import records_collectives
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group, WaitTimes, whole_group
from evodsp.training.gradients import BatchGradients, Gradients, PlainGradients, SampleGradients
from evodsp.training.loader import FailedChain

T = TypeVar("T")


class World:
    """One process: a single data rank, nothing to communicate."""

    group: Group | None = None
    """All ranks; None for one process."""
    data_ranks = 1
    """Number of batches that are computed at the same time. All ranks of a sequence group share one batch."""
    data_rank = 0
    """Number of this rank's batch among these."""
    reads = True
    """Whether this rank reads samples; otherwise another rank of its sequence group does."""
    waits: WaitTimes | None = None
    """Measures how long this rank waits for collectives of the model and for the mean of gradients; None where not all of
    these pass through it."""

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, by rank."""
        return all_of(value, self.group)

    def of_sample(self, text: str) -> list[str]:
        """The texts of the ranks that share this rank's sample. They call this together."""
        return [text]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all ranks."""
        return x

    def check_batches(
        self, found: Sequence[Mapping[str, Tensor]] | UserError, failures: Sequence[FailedChain] = ()
    ) -> list[FailedChain]:
        """Agree on the batches of a step before anybody computes on them; return the failures of all ranks.

        `found`: this rank's batches of the step, or the UserError that it met instead. `failures`: the chains of which this
        rank could make no sample. Raises the UserError. On a mesh all ranks call this together.
        """
        if isinstance(found, UserError):
            raise found
        return list(failures)

    def share(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The batch of the rank that reads, on every rank of its sequence group: tensors on `device`, and tensors on the host.

        All ranks of a group call this together. The arguments of ranks that do not read are ignored.
        """
        return dict(on_device), dict(on_host)

    def gradients(
        self, parameters: Iterable[nn.Parameter], clip: float | None, per_sample: bool, accumulate: int
    ) -> Gradients:
        """The object that turns backward passes into the gradient of an optimizer step.

        `clip`: the largest norm, or None for no limit. `per_sample`: whether it bounds the gradient of each sample, instead of
        the whole batch's. `accumulate`: the number of backward passes in a step.
        """
        if per_sample and clip is not None and accumulate > 1:
            return SampleGradients(parameters, None, clip)
        return PlainGradients(parameters, clip)

    def optimizer(self, parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
        """Adam over `parameters`."""
        return Adam(parameters, **options)

    def release(self) -> None:
        """Called at the end of every run of a trainer, also of one that fails."""


class MeshWorld(World):
    """The ranks of a (data, sequence) mesh, which hold parameters as `config.parameters` says."""

    def __init__(self, config: ParallelConfig, on_gpu: bool = False) -> None:
        """All ranks call this together, once their default process group has started (`meet`)."""
        self.config, self.on_gpu = config, on_gpu
        self.mesh = process_group.mesh_of(config, "cuda" if on_gpu else "cpu")
        self.group = whole_group()
        self.data_ranks, self.data_rank = self.mesh.data, self.mesh.data_rank
        self._readers = self.mesh.sequence_group()
        self.reads = self._readers.rank == 0
        self._all_hosts = self._connected_hosts()
        begin = self.data_rank * self.mesh.sequence
        self._reading_hosts = Members(self._all_hosts, range(begin, begin + self.mesh.sequence))
        # FSDP2 communicates by itself.
        self.waits = None if config.parameters == "fsdp2" else WaitTimes(on_gpu)
        self._gradients: BatchGradients | None = None
        self._model: nn.Module | None = None
        """The model that was placed."""

    @classmethod
    def meet(cls, config: ParallelConfig, on_gpu: bool, settings: str) -> MeshWorld:
        """Connect all ranks. `settings`: the run's settings as text; raises UserError on every rank if they differ."""
        process_group.start("nccl" if on_gpu else "gloo", config.timeout)
        check_same("settings", settings, whole_group())
        return cls(config, on_gpu)

    def _connected_hosts(self) -> Group:
        """All ranks, connected by gloo: messages between hosts do not pass through a GPU, whose queue need not be empty."""
        if "gloo" in dist.get_backend():
            return whole_group()
        timeout = process_group.collective_timeout(self.config.timeout)
        return Group(dist.new_group(backend="gloo", timeout=timeout))

    def of_sample(self, text: str) -> list[str]:
        return [text] if self._readers.size == 1 else all_of(text, self._reading_hosts)

    def mean(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def check_batches(
        self, found: Sequence[Mapping[str, Tensor]] | UserError, failures: Sequence[FailedChain] = ()
    ) -> list[FailedChain]:
        """Without this check a rank that raises leaves the others waiting in a collective; see `World.check_batches`.

        If any rank has failures, all of them are returned, the same list on every rank: the samples are replaced, and all ranks
        call this again. A rank has no batches if it has failures, if another rank of its sequence group reads, or if its whole
        group leaves the batch out.

        Raises UserError on every rank if any rank met one, or if a sample has fewer residues than its group has ranks.
        """
        if isinstance(found, UserError):
            error: UserError | None = found
        else:
            error = next((error for batch in found if (error := self._too_short(batch)) is not None), None)
        own = torch.tensor((int(error is not None), len(failures)))
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own, group=self._all_hosts.handle)
        failed, lost = torch.stack(gathered).unbind(1)
        if failed.any():
            texts = all_of(None if error is None else str(error), self._all_hosts)
            raise UserError(next(text for text in texts if text is not None))
        if lost.any():
            return [failure for of_rank in all_of(list(failures), self._all_hosts) for failure in of_rank]
        return []

    def _too_short(self, batch: Mapping[str, Tensor]) -> UserError | None:
        residues, ranks = batch["aatype"].shape[-1], self.mesh.sequence
        if residues >= ranks:
            return None
        return UserError(
            f"parallel.sequence is {ranks}, but sample {batch['sample_index'].tolist()} has only {residues} residues; "
            "use fewer ranks per sample, or leave that chain out"
        )

    def share(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Broadcast the batch within each sequence group; see `World.share`. The ranks then make the features each for itself.

        Features are thirty times as large as what they are made from, so sending each rank its part of them would take more
        bytes in any group of less than thirty ranks.
        """
        if self._readers.size == 1:
            return dict(on_device), dict(on_host)
        layout, host = from_first(lambda: (layout_of(on_device), dict(on_host)), self._reading_hosts)
        memory = torch.empty(packed_bytes(layout), dtype=torch.uint8, device=device)
        if self.reads:
            pack(on_device, memory)
        dist.broadcast(memory, group=self._readers.handle, group_src=0)
        return unpack(layout, memory), host

    def place(self, model: nn.Module, plan: CommunicationPlan | None, half: torch.dtype | None) -> None:
        """Give all ranks the weights of rank 0 and the layers their exchange, and shard parameters with `fsdp2`.

        `plan`: the choice of communication where the model has more than one way. `half`: see `shard_parameters`.
        """
        self._model = model
        broadcast_weights(model)
        if self.mesh.sequence > 1:
            wire = torch.bfloat16 if self.config.wire == "bf16" else None
            exchange = ShardedExchange(self.mesh.sequence_group(waits=self.waits), self.config.overlap, wire)
            use_exchange(model, exchange, plan)
        if self.config.parameters == "fsdp2":
            shard_parameters(model, half)

    def gradients(
        self, parameters: Iterable[nn.Parameter], clip: float | None, per_sample: bool, accumulate: int
    ) -> Gradients:
        if self.config.parameters == "fsdp2":
            return PlainGradients(parameters, clip)  # FSDP2 averages over all ranks in the backward pass
        if per_sample and clip is not None:
            return SampleGradients(parameters, self.mesh, clip, self.waits)
        early = self._model is None or not records_collectives(self._model)
        self._gradients = BatchGradients(parameters, self.mesh, clip, accumulate, self.waits, early=early)
        return self._gradients

    def optimizer(self, parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
        """Adam; with `zero1` each rank keeps the optimizer state of its share of the parameters."""
        if self.config.parameters == "zero1":
            return ZeroRedundancyOptimizer(parameters, Adam, parameters_as_bucket_view=True, **options)
        return super().optimizer(parameters, **options)

    def release(self) -> None:
        """Take the hooks of `gradients` off the parameters."""
        if self._gradients is not None:
            self._gradients.close()


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
