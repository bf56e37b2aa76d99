"""Real `evodsp fit` runs whose ranks are killed or stopped, and whose disk is full or becomes read-only: they end in time with
one line that names the rank or the folder, and resume where they were."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from evodsp.report.runs import read_curve
from evodsp.training.run_folder import damage
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.processes import TORCHRUN, begin, free_port
from tests.builders.small_run import (
    EVERY,
    PATIENCE_S,
    Started,
    assert_nothing_partial,
    evodsp,
    losses,
    ranks_of,
    runs,
    under_way,
    words,
    write_config,
)
from tests.builders.training import CommandPool


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("faults") / "run.yaml")


@pytest.fixture(scope="module")
def undisturbed(commands: CommandPool, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    outcomes = commands.evodsp(2, *words(config, output))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    return output


def assert_resumes(commands: CommandPool, config: Path, output: Path, undisturbed: Path) -> None:
    outcomes = commands.evodsp(2, *words(config, output, "--ckpt_path", "last"))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert losses(output) == losses(undisturbed)
    assert_nothing_partial(output)


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_which_resumes_from_its_checkpoint(
    commands: CommandPool, config: Path, undisturbed: Path, tmp_path: Path, victim: int
) -> None:
    """The out-of-memory killer: a rank that waits for the dead one, a traceback, a torn checkpoint, repeated samples."""
    output = tmp_path / "run"
    with under_way(evodsp(*words(config, output)), output) as ((process,), ranks):
        os.kill(ranks[victim], signal.SIGKILL)
        at = time.monotonic()
        _, error = process.communicate(timeout=60)
        seconds = time.monotonic() - at
        assert not any(map(runs, ranks.values()))
    print(f"killed rank {victim}: {seconds:.1f} s")
    assert process.returncode == 1
    named = f"rank {victim} (pid {ranks[victim]} on {socket.gethostname()}) was killed by SIGKILL"
    assert [line for line in error.splitlines() if "evodsp: error" in line] == [
        f"evodsp: error: {named}; the other ranks were ended. Probably out of memory: Linux kills the largest process then"
    ], error
    assert "Traceback" not in error
    assert seconds < 15
    assert_resumes(commands, config, output, undisturbed)


@pytest.mark.verify
@pytest.mark.parametrize("moment", ["step", "save"])
def test_five_kills_leave_the_run_as_it_was(config: Path, undisturbed: Path, tmp_path: Path, moment: str) -> None:
    """Catches a save that is torn, or whose file is of a later step than its content; steps that are lost or repeated; a row
    of the curve that is lost because the checkpoint of its step was complete before."""
    output, draws, torn = tmp_path / "run", random.Random(13), 0
    command = evodsp(*words(config, output, "--ckpt_path=auto"))
    for attempt in range(5):
        after, victim = EVERY * attempt + draws.randrange(1, EVERY), draws.randrange(2)
        process = begin(command)
        try:
            await_(partial(has_come, output, after), process)
            await_(partial(all_run, process), process)
            ranks = ranks_of(process)
            if moment == "step":
                time.sleep(0.2 * draws.random())
            else:
                await_(partial(is_writing, output), process, 0.0)
            os.kill(ranks[victim], signal.SIGKILL)
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode == 1
        torn += is_writing(output)
    print(f"killed five times in a {moment}; {torn} unfinished files were left")
    process = begin(command)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, error
    assert losses(output) == losses(undisturbed)
    one, other = (read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (output, undisturbed))
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    assert_nothing_partial(output)


def has_come(output: Path, step: int) -> bool:
    return max(losses(output), default=-1) >= step


def all_run(process: Started) -> bool:
    return sorted(ranks_of(process)) == [0, 1]


def is_writing(output: Path) -> bool:
    return any((output / "checkpoints").glob(".last.ckpt.*"))


def await_(happens: Callable[[], bool], process: Started, pause_s: float = 0.01) -> None:
    """Wait until something happens while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not happens():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not come that far"
        time.sleep(pause_s)


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_ended(config: Path, tmp_path: Path, victim: int) -> None:
    """It keeps its connections, and takes no SIGTERM."""
    output, timeout = tmp_path / "run", 10
    command = evodsp(*words(config, output, f"--parallel.timeout={timeout}"))
    with under_way(command, output) as ((process,), ranks):
        os.kill(ranks[victim], signal.SIGSTOP)
        at = time.monotonic()
        _, error = process.communicate(timeout=120)
        seconds = time.monotonic() - at
        assert not any(map(runs, ranks.values()))
    print(f"stopped rank {victim}: {seconds:.1f} s with a time-out of {timeout} s")
    assert process.returncode == 1
    named = f"rank {victim} (pid {ranks[victim]} on {socket.gethostname()}) sent no heartbeat for"
    assert len([line for line in error.splitlines() if "evodsp: error" in line]) == 1, error
    assert named in error
    assert "Traceback" not in error
    assert seconds < 2 * timeout + 15


