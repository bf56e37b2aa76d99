"""Records work on a device once and repeats it: as a CUDA graph or, in tests without a GPU, by computing again."""

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
    def record(self, run: Callable[[], Results], pool: Any) -> tuple[Results, Callable[[], None]]:
        """The tensors that `run` returns, not filled yet, and a function that fills them."""


class CudaRecorder(Recorder):
    """CUDA graphs. A recorded function must not wait for the GPU, nor read memory of the host."""

    device = "cuda"

    def warm_up(self, run: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # another stream cannot use memory that the allocator keeps for this one
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results], pool: Any) -> tuple[Results, Callable[[], None]]:
        gc.collect()  # frees memory of dead reference cycles, which the recording could not use
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may go on, such as one that locks pages for the next batch.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            torch.cuda.set_stream(stream)  # after an error torch leaves the recording's stream current
            raise
        return results, graph.replay


class Rerun(Recorder):
    """Computes again and copies the results into the tensors of the first run: the effect of a graph without its speed.
    Unlike a graph it also reads Python numbers again.
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
