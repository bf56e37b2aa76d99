"""One rank of each sequence group reads a sample and gives it to the others, which then make the features each for itself.

Features are thirty times as large as what they are made from, so sending each rank its part of them would take more bytes
in any group of less than thirty ranks. Every rank makes them whole, without further communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.data.samples.sample_pool import Layout, layout_of, pack, packed_bytes, unpack
from evodsp.parallel.group import Group
from evodsp.parallel.mesh import Mesh, own_group


class BatchSharing:
    """Broadcasts batches within the sequence groups of a mesh."""

    def __init__(self, group: Group, host: dist.ProcessGroup) -> None:
        """`group`: the ranks that share a sample. `host`: the same ranks, connected by gloo: what the host must know, layouts
        and sizes, does not pass through a GPU, whose queue need not be empty.
        """
        self._group, self._host = group, host

    @classmethod
    def on(cls, mesh: Mesh, timeout: timedelta | None = None) -> BatchSharing:
        """Between the ranks of a mesh; all of them call this together."""
        group = mesh.sequence_group()
        if "gloo" in dist.get_backend(group.handle):
            return cls(group, group.handle)
        ranks = torch.arange(mesh.data * mesh.sequence).view(mesh.data, mesh.sequence)
        return cls(group, own_group(ranks, "gloo", timeout))

    @property
    def reads(self) -> bool:
        """Whether this rank reads the samples of its group."""
        return self._group.rank == 0

    def share(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, Tensor], device: torch.device
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The reading rank's tensors, on every rank of its group: those on `device`, and those on the host.

        All ranks of a group call this together; what the others pass is not looked at.
        """
        if self._group.size == 1:
            return dict(on_device), dict(on_host)
        sent: list[tuple[Layout, dict[str, Tensor]] | None] = [None]
        if self.reads:
            sent = [(layout_of(on_device), dict(on_host))]
        dist.broadcast_object_list(sent, group=self._host, group_src=0)
        if sent[0] is None:
            raise RuntimeError("the reading rank sent no layout")
        layout, host = sent[0]
        memory = torch.empty(packed_bytes(layout), dtype=torch.uint8, device=device)
        if self.reads:
            pack(on_device, memory)
        dist.broadcast(memory, group=self._group.handle, group_src=0)
        return unpack(layout, memory), host
