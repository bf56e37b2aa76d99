"""Collectives between CPU processes of one machine, through memory that they share: a process group of torch.distributed.

gloo sends every message through TCP and hands it from thread to thread, which takes a few tenths of a millisecond even for a
kilobyte. A step of a small model launches a hundred collectives and computes for a hundred milliseconds.

Every rank has an arena, which the others can read. To launch a collective, a rank copies what others shall read into a slot of
its arena, and sends each of them a packet through a Unix socket, which says where it is. It does not wait. To complete a
collective, a rank receives one packet from each of the others, and copies or adds what they refer to. Collectives complete in
the order in which they were launched, the same on all ranks.

Nobody reports that a slot was read, because a launch implies it. Before a rank launches collective n, it completes n - DEPTH.
So it has the others' packets of n - DEPTH, and before they sent those, they had completed n - 2 DEPTH. Hence the slot of
n - 2 DEPTH is free. A message that is larger than a slot travels in a memory file of its own, attached to the packet.

A rank that ends closes its sockets, and the others' next collective fails at once. Not for several threads.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "evodsp_shared_memory"
"""The backend's name in torch.distributed."""

DEPTH = 8
"""Collectives that a rank may have launched and not completed; the next launch completes the oldest one."""

SLOT = 1 << 21
"""Bytes of a slot. A slot takes memory only as far as it was ever written."""

_PACKET = struct.Struct("<16sqqq")  # collective, its number, first byte and number of bytes to read

Flat = Tensor
"""A tensor of one axis: all numbers of another tensor, or some of them, in a row."""


def machine() -> str:
    """Names what processes must have in common to share memory: the running kernel and the network, which owns the sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def supported() -> bool:
    """Whether this system can share memory as this module does: Linux."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/ns/net")


