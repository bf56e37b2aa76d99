"""The mesh of ranks: (data, sequence). Ranks of one sequence group hold one sample and are neighbours, so that where
launchers number ranks node by node a group lies inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evodsp.errors import UserError
from evodsp.parallel.group import Group
from evodsp.parallel.ledger import Ledger

DATA, SEQUENCE = "data", "sequence"


@dataclass(frozen=True)
class Mesh:
    """`data` x `sequence` ranks. Rank r is number r mod `sequence` of the group of data rank r // `sequence`."""

    devices: DeviceMesh

    @property
    def sequence(self) -> int:
        """Ranks that share a sample."""
        return self.devices[SEQUENCE].size()

    @property
    def data(self) -> int:
        """Samples that are worked on at once."""
        return self.devices[DATA].size()

    @property
    def data_rank(self) -> int:
        """Which of the samples is this rank's."""
        return self.devices[DATA].get_local_rank()

    @property
    def sequence_rank(self) -> int:
        """Which of the shards is this rank's."""
        return self.devices[SEQUENCE].get_local_rank()

    def sequence_group(self, ledger: Ledger | None = None) -> Group:
        """The ranks that share this rank's sample."""
        return Group(self.devices[SEQUENCE].get_group(), ledger)

    def data_group(self) -> Group:
        """The ranks that hold this rank's shard of other samples."""
        return Group(self.devices[DATA].get_group())


def data_ranks(world: int, sequence: int) -> int:
    """How many samples `world` ranks work on at once, `sequence` on each. Raises UserError if that does not multiply out."""
    if sequence < 1 or world % sequence:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(
            f"parallel.sequence is {sequence}, but there are {world} ranks, which groups of {sequence} do not divide; "
            f"use one of {', '.join(map(str, divisors))}, or another number of devices"
        )
    return world // sequence


def init_mesh(sequence: int, device_type: str | None = None, timeout: timedelta | None = None) -> Mesh:
    """The mesh over all ranks of the initialised default group. Raises UserError if `sequence` does not divide them.

    `device_type`: 'cpu' or 'cuda'; None: what the default group communicates on. `timeout`: of a collective; None: torch's.
    """
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu"
    world = dist.get_world_size()
    places = torch.arange(world).view(data_ranks(world, sequence), sequence)
    # `init_device_mesh` would give its groups torch's own time-outs, whatever the default group's is.
    groups = [dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout)[0] for members in (places.T, places)]
    return Mesh(DeviceMesh.from_group(groups, device_type, places, mesh_dim_names=(DATA, SEQUENCE)))
