"""`evodsp selftest`: runs the checks as commands of their own, on one device and on several, and prints a table of how
they ended.

A check begins when those whose files it reads have succeeded. The table keeps the order of the list. A check that takes
longer than the limit has failed; it and the processes that it started are ended, and the others go on.

Importing this costs nothing (no torch), because `--help` reads the settings.
"""

from __future__ import annotations

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

from evodsp.errors import POSITIVE, SIZE, UserError, check_numbers, nearest
from evodsp.packaged import packaged_folder
from evodsp.printing import show

SCALING_PARTS = {
    "environment": 60.0, "collectives": 60.0, "speed": 180.0, "blocks": 300.0, "training": 240.0, "scaling": 240.0,
    "killed": 45.0, "stopped": 45.0,
}  # fmt: skip
"""The parts of `--scaling`, and the seconds after which each is ended."""


@dataclass(frozen=True)
class SelftestConfig:
    """Devices and limits of a check of a machine. Raises UserError if a value is out of range."""

    cpu: int | None = None
    """Number of CPU processes to check in place of the GPUs; null: all GPUs of this machine."""
    jobs: int | None = None
    """Number of checks of one device that run at once; null: half as many as this machine has cores."""
    limit: float = 300.0
    """Seconds after which a check is ended and counts as failed. Parts of --scaling have limits of their own."""
    scaling: bool = False
    """Check and measure what several GPUs do together, in about ten minutes, in place of the other checks: on all GPUs of this
    machine, or on the ranks that torchrun, srun or mpirun has started. Results are written as they come."""
    parts: str | None = None
    """Parts of --scaling to run, with commas between them; null: all. They are environment, collectives, speed, blocks,
    training, scaling, killed and stopped."""
    output: Path | None = None
    """Report of --scaling, which must end in .json; a page is written beside it. null: scaling.json. `evodsp plan` takes it as
    --device."""

    def __post_init__(self) -> None:
        check_numbers(self, {"cpu": SIZE, "jobs": SIZE, "limit": POSITIVE}, "--")
        if not self.scaling and (self.parts or self.output):
            raise UserError("--parts and --output are options of --scaling; add --scaling, or leave them out")
        if self.output is not None and self.output.suffix != ".json":
            raise UserError(f"--output is {self.output}, but the report needs a name that ends in .json")
        for name in self.chosen:
            if name not in SCALING_PARTS:
                raise UserError(
                    f"--parts names '{name}', but the parts are {', '.join(SCALING_PARTS)}.{nearest(name, SCALING_PARTS)}"
                )

    @property
    def chosen(self) -> list[str]:
        """The parts of --scaling to run."""
        return list(SCALING_PARTS) if self.parts is None else self.parts.split(",")

    @property
    def report(self) -> Path:
        """The report of --scaling."""
        return self.output or Path("scaling.json")


_RANKS = ("evodsp.selftest.ranks",)
GLOBAL_BATCH = 2
"""Samples of a training step, the same on every mesh."""
_FIRST = 5
"""Steps whose losses have to be equal. Each step amplifies rounding: on a CPU two ranks differ from one by 2e-6 in the fifth
step and by 1.4e-4 in the tenth, fsdp2 from replicated parameters by 2e-6 and 2.6e-3; in float64 by 7e-8 and 0 in the tenth.
"""


@dataclass(frozen=True)
class Check:
    """A command that checks something."""

    name: str
    words: tuple[str, ...]
    """The words after `python -m`."""
    ranks: int = 1
    """Number of processes that run it together; 0: one process that is no rank."""
    after: tuple[Check, ...] = ()
    """The checks whose files it reads."""


