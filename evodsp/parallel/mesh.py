"""The mesh of ranks, (data, sequence). The ranks of a sequence group share one sample.

They have consecutive numbers. Launchers number ranks node by node, so a sequence group lies within a node if it fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from evodsp.errors import UserError
from evodsp.parallel.group import Group
from evodsp.parallel.ledger import Ledger
from evodsp.parallel.waits import WaitTimes

DATA, SEQUENCE = "data", "sequence"


@dataclass(frozen=True)
class Mesh:
    """`data` x `sequence` ranks. Rank r belongs to data rank r // `sequence`, and is number r mod `sequence` in its group."""

    devices: DeviceMesh

    @property
    def sequence(self) -> int:
        """Number of ranks that share a sample."""
        return self.devices[SEQUENCE].size()

    @property
    def data(self) -> int:
        """Number of samples that are processed at once."""
        return self.devices[DATA].size()

    @property
    def data_rank(self) -> int:
        """Number, among these samples, of the sample of this rank."""
        return self.devices[DATA].get_local_rank()

    def sequence_group(self, ledger: Ledger | None = None, waits: WaitTimes | None = None) -> Group:
        """The ranks that share this rank's sample. `ledger`: record of their collectives; `waits`: clock of the waits for
        them.
        """
        return Group(self.devices[SEQUENCE].get_group(), ledger, waits)

    def data_group(self) -> Group:
        """The ranks that hold the same shard of the other samples."""
        return Group(self.devices[DATA].get_group())

    def all_ranks(self) -> Group:
        """All ranks of the mesh."""
        return self.sequence_group() if self.data == 1 else whole_group()


Ranks = Mesh | DeviceMesh | dist.ProcessGroup | Group
"""A name for the ranks that share a tensor. A `Mesh` stands for its sequence group; a `DeviceMesh` must have one dimension."""


def group_of(ranks: Ranks) -> Group:
    """The group that `ranks` names. Raises ValueError for a DeviceMesh of several dimensions."""
    if isinstance(ranks, Group):
        return ranks
    if isinstance(ranks, Mesh):
        return ranks.sequence_group()
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ValueError(f"{ranks} has {ranks.ndim} dimensions; choose one, for instance mesh['sequence']")
        return Group(ranks.get_group())
    return Group(ranks)


def whole_group() -> Group:
    """All ranks of the default process group."""
    return Group(dist.distributed_c10d._get_default_group())


def data_ranks(world: int, sequence: int) -> int:
    """Number of data ranks: `world` / `sequence`. Raises UserError if that is not a whole number."""
    if sequence < 1 or world % sequence:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(
            f"parallel.sequence is {sequence}, but the number of ranks, {world}, is not a multiple of it; "
            f"use one of {', '.join(map(str, divisors))}, or another number of devices"
        )
    return world // sequence


def own_group(groups: Tensor, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """This rank's group in a division of all ranks into groups. All ranks call this together.

    `groups` [groups, size]: the ranks of one group in each row. With NCCL all groups are made by one split of the communicator;
    made one by one, each would be a split of its own over all ranks.
    """
    whole = dist.distributed_c10d._get_default_group()
    if "nccl" in dist.get_backend() and whole.bound_device_id is not None:
        found = dist.split_group(split_ranks=groups.tolist(), timeout=timeout)
        assert found is not None  # every rank is in a row
        return found
    return dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]


def init_mesh(sequence: int, device_type: str | None = None, timeout: timedelta | None = None) -> Mesh:
    """The mesh over all ranks of the default process group. Raises UserError if their number is no multiple of `sequence`.

    `device_type`: 'cpu' or 'cuda'; None: the default group's. `timeout`: time limit of one collective; None: torch's
    default.
    """
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"
    world = dist.get_world_size()
    ranks = torch.arange(world).view(data_ranks(world, sequence), sequence)
    # `init_device_mesh` is not used, because its groups get torch's default time-out instead of the default group's.
    groups = [own_group(members, timeout=timeout) for members in (ranks.T, ranks)]
    return Mesh(DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=(DATA, SEQUENCE)))
