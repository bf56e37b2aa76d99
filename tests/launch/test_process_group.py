"""A rank's GPU and threads, what ranks hear of each other, and which rank the stall detector blames."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch import consensus, process_group
from evodsp.launch.consensus import long_from_first
from evodsp.launch.environment import place
from evodsp.launch.launcher import _environment
from evodsp.launch.watch import StallDetector, State, Watch, _launched
from evodsp.parallel.group import Group
from tests.ranks import RankPool

TORCHRUN = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "gpu003", "MASTER_PORT": 29500}


def given(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_threads_are_divided_among_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches eight ranks that start sixteen threads each on sixteen cores."""
    monkeypatch.setattr("evodsp.launch.launcher._cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _environment(0, 8, 1)["OMP_NUM_THREADS"] == "2"
    assert _environment(0, 32, 1)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _environment(0, 8, 1)["OMP_NUM_THREADS"] == "5"


def test_too_few_gpus_is_a_mistake_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CUDA traceback where a machine has fewer GPUs than local ranks."""
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 2)
    given(monkeypatch, **{**TORCHRUN, "LOCAL_RANK": "2"})
    with pytest.raises(UserError, match="rank 5 is local rank 2 on its machine, which has 2 GPUs"):
        process_group.start("nccl")


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `srun --gpus-per-task=1` being refused: each rank sees its own GPU only, which is number 0 to it."""
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 1)
    given(monkeypatch, **TORCHRUN)
    assert process_group.gpu_number(place()) == 0