@pytest.mark.verify
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_does(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """`scancel` or Ctrl-C: ranks that talk to each other when it comes (Lightning's way), each at another place, and hang; or
    that end without a checkpoint."""
    output = tmp_path / "run"
    with under_way(evodsp(*words(config, output)), output) as ((process,), ranks):
        process.send_signal(number)
        at = time.monotonic()
        _, error = process.communicate(timeout=60)
        seconds = time.monotonic() - at
        assert not any(map(runs, ranks.values()))
    print(f"{number.name}: {seconds:.1f} s")
    assert process.returncode == (75 if number == signal.SIGTERM else 130), error
    assert "Traceback" not in error
    assert "resume with --ckpt_path last" in error
    assert seconds < 30
    assert max(losses(output)) == read_checkpoint(output / "checkpoints/last.ckpt")["global_step"] - 1


@pytest.mark.verify
@pytest.mark.parametrize("kind", ["rank", "launcher"])
def test_a_hundred_volleys_of_signals(kind: str, tmp_path: Path) -> None:
    """Catches a further SIGTERM that comes at the one moment at which it ends the run without its checkpoint or its code."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.builders.repeated_signals", kind, "100", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.endswith("100 runs, 0 wrong\n"), done.stdout + done.stderr


@pytest.mark.verify
def test_ranks_end_with_their_launcher(config: Path, tmp_path: Path) -> None:
    """A launcher that is killed cannot end its ranks; left alone they keep the GPUs."""
    output = tmp_path / "run"
    with under_way(evodsp(*words(config, output, steps=10_000)), output) as ((process,), ranks):
        process.kill()
        at = time.monotonic()
        while any(map(runs, ranks.values())):
            assert time.monotonic() < at + 30
            time.sleep(0.1)
        print(f"without launcher: {time.monotonic() - at:.1f} s")


@pytest.mark.verify
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_a_run_which_resumes(config: Path, undisturbed: Path, tmp_path: Path, victim: int) -> None:
    """Restarts that begin anew, find the earlier run in the way, or do not find each other."""
    output = tmp_path / "run"
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "evodsp"]
    with under_way([*agent, *words(config, output, "--ckpt_path=auto")], output) as ((process,), ranks):
        os.kill(ranks[victim], signal.SIGKILL)
        restarted, done, said = seconds_to_restart([process], ranks)
    print(f"rank {victim} killed: restarted {restarted:.1f} s, done {done:.1f} s later")
    assert process.returncode == 0, said
    assert said.count("checkpoint:") == 1
    assert losses(output) == losses(undisturbed)
    assert_nothing_partial(output)


@pytest.mark.verify
@pytest.mark.parametrize("victim", [None, 0, 1])
def test_two_agents_train(config: Path, undisturbed: Path, tmp_path: Path, victim: int | None) -> None:
    """A sample over two machines: both call their rank 0 locally, one writes, and one does not know of the other's restarts."""
    output = tmp_path / "run"
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, "--local-addr=127.0.0.1"]
    command = [*agent, "--max-restarts=2", "-m", "evodsp", *words(config, output, "--ckpt_path=auto")]
    with under_way(command, output, times=2) as (processes, ranks):
        if victim is not None:
            os.kill(ranks[victim], signal.SIGKILL)
        restarted, done, said = seconds_to_restart(processes, ranks)
    print(f"two agents, rank {victim} killed: restarted {restarted:.1f} s, done {done:.1f} s later")
    assert [process.returncode for process in processes] == [0, 0], said
    assert said.count("checkpoint:") == 1
    assert losses(output) == losses(undisturbed)
    assert_nothing_partial(output)


