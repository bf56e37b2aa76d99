"""How work on a device is recorded once and repeated: as a CUDA graph, or, to test what uses it, by computing again."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Results = Sequence[Tensor | None]


class Recorder(ABC):
    """Records what a function does on a device. Repeating it fills the tensors that the function returned when it was recorded.

    What the function reads must lie at the same addresses when it is repeated, with other numbers if need be.
    """

    device: str
    """Type of the devices whose work it records."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run it without recording, so that kernels are compiled and libraries have their workspaces."""

    @abstractmethod
    def pool(self) -> Any:
        """Memory for recordings. Those that share it may overwrite what the others do not return."""

    @abstractmethod
    def record(self, run: Callable[[], Results], pool: Any) -> tuple[Results, Callable[[], None]]:
        """The tensors that `run` returns, which have no numbers yet, and a function that fills them."""


class CudaRecorder(Recorder):
    """CUDA graphs. A recorded function must not wait for the GPU, nor read memory of the host."""

    device = "cuda"

    def warm_up(self, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the allocator keeps for one stream, another cannot use
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results], pool: Any) -> tuple[Results, Callable[[], None]]:
        gc.collect()  # memory of dead cycles, which the recording could not use
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may go on, such as one that locks pages for the next batch.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            torch.cuda.set_stream(stream)  # torch leaves the recording's current if it ends with an error
            raise
        return results, graph.replay


class Rerun(Recorder):
    """Computes again, and copies into the tensors of the first time: what a graph does, without its speed. Numbers that are
    part of a graph, such as Python's, are read again too.
    """

    device = "cpu"

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def pool(self) -> Any:
        return None

    def record(self, run: Callable[[], Results], pool: Any) -> tuple[Results, Callable[[], None]]:
        first = [None if x is None else torch.full_like(x.detach(), torch.nan) for x in run()]

        def repeat() -> None:
            for kept, new in zip(first, run(), strict=True):
                if kept is not None and new is not None:
                    kept.copy_(new.detach())

        return first, repeat
