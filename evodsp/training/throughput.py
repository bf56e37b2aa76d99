"""Speed of training, its waits, its memory and its use of the device, measured for each row of the logs.

Lightning's ThroughputMonitor makes the host wait for the GPU after each batch, multiplies samples by all ranks although ranks
may share a sample, and is silent for its first 100 batches. It knows neither waiting nor memory.

Model FLOPs utilisation is the share of a device's peak that goes into the model's own matrix products:

    utilisation = FLOPs of the samples / (seconds x devices x peak)
    FLOPs of a sample = (recycling iterations + 3) x FLOPs of one forward pass

Iterations before the last one have no backward pass; the last one's counts as two forward passes (`evodsp.model.flops`), and
as less where parts of the model are frozen.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from evodsp.config import MatmulPrecision, ModelConfig
from evodsp.model.flops import backward_flops, pass_flops, training_flops
from evodsp.parallel.group import WaitTimes
from evodsp.planner.device import load_device
from evodsp.training.datamodule import ChainDataModule

if TYPE_CHECKING:
    from evodsp.training.module import TrainingModule


MEASURED = (
    "train/step_seconds", "train/samples_per_second", "train/residues_per_second", "train/waiting_percent",
    "train/communication_percent", "train/memory_gib", "train/mfu_percent",
)  # fmt: skip
"""The columns that are logged here. They differ from run to run; all others are functions of the settings."""


WORST = ("waiting_percent", "communication_percent", "memory_gib")
"""Columns that differ from rank to rank. The largest is logged: the rank that runs out of memory need not be the first."""


class Throughput(Callback):
    """Logs the columns `MEASURED`, of the steps since the last row, or since the start or the resume of the run.

    Time counts from row to row, without validations; writing checkpoints is in it. docs/training.md describes each column.
    """

    def __init__(
        self, module: TrainingModule, data: ChainDataModule, waits: WaitTimes | None, utilisation: Utilisation | None
    ) -> None:
        """`waits`: the clock of communication, which on a GPU measures only the step of the row; None where some communication
        does not pass through it. `utilisation`: the counter of FLOPs; None logs no utilisation.
        """
        self._module, self._data, self._waits, self._utilisation = module, data, waits, utilisation
        self._measuring = False
        self._restart()

    def _restart(self) -> None:
        self._begun, self._waited = time.perf_counter(), self._data.waited_s
        self._steps = self._samples = 0
        self._communication_s = self._measured_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._utilisation is not None:
            self._utilisation.start(pl_module.device)
        self._restart()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._utilisation is not None:
            begun = time.perf_counter()
            self._utilisation.prepare(batch)
            self._begun += time.perf_counter() - begun
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._step_begun = time.perf_counter()
            self._measuring = self._waits is not None and (self._waits.free or self._module.at_row)
            if self._waits is not None and self._measuring:
                self._waits.begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_begun = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun += time.perf_counter() - self._validation_begun

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += len(batch["sample_index"])
        if self._utilisation is not None:
            self._utilisation.add(batch)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._steps += 1
        if self._waits is not None and self._measuring:
            self._communication_s += self._waits.end()
            self._measured_s += time.perf_counter() - self._step_begun
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            measured = self._row(trainer, pl_module.device)
            self._module.log_row({f"train/{name}": value for name, value in measured.items()})
            self._restart()

    def _row(self, trainer: Trainer, device: torch.device) -> dict[str, float]:
        now = time.perf_counter()
        seconds = max(now - self._begun, 1e-9)
        rate = self._samples * self._module.world.data_ranks / seconds
        row = {
            "step_seconds": seconds / self._steps,
            "samples_per_second": rate,
            "waiting_percent": 100 * (self._data.waited_s - self._waited) / seconds,
        }
        if (residues := self._module.rows.last.get("residues")) is not None:
            row["residues_per_second"] = rate * residues
        if self._measured_s:
            row["communication_percent"] = 100 * self._communication_s / self._measured_s
        if (used := memory_used(device)) is not None:
            row["memory_gib"] = used / 2**30
        if self._utilisation is not None:
            share = self._utilisation.percent(seconds, trainer.world_size // self._module.world.data_ranks)
            if share is not None:
                row["mfu_percent"] = share
        own = {name: row[name] for name in WORST if name in row}
        every = self._module.world.gather(own)
        return row | {name: max(of_rank[name] for of_rank in every) for name in own}


def memory_used(device: torch.device) -> int | None:
    """Bytes that tensors took on a GPU at most since the last call; on a CPU, this process's resident memory (Linux only)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.is_file() else None