def register() -> str:
    """Make the backend known to torch.distributed, once, and return its name."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
    return NAME


class SharedMemoryGroup(dist.ProcessGroup):
    """The ranks of one machine, as torch.distributed sees them. It has the collectives that evodsp launches.

    Tensors are contiguous and on the CPU. Reductions add in the order of the ranks, so the result is the same on all of them.
    Raises dist.DistNetworkError if another rank is gone, or silent for `timeout`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """`store`: for the addresses of this group's ranks alone. Returns when all ranks are connected."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own, self._ranks = rank, size
        self._launched = self._completed = 0
        self._pending: deque[_Launch] = deque()
        self._peers = _connect(store, rank, size, timeout)
        file, self._arena = _memory(2 * DEPTH * SLOT)
        for peer in self._peers.values():
            socket.send_fds(peer, [b"arena"], [file])
        os.close(file)
        self._arenas = {rank: _received_memory(peer, rank)[1] for rank, peer in self._peers.items()}

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Every rank gets the sum, or the maximum."""
        (x,) = tensors
        flat, reduce = x.detach().view(-1), _reduction(opts)
        return self._launch("all-reduce", flat, [(0, flat.numel())] * self._ranks, flat.numel(), _into(flat, reduce))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank gets the others' tensors, one after another."""
        flat, parts = input.detach().view(-1), output.detach().view(self._ranks, -1)

        def finish(received: Sequence[Flat]) -> None:
            for part, values in zip(parts, received, strict=True):
                part.copy_(values)

        return self._launch("all-gather", flat, [(0, flat.numel())] * self._ranks, flat.numel(), finish)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank gets its part of the sum."""
        flat, own = input.detach().view(-1), output.detach().view(-1)
        spans = [(rank * own.numel(), own.numel()) for rank in range(self._ranks)]
        return self._launch("reduce-scatter", flat, spans, own.numel(), _into(own, _reduction(opts)))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Every rank gets its part of every rank's tensor. Sizes count entries of the first axis; none: equal parts."""
        flat, whole = input.detach().view(-1), output.detach().view(-1)
        sent, received = self._numbers(input, input_sizes), self._numbers(output, output_sizes)
        parts = whole.split(received)

        def finish(values: Sequence[Flat]) -> None:
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)

        spans = list(zip(accumulate([0, *sent[:-1]]), sent, strict=True))
        return self._launch("all-to-all", flat, spans, received, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Every rank gets the root's tensor."""
        (x,) = tensors
        flat, root = x.detach().view(-1), opts.rootRank
        sends = flat.numel() if self._own == root else 0
        expected = [flat.numel() if rank == root else 0 for rank in range(self._ranks)]

        def finish(received: Sequence[Flat]) -> None:
            if self._own != root:
                flat.copy_(received[root])

        return self._launch("broadcast", flat[:sends], [(0, sends)] * self._ranks, expected, finish)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """The root gets the sum."""
        (x,) = tensors
        flat, root = x.detach().view(-1), opts.rootRank
        spans = [(0, flat.numel() if rank == root else 0) for rank in range(self._ranks)]
        if self._own == root:
            return self._launch("reduce", flat, spans, flat.numel(), _into(flat, _reduction(opts)))
        return self._launch("reduce", flat, spans, 0, _nothing)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns on no rank before every rank has called it."""
        empty = torch.empty(0)
        return self._launch("barrier", empty, [(0, 0)] * self._ranks, 0, _nothing)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Leave the group: the other ranks' next collective fails."""
        for peer in self._peers.values():
            peer.close()

    # What torch.distributed and the watch of the ranks ask of every group; torch's own answers need a backend in C++.

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_sequence_number_for_group(self) -> int:
        return self._launched

    def complete(self, number: int) -> None:
        """Complete all collectives up to `number`, in order."""
        while self._completed < number:
            launch = self._pending.popleft()
            self._completed += 1
            values = []
            for rank in range(self._ranks):
                memory = launch.memory if rank == self._own else self._from(rank, launch)
                values.append(memory)
            launch.finish(values)

    def _launch(
        self,
        name: str,
        flat: Flat,
        spans: Sequence[tuple[int, int]],
        expected: int | Sequence[int],
        finish: Callable[[Sequence[Flat]], None],
    ) -> dist.Work:
        """Offer parts of `flat` to the other ranks.

        `spans`: first entry and number of entries that each rank shall read. `expected`: how many this rank reads from each.
        `finish`: gets what this rank reads, by rank, its own part too, and keeps none of it.
        """
        self.complete(self._launched + 1 - DEPTH)
        self._launched += 1
        size, file = flat.element_size(), None
        if flat.numel() * size <= SLOT:
            first = self._launched % (2 * DEPTH) * SLOT
            memory = self._arena[first : first + flat.numel() * size]
        else:
            first, (file, memory) = 0, _memory(flat.numel() * size)
        memory = memory.view(flat.dtype)
        memory.copy_(flat)
        for rank, peer in self._peers.items():
            start, count = spans[rank]
            packet = _PACKET.pack(name.encode(), self._launched, first + start * size, count * size)
            try:
                socket.send_fds(peer, [packet], [] if file is None else [file])
            except OSError as error:
                raise _lost(rank, str(error)) from error
        if file is not None:
            os.close(file)
        start, count = spans[self._own]
        counts = [expected] * self._ranks if isinstance(expected, int) else list(expected)
        self._pending.append(_Launch(name, self._launched, flat.dtype, counts, memory[start : start + count], finish))
        return _Work(self, self._launched)

    def _from(self, rank: int, launch: _Launch) -> Flat:
        """What another rank offers in the same collective. Waits for its packet."""
        try:
            packet, files, *_ = socket.recv_fds(self._peers[rank], _PACKET.size, 1)
        except OSError as error:  # among them a time-out
            raise _lost(rank, str(error)) from error
        if not packet:
            raise _lost(rank, "it has closed its connection")
        name, number, first, size = _PACKET.unpack(packet)
        memory = self._arenas[rank] if not files else _mapped(files[0])
        wanted = launch.counts[rank] * launch.dtype.itemsize
        if (found := name.rstrip(b"\0").decode()) != launch.name or number != launch.number or size != wanted:
            raise RuntimeError(
                f"rank {rank} launched {found} number {number}, of {size} bytes for this rank, and rank {self._own} "
                f"{launch.name} number {launch.number} of {wanted}; all ranks must run the same program"
            )
        return memory[first : first + size].view(launch.dtype)

    def _numbers(self, x: Tensor, sizes: Sequence[int]) -> list[int]:
        """Numbers in each rank's part of `x`, from sizes along its first axis."""
        if not sizes:
            return [x.numel() // self._ranks] * self._ranks
        row = x[:1].numel() if len(x) else 0
        return [size * row for size in sizes]


@dataclass(frozen=True)
class _Launch:
    """A collective that was launched and is not complete."""

    name: str
    number: int
    dtype: torch.dtype
    counts: list[int]
    """How many numbers each rank offers to this one."""
    memory: Flat
    """What this rank offers to itself."""
    finish: Callable[[Sequence[Flat]], None]


class _Work(dist.Work):
    """The handle of a collective."""

    def __init__(self, group: SharedMemoryGroup, number: int) -> None:
        super().__init__()
        self._group, self._number = group, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.complete(self._number)
        return True

    def is_completed(self) -> bool:
        return self._group._completed >= self._number


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dict[int, socket.socket]:
    """Connections to the other ranks, each with its packets in order."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.settimeout(timeout.total_seconds())
    listening.bind("")  # Linux chooses a name, which exists as long as the socket does
    listening.listen(size)
    store.set(str(rank), listening.getsockname())
    peers = {}
    for lower in range(rank):
        peers[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[lower].connect(store.get(str(lower)))
        peers[lower].send(str(rank).encode())
    for _ in range(rank + 1, size):
        peer, _ = listening.accept()
        peers[int(peer.recv(16))] = peer
    listening.close()
    for peer in peers.values():
        peer.settimeout(timeout.total_seconds())
    return dict(sorted(peers.items()))


def _memory(size: int) -> tuple[int, Flat]:
    """A new memory file and its bytes. It lives until the last process has closed it and dropped its bytes."""
    file = os.memfd_create("evodsp")
    os.truncate(file, size)
    return file, _bytes(file)


def _received_memory(peer: socket.socket, rank: int) -> tuple[bytes, Flat]:
    """What a packet says, and the memory file that is attached to it."""
    packet, files, *_ = socket.recv_fds(peer, _PACKET.size, 1)
    if not files:
        raise _lost(rank, "it has closed its connection")
    return packet, _mapped(files[0])


def _mapped(file: int) -> Flat:
    """The bytes of another rank's memory file, which is closed."""
    memory = _bytes(file)
    os.close(file)
    return memory


def _bytes(file: int) -> Flat:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


def _reduction(opts: Any) -> Callable[..., Tensor]:
    """The operation of two tensors that a reduction's options name. Raises ValueError for others than sum and maximum."""
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    if operation == dist.ReduceOp.SUM:
        return torch.add
    if operation == dist.ReduceOp.MAX:
        return torch.maximum
    raise ValueError(f"shared memory reduces by sum or maximum, not by {operation}")


def _into(out: Flat, reduce: Callable[..., Tensor]) -> Callable[[Sequence[Flat]], None]:
    """What completes a reduction into `out`."""

    def finish(received: Sequence[Flat]) -> None:
        if len(received) == 1:
            out.copy_(received[0])
            return
        reduce(received[0], received[1], out=out)
        for values in received[2:]:
            reduce(out, values, out=out)

    return finish


def _nothing(received: Sequence[Flat]) -> None:
    """What completes a collective of which this rank gets nothing."""


def _lost(rank: int, why: str) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"shared memory: rank {rank} of the group is gone: {why}")
