"""The end of memory, of a GPU or of this machine, as one line that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evodsp.errors import UserError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def memory_errors(name: str, residues: int, device: torch.device) -> Iterator[None]:
    """Turn the end of memory, of a GPU or of this machine, into a UserError that says what to change."""
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
        raise UserError(
            f"{name}: {residues:,} residues do not fit into {where}; lower --working_memory, --msa_clusters and "
            f"--extra_msa, take --precision bf16, raise --parallel.sequence{instead}"
        ) from error
