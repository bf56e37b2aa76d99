"""A pool of ranks for tests. Its processes are kept between tests, because starting them takes seconds.

`pool.run(n, function, *arguments)` calls a module-level function on ranks 0 … n-1, with a gloo process group of these
ranks as its first argument. The results are returned in rank order. Every rank uses one thread.

Ranks are forks of one process that has imported what they need and has trained and predicted once, because that takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

MAX_RANKS = 4
TIMEOUT, AFTER_A_FAILURE = 300.0, 5.0
IMPORTED = ("evodsp.training.command", "evodsp.inference.command", "torch._dynamo")

Target = Callable[[int, int, str, Connection], None]
"""What a process of a pool runs: of its rank, the number of ranks, the path of their rendezvous, and the pipe to the tests."""


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
        self._processes: list[int] = []
        self._pipes: list[Connection] = []

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(group, *arguments)` on the first `ranks` ranks and return their results by rank.

        Raises RankError if the function failed on a rank, TimeoutError if a rank gave no result in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        results, failed, left = {}, {}, dict(zip(self._pipes[:ranks], range(ranks), strict=True))
        deadline = time.monotonic() + TIMEOUT
        while left and (ready := wait(list(left), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                succeeded, value = pipe.recv()
                (results if succeeded else failed)[left.pop(pipe)] = value
                if not succeeded:  # the others may wait for it for ever
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
        if failed or left:
            self.stop()
        if failed:
            raise RankError(dict(sorted(failed.items())))
        if left:
            raise TimeoutError(f"rank {min(left.values())} gave no answer within {TIMEOUT} s")
        return [results[rank] for rank in range(ranks)]

    def stop(self) -> None:
        """Kill the processes; where branches are counted (tests/coverage.ini), so that they write down what they have seen."""
        number = signal.SIGTERM if "coverage" in sys.modules else signal.SIGKILL
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            os.kill(process, number)
            pipe.close()
        self._processes, self._pipes = [], []

    def _target(self) -> Target:
        """The main function of the processes. A subclass may return another one, for other messages from `run`."""
        return _serve

    checked = True
    """Whether the processes check the shapes in signatures."""

    def _start(self) -> None:
        self._processes, self._pipes = _parent(self.checked).forks(self.ranks, self._target())


class _Parent:
    """A process that has imported what ranks need. Every process of the tests that starts ranks has one for all its pools."""

    def __init__(self, checked: bool) -> None:
        context = mp.get_context("spawn")
        self._pipe, remote_end = context.Pipe()
        context.Process(target=_bear, args=(remote_end, checked)).start()
        remote_end.close()
        atexit.register(self._pipe.close)  # before multiprocessing waits for the process, which ends then
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process that ranks are forks of ended; its error stands above") from None

    def forks(self, ranks: int, target: Target) -> tuple[list[int], list[Connection]]:
        """Process ids of new ranks that run `target`, and pipes to them."""
        handle, path = tempfile.mkstemp(prefix="ranks_")
        os.close(handle)
        os.unlink(path)
        with Listener(family="AF_UNIX") as listener:
            self._pipe.send((ranks, target, path, listener.address))
            pipes = [listener.accept() for _ in range(ranks)]
        by_rank = sorted((*pipe.recv(), pipe) for pipe in pipes)
        return [process for _, process, _ in by_rank], [pipe for _, _, pipe in by_rank]


@cache
def _parent(checked: bool) -> _Parent:
    return _Parent(checked)


def _bear(pipe: Connection, checked: bool) -> None:
    """Fork ranks as messages from `pipe` say, until it is closed; they end with this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then close the pipe
    gc.disable()  # imports take a quarter less without it
    if checked:
        import tests.process  # noqa: F401
    for name in IMPORTED:
        import_module(name)
    if checked:
        from tests.builders.first_run import run_first

        run_first()
    gc.collect()
    gc.freeze()  # else collections in the forks would copy the memory that they share
    gc.enable()
    pipe.send("ready")
    context = mp.get_context("fork")
    while True:
        try:
            ranks, target, path, address = pipe.recv()
        except EOFError:
            os._exit(0)  # an orderly end would wait for ranks that wait for this process to end
        for rank in range(ranks):
            context.Process(target=_born, args=(rank, ranks, target, path, address), daemon=True).start()


def _born(rank: int, ranks: int, target: Target, path: str, address: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe = Client(address, family="AF_UNIX")
    pipe.send((rank, os.getpid()))
    target(rank, ranks, path, pipe)


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

    checked = False


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a module-level function in a new process without the checks of shapes. Raises RankError if it fails."""
    _, (pipe,) = _parent(checked=False).forks(1, _call)
    with pipe:
        pipe.send((function, arguments))
        succeeded, value = pipe.recv()
    if not succeeded:
        raise RankError({0: value})
    return value


def _call(_: int, __: int, ___: str, pipe: Connection) -> None:
    end_with_parent()
    import torch

    torch.set_num_threads(1)
    mp.current_process()._config["daemon"] = False  # it may start processes
    function, arguments = pipe.recv()
    try:
        pipe.send((True, function(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _serve(rank: int, ranks: int, path: str, pipe: Connection) -> None:
    """Run the functions that arrive through `pipe`, until it is closed."""
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
