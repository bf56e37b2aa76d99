"""The checks of `verify_gpus.sh`: each is a command of its own, as many of them at once as the machine has cores for.

A check begins when those whose files it reads have succeeded. What is printed keeps the order of the list. A check that takes
longer than `--limit` counts as failed; it and the processes that it started are ended, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = ("scripts.verify_ranks",)
GLOBAL_BATCH = 2
"""Samples of a training step, the same on every mesh."""
_ENDING_S = 40.0
"""How long an ended launcher has to end its ranks."""


@dataclass(frozen=True)
class Check:
    """A command that verifies something."""

    name: str
    words: tuple[str, ...]
    """After `python -m`."""
    ranks: int = 1
    """How many processes run it together; 0: one that is no rank."""
    after: tuple[Check, ...] = ()
    """Those whose files it reads."""


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    succeeded: bool
    seconds: float
    output: str


class Runner:
    """Runs checks, and ends what is still running when it is left."""

    def __init__(self, jobs: int, limit_s: float, environment: dict[str, str]) -> None:
        self.jobs, self._limit_s, self._environment = jobs, limit_s, environment
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, checks: Sequence[Check]) -> Iterator[tuple[Check, Outcome]]:
        """Each check and how it ended, in the order given, in which a check is behind those that it is `after`."""
        with ThreadPoolExecutor(self.jobs) as pool:
            found: dict[Check, Future[Outcome]] = {}
            try:
                for check in checks:
                    found[check] = pool.submit(self._outcome, check, [(c, found[c]) for c in check.after if c in found])
                for check in checks:
                    yield check, found[check].result()
            finally:
                self.stop()

    def stop(self) -> None:
        """End what is running, and begin nothing more."""
        with self._lock:
            self._stopped, running = True, list(self._running)
        for process in running:
            _end(process)

    def _outcome(self, check: Check, after: list[tuple[Check, Future[Outcome]]]) -> Outcome:
        for earlier, future in after:
            if not future.result().succeeded:
                return Outcome(False, 0, f"left out, because it reads what '{earlier.name}' writes\n")
        begun = time.monotonic()
        with self._lock:
            if self._stopped:
                return Outcome(False, 0, "not begun\n")
            process = subprocess.Popen(
                _command(check), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True, env={**self._environment, **_place(check)},
            )  # fmt: skip
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            output = process.communicate()[0] + f"it took longer than {self._limit_s:g} s and was ended\n"
        finally:
            with self._lock:
                self._running.discard(process)
        return Outcome(process.returncode == 0, time.monotonic() - begun, output)


def _command(check: Check) -> list[str]:
    if check.ranks < 2:
        return [sys.executable, "-m", *check.words]
    # An address rather than this machine's name, which a machine without network may not be able to look up.
    launch = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", *launch, "--nproc-per-node", str(check.ranks), "-m", *check.words]


def _place(check: Check) -> dict[str, str]:
    """The variables by which a launcher tells a rank its place. A single rank needs no launcher, which starts in seconds."""
    if check.ranks != 1:
        return {}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and its processes. Ranks are in sessions of their own: their launcher ends them if it is asked to."""
    for number, wait_s in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class Suite:
    """The checks of a machine, and the folder in which they leave files for each other."""

    def __init__(self, device: str, available: int, work: Path, jobs: int) -> None:
        self.device, self.available, self.work, self.jobs = device, available, work, jobs

    def kernels(self) -> list[Check]:
        """Before everything else: by several processes, it compiles what the others need too."""
        processes = 2 * self.jobs if self.jobs > 1 else 1
        return [self._ranks("every kernel equals its formula", "kernels", str(processes))]

    def one_device(self) -> list[Check]:
        """What one device is enough for, independent checks first."""
        first = self._fit("ten training steps, (data, sequence) = (1, 1)", "1_1")
        half = self._fit("the same in bf16-mixed", "bf16", "--trainer.precision", "bf16-mixed")
        zero1 = self._fit("the same with zero1", "zero1", "--parallel.parameters", "zero1")
        five = self._fit("five steps", "resumed", steps=5)
        resumed = self._fit("resumed for five more", "resumed", "--ckpt_path", "last", after=(five,))
        by_batch = ("--model.optimizer.clip", "batch")
        clipped = self._fit("ten steps, gradients clipped by batch", "clipped", *by_batch)
        fsdp2 = self._fit("the same with fsdp2", "fsdp2", *by_batch, "--parallel.parameters", "fsdp2")
        predicted = [self._predict(first, precision) for precision in ("fp32", "bf16")]
        folders = [str(self.work / name / "s005_A") for name in ("fp32", "bf16")]
        return [
            self._ranks("blocks in bf16-mixed against float32", "half"),
            first, half, zero1, five, clipped, fsdp2,
            Check("sharded kernels of ranks that share a device equal one rank", (*_PROGRAM, "shared", self.device), 3),
            resumed, *predicted,
            self._curves("losses in bf16-mixed are near", 0.02, {"1_1": first, "bf16": half}),
            self._curves(
                "losses with zero1, and after resuming, are equal", 1e-5,
                {"1_1": first, "zero1": zero1, "resumed": resumed},
            ),
            self._curves("losses with fsdp2 are equal", 1e-5, {"clipped": clipped, "fsdp2": fsdp2}),
            Check("predictions in fp32 and bf16 are near", (*_PROGRAM, "predictions", *folders), after=tuple(predicted)),
        ]  # fmt: skip

    def several(self) -> list[Check]:
        """What needs several devices. They take all of them, so one check runs at a time."""
        checks = []
        for ranks in (n for n in (2, 3, 4, 8) if n <= self.available):
            checks += [
                self._ranks(f"collectives and their transposes, {ranks} ranks", "collectives", ranks=ranks),
                self._ranks(f"model over {ranks} ranks equals one", "model", ranks=ranks),
                self._ranks(f"speed of the switch, {ranks} ranks", "switch", ranks=ranks),
            ]
        fits = {}
        for data, sequence in ((1, 2), (2, 1), (1, 3), (2, 2), (1, 4), (2, 4), (1, 8)):
            if data * sequence <= self.available:
                name = f"{data}_{sequence}"
                title = f"ten training steps, (data, sequence) = ({data}, {sequence})"
                fits[name] = self._fit(title, name, data=data, sequence=sequence)
        return [*checks, *fits.values(), self._curves("their losses are equal", 1e-5, {"1_1": None, **fits})]

    def _ranks(self, name: str, check: str, *words: str, ranks: int = 1) -> Check:
        return Check(name, (*_PROGRAM, check, self.device, *words), ranks)

    def _fit(
        self,
        title: str,
        name: str,
        *words: str,
        data: int = 1,
        sequence: int = 1,
        steps: int = 10,
        after: tuple[Check, ...] = (),
    ) -> Check:
        """Training of the quickstart's model. The run's folder is `name`."""
        settings = {
            "trainer.accelerator": self.device, "trainer.max_steps": steps, "trainer.log_every_n_steps": 1,
            "trainer.num_sanity_val_steps": 0, "trainer.enable_progress_bar": "false", "data.validation_chains": "null",
            "data.batch_size": GLOBAL_BATCH // data, "parallel.sequence": sequence,
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        fit = ("evodsp", "fit", "--config", "configs/quickstart.yaml", "--output", str(self.work / name))
        return Check(title, (*fit, *options, *words), data * sequence, after)

    def _predict(self, trained: Check, precision: str) -> Check:
        checkpoint = self.work / "1_1" / "checkpoints" / "last.ckpt"
        options = {
            "fasta": "data/fasta/s005_A.fasta", "alignments": "data/alignments", "format": "pdb",
            "checkpoint": checkpoint, "output": self.work / precision, "device": self.device, "precision": precision,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return Check(f"a prediction in {precision}", ("evodsp", "predict", *words), 0, (trained,))

    def _curves(self, title: str, tolerance: float, runs: dict[str, Check | None]) -> Check:
        files = [str(self.work / name / "curve.csv") for name in runs]
        after = tuple(check for check in runs.values() if check is not None)
        return Check(title, (*_PROGRAM, "curves", str(tolerance), *files), 0, after)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Within, SIGTERM leaves the program as an interrupt does, through what cleans up."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(check: Check, outcome: Outcome) -> str:
    """What is printed of a check: one line and its results, or if it failed all of its output."""
    if not outcome.succeeded:
        return "\n".join([f"FAILED  {check.name}", *(f"        {line}" for line in outcome.output.splitlines())])
    results = [line.removeprefix("result: ") for line in outcome.output.splitlines() if line.startswith("result: ")]
    return "\n".join([f"ok      {check.name}, {outcome.seconds:.0f} s", *(f"        {line}" for line in results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks. Returns 0 if all succeeded, otherwise 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="verify_gpus.sh", description="Verify evodsp on a machine with GPUs.")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="try the checks on so many CPU processes")
    parser.add_argument(
        "--jobs", type=int, default=max(1, cores // 2), help="how many checks of one device run at once"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="the longest that a check may take"
    )
    options = parser.parse_args(arguments)
    available = options.cpu
    if available is None:
        import torch

        available = torch.cuda.device_count()
    if available < 1 or options.jobs < 1:
        print("FAILED: this machine has no GPU; use one that has, or test the script with --cpu 3")
        return 1
    threads = str(max(1, cores // options.jobs // 2))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    failed = False
    with tempfile.TemporaryDirectory() as folder, _stopped_by_signals():
        suite = Suite("cpu" if options.cpu else "cuda", available, Path(folder), options.jobs)
        stages = [(suite.kernels(), 1), (suite.one_device(), options.jobs)]
        if available > 1:
            stages.append((suite.several(), 1))
        for checks, jobs in stages:
            for check, outcome in Runner(jobs, options.limit, environment).run(checks):
                print(report(check, outcome), flush=True)
                failed = failed or not outcome.succeeded
    if available == 1:
        print("        one device: what several do is not verified, except that they compute what one does")
    if not failed:
        print("all verified")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