def test_two_ranks_on_one_gpu_are_a_mistake_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two ranks that each take the only GPU of a machine: NCCL would fail without a word on the cause, or hang."""
    given(monkeypatch, **TORCHRUN)
    monkeypatch.setattr(
        process_group.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")
    )
    store, here = dist.HashStore(), place()
    process_group._claim_gpu(store, here, torch.device("cuda", 0))
    process_group._claim_gpu(store, here, torch.device("cuda", 1))
    with pytest.raises(UserError, match="the same GPU as another rank, GPU-0"):
        process_group._claim_gpu(store, here, torch.device("cuda", 0))


def test_an_address_that_others_cannot_reach_is_a_mistake_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of several hosts that wait in gloo for ever, and a refusal where all ranks are on one host."""
    given(monkeypatch, **TORCHRUN)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_group.socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(process_group.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    store, here = dist.HashStore(), place()
    store.set("host/0", "node2")
    store.set("host/7", "node2")
    process_group._check_address(store, here)
    store.set("host/7", "node3")
    with pytest.raises(
        UserError, match=r"rank 5 on node2: gloo would .* to connect to 127\.0\.1\.1, .* set GLOO_SOCKET_IFNAME"
    ):
        process_group._check_address(store, here)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    process_group._check_address(store, here)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(UserError, match=r"to connect to 127\.0\.0\.1"):
        process_group._check_address(store, here)


def states(*pairs: tuple[int, int]) -> dict[int, State]:
    """The state of each rank, from pairs (heartbeats, launched collectives)."""
    return {rank: State(*pair) for rank, pair in enumerate(pairs)}


def watched(detector: StallDetector, seconds: int, step: int = 1, **stuck: int) -> tuple[list[int], str] | None:
    """Watch three ranks for some seconds: the time, the blamed ranks and the message, or None.

    From 5 s on, rank `silent` sends no heartbeat; rank `hangs` launches no collective and the others wait for it.
    """
    for now in range(0, seconds, step):
        found = detector.find(
            states(
                *(
                    (
                        min(now, 5) if rank == stuck.get("silent") else now,
                        (min(now, 5) + (rank != stuck["hangs"] and now > 5)) if "hangs" in stuck else now,
                    )
                    for rank in range(3)
                )
            ),
            float(now),
        )
        if found:
            return [now, *found[0]], found[1]
    return None


def test_a_healthy_run_is_left_alone() -> None:
    """Catches a detector that ends a run in which nothing is wrong."""
    assert watched(StallDetector(silent_s=10.0, stalled_s=20.0), 100) is None


def test_a_silent_rank_is_found() -> None:
    """Catches a rank without heartbeats that is found late, or another rank that is blamed."""
    found = watched(StallDetector(silent_s=10.0, stalled_s=20.0), 100, silent=2)
    assert found is not None
    assert found[0] == [16, 2]
    assert "sent no heartbeat for 10 s" in found[1]


def test_the_rank_that_others_wait_for_is_found() -> None:
    """Catches the wrong rank blamed for a hang: all ranks stand still, but one has launched one collective less."""
    found = watched(StallDetector(silent_s=10.0, stalled_s=20.0), 100, hangs=1)
    assert found is not None
    assert found[0][1:] == [1]
    assert "launched no collective for 20 s while others wait, 1 ahead" in found[1]


def test_a_silent_rank_is_to_blame_for_a_stall() -> None:
    """Catches a stall reported instead of the silent rank that causes it, when both are found at the same moment."""
    detector = StallDetector(silent_s=10.0, stalled_s=10.0)
    found = [detector.find(states((now, 7), (min(now, 1), 7)), float(now)) for now in range(12)]
    assert found[-1] is not None
    assert found[-1][0] == [1]


def test_a_suspended_job_is_blamed_on_no_rank() -> None:
    """Catches ranks blamed after a batch system suspended the whole job.

    When it wakes up, rank 0 looks before the other ranks have written a heartbeat.
    """
    detector = StallDetector(silent_s=10.0, stalled_s=20.0)
    assert watched(detector, 50) is None
    asleep = states((49, 49), (49, 49), (49, 49))
    assert detector.find(asleep, 4000.0) is None
    assert detector.find(asleep, 4004.0) is None
    assert detector.find(states((50, 49), (50, 49), (50, 49)), 4008.0) is None


def test_a_pause_of_more_than_half_the_silence_is_this_process_s_own() -> None:
    """Catches all ranks blamed because the watching process itself was paused for a few seconds."""
    detector = StallDetector(silent_s=10.0, stalled_s=20.0)
    assert watched(detector, 50) is None
    asleep = states((49, 49), (49, 49), (49, 49))
    assert detector.find(asleep, 54.5) is None  # 5.5 s after the last look: the clocks restart
    assert detector.find(asleep, 59.0) is None
    assert detector.find(asleep, 63.5) is None  # 14.5 s after the last heartbeat, 9 s after the pause
    assert detector.find(asleep, 65.0) == (
        [0, 1, 2],
        "sent no heartbeat for 10 s (stopped, starved, or its machine is gone)",
    )


def test_a_rank_that_does_not_wake_up_is_found() -> None:
    """Catches a detector that restarts its clocks at every look after a pause, and so never blames anybody."""
    detector = StallDetector(silent_s=10.0, stalled_s=100.0)
    assert watched(detector, 50) is None
    found = [detector.find(states((now, 49), (49, 49), (now, 49)), 4000.0 + now) for now in range(12)]
    assert found[:11] == [None] * 11
    assert found[11] is not None
    assert found[11][0] == [1]


def test_when_all_have_launched_the_same() -> None:
    """Catches a rank blamed for a GPU that hangs: all ranks have launched the same collectives."""
    detector = StallDetector(silent_s=10.0, stalled_s=20.0)
    found = [detector.find(states((now, 7), (now, 7)), float(now)) for now in range(22)]
    assert found[-1] == ([], "no rank launched a collective for 20 s; all have launched 7")


def test_ranks_that_work_apart_need_no_collectives() -> None:
    """Catches groups of one rank that are ended as hung, because a long structure takes more than the time-out."""
    store = dist.HashStore()
    assert Watch(store, 0, 2, timeout_s=5.0, together=False)._detector.stalled_s == math.inf
    assert Watch(store, 0, 2, timeout_s=5.0)._detector.stalled_s == 5.0


def test_what_graphs_launch_again_counts() -> None:
    """Catches a run of replayed collectives, which torch does not count, that is ended as hung."""
    store = dist.HashStore()
    watch = Watch(store, 0, 2, timeout_s=5.0)
    watch.count(lambda: 41)
    watch._write_state()
    assert store.get("state/0").decode().split()[1] == "41"


def work_long(handle: Any, mistake: bool) -> tuple[Any, int, list[str]]:
    """What a rank gets from work that takes half a second, the collectives meanwhile, and where the work was done."""
    usual, consensus._WORD_EVERY_S = consensus._WORD_EVERY_S, 0.05
    places: list[str] = []

    def make() -> tuple[int, str]:
        places.append(threading.current_thread().name)
        time.sleep(0.5)
        if mistake:
            raise UserError("no such thing")
        return handle.rank(), "made"

    before = _launched()
    found: Any
    try:
        found = long_from_first(make, Group(handle))
    except UserError as error:
        found = str(error)
    finally:
        consensus._WORD_EVERY_S = usual  # the ranks serve other tests too
    return found, _launched() - before, places


@pytest.mark.parametrize(("mistake", "expected"), [(False, (0, "made")), (True, "no such thing")])
def test_ranks_hear_from_one_that_works_long(pool: RankPool, mistake: bool, expected: Any) -> None:
    """Catches a wait without a sign of life, which the watch or a collective's time-out would end, and a lost mistake."""
    (one, words, places), (other, _, elsewhere) = pool.run(2, work_long, mistake)
    assert one == other == expected
    assert places == ["evodsp work"]
    assert elsewhere == []
    assert words >= 5


def test_one_process_works_by_itself() -> None:
    """Catches a thread where nobody waits: Ctrl-C would not reach the work."""
    assert long_from_first(threading.current_thread, None) is threading.main_thread()
