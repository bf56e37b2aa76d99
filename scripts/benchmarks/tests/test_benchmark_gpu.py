"""The measurement on a GPU (`scripts/benchmarks/gpu.sh`), tried on a CPU: parts, failures, time limits, and what is counted."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from scripts.benchmarks import (
    gpu,
    gpu_blocks,
    gpu_cases,
    gpu_clock,
    gpu_operators,
    gpu_rows,
)
from scripts.benchmarks.gpu_rows import Case, Measured, Part, Setup

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
NOT_IN_A_BLOCK = {"gated_output", "gated_projection", "layer_norm"}
"""Of one rank: two are for several ranks, and every other operator of a block begins with its own norm."""


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "gpu.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    """Catches a part that cannot run at all, which would be found on the GPU, where time is short."""
    script = ROOT / "scripts" / "benchmarks" / "gpu.sh"
    words = [str(script), "--cpu", "--backends", "chunked", "--output", str(tmp_path / "found")]
    # torch.compile links no C++ if the path of its package has a blank; a link's has none.
    (tmp_path / "environment").symlink_to(sys.prefix)
    interpreter = tmp_path / "environment" / "bin" / "python"
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "EVODSP_PYTHON": str(interpreter)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "found")
    found = {(row["part"], row["quantity"]) for row in rows}
    assert found >= {
        ("machine", "bandwidth"), ("machine", "products bf16"), ("checks", "self-check"), ("blocks", "forward"),
        ("blocks", "backward"), ("blocks", "peak memory"), ("blocks", "kept for backward"), ("operators", "fraction forward"),
        ("operators", "fraction backward"), ("model", "optimizer"), ("model", "prediction"),
        ("longest", "R that fits at least"),
    }  # fmt: skip
    parts = {part.name for part in gpu.PARTS} - {"profile"}  # there are no kernels on a CPU
    assert {row["part"] for row in rows} == parts
    assert all(float(row["value"]) > 0 for row in rows if row["unit"])
    assert {row["command"] for row in rows} == {f"scripts/benchmarks/gpu.sh {' '.join(words[1:])}"}
    errors = {
        row["case"].rpartition(": ")[2]: float(row["value"])
        for row in rows
        if row["part"] == "checks" and row["quantity"] == "error"
    }  # of the last precision, fp32
    assert set(errors) == set(gpu_rows.operators_of("chunked")) - NOT_IN_A_BLOCK
    assert max(errors.values()) < 1e-5
    text = (tmp_path / "found" / "gpu.md").read_text()
    assert text.count("\n## ") == len(parts)
    assert "s left" in done.stdout


def good(setup: Setup) -> Iterator[Case]:
    yield Case("good", "", "", lambda: [Measured("answer", 42.0, "s")])


def wrong(setup: Setup) -> Iterator[Case]:
    def measure() -> Iterator[Measured]:
        yield Measured("before", 1.0)
        raise ValueError("a | b\nsecond line")

    yield Case("wrong", "", "", measure)
    yield from good(setup)


def dies(setup: Setup) -> Iterator[Case]:
    yield from good(setup)
    yield Case("dies", "", "", lambda: os._exit(3))


def hangs(setup: Setup) -> Iterator[Case]:
    yield from good(setup)
    yield Case("hangs", "", "", lambda: time.sleep(60))  # type: ignore[arg-type, return-value, func-returns-value]


def full(setup: Setup) -> Iterator[Case]:
    def measure() -> Iterator[Measured]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        yield

    yield Case("full", "", "", measure)


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, *cases: Callable[[Setup], Iterator[Case]]
) -> tuple[int, list[tuple[str, ...]]]:
    """The exit code, and (part, case, quantity, value) of each row."""
    monkeypatch.setattr(gpu, "PARTS", tuple(Part(f.__name__, f.__name__, n + 1.0, f) for n, f in enumerate(cases)))
    monkeypatch.setattr(gpu, "GRACE", 0.3)
    code = gpu.main(["--cpu", "--minutes", str(minutes), "--output", str(folder)])
    return code, [(row["part"], row["case"], row["quantity"], row["value"]) for row in read(folder)]


def test_what_fails_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a case or a process that takes others, or what was measured before it, along; and an exit code of 0 after it."""
    code, rows = run(tmp_path, monkeypatch, 1, wrong, dies, good)
    assert code == 1
    assert rows == [
        ("wrong", "wrong", "before", "1"),
        ("wrong", "wrong", "failed", ""),
        ("wrong", "good", "answer", "42"),
        ("dies", "good", "answer", "42"),
        ("dies", "", "failed", ""),
        ("good", "good", "answer", "42"),
    ]
    notes = [row["note"] for row in read(tmp_path) if row["quantity"] == "failed"]
    assert notes == ["ValueError: a | b", "its process ended with code 3"]
    assert "|wrong|||1|ValueError: a / b|" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that takes longer than it was given, and parts that inherit no time from those before them."""
    begin = time.monotonic()
    code, rows = run(tmp_path, monkeypatch, 0.2, hangs, good)
    assert time.monotonic() - begin < 30  # 4 seconds, if nothing else runs on the machine
    assert code == 1
    assert rows[-2:] == [("hangs", "", "failed", ""), ("good", "good", "answer", "42")]


def test_without_time_a_case_is_left_out(tmp_path: Path) -> None:
    """Catches a case that begins when its part's time is over."""
    file = tmp_path / "rows"
    gpu.run_part(Part("x", "x", 1.0, good), Setup(CPU, gpu_cases.TINY, time.monotonic() - 1), file, time.monotonic())
    assert '"left out"' in file.read_text()
    assert "42" not in file.read_text()


