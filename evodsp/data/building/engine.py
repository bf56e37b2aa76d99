"""Who builds the shards: processes of this machine, or the workers of a Dask cluster.

A chain may end the process that reads it (out of memory, a crash of a parser). Only that process's shard is then made again,
in a process of its own and without the chain that it was reading. `concurrent.futures` and loky give up all tasks when one of
their processes dies, and cannot be interrupted; hence this small pool. Dask's local cluster goes on, but it blames no chain: it
gives up a shard whose workers die four times, and costs 70 MB of packages and two seconds; hence only where it is asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from evodsp.data.building.parts import Part, build_part
from evodsp.errors import UserError

_CONTEXT = multiprocessing.get_context("forkserver")
_KILLED = "its worker process was ended (out of memory, or a crash of a parser)"

LOCAL = "local"
"""In place of a scheduler's address: a Dask cluster of this machine."""

_Task = tuple[Part, dict[str, str]]
Build = Callable[[Part, dict[str, str]], int]


def on_this_machine(parts: Sequence[Part], workers: int, build: Build = build_part) -> Iterator[int]:
    """Build the parts in `workers` processes. Yields the number of names of each finished part.

    `build`: what builds one of them. Raises OSError if a part cannot be written. If the caller stops, the processes are killed.
    """
    waiting: list[_Task] = [(part, {}) for part in reversed(parts)]
    crew: dict[Connection, tuple[Any, _Task]] = {}
    try:
        while waiting or crew:
            while waiting and len(crew) < workers:
                connection, process = _start(build)
                crew[connection] = process, waiting.pop()
                _give(connection, crew[connection][1])
            for ready in wait(list(crew)):
                assert isinstance(ready, Connection)
                process, (part, deadly) = crew.pop(ready)
                try:
                    result = ready.recv()
                except (EOFError, ConnectionError):
                    waiting.append((part, deadly | _killed_by(part, deadly)))
                    continue
                if isinstance(result, BaseException):
                    raise result
                yield result
                if waiting:
                    crew[ready] = process, waiting.pop()
                    _give(ready, crew[ready][1])
                else:
                    ready.close()  # the process ends
    finally:
        for process, _ in crew.values():
            process.kill()


def on_cluster(parts: Sequence[Part], address: str, workers: int) -> Iterator[int]:
    """Build the parts on the workers of the Dask scheduler at `address`. Yields the number of names of each finished part.

    `address` LOCAL: on a Dask cluster of `workers` processes of this machine, which ends with the build. A part whose workers
    die again and again is built on this machine instead.
    Raises UserError if distributed is not installed or the scheduler does not answer; OSError if a part cannot be written.
    """
    try:
        from distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError as error:
        raise UserError("--scheduler needs Dask; install the extra cluster, or distributed itself") from error
    with contextlib.ExitStack() as stack:
        try:
            if address == LOCAL:  # port 0: a dashboard beside those of other clusters
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
                address = stack.enter_context(cluster).scheduler_address
            client = stack.enter_context(Client(address))
        except (OSError, ValueError) as error:
            raise UserError(
                f"--scheduler {address}: no Dask scheduler answers there ({error}); check the address"
            ) from error
        part_of = {future: part for part in parts for future in [client.submit(build_part, part, pure=False)]}
        for future in as_completed(list(part_of)):
            try:
                yield future.result()
            except KilledWorker:
                yield from on_this_machine([part_of[future]], workers=1)


def _start(build: Build) -> tuple[Connection, Any]:
    _CONTEXT.set_forkserver_preload([build_part.__module__])  # imported once, not by each process
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=[theirs, build], daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _give(connection: Connection, task: _Task) -> None:
    """Send a task to a worker. If the worker is dead already, the next `recv` tells."""
    task[0].current.unlink(missing_ok=True)  # of a build that was killed
    with contextlib.suppress(ConnectionError):
        connection.send(task)


def _serve(connection: Connection, build: Build) -> None:
    """Build parts until the other end is closed: there are no more, or the building process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the building process ends this one
    while True:
        try:
            part, deadly = connection.recv()
        except EOFError:
            return
        try:
            connection.send(build(part, deadly))
        except (OSError, UserError) as error:
            connection.send(error)


def _killed_by(part: Part, deadly: dict[str, str]) -> dict[str, str]:
    """The name that a dead worker was reading, with the reason why it is left out from now on."""
    name = part.current.read_bytes().decode("utf-8", "surrogateescape") if part.current.is_file() else ""
    if not name or name in deadly:
        raise UserError(
            f"{part.shard}: the worker process that makes it was ended (out of memory?); use fewer --workers and run again"
        )
    return {name: _KILLED}
