"""What is logged of a run's speed, waiting and memory, and that the numbers fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.model.flops import pass_flops
from evodsp.parallel.waits import WaitTimes
from evodsp.report.curve import read_curve
from evodsp.training.command import TrainingCLI
from evodsp.training.throughput import MEASURED
from evodsp.training.utilisation import peak_flops
from evodsp.training.world import World
from tests.builders import small_model
from tests.builders.training import CommandPool

PEAK_TFLOPS = 1e-3
SAMPLES = 2
"""Of a step."""


def words(chains: Path, output: Path, *options: str) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--peak_tflops={PEAK_TFLOPS}",
            f"--trainer.accumulate_grad_batches={SAMPLES}", "--trainer.max_steps=4", "--trainer.log_every_n_steps=2",
            *options]  # fmt: skip


def check(chains: Path, output: Path, ranks: int) -> None:
    """The figures of each row belong to one interval of two steps, of a sample that `ranks` ranks share."""
    config = TrainingCLI("fit", words(chains, output)[1:]).settings.model.model_config()
    flops = pass_flops(config, small_model.features(1, (4, 3, 10)))  # the sizes in tiny.yaml
    curve = read_curve(output / "curve.csv")
    assert list(curve) == [1, 3]
    for cells in curve.values():
        row = {name: float(cells.get(f"train/{name}", "nan")) for name in (*SHORT, "residues", "recycles")}
        assert row["samples_per_second"] * row["step_seconds"] == pytest.approx(SAMPLES, rel=1e-5)
        assert row["residues_per_second"] == pytest.approx(row["samples_per_second"] * row["residues"], rel=1e-5)
        assert row["residues"] == 10, "padding counted, or ranks' shards"
        assert 0 <= row["waiting_percent"] <= 100
        assert 0.05 < row["memory_gib"] < 50
        used = row["mfu_percent"] / 100 * row["step_seconds"] * ranks * PEAK_TFLOPS * 1e12
        assert used == pytest.approx(SAMPLES * (row["recycles"] + 3) * flops, rel=1e-5)
        if ranks > 1:
            assert 0 < row["communication_percent"] < 100
        else:
            assert "train/communication_percent" not in cells


SHORT = [name.removeprefix("train/") for name in MEASURED]


def test_one_rank(chains: Path, tmp_path: Path) -> None:
    """Time and samples of different intervals, accumulated batches that do not count, FLOPs of a gradient in every recycling
    iteration."""
    assert main(words(chains, tmp_path / "run")) == 0
    check(chains, tmp_path / "run", ranks=1)


def test_ranks_that_share_a_sample(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """A sample counted once a rank, the peak of one device for two, waiting that nobody measures."""
    outcomes = commands.evodsp(2, *words(chains, tmp_path / "run", "--parallel.sequence=2"))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    check(chains, tmp_path / "run", ranks=2)


def test_what_differs_from_rank_to_rank_is_the_worst_ranks(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and waiting of rank 0, which another rank exceeds; or a figure of the run that is taken for a rank's."""

    def gather(self: World, value: Any) -> list[Any]:
        of_ranks = isinstance(value, dict) and "memory_gib" in value
        return [value, {name: 1000 + own for name, own in value.items()}, value] if of_ranks else [value]

    monkeypatch.setattr(World, "gather", gather)
    assert main(words(chains, tmp_path / "run")) == 0
    for cells in read_curve(tmp_path / "run" / "curve.csv").values():
        row = {name: float(cells[f"train/{name}"]) for name in ("memory_gib", "waiting_percent", "step_seconds")}
        assert row["memory_gib"] > 1000
        assert row["waiting_percent"] >= 1000
        assert row["step_seconds"] < 1000


def test_an_unknown_peak_is_no_utilisation(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A share of nothing, or of another device's peak; a peak of zero."""
    h100 = peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed", "highest")
    assert h100 == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16-mixed", "highest") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true", "high") == 156e12
    assert peak_flops("NVIDIA A10", "32-true", "highest") == 31.2e12
    assert peak_flops("NVIDIA A10G", "32-true", "highest") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "64-true", "highest") is None
    given = [word for word in words(chains, tmp_path / "run") if "peak_tflops" not in word]
    assert main([*given, "--peak_tflops=0"]) == 2
    assert "peak_tflops is 0.0" in capsys.readouterr().err


class _Work:
    """A collective that takes `ms` of the device's time."""

    def __init__(self, device: dict[str, float], ms: float) -> None:
        self.device, self.ms = device, ms

    def wait(self) -> None:
        self.device["ms"] += self.ms


def test_a_gpus_waits_are_read_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a step that is not measured, time of the host instead of the device's, events in the wrong order."""
    device = {"ms": 0.0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            device["events"] = device.get("events", 0) + 1

        def record(self) -> None:
            self.at = device["ms"]

        def synchronize(self) -> None:
            device["synchronized"] = device.get("synchronized", 0) + 1

        def elapsed_time(self, later: Any) -> float:
            assert device["synchronized"]
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    waits = WaitTimes(on_gpu=True)
    for step in range(1, 3):
        waits.wait(_Work(device, 1.0))  # in a step that is not measured
        waits.begin()
        for ms in (20.0, 30.0):
            waits.wait(_Work(device, ms))
            device["ms"] += 7  # it computes
        assert waits.end() == pytest.approx(0.05)
        assert device["events"] == 4 * step
