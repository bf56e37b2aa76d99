"""Ranks agree on each batch before they work on it: one's mistake is everybody's, and a sequence group holds one sample.

Without this, a rank that raises leaves the others waiting in a collective, and ranks of a group with different samples
compute nonsense or hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.errors import UserError
from evodsp.parallel.mesh import Mesh

SAMPLED = 4096
"""Numbers of each tensor, evenly spread, that go into a digest: two samples, crops or draws differ in many places."""


class Agreement:
    """Compares batches over the ranks of a mesh. Talks over gloo, on the CPU: a GPU's queue is not waited for."""

    def __init__(self, mesh: Mesh, timeout: timedelta | None = None) -> None:
        self.mesh = mesh
        on_cpu = "gloo" in dist.get_backend()
        self._group = dist.group.WORLD if on_cpu else dist.new_group(backend="gloo", timeout=timeout)

    def check(self, batch: Mapping[str, Tensor] | UserError) -> None:
        """To be called on all ranks at once, with this rank's batch or the mistake that it met.

        Raises UserError on every rank if one met a mistake, if a sequence group holds different batches, or if a sample is
        shorter than its group has ranks.
        """
        mistake = batch if isinstance(batch, UserError) else self._too_short(batch)
        own = (int(mistake is not None), 0 if isinstance(batch, UserError) else digest(batch))
        gathered = [torch.empty(2, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(own), group=self._group)
        everybody = torch.stack(gathered)
        if everybody[:, 0].any():
            self._raise_first(mistake)
        digests = everybody[:, 1].view(self.mesh.data, self.mesh.sequence)
        differing = (digests != digests[:, :1]).nonzero()
        if len(differing):
            group, place = differing[0].tolist()
            first = group * self.mesh.sequence
            raise UserError(
                f"ranks {first} and {first + place} share a sample but were given different ones; give all ranks the same "
                "settings, seed and files"
            )

    def _too_short(self, batch: Mapping[str, Tensor]) -> UserError | None:
        residues, ranks = batch["aatype"].shape[-1], self.mesh.sequence
        if residues >= ranks:
            return None
        return UserError(
            f"parallel.sequence is {ranks}, but sample {batch['sample_index'].tolist()} has {residues} residues only; "
            "use fewer ranks a sample, or leave that chain out"
        )

    def _raise_first(self, mistake: UserError | None) -> None:
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if mistake is None else str(mistake), group=self._group)
        raise UserError(next(text for text in texts if text is not None))


def digest(batch: Mapping[str, Tensor]) -> int:
    """A number that differs for batches of different samples, crops or draws: of names, shapes and a part of the values."""
    number = 0
    for name in sorted(batch):
        value = batch[name].detach().cpu().reshape(-1)
        number = zlib.crc32(f"{name} {tuple(batch[name].shape)} {value.dtype}".encode(), number)
        number = zlib.crc32(value[:: max(1, value.numel() // SAMPLED)].contiguous().numpy().tobytes(), number)
    return number
