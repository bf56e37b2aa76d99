"""Who builds the shards: processes of this machine, or the workers of a Dask cluster.

A chain may end the process that reads it (out of memory, a crash of a parser). Only that process's shard is then made again,
in a process of its own and without the chain that it was reading. Dask's local cluster goes on too, but it blames no chain: it
gives up a shard whose workers die four times, and costs 70 MB of packages and two seconds; hence only where it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from evodsp.data.building.parts import Part, build_part
from evodsp.data.pool import Pool, WorkerEndedError
from evodsp.errors import UserError

_KILLED = "its worker process was ended (out of memory, or a crash of a parser)"

LOCAL = "local"
"""In place of a scheduler's address: a Dask cluster of this machine."""

_Task = tuple[Part, dict[str, str]]
Build = Callable[[Part, dict[str, str]], int]


def on_this_machine(parts: Sequence[Part], workers: int, build: Build = build_part) -> Iterator[int]:
    """Build the parts in `workers` processes. Yields the number of names of each finished part.

    `build`: what builds one of them. Raises OSError if a part cannot be written. If the caller stops, the processes are killed.
    """
    pool: Pool[int] = Pool(build, min(workers, len(parts)))
    running: dict[Future[int], _Task] = {}

    def begin(part: Part, deadly: dict[str, str]) -> None:
        part.current.unlink(missing_ok=True)  # of a build that was killed
        running[pool.submit(part, deadly)] = part, deadly

    try:
        for part in parts:
            begin(part, {})
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                part, deadly = running.pop(done)
                try:
                    names = done.result()
                except WorkerEndedError:
                    begin(part, deadly | _killed_by(part, deadly))
                    continue
                yield names
    finally:
        pool.close()


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


def _killed_by(part: Part, deadly: dict[str, str]) -> dict[str, str]:
    """The name that a dead worker was reading, with the reason why it is left out from now on."""
    name = part.current.read_bytes().decode("utf-8", "surrogateescape") if part.current.is_file() else ""
    if not name or name in deadly:
        raise UserError(
            f"{part.shard}: the worker process that makes it was ended (out of memory?); use fewer --workers and run again"
        )
    return {name: _KILLED}
