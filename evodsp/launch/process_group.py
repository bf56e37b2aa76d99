"""Starts and stops the default process group of a rank, whichever program started the rank (`evodsp.launch.environment`).

How failures are noticed:

- A rank that dies closes its connections: the others' next collective fails at once (`guarded` prints one line).
- A rank that is stopped, or whose machine is gone, keeps its connections: `watch` misses its heartbeat.
- A rank that hangs in its own code still sends heartbeats but launches no collectives: `watch` names the rank furthest behind.
- If all else fails, the group's own time-out ends the run somewhat later. gloo then raises in the waiting rank. NCCL waits on
  the GPU, so its watchdog thread aborts the process (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by default).
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch.environment import GIVEN_UP, RankAddress, place
from evodsp.launch.watch import Watch, foreign, loopback, open_store, text, watch_of_this_process
from evodsp.parallel.config import SequenceConfig
from evodsp.parallel.group import Mesh, init_mesh
from evodsp.printing import one_line, shown, tell

TIMEOUT_S = 600.0
"""Seconds that a rank may stand still (NCCL's own default; gloo's is three times as long): longer than the others wait while
one rank reads an alignment or saves a checkpoint, and short enough not to waste a stuck machine's time."""

MEETING_S = 600.0
"""Seconds that ranks wait for each other at the start; some machines boot or import more slowly than others."""

_SAID_S = 5.0
"""After this time rank 0 says for whom it waits."""

# Within this time a launcher names a dead rank and ends the others.
_GRACE_S = 5.0
_POLL_S = 0.02


def collective_timeout(timeout_s: float) -> timedelta:
    """Time-out of the collectives of every group: later than the watch's, which can name the rank at fault."""
    return timedelta(seconds=1.2 * timeout_s + 10)


def start(
    backend: str | None = None, timeout_s: float = TIMEOUT_S, meeting_s: float = MEETING_S, together: bool = True
) -> None:
    """Start the default process group of this rank, unless there is one already.

    `backend`: 'nccl' (takes the GPU of this rank's number on its machine) or 'gloo'; None: NCCL where there are GPUs.
    `timeout_s`: how long a rank may stand still before the run is ended, the same on all ranks. `meeting_s`: how long to wait
    for the other ranks. `together`: whether ranks compute together; if not, one that launches no collective does not hang.

    Raises UserError if this process is not a rank, has no GPU, or does not meet the others.
    """
    if dist.is_initialized():
        return
    here = place()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = None
    if backend == "nccl":
        device = torch.device("cuda", gpu_number(here))
        torch.cuda.set_device(device)
    try:
        # Two clients, because the watch reads the store while the main thread waits on it. Both use a part of the store that no
        # earlier attempt has used.
        main, watching = (open_store(here.host, here.port, meeting_s, hosts) for hosts in (here.hosts_store, False))
        part = _fresh_part(main, here, meeting_s)
    except dist.DistError as error:
        raise UserError(
            f"rank {here.rank} did not meet the others at {here.host}:{here.port} within {meeting_s:g} s; "
            "check that all of them were started and reach that address"
        ) from error
    _check_address(dist.PrefixStore(part, main), here)
    if device is not None:
        _claim_gpu(dist.PrefixStore(part, main), here, device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(part, main),
        rank=here.rank,
        world_size=here.ranks,
        timeout=collective_timeout(timeout_s),
        device_id=device,
    )
    if here.ranks > 1:
        watch = Watch(dist.PrefixStore(part, watching), here.rank, here.ranks, timeout_s, together)
        dist.barrier()  # all ranks have written their first state
        watch.start()


def mesh_of(config: SequenceConfig, device_type: str | None = None) -> Mesh:
    """The mesh over all ranks, after `start`. All ranks call this together.

    `device_type`: 'cpu' or 'cuda'; None takes that of the default group. Raises UserError if the ranks do not divide into
    groups.
    """
    return init_mesh(config.sequence, device_type, collective_timeout(config.timeout))


