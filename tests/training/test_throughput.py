"""What is logged of a run's speed, waiting and memory, and that the numbers fit each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch import Trainer

from evodsp.cli import main
from evodsp.parallel.group import WaitTimes
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule
from evodsp.training.command import TrainingCLI
from evodsp.training.logs import MEASURED, Throughput, Utilisation, pass_flops, peak_flops
from evodsp.training.module import TrainingModule
from evodsp.training.world import World
from tests.builders import small_model
from tests.builders.training import CommandPool

PEAK_TFLOPS = 1e-3
SAMPLES = 2
"""Of a step."""


def words(chains: Path, output: Path, *options: str) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--peak_tflops={PEAK_TFLOPS}",
            f"--trainer.accumulate_grad_batches={SAMPLES}", "--trainer.max_steps=4", "--trainer.log_every_n_steps=2",
            "--trainer.limit_val_batches=0", *options]  # fmt: skip


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


@pytest.mark.verify
def test_ranks_that_share_a_sample(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """A sample counted once a rank, the peak of one device for two, waiting that nobody measures."""
    outcomes = commands.evodsp(2, *words(chains, tmp_path / "run", "--parallel.sequence=2"))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    check(chains, tmp_path / "run", ranks=2)


@pytest.mark.verify
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


def test_an_unknown_peak_is_no_utilisation() -> None:
    """A share of nothing, or of another device's peak."""
    h100 = peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed", "highest")
    assert h100 == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16-mixed", "highest") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32-true", "high") == 156e12
    assert peak_flops("NVIDIA A10", "32-true", "highest") == 31.2e12
    assert peak_flops("NVIDIA A10G", "32-true", "highest") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "64-true", "highest") is None


class Clock:
    """Stands for time.perf_counter in what is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("evodsp.training.logs.time.perf_counter", lambda: self.now)


def measured(
    utilisation: Utilisation | None, ranks: int, data_ranks: int, waits: WaitTimes | None = None
) -> tuple[Throughput, Any, Any]:
    """The callback, its trainer with a row after two steps of two batches, and the mock that is given the row."""
    module, data, trainer = MagicMock(spec=TrainingModule), MagicMock(spec=ChainDataModule), MagicMock(spec=Trainer)
    module.rows, module.device = SimpleNamespace(last={}), torch.device("cpu")
    module.world = MagicMock(spec=World, data_ranks=data_ranks, gather=lambda value: [value])
    data.waited_s = 0.0
    trainer.accumulate_grad_batches, trainer.log_every_n_steps, trainer.world_size = 2, 2, ranks
    return Throughput(module, data, waits, utilisation), trainer, module


def test_what_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the time of a validation, or that of counting FLOPs, in the time of a step; samples of one rank only, and batches
    taken for steps."""
    clock = Clock(monkeypatch)

    class Slow(Utilisation):
        def prepare(self, batch: Any) -> None:
            clock.now += 500.0

    callback, trainer, module = measured(Slow(small_model.config(), "32-true", "highest", None), ranks=6, data_ranks=3)
    callback.on_train_start(trainer, module)
    batch = {"sample_index": torch.arange(2), "aatype": torch.zeros(2, 3, 7)}
    for number in range(4):
        trainer.global_step = (number + 1) // 2
        callback.on_train_batch_start(trainer, module, batch, number)
        clock.now += 2.5
        callback.on_train_batch_end(trainer, module, None, batch, number)
        if number == 1:
            callback.on_validation_start(trainer, module)
            clock.now += 3000.0
            callback.on_validation_end(trainer, module)
    (row,) = (call.args[0] for call in module.log_row.call_args_list)
    assert row["train/step_seconds"] == pytest.approx(5.0)
    assert row["train/samples_per_second"] == pytest.approx(4 * 2 * 3 / 10.0)
    assert "train/mfu_percent" not in row


def test_utilisation_is_that_of_the_devices_that_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a batch's FLOPs that are divided among all devices, although each pair of them has a batch of its own."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("evodsp.training.logs.pass_flops", lambda config, batch: 10**9)
    utilisation = Utilisation(small_model.config(), "32-true", "highest", PEAK_TFLOPS)
    callback, trainer, module = measured(utilisation, ranks=4, data_ranks=2)
    batch = {"sample_index": torch.arange(1), "aatype": torch.zeros(1, 3, 7)}
    callback.on_train_start(trainer, module)
    for number in range(4):
        trainer.global_step = (number + 1) // 2
        callback.on_train_batch_start(trainer, module, batch, number)
        clock.now += 2.5
        callback.on_train_batch_end(trainer, module, None, batch, number)
    (row,) = (call.args[0] for call in module.log_row.call_args_list)
    assert row["train/mfu_percent"] == pytest.approx(100 * 4 * (3 + 2) * 1e9 / (10.0 * 2 * PEAK_TFLOPS * 1e12))


@pytest.mark.parametrize(("on_gpu", "expected"), [(False, [20.0, 60.0]), (True, [30.0, 80.0])])
def test_communication_is_a_share_of_the_steps_that_are_measured(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, expected: list[float]
) -> None:
    """Catches waits of a GPU's last step as a share of all steps, time before a step that counts, and the waits of an earlier
    row."""
    clock = Clock(monkeypatch)
    waits = MagicMock(spec=WaitTimes, free=not on_gpu)
    callback, trainer, module = measured(None, ranks=2, data_ranks=1, waits=waits)
    callback.on_train_start(trainer, module)
    batch = {"sample_index": torch.arange(1), "aatype": torch.zeros(1, 3, 7)}
    for step, seconds in enumerate([1.0, 3.0, 4.0, 8.0]):  # a row after each two steps, of 10 s each
        module.at_row = step % 2 == 1
        waits.end.return_value = seconds
        for number in (2 * step, 2 * step + 1):
            clock.now += 90.0 if number % 2 == 0 else 0.0
            callback.on_train_batch_start(trainer, module, batch, number)
            clock.now += 5.0
            trainer.global_step = (number + 1) // 2
            callback.on_train_batch_end(trainer, module, None, batch, number)
    rows = [call.args[0] for call in module.log_row.call_args_list]
    assert [row["train/communication_percent"] for row in rows] == pytest.approx(expected)
    assert waits.begin.call_count == waits.end.call_count == (2 if on_gpu else 4)


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
