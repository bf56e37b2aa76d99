"""The default process group of one rank: found from the environment, started, stopped.

Ranks are started by torchrun, by plain `srun`, or by `evodsp` itself (`evodsp.launch.launcher`); `start` serves all three.
What can go wrong, and how soon it ends:

- A rank that dies takes its connections with it: the others' next collective fails at once (`guarded` says so in a line).
- A rank that is stopped, or whose machine is gone, keeps its connections: `watch` misses its sign of life.
- A rank that hangs in its own code gives signs of life but launches no more collectives: `watch` names the furthest behind.
- The time-out of the group itself, somewhat later, is what remains if all else fails. gloo then raises in the rank that
  waits. NCCL waits on the GPU, so its own watchdog thread aborts the process (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by default).
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch.watch import GIVEN_UP, Watch, watch_of_this_process

TIMEOUT_S = 600.0
"""How long a collective may take (NCCL's own default; gloo's is three times that): longer than reading an alignment or saving
a checkpoint on one rank while the others wait, shorter than anybody wants to pay for a machine that does nothing."""

MEETING_S = 600.0
"""How long ranks wait for each other at the start: some machines boot, queue or import more slowly than others."""

# A launcher ends the survivors of a dead rank within this time, having named it.
_GRACE_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of a run."""

    rank: int
    ranks: int
    local_rank: int
    """Its number on its machine, and so the number of its GPU."""
    host: str
    """Where the store is that ranks meet at."""
    port: int
    hosts_store: bool
    """Whether the store is this process's to make."""


def under_launcher() -> bool:
    """Whether torchrun, srun or the like started this process as one of several ranks (or as the only one of a group)."""
    return _place(os.environ) is not None


def was_restarted() -> bool:
    """Whether torchrun started this rank again after a failure on this machine. (Those of other machines may not know.)"""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def place() -> Place:
    """This process's place, from the environment. Raises UserError if nobody started it as a rank."""
    found = _place(os.environ)
    if found is None:
        raise UserError("not started as a rank of several; use torchrun, srun, or --parallel.sequence on one machine")
    return found


def _place(environment: Mapping[str, str]) -> Place | None:
    """torchrun's variables, else those of a step of `srun`. Raises UserError if they are not numbers."""
    port = environment.get("MASTER_PORT")
    try:
        if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")) and port is not None:
            rank = int(environment["RANK"])
            agent_hosts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return Place(
                rank,
                int(environment["WORLD_SIZE"]),
                int(environment.get("LOCAL_RANK", rank)),
                environment["MASTER_ADDR"],
                int(port),
                hosts_store=rank == 0 and not agent_hosts,
            )
        # Of a step: SLURM_NTASKS is there in a batch script as well, which is one process.
        if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environment:
            rank = int(environment["SLURM_PROCID"])
            step = int(environment.get("SLURM_JOB_ID", 0)) * 31 + int(environment.get("SLURM_STEP_ID", 0))
            return Place(
                rank,
                int(environment["SLURM_STEP_NUM_TASKS"]),
                int(environment.get("SLURM_LOCALID", 0)),
                environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "localhost")),
                # Ranks must agree on a port without talking; two steps of a node should not get the same.
                int(port) if port is not None else 15000 + step % 15000,
                hosts_store=rank == 0,
            )
    except ValueError as error:
        raise UserError(f"the launcher's environment holds no number where one belongs ({error})") from error
    return None