class Suite:
    """The checks of a machine, and the folder in which they leave files for each other."""

    def __init__(self, device: str, available: int, work: Path, jobs: int) -> None:
        self.device, self.available, self.work, self.jobs = device, available, work, jobs

    def kernels(self) -> list[Check]:
        """The check that runs before all others: by several processes, it compiles what the others need too."""
        processes = 2 * self.jobs if self.jobs > 1 else 1
        return [self._ranks("every kernel equals its formula", "kernels", str(processes))]

    def one_device(self) -> list[Check]:
        """The checks for which one device is enough; independent ones stand first."""
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
            Check("sharded kernels of ranks that share a device equal one rank", (*_RANKS, "shared", self.device), 3),
            resumed, *predicted,
            self._curves("losses in bf16-mixed are near", 0.02, {"1_1": first, "bf16": half}),
            self._curves(
                "losses with zero1, and after resuming, are equal", 1e-5,
                {"1_1": first, "zero1": zero1, "resumed": resumed},
            ),
            self._curves("first losses with fsdp2 are equal", 1e-5, {"clipped": clipped, "fsdp2": fsdp2}, _FIRST),
            Check("predictions in fp32 and bf16 are near", (*_RANKS, "predictions", *folders), after=tuple(predicted)),
        ]  # fmt: skip

    def several(self) -> list[Check]:
        """The checks that need several devices. Each takes all of them, so one runs at a time."""
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
        equal = self._curves("their first losses are equal", 1e-5, {"1_1": None, **fits}, _FIRST)
        return [*checks, *fits.values(), equal]

    def _ranks(self, name: str, check: str, *words: str, ranks: int = 1) -> Check:
        return Check(name, (*_RANKS, check, self.device, *words), ranks)

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
        """A check that trains the quickstart's model, in the folder `name`."""
        settings = {
            "trainer.accelerator": self.device, "trainer.max_steps": steps, "trainer.log_every_n_steps": 1,
            "trainer.num_sanity_val_steps": 0, "trainer.enable_progress_bar": "false", "data.validation_chains": "null",
            "data.batch_size": GLOBAL_BATCH // data, "parallel.sequence": sequence,
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        fit = ("evodsp", "fit", "--config", "quickstart", "--output", str(self.work / name))
        return Check(title, (*fit, *options, *words), data * sequence, after)

    def _predict(self, trained: Check, precision: str) -> Check:
        checkpoint, data = self.work / "1_1" / "checkpoints" / "last.ckpt", packaged_folder("data")
        fasta = str(data / "fasta" / "s005_A.fasta")
        options = {
            "alignments": data / "alignments", "format": "pdb", "checkpoint": checkpoint,
            "output": self.work / precision, "device": self.device, "precision": precision,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return Check(f"a prediction in {precision}", ("evodsp", "predict", fasta, *words), 0, (trained,))

    def _curves(self, title: str, tolerance: float, runs: dict[str, Check | None], first: int = 10) -> Check:
        files = [str(self.work / name / "curve.csv") for name in runs]
        after = tuple(check for check in runs.values() if check is not None)
        return Check(title, (*_RANKS, "curves", str(tolerance), str(first), *files), 0, after)


_ENDING_S = 40.0
"""Seconds that an ended launcher has to end its ranks."""
_COLUMN = " " * 17
"""Text before the third column of the table."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a check."""

    succeeded: bool
    seconds: float
    output: str


class CheckRunner:
    """Runs checks, and ends what is still running when it is left."""

    def __init__(self, jobs: int, limit_s: float, environment: dict[str, str]) -> None:
        self._jobs, self._limit_s, self._environment = jobs, limit_s, environment
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, checks: Sequence[Check]) -> Iterator[tuple[Check, CheckResult]]:
        """Each check and how it ended, in the order given, in which a check stands behind those that it is `after`."""
        with ThreadPoolExecutor(self._jobs) as pool:
            found: dict[Check, Future[CheckResult]] = {}
            try:
                for check in checks:
                    found[check] = pool.submit(self._result, check, [(c, found[c]) for c in check.after if c in found])
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

    def _result(self, check: Check, after: list[tuple[Check, Future[CheckResult]]]) -> CheckResult:
        for earlier, future in after:
            if not future.result().succeeded:
                return CheckResult(False, 0.0, f"left out, because it reads what '{earlier.name}' writes\n")
        begun = time.monotonic()
        with self._lock:
            if self._stopped:
                return CheckResult(False, 0.0, "not begun\n")
            process = subprocess.Popen(
                command_of(check), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
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
        return CheckResult(process.returncode == 0, time.monotonic() - begun, output)


def command_of(check: Check) -> list[str]:
    """The command line of a check, which finds evodsp where this process did: it need not be installed."""
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


def rows(check: Check, result: CheckResult) -> str:
    """The row of a check in the table, and below it the lines of its results; of a check that failed, all of its output."""
    state, lines = "FAILED", result.output.splitlines()
    if result.succeeded:
        state, lines = "ok", [line.removeprefix("result: ") for line in lines if line.startswith("result: ")]
    return "\n".join([f"{state:<6} {result.seconds:>8.0f}  {check.name}", *(f"{_COLUMN}{line}" for line in lines)])


def run(settings: SelftestConfig, words: list[str]) -> int:
    """Run the checks and print the table. Returns 0 if all succeeded, otherwise 1. Raises UserError if there is no GPU."""
    if settings.scaling:
        from evodsp.selftest import scaling

        return scaling.run(settings, words)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = settings.jobs or max(1, cores // 2)
    available = settings.cpu
    if available is None:
        import torch

        available = torch.cuda.device_count()
    if available < 1:
        raise UserError("this machine has no GPU that PyTorch finds; give --cpu 2 to check it with two CPU processes")
    threads = str(max(1, cores // jobs // 2))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    results = []
    show(f"{'result':<6} {'seconds':>8}  check", flush=True)
    with tempfile.TemporaryDirectory() as folder, _stopped_by_signals():
        suite = Suite("cpu" if settings.cpu else "cuda", available, Path(folder), jobs)
        stages = [(suite.kernels(), 1), (suite.one_device(), jobs)]
        if available > 1:
            stages.append((suite.several(), 1))
        for checks, at_once in stages:
            for check, result in CheckRunner(at_once, settings.limit, environment).run(checks):
                show(rows(check, result), flush=True)
                results.append(result.succeeded)
    if available == 1:
        show("One device cannot show what several do, except that ranks which share it compute what one computes.")
    failed = results.count(False)
    show(f"{failed} of {len(results)} checks failed" if failed else f"all {len(results)} checks succeeded")
    return int(failed > 0)