def test_memory_that_is_full_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a backend that needs more memory than there is being reported as a failure of the run."""
    assert run(tmp_path, monkeypatch, 1, full) == (0, [("full", "full", "out of memory", "")])


def attention_call() -> gpu_operators.Call:
    """Of the bf16 pass of a small block."""
    setup = Setup(CPU, gpu_cases.TINY, time.monotonic() + 100)
    calls = gpu_operators.block_calls(setup, "evoformer", 5, 7, torch.bfloat16)
    return next(call for call in calls if call.operator == "biased_attention")


def test_the_work_of_an_operator() -> None:
    """Catches a roofline that counts a product twice, or bytes of another precision."""
    call = attention_call()
    batch, rows, length, _, heads, width = call.tensors[0].shape  # queries, keys, values and gate in one
    needed = gpu_operators.work(call)
    products = 2 * 2 * batch * rows * heads * length * length * width
    assert needed["forward"].products == products
    assert needed["backward"].products == 2 * products
    inputs = sum(x.numel() * x.element_size() for x in call.tensors)
    assert needed["forward"].bytes == inputs + call.tensors[0].numel() // 4 * 2
    assert needed["forward"].seconds(1e9, 1e15) == pytest.approx(needed["forward"].bytes / 1e9)
    assert needed["forward"].seconds(1e15, 1e9) == pytest.approx(products / 1e9)


def test_the_error_of_an_operator() -> None:
    """Catches a comparison that sees only the result, or that compares a function with itself."""
    call = attention_call()
    right = gpu_rows.operators_of("chunked")["biased_attention"]
    assert 0 < gpu_operators.error(call, right).largest < 0.03
    assert gpu_operators.same_twice(call, right)

    def with_wrong_gradient(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return right(x.detach() + (x - x.detach()) * 2, *others)

    found = gpu_operators.error(call, with_wrong_gradient)
    assert found.largest > 0.4
    assert found.of == "gradient of tensor 0"

    def with_noise(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return right(x, *others) + 1e-3 * torch.rand(())

    assert not gpu_operators.same_twice(call, with_noise)

    def without_numbers(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return right(x, *others) * math.nan

    assert math.isnan(gpu_operators.error(call, without_numbers).largest)


def test_our_kernels_report_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches grids that are not found under the operator's name, or that the backward pass is given."""
    call = attention_call()
    operator = SimpleNamespace(launches=lambda *_: [SimpleNamespace(bytes_moved=1000)])
    monkeypatch.setitem(gpu_operators.LAUNCHED, "aten::sigmoid", operator)
    found = gpu_operators.reported(call, gpu_rows.operators_of("reference")["biased_attention"])
    assert found == {"forward": 1000}


