"""All ranks tell each other how reading the batches of a step went, before they compute on them.

Without this check a rank that raises leaves the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.data.quarantine import Failure
from evodsp.errors import UserError
from evodsp.parallel.mesh import Mesh


class BatchCheck:
    """Collects failures over the ranks of a mesh. It uses gloo on the CPU, so that a GPU's queue need not be empty."""

    def __init__(self, mesh: Mesh, timeout: timedelta | None = None) -> None:
        self.mesh = mesh
        on_cpu = "gloo" in dist.get_backend()
        self._group = dist.group.WORLD if on_cpu else dist.new_group(backend="gloo", timeout=timeout)

    def check(
        self, found: Sequence[Mapping[str, Tensor]] | UserError, failures: Sequence[Failure] = ()
    ) -> list[Failure]:
        """Say whether this rank has the batches of a step, or the UserError that it met instead. All ranks call this together.

        `failures`: chains that this rank could not make into samples; there are then no batches. If any rank has some, all of
        them are returned, the same list on every rank: the samples are replaced, and all ranks call this again. A rank also
        has no batches if another rank of its sequence group reads, or if its whole group leaves the batch out.

        Raises UserError on every rank if any rank met one, or if a sample has fewer residues than its group has ranks.
        """
        if isinstance(found, UserError):
            error: UserError | None = found
        else:
            error = next((error for batch in found if (error := self._too_short(batch)) is not None), None)
        local = (int(error is not None), len(failures))
        gathered = [torch.empty(2, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(local), group=self._group)
        failed, lost = torch.stack(gathered).unbind(1)
        if failed.any():
            self._raise_first(error)
        if lost.any():
            everyones: list[list[Failure]] = [[] for _ in gathered]
            dist.all_gather_object(everyones, list(failures), group=self._group)
            return [failure for of_rank in everyones for failure in of_rank]
        return []

    def _too_short(self, batch: Mapping[str, Tensor]) -> UserError | None:
        residues, ranks = batch["aatype"].shape[-1], self.mesh.sequence
        if residues >= ranks:
            return None
        return UserError(
            f"parallel.sequence is {ranks}, but sample {batch['sample_index'].tolist()} has only {residues} residues; "
            "use fewer ranks per sample, or leave that chain out"
        )

    def _raise_first(self, error: UserError | None) -> None:
        """Raise the first rank's error on every rank."""
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if error is None else str(error), group=self._group)
        raise UserError(next(text for text in texts if text is not None))