TERA = 1e12


_DEVICES = {"GH200": "h200", "H200": "h200", "H100": "h100", "A100": "a100", "B200": "b200"}
"""The planner's file of a device, by a part of the device's name."""
_PEAKS: dict[str, tuple[float, float, float]] = {
    "H100 PCIe": (51, 378, 756),
    "H100 NVL": (60, 417, 835),
    "V100-SXM2": (15.7, 15.7, 125),
    "L40S": (91.6, 183, 362),
    "L4": (30.3, 60, 121),
    "A40": (37.4, 74.8, 149.7),
    "A10": (31.2, 62.5, 125),
    "RTX 4090": (82.6, 82.6, 165.2),
    "RTX 3090": (35.6, 35.6, 71),
}
"""Peaks of devices that the planner has no file for, in TFLOP/s of dense matrices, by a part of the device's name: float32,
TF32, and half precision with sums in float32. From NVIDIA's data sheets.

Lightning's `get_available_flops` has such a table too, but for H100 NVL and H200 it holds half precision's peak for sparse
matrices, twice what a model can use."""


def peak_flops(device: str, precision: str, matmul: MatmulPrecision) -> float | None:
    """Peak of a device in FLOP/s; None if it is not known. `device`: its name. `precision`: `trainer.precision`."""
    if precision.startswith("64"):
        return None
    peaks = next((peaks for part, peaks in _PEAKS.items() if _is_named(device, part)), None)
    file = next((file for part, file in _DEVICES.items() if _is_named(device, part)), None)
    if peaks is None and file is not None:
        found = load_device(file)
        peaks = (found.tflops_single, found.tflops_tf32, found.tflops_half)
    kind = 2 if "16" in precision else 1 if matmul == "high" else 0
    return None if peaks is None else peaks[kind] * TERA


def _is_named(device: str, part: str) -> bool:
    return re.search(rf"\b{part}\b", device) is not None


class Utilisation:
    """Counts the FLOPs of training batches that all have one size."""

    def __init__(
        self,
        model: ModelConfig,
        precision: str,
        matmul: MatmulPrecision,
        peak_tflops: float | None,
        frozen: Sequence[str] = (),
        only: Sequence[str] = (),
    ) -> None:
        """`peak_tflops`: the peak of one device; None takes the known peak of the device. `frozen`: parts of the model that
        are not trained.
        """
        self._model, self._precision, self._matmul, self._given = model, precision, matmul, peak_tflops
        self._frozen = (frozen, only)
        self._peak: float | None = None
        self._of_a_pass: int | None = None
        self._backward: int | None = None
        self._flops = 0

    def start(self, device: torch.device) -> None:
        """Look up the peak of the run's device."""
        if self._given is not None:
            self._peak = self._given * TERA
        elif device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(device), self._precision, self._matmul)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Count a pass of the first batch, which takes seconds for a large model."""
        if self._peak is not None and self._of_a_pass is None:
            self._of_a_pass = pass_flops(self._model, batch)
            self._backward = backward_flops(self._model, batch, *self._frozen) if any(self._frozen) else None

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """One more batch has been trained on."""
        self._flops += training_flops(self._of_a_pass or 0, batch["aatype"].shape[1], self._backward)

    def percent(self, seconds: float, devices: int) -> float | None:
        """The utilisation since the last call, if `devices` shared each batch; None if the peak is not known."""
        flops, self._flops = self._flops, 0
        return None if self._peak is None else 100 * flops / (seconds * devices * self._peak)
