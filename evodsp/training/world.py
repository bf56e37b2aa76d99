"""The ranks of a run, as the training module and the data module see them.

They ask a `World` for everything that depends on the number of ranks: data ranks, gradients, the optimizer, values of other
ranks. So neither needs to know which Lightning strategy it runs under. `World` itself is a single process; `MeshWorld` is a
mesh of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Adam, Optimizer

from evodsp.data.quarantine import Failure
from evodsp.errors import UserError
from evodsp.launch import process_group
from evodsp.launch.consensus import all_of, check_same
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.group import Group
from evodsp.parallel.mesh import Mesh
from evodsp.parallel.waits import WaitTimes
from evodsp.training.batch_check import BatchCheck
from evodsp.training.gradients import BatchGradients, Gradients, PlainGradients, SampleGradients
from evodsp.training.sharing import BatchSharing

T = TypeVar("T")


class World:
    """One process: a single data rank, nothing to communicate."""

    waits: WaitTimes | None = None
    """Measures how long this rank waits for collectives of the model and for the mean of gradients; None where not all of
    these pass through it."""

    @property
    def data_ranks(self) -> int:
        """Number of batches that are computed at the same time. All ranks of a sequence group share one batch."""
        return 1

    @property
    def data_rank(self) -> int:
        """Which of these batches is this rank's."""
        return 0

    @property
    def group(self) -> Group | None:
        """All ranks; None for one process."""
        return None

    def meet(self, settings: str) -> None:
        """Connect all ranks. `settings`: the run's settings as text; raises UserError on every rank if they differ."""

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, by rank."""
        return all_of(value, self.group)

    def check_batches(
        self, found: Sequence[Mapping[str, Tensor]] | UserError, failures: Sequence[Failure] = ()
    ) -> list[Failure]:
        """Raise the UserError that stands in for the batches of a step; return the `failures` of all ranks.

        Every rank calls this with its batches before computing on them; see `BatchCheck.check`.
        """
        if isinstance(found, UserError):
            raise found
        return list(failures)

    @property
    def reads(self) -> bool:
        """Whether this rank reads samples; otherwise another rank of its sequence group does."""
        return True

    def share(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The batch of the rank that reads; see `BatchSharing.share`."""
        return dict(on_device), dict(on_host)

    def gradients(
        self, parameters: Iterable[nn.Parameter], clip: float | None, per_sample: bool, accumulate: int
    ) -> Gradients:
        """What turns backward passes into the gradient of an optimizer step.

        `clip`: largest norm, or None; `per_sample`: of each sample's gradient; `accumulate`: backward passes per step.
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
    """A (data, sequence) mesh of ranks, with parameters kept as `config.parameters` says. Connected by `meet`."""

    def __init__(self, config: ParallelConfig, on_gpu: bool) -> None:
        self.config, self.on_gpu = config, on_gpu
        # FSDP2 communicates by itself.
        self.waits = None if config.parameters == "fsdp2" else WaitTimes(on_gpu)
        self._mesh: Mesh | None = None
        self._batch_check: BatchCheck | None = None
        self._sharing: BatchSharing | None = None
        self._gradients: BatchGradients | None = None

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("the mesh exists only after meet()")
        return self._mesh

    @property
    def data_ranks(self) -> int:
        return self.mesh.data

    @property
    def data_rank(self) -> int:
        return self.mesh.data_rank

    @property
    def group(self) -> Group | None:
        return Group(dist.distributed_c10d._get_default_group())

    def meet(self, settings: str) -> None:
        """Start the process group and make the mesh; see `World.meet`."""
        process_group.start("nccl" if self.on_gpu else "gloo", self.config.timeout)
        check_same("settings", settings, self.group)
        timeout = process_group.collective_timeout(self.config.timeout)
        self._mesh = process_group.mesh_of(self.config, "cuda" if self.on_gpu else "cpu")
        self._batch_check, self._sharing = BatchCheck(self._mesh, timeout), BatchSharing.on(self._mesh, timeout)

    def check_batches(
        self, found: Sequence[Mapping[str, Tensor]] | UserError, failures: Sequence[Failure] = ()
    ) -> list[Failure]:
        """Tell the other ranks of the batches; see `BatchCheck.check`."""
        if self._batch_check is None:
            raise RuntimeError("batches are compared only after meet()")
        return self._batch_check.check(found, failures)

    @property
    def reads(self) -> bool:
        return self.sharing.reads

    @property
    def sharing(self) -> BatchSharing:
        """Gives batches to the ranks of a sequence group that read none."""
        if self._sharing is None:
            raise RuntimeError("batches are shared only after meet()")
        return self._sharing

    def share(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.sharing.share(on_device, on_host, device)

    def gradients(
        self, parameters: Iterable[nn.Parameter], clip: float | None, per_sample: bool, accumulate: int
    ) -> Gradients:
        if self.config.parameters == "fsdp2":
            return PlainGradients(parameters, clip)  # FSDP2 averages over all ranks in the backward pass
        if per_sample and clip is not None:
            return SampleGradients(parameters, self.mesh, clip, self.waits)
        self._gradients = BatchGradients(parameters, self.mesh, clip, accumulate, self.waits)
        return self._gradients

    def release(self) -> None:
        """Take the hooks of `gradients` off the parameters."""
        if self._gradients is not None:
            self._gradients.close()

    def optimizer(self, parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
        """Adam; with `zero1` each rank keeps the optimizer state of its share of the parameters."""
        if self.config.parameters == "zero1":
            return ZeroRedundancyOptimizer(parameters, Adam, parameters_as_bucket_view=True, **options)
        return super().optimizer(parameters, **options)
