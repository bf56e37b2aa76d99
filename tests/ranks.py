"""A pool of ranks for tests. Its processes are kept between tests, because starting them takes seconds.

`pool.run(n, function, *arguments)` calls a module-level function on ranks 0 … n-1, with a gloo process group of these
ranks as its first argument. The results are returned in rank order. Every rank uses one thread.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

MAX_RANKS = 4
TIMEOUT = 300.0


@dataclass
class RankError(Exception):
    """A function failed on some ranks. `traces`: their tracebacks by rank."""

    traces: dict[int, str]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {trace}" for rank, trace in self.traces.items())


class RankPool:
    """Processes that run functions as the ranks of a group. They start at the first call of `run`."""

    def __init__(self, ranks: int = MAX_RANKS) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(group, *arguments)` on the first `ranks` ranks and return their results by rank.

        Raises RankError if the function failed on a rank, TimeoutError if a rank gave no result in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        results, failed = [], {}
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(TIMEOUT):
                self.stop()
                raise TimeoutError(f"rank {rank} gave no answer within {TIMEOUT} s")
            succeeded, value = pipe.recv()
            if succeeded:
                results.append(value)
            else:
                failed[rank] = value
        if failed:
            self.stop()  # the other ranks may wait for the failed one forever
            raise RankError(failed)
        return results

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _target(self) -> Callable[[int, int, str, Connection], None]:
        """The main function of the processes. A subclass may return another one, for other messages from `run`."""
        return _serve

    def _start(self) -> None:
        context = mp.get_context("spawn")
        handle, path = tempfile.mkstemp(prefix="ranks_")
        os.close(handle)
        os.unlink(path)
        for rank in range(self.ranks):
            local_end, remote_end = context.Pipe()
            process = context.Process(target=self._target(), args=(rank, self.ranks, path, remote_end), daemon=True)
            process.start()
            remote_end.close()
            self._processes.append(process)
            self._pipes.append(local_end)


def end_with_parent() -> None:
    """End this process when its parent ends for any reason, even while it waits in a collective."""
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


class UncheckedPool(RankPool):
    """Ranks without the checks of shapes, which torch.compile cannot trace."""

    def _target(self) -> Callable[[int, int, str, Connection], None]:
        return _serve_unchecked


def _serve(rank: int, ranks: int, path: str, pipe: Connection) -> None:
    """Run the functions that arrive through `pipe`, until it is closed."""
    import tests.process  # noqa: F401  (installs the shape checks)

    _serve_unchecked(rank, ranks, path, pipe)


def _serve_unchecked(rank: int, ranks: int, path: str, pipe: Connection) -> None:
    end_with_parent()
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, ranks + 1)}
    while True:
        try:
            n, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(groups[n], *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
