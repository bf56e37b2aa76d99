"""Makers of samples: the calling process, or a pool of processes that hand samples over in shared memory.

A sample or a batch is packed into one piece of memory, to be handed to other processes or other ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.multiprocessing  # teaches pipes to send tensors
from jaxtyping import UInt8
from torch import Tensor

from evodsp.data.pool import Pool
from evodsp.data.samples.dataset import Sample, SampleDataset
from evodsp.errors import MachineError, UserError

Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Names, types and shapes of tensors, in the order in which they lie in the memory."""

_ALIGNMENT = 64
"""Bytes to which tensors are aligned, as torch aligns its own."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout in which `pack` writes the tensors."""
    return [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def packed_bytes(layout: Layout) -> int:
    """Bytes of memory that a layout needs."""
    return sum(_aligned(_bytes(dtype, shape)) for _, dtype, shape in layout)


def pack(tensors: Mapping[str, Tensor], memory: UInt8[Tensor, " n"]) -> None:
    """Copy the tensors into `memory`, which may be on another device."""
    for value, place in zip(tensors.values(), unpack(layout_of(tensors), memory).values(), strict=True):
        place.copy_(value)


def unpack(layout: Layout, memory: UInt8[Tensor, " n"]) -> dict[str, Tensor]:
    """The tensors in `memory`, as views."""
    tensors, start = {}, 0
    for name, dtype, shape in layout:
        size = _bytes(dtype, shape)
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return tensors


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@runtime_checkable
class SampleMaker(Protocol):
    """Makes samples of given chains."""

    def submit(self, index: int, key: str) -> Future[Sample]:
        """Sample `index` of the chain `key`. The future raises UserError if the chain cannot be made into a sample.

        Any other exception is a bug, of the data code or of the pool.
        """

    def close(self) -> None:
        """End all work in the background."""


class MadeHere:
    """Makes samples in the calling process, when they are asked for."""

    def __init__(self, samples: SampleDataset) -> None:
        self._samples = samples

    def submit(self, index: int, key: str) -> Future[Sample]:
        future: Future[Sample] = Future()
        try:
            future.set_result(self._samples.make(index, key))
        except UserError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing to end."""


class SamplePool:
    """A `Pool` of `workers` processes. A chain whose worker dies, or needs longer than `time_limit` seconds (None: no limit),
    is one that cannot be made into a sample. The lowest sample is begun first. On a machine with a GPU samples arrive in
    pinned memory.
    """

    def __init__(self, samples: SampleDataset, workers: int, time_limit: float | None = None) -> None:
        make = partial(_packed, samples.without_keys())
        self._pool: Pool[Sample] = Pool(make, workers, time_limit, "data.time_limit", _unpacked)

    def submit(self, index: int, key: str) -> Future[Sample]:
        """See `SampleMaker.submit`. A future that is cancelled before its sample is begun costs nothing."""
        return self._pool.submit(index, key, number=index)

    def close(self) -> None:
        """End all workers, in the middle of a sample too."""
        self._pool.close()


def _packed(samples: SampleDataset, index: int, key: str) -> tuple[Any, torch.Tensor]:
    """A sample in one piece of shared memory: one open file instead of one for each of its sixty tensors."""
    torch.set_num_threads(1)
    sample = samples.make(index, key)
    layout = layout_of(sample)
    memory = torch.empty(size := packed_bytes(layout), dtype=torch.uint8)
    try:
        memory = memory.share_memory_()
    except RuntimeError as error:  # torch's words for no room
        raise MachineError(
            f"/dev/shm, the shared memory, has no room for a sample of {size / 2**20:,.1f} MiB; make room there (in "
            "a container: --ipc host or --shm-size 8g), or read samples without workers: --data.num_workers 0"
        ) from error
    pack(sample, memory)
    return layout, memory


def _unpacked(packed: tuple[Any, torch.Tensor]) -> Sample:
    layout, memory = packed
    return unpack(layout, memory.pin_memory() if torch.cuda.is_available() else memory)
