"""Shared memory between ranks: slots, large messages, ranks that differ or are gone. `test_collectives` has the values.

Two ranks are two threads here, each with its own group: groups share nothing but sockets and memory files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from evodsp.parallel import shared_memory
from evodsp.parallel.mesh import init_mesh
from evodsp.parallel.shared_memory import DEPTH, NAME, SLOT, SharedMemoryGroup
from tests.ranks import RankPool


@contextmanager
def two_groups(timeout_s: float = 20.0) -> Iterator[list[SharedMemoryGroup]]:
    """The groups of two ranks."""
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)
    groups = both(lambda rank: SharedMemoryGroup(store, rank, 2, timeout))
    yield groups
    for group in groups:
        group.shutdown()


def both(program: Callable[[int], Any]) -> list[Any]:
    """What the program returns as rank 0 and as rank 1, at the same time."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(program, range(2)))


def test_a_slot_is_not_written_while_it_may_be_read() -> None:
    """Catches too few slots: rank 0 is as far ahead of rank 1 as it can be, and its first messages are still unread."""
    with two_groups() as groups:
        far = 2 * DEPTH
        # Rank 1 can launch DEPTH sums without completing one. With their packets, rank 0 can launch twice as many.
        sums = [[torch.full((3,), float(n + 100 * rank)) for n in range(far)] for rank in range(2)]
        behind = [groups[1].allreduce([x]) for x in sums[1][:DEPTH]]
        ahead = [groups[0].allreduce([x]) for x in sums[0]]
        behind += [groups[1].allreduce([x]) for x in sums[1][DEPTH:]]
        both(lambda rank: [work.wait() for work in reversed((ahead, behind)[rank])])
        for x in sums:
            assert [int(values[0]) for values in x] == [2 * n + 100 for n in range(far)]


def test_a_message_larger_than_a_slot_arrives_and_leaves_no_file() -> None:
    """Catches a large message written across slots, and memory files that stay open: a long run would have too many."""
    with two_groups() as groups:
        count = SLOT // 4 + 5

        def gather(rank: int) -> torch.Tensor:
            output = torch.empty(2 * count)
            groups[rank].all_gather_single(output, torch.arange(count) * (1.0 + rank)).wait()
            return output

        files = len(os.listdir("/proc/self/fd"))
        for output in both(gather):
            torch.testing.assert_close(output.view(2, -1)[1], 2 * output.view(2, -1)[0], rtol=0, atol=0)
            assert output[count - 1] == count - 1
        assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_reductions_of_every_precision(dtype: torch.dtype) -> None:
    """Catches bytes that are read as another type, and a maximum that is a sum."""
    with two_groups() as groups:
        for operation, expected in ((dist.ReduceOp.SUM, [5, 5]), (dist.ReduceOp.MAX, [4, 3])):
            options = mock.Mock(reduceOp=operation)
            values = [torch.tensor([1, 3], dtype=dtype), torch.tensor([4, 2], dtype=dtype)]
            both(lambda rank, values=values, options=options: groups[rank].allreduce([values[rank]], options).wait())
            assert [x.tolist() for x in values] == [expected, expected]
        with pytest.raises(ValueError, match="sum or maximum"):
            groups[0].allreduce([torch.ones(1)], mock.Mock(reduceOp=dist.ReduceOp.MIN))


def test_ranks_that_launch_different_collectives_are_told() -> None:
    """Catches ranks whose programs differ and that read each other's numbers as something else."""
    with two_groups() as groups:
        sums = groups[0].allreduce([torch.ones(3)]), groups[1].allreduce([torch.ones(2)])
        with pytest.raises(RuntimeError, match=r"rank 1 launched all-reduce number 1, of 8 bytes .* number 1 of 12"):
            sums[0].wait()


def test_a_rank_that_is_gone_is_an_error_of_lost_contact() -> None:
    """Catches a rank that waits for a dead one, or whose error `guarded` does not recognise."""
    with two_groups() as groups:
        groups[1].shutdown()
        with pytest.raises(dist.DistNetworkError, match="rank 1 of the group is gone"):
            groups[0].barrier().wait()


def test_a_silent_rank_is_noticed() -> None:
    """Catches a wait without limit for a rank that was stopped."""
    with two_groups(timeout_s=0.3) as groups, pytest.raises(dist.DistNetworkError, match=r"rank 1 .* timed out"):
        groups[0].barrier().wait()


def backends(handle: Any, wanted: bool, apart: bool) -> tuple[str, str]:
    """Backends of the data and of the sequence group. `apart`: every rank claims a machine of its own."""
    own = shared_memory.machine() + (str(dist.get_rank()) if apart else "")
    with mock.patch("evodsp.parallel.mesh.machine", return_value=own):
        mesh = init_mesh(2, "cpu", shared_memory=wanted)
    return dist.get_backend(mesh.data_group().handle), dist.get_backend(mesh.sequence_group().handle)


@pytest.mark.parametrize(
    ("wanted", "apart", "backend"), [(True, False, NAME), (True, True, "gloo"), (False, False, "gloo")]
)
def test_a_mesh_shares_memory_where_it_can(pool: RankPool, wanted: bool, apart: bool, backend: str) -> None:
    """Catches shared memory between machines, or where it was not asked for."""
    assert pool.run(4, backends, wanted, apart) == [("gloo", backend)] * 4
