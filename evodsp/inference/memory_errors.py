"""The end of memory, of a GPU or of this machine, as one line that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evodsp.errors import UserError
from evodsp.inference.failures import Failure
from evodsp.parallel.group import Group

LESS_MEMORY = "lower --working_memory, --msa_clusters and --extra_msa, take --precision bf16, raise --parallel.sequence"
"""What a user can change."""
_CPU_ALLOCATOR = "DefaultCPUAllocator"


class LeftAlone(Exception):
    """A rank of several has no memory left. The others wait for it in a collective, so it cannot go on with them."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@contextmanager
def memory_errors(name: str, residues: int, device: torch.device, group: Group | None = None) -> Iterator[None]:
    """Turn the end of memory, of a GPU or of this machine, into a UserError that says what to change.

    `group`: ranks that compute together here, so that the others wait for one whose memory ends: it raises LeftAlone.
    """
    try:
        yield
    except (
        MemoryError,
        RuntimeError,
    ) as error:  # torch.OutOfMemoryError, and what PyTorch raises on a CPU, are RuntimeErrors
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and not isinstance(error, MemoryError) and _CPU_ALLOCATOR not in str(error):
            raise
        where = f"the memory of this GPU ({device})" if on_gpu else "the memory of this machine"
        instead = ", or use --device cpu" if on_gpu else ""
        reason = f"{name}: {residues:,} residues do not fit into {where}; {LESS_MEMORY}{instead}"
        raise UserError(reason) if group is None else LeftAlone(Failure(name, reason)) from error