def first_host(nodes: str) -> str:
    """The first host of SLURM's node list: 'gpu[003-007,010],cpu1' -> 'gpu003'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def collective_timeout(timeout_s: float) -> timedelta:
    """When a collective gives up: later than the watch, which can say whose fault it is. For every group of a run."""
    return timedelta(seconds=1.2 * timeout_s + 10)


def start(backend: str | None = None, timeout_s: float = TIMEOUT_S, meeting_s: float = MEETING_S) -> None:
    """Start the default process group of this rank; nothing happens if there is one.

    `backend`: 'nccl' (takes the GPU of this rank's number on its machine) or 'gloo'; None: NCCL where there are GPUs.
    `timeout_s`: how long a rank may stand still before the run is ended; all ranks give the same. `meeting_s`: how long to wait
    for ranks that have not come yet.

    Raises UserError if this process is no rank, has no GPU, or does not meet the others.
    """
    if dist.is_initialized():
        return
    here = place()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _take_gpu(here) if backend == "nccl" else None
    try:
        # Two clients, because the watch looks at times when the main thread waits. Of a part that no earlier attempt used.
        main, watching = (_store(here, meeting_s, hosts) for hosts in (here.hosts_store, False))
        part = _fresh_part(main, here, meeting_s)
    except dist.DistError as error:
        raise UserError(
            f"rank {here.rank} did not meet the others at {here.host}:{here.port} within {meeting_s:g} s; "
            "check that all of them were started and reach that address"
        ) from error
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(part, main),
        rank=here.rank,
        world_size=here.ranks,
        timeout=collective_timeout(timeout_s),
        device_id=device,
    )
    if here.ranks > 1:
        watch = Watch(dist.PrefixStore(part, watching), here.rank, here.ranks, timeout_s)
        dist.barrier()  # all have written their first state
        watch.start()


def _store(here: Place, timeout_s: float, hosts: bool) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(here.host, here.port, None, hosts, timeout=timeout, wait_for_workers=False)


def _fresh_part(store: dist.Store, here: Place, timeout_s: float) -> str:
    """The name of a part of the store that no earlier attempt has written to, the same on every rank of this one.

    After a restart torchrun's store still holds the addresses of the dead. TORCHELASTIC_RESTART_COUNT cannot tell attempts
    apart: each machine's agent counts its own workers' failures, so the counts of two machines come to differ. Instead rank 0
    draws a name, and every other rank asks for it under a name of its own, to which no old answer can belong.
    """
    store, mine = dist.PrefixStore("evodsp", store), uuid.uuid4().hex
    if here.rank > 0:
        store.set(f"asks/{here.rank}", mine)
        name = store.get(f"answer/{mine}").decode()
        store.add(f"arrived/{name}", 1)
        return name
    answered = dict[int, bytes]()
    deadline = time.monotonic() + timeout_s
    while store.add(f"arrived/{mine}", 0) < here.ranks - 1:
        # A rank that asked in an earlier attempt is answered too, in vain; hence each again and again.
        for rank in range(1, here.ranks):
            if store.check([f"asks/{rank}"]) and (asked := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{asked.decode()}", mine)
                answered[rank] = asked
        if time.monotonic() > deadline:
            missing = ", ".join(str(rank) for rank in range(1, here.ranks) if rank not in answered)
            raise UserError(
                f"of {here.ranks} ranks number {missing or 'unknown'} did not come within {timeout_s:g} s; "
                "check that all of them were started"
            )
        time.sleep(_POLL_S)
    return mine


def _take_gpu(here: Place) -> torch.device:
    """Raises UserError if there are fewer GPUs than ranks on this machine."""
    gpus = torch.cuda.device_count()
    if here.local_rank >= gpus:
        raise UserError(
            f"rank {here.rank} is number {here.local_rank} on its machine, which has {gpus} GPUs; "
            f"start at most {gpus} ranks on it"
        )
    device = torch.device("cuda", here.local_rank)
    torch.cuda.set_device(device)
    return device


def stop() -> None:
    """Leave the group once every rank has come here: one that left early would look dead to the others."""
    if not dist.is_initialized():
        return
    dist.barrier()
    if watch := watch_of_this_process():
        watch.stop()
        dist.barrier()  # the rank that has the store must not go before all have stopped using it
    dist.destroy_process_group()


@contextmanager
def guarded() -> Iterator[None]:
    """Turns a collective's failure because another rank is gone into one line and exit code 3, without a traceback.

    The line is withheld for a few seconds: whoever started the ranks knows which of them died, says so and ends the rest.
    """
    try:
        yield
    except RuntimeError as error:
        if not (dist.is_initialized() and lost_contact(error)):
            raise
        time.sleep(_GRACE_S)
        why = " ".join(str(error).split())
        print(
            f"evodsp: rank {dist.get_rank()} lost contact with another rank, which failed first: {why}", file=sys.stderr
        )
        raise SystemExit(GIVEN_UP) from None


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: gloo's errors are plain RuntimeErrors, NCCL's have a class."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