def _fresh_part(store: dist.Store, here: RankAddress, timeout_s: float) -> str:
    """The name of a part of the store that no earlier attempt has written to, the same on every rank of this attempt.

    After a restart torchrun's store still holds the addresses of dead ranks. TORCHELASTIC_RESTART_COUNT does not identify an
    attempt: each machine's agent counts its own workers' failures, so two machines may have different counts. Instead rank 0
    draws a random name, and every other rank requests it under its own random name, which no old answer can match.
    """
    store, mine = dist.PrefixStore("evodsp", store), uuid.uuid4().hex
    if here.rank > 0:
        store.set(f"asks/{here.rank}", mine)
        store.wait([f"answer/{mine}"])
        name = _drawn(store, f"answer/{mine}")
        store.add(f"arrived/{name}", 1)
        return name
    answered = dict[int, str]()
    begun, told = time.monotonic(), False
    while store.add(f"arrived/{mine}", 0) < here.ranks - 1:
        # The request may be left over from an earlier attempt, so each rank is answered again when its request changes.
        for rank in range(1, here.ranks):
            if store.check([f"asks/{rank}"]) and (asked := _drawn(store, f"asks/{rank}")) != answered.get(rank):
                store.set(f"answer/{asked}", mine)
                answered[rank] = asked
        waited = time.monotonic() - begun
        missing = ", ".join(str(rank) for rank in range(1, here.ranks) if rank not in answered) or "unknown"
        if waited > _SAID_S and not told:
            told = True
            tell(f"evodsp: rank 0 waits for rank {missing} of {here.ranks}, as {here.told_by} says; {here.hint}")
        if waited > timeout_s:
            raise UserError(
                f"of {here.ranks} ranks ({here.told_by}), rank {missing} did not arrive within {timeout_s:g} s; {here.hint}"
            )
        time.sleep(_POLL_S)
    return mine


def _drawn(store: dist.Store, key: str) -> str:
    """The random name under a key of the store."""
    name = text(store, key)
    if re.fullmatch("[0-9a-f]{32}", name) is None:
        raise foreign(store, key, shown(name), "a name of 32 hexadecimal digits")
    return name


def gpu_number(here: RankAddress) -> int:
    """The number of this rank's GPU among those that it sees: its local rank, or 0 where it sees a single one, as under
    `srun --gpus-per-task=1`. Raises UserError if there are several GPUs, but fewer than ranks on this machine.
    """
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return 0
    if here.local_rank >= gpus:
        raise UserError(
            f"rank {here.rank} is local rank {here.local_rank} on its machine, which has {gpus} GPUs; "
            f"start at most {gpus} ranks on it"
        )
    return here.local_rank


def _claim_gpu(store: dist.Store, here: RankAddress, device: torch.device) -> None:
    """Raise UserError if another rank has this GPU, which may have different numbers in two processes: NCCL would hang."""
    gpu = torch.cuda.get_device_properties(device).uuid
    if store.add(f"gpu/{gpu}", 1) > 1:
        raise UserError(
            f"rank {here.rank} (local rank {here.local_rank}) has the same GPU as another rank, {gpu}; start one rank for each "
            "GPU of the machine"
        )


def own_address() -> str:
    """Address of gloo for the other ranks: the network that GLOO_SOCKET_IFNAME names, otherwise the first address of
    the host's own name that is this machine's; 127.0.0.1 if there is none."""
    if network := os.environ.get("GLOO_SOCKET_IFNAME"):
        return "127.0.0.1" if network == "lo" else network
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as one:
            one.bind(address)
            return str(address[0])
    return "127.0.0.1"


def _check_address(store: dist.Store, here: RankAddress) -> None:
    """Raise UserError if the ranks are on several hosts and this one tells gloo an address that others cannot reach: gloo would
    wait for ever."""
    host, ends = socket.gethostname(), (0, here.ranks - 1)  # ranks are numbered host by host
    if here.rank in ends:
        store.set(f"host/{here.rank}", host)
    address = own_address()
    if loopback(address) and any(text(store, f"host/{rank}") != host for rank in ends):
        raise UserError(
            f"rank {here.rank} on {host}: gloo would tell ranks of other hosts to connect to {address}, which is their own "
            "machine; set GLOO_SOCKET_IFNAME to a network that all hosts share (`ip -br address` lists them)"
        )


def stop() -> None:
    """Leave the group when every rank has called this: a rank that left early would look dead to the others."""
    if not dist.is_initialized():
        return
    dist.barrier()
    if watch := watch_of_this_process():
        watch.stop()
        dist.barrier()  # the rank that hosts the store must not leave before all have stopped using it
    dist.destroy_process_group()


@contextmanager
def guarded() -> Iterator[None]:
    """Turn the failure of a collective because another rank is gone into one line and exit code 3.

    The line is delayed by a few seconds, in which a launcher names the dead rank and ends the others.
    """
    try:
        yield
    except RuntimeError as error:
        if not (dist.is_initialized() and lost_contact(error)):
            raise
        time.sleep(_GRACE_S)
        tell(
            f"evodsp: rank {dist.get_rank()} lost contact with another rank, which failed first: {one_line(str(error))}"
        )
        raise SystemExit(GIVEN_UP) from None


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because of another rank. gloo raises plain RuntimeErrors, NCCL a class of its own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
