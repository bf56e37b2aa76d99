"""Records work on a device once and repeats it: as a CUDA graph or, in tests without a GPU, by computing again."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Results = Sequence[Tensor | None]


@dataclass(frozen=True)
class Taken:
    """What was recorded."""

    results: Results
    """Tensors that `repeat` fills."""
    repeat: Callable[[], None]
    free: Callable[[], None]
    """Gives the memory back, and lets go of the communicators. It cannot be repeated afterwards."""


class Recorder(ABC):
    """Records what a function does on a device. Repeating it fills the tensors that the function returned when it was recorded.

    The function's inputs must lie at the same addresses when it is repeated; their values may differ.
    """

    device: str
    """Type of device whose work is recorded."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run the function without recording, so that kernels are compiled and libraries have their workspaces."""

    @abstractmethod
    def pool(self) -> Any:
        """Memory for recordings. Recordings that share it may overwrite each other's intermediates, but not results."""

    @abstractmethod
    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        """Record `run`. The tensors that it returns are not filled yet."""

    @abstractmethod
    def holds(self, backend: str) -> bool:
        """Whether collectives of this backend of torch's process groups can be recorded."""


class CudaRecorder(Recorder):
    """CUDA graphs. A recorded function must not wait for the GPU, nor read memory of the host.

    NCCL's collectives are recorded as kernels. torch launches them on a stream of its own, which waits for the one that
    records, so the recording follows them there. A wait for a collective is an edge of the graph and must be in the same
    recording.
    """

    device = "cuda"

    def warm_up(self, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # another stream cannot use memory that the allocator keeps for this one
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def holds(self, backend: str) -> bool:
        return "nccl" in backend

    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        gc.collect()  # frees memory of dead reference cycles, which the recording could not use
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may go on, such as one that locks pages for the next batch.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            torch.cuda.set_stream(stream)  # after an error torch leaves the recording's stream current
            raise
        return Taken(results, graph.replay, graph.reset)


class Rerun(Recorder):
    """Computes again and copies the results into the tensors of the first run: the effect of a graph without its speed.
    Unlike a graph it also reads Python numbers again, and it communicates when it records.
    """

    device = "cpu"

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def pool(self) -> Any:
        return None

    def holds(self, backend: str) -> bool:
        return True

    def record(self, run: Callable[[], Results], pool: Any) -> Taken:
        first = [None if x is None else torch.full_like(x.detach(), torch.nan) for x in run()]

        def repeat() -> None:
            for kept, new in zip(first, run(), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new.detach())

        return Taken(first, repeat, lambda: None)


def versions() -> str:
    """What decides which kernels a recording holds, besides the settings."""
    triton = importlib.util.find_spec("triton")
    named = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": torch.cuda.nccl.version() if torch.cuda.is_available() else None,
        "Triton": importlib.metadata.version("triton") if triton else None,
    }
    return ", ".join(f"{name} {version}" for name, version in named.items())