def seconds_to_restart(agents: list[Started], ranks: dict[int, int]) -> tuple[float, float, str]:
    """Seconds until every rank is another process than in `ranks`, and until the end; what all said."""
    at, restarted = time.monotonic(), float("nan")
    with ThreadPoolExecutor() as threads:
        said = [threads.submit(agent.communicate, timeout=PATIENCE_S) for agent in agents]
        while not all(one.done() for one in said):
            now = ranks_of(*agents)
            if restarted != restarted and len(now) == 2 and all(now[rank] != ranks[rank] for rank in now):
                restarted = time.monotonic() - at
            time.sleep(0.05)
        return restarted, time.monotonic() - at, "".join(text for one in said for text in one.result())


@pytest.mark.verify
def test_ranks_that_were_given_different_inputs_end_by_themselves(config: Path, tmp_path: Path) -> None:
    """Real processes, without a launcher that would end them: a rank that leaves first takes the store with it."""
    output, port = tmp_path / "run", free_port()
    ranks = [
        begin(
            evodsp(*words(config, output, f"--seed={rank}")),
            RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        _, error = rank.communicate(timeout=PATIENCE_S)
        assert rank.returncode == 2, error
        # Not always the last line: where the other rank has left already, torch says so.
        assert sum("given different settings" in line for line in error.splitlines()) == 1
        assert "Traceback" not in error
    assert not list(output.rglob("*.ckpt"))


STEPS = 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB in memory, which only root may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "evodsp-test", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is refused: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    """All but a part of a checkpoint. A run that saves meanwhile may take some of it."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with suppress(OSError), (disk / "ballast").open("wb") as file:
        file.write(b"\0" * (free - 150_000))


def write_protect(disk: Path, protected: bool = True) -> None:
    """Put a read-only view of the folder over it, or take it away. The folder itself cannot be remounted: run.lock is open."""
    if not protected:
        subprocess.run(["umount", disk], check=True)
        return
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(
        ["mount", "-o", "remount,ro,bind", disk], check=False
    ).returncode:  # a file is being written there
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "mend", "said"),
    [
        pytest.param(fill, lambda disk: (disk / "ballast").unlink(), "No space left on device", id="full"),
        pytest.param(write_protect, lambda disk: write_protect(disk, False), "Read-only file system", id="read-only"),
    ],
)
def test_a_run_on_a_spoilt_disk(
    disk: Path,
    tmp_path: Path,
    ranks: int,
    spoil: Callable[[Path], None],
    mend: Callable[[Path], None],
    said: str,
) -> None:
    """A traceback, a run that trains on without saving or hangs, half a checkpoint in place of a whole one; weights that differ
    after the resume."""
    output, options = disk / "run", (f"--parallel.sequence={ranks}", "--trainer.limit_val_batches=0")
    config = write_config(tmp_path / "run.yaml")
    process = begin(evodsp(*words(config, output, *options, steps=10_000)))
    last, deadline = output / "checkpoints/last.ckpt", time.monotonic() + PATIENCE_S
    while not last.is_file():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not come that far"
        time.sleep(0.01)
    spoil(disk)
    _, error = process.communicate(timeout=PATIENCE_S)
    print(error)
    assert process.returncode == 2, error
    errors = [line for line in error.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, error
    assert errors[0].startswith(f"evodsp: error: --output {output}: ")
    assert said in errors[0]
    assert "Traceback" not in error
    assert damage(last) is None
    mend(disk)
    reached = read_checkpoint(last)["global_step"]
    whole, steps = tmp_path / "whole", max(STEPS, reached + 2)
    for folder, more in ((output, ["--ckpt_path=last"]), (whole, [])):
        resumed = begin(evodsp(*words(config, folder, *options, *more, steps=steps)))
        _, error = resumed.communicate(timeout=PATIENCE_S)
        assert resumed.returncode == 0, error
    assert_nothing_partial(output)
    one, other = (read_checkpoint(folder / "checkpoints/last.ckpt") for folder in (output, whole))
    assert one["global_step"] == other["global_step"] == steps
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    assert list(read_curve(output / "curve.csv")) == list(range(steps))