def test_where_the_time_goes() -> None:
    """Catches bytes of one grid that are given to another kernel of the same name, and kernels that are not summed."""

    def grid(name: str, moved: int) -> SimpleNamespace:
        return SimpleNamespace(kernel=name, bytes_moved=moved)

    ran = [gpu_clock.Kernel(name, 1e-3) for name in ("forward", "void at::native::copy", "forward", "forward")]
    grids = [grid("attention.forward", 10**6), grid("gate.forward", 10**6), grid("attention.forward", 2 * 10**6)]
    rows = list(gpu_blocks._shares("backward", ran, grids, copy=10.0))  # type: ignore[arg-type]
    assert [(row.of, row.value) for row in rows] == [
        ("all", 4000), ("attention.forward", 2000), ("copy", 1000), ("gate.forward", 1000)
    ]  # fmt: skip
    assert rows[1].note == "2 launches, 50.0%, 2 GB/s, 0.15 of the copy's"


def test_the_list_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches parts that together take longer than the ten minutes that a run is to stay under."""
    assert gpu.main(["--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [part.name for part in gpu.PARTS]
    assert sum(float(line.split()[1]) for line in listed) <= 545


class Gpu:
    """Stands in for what `gpu_clock` asks of torch.cuda: a clock and an allocator that advance with each stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.held, self.peak = 0.0, 1000 * 2**20, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.at - self.at)

        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **keywords: empty(1, **keywords))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(self, "now", self.now + 100.0))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.held))

    def step(self) -> Iterator[str]:
        for stage, seconds, mebibytes in (("forward", 1.0, 30), ("backward", 2.0, -30)):
            self.now += seconds
            self.held += mebibytes * 2**20
            self.peak = max(self.peak, self.held + 5 * 2**20)
            yield stage


def test_time_and_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stage that is given another's time, milliseconds taken for seconds, and memory that was there before."""
    stand_in, device = Gpu(monkeypatch), torch.device("cuda", 0)
    assert gpu_clock.timed(stand_in.step, device, 0.0, 4) == {"forward": [1.0] * 3, "backward": [2.0] * 3}
    found = gpu_clock.memory(stand_in.step, device)
    assert (found.peak, found.after) == (35, {"forward": 30, "backward": 0})


def test_launches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches host events or annotations that are counted as launches, copies that are, and stages that share their kernels."""
    Gpu(monkeypatch)
    stages = iter(["forward", "backward", None])

    class Profiler:
        def __init__(self, activities: list[object]) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: object) -> None:
            self.stage = next(stages)

        def events(self) -> list[SimpleNamespace]:
            def event(name: str, start: int, kind: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
                return SimpleNamespace(
                    name=name, device_type=kind, time_range=SimpleNamespace(start=start, elapsed_us=lambda: 7.0)
                )

            annotation = event("Optimizer.step", 0)
            annotation.is_user_annotation = True
            return [
                event(f"b {self.stage}", 2),
                event("Memcpy HtoD", 3),
                event("a", 1),
                event("op", 0, DeviceType.CPU),
                annotation,
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    found = gpu_clock.kernels(lambda: iter(["forward", "backward"]), torch.device("cuda", 0))
    assert {stage: [kernel.name for kernel in kernels] for stage, kernels in found.items()} == {
        stage: ["a", f"b {stage}", "Memcpy HtoD"] for stage in ("forward", "backward")
    }
    assert [kernel.copies for kernel in found["forward"]] == [False, False, True]
    assert found["forward"][0].seconds == pytest.approx(7e-6)
