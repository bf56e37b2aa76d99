"""The numbers of a training run: means over the steps of a row, the learning curve, and the loggers that get each row.

Three things differ from Lightning's way. A row of the logs is the mean over the steps since the last row: a row of one
step's numbers would leave out all others. A row is written before the checkpoint of its step: a run that is killed in
between would resume behind the row, and the curve would lack it. The curve is one CSV file, which a resumed run continues.

Speed, waits, memory and use of the device are measured for each row. Lightning's ThroughputMonitor makes the host wait for
the GPU after each batch, multiplies samples by all ranks although ranks may share a sample, and is silent for its first 100
batches. It knows neither waiting nor memory.

Model FLOPs utilisation is the share of a device's peak that goes into the model's own matrix products:

    utilisation = FLOPs of the samples / (seconds x devices x peak)
    FLOPs of a sample = (recycling iterations + 3) x FLOPs of one forward pass

Iterations before the last one have no backward pass; the last one's counts as two forward passes, and
as less where parts of the model are frozen.

The model is run on shapes alone (the meta device) while torch counts, so the number cannot differ from the program. Other
work (norms, softmax, activations that are recomputed in the backward pass) does not count as useful.

Progress is a bar on a terminal, otherwise a line every 20 seconds.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from evodsp.config import MatmulPrecision, ModelConfig
from evodsp.files import whole_file
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import Kernels
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.parallel.group import WaitTimes
from evodsp.planner.device import load_device
from evodsp.printing import duration, one_line, printable
from evodsp.reading.text_files import parse_yaml
from evodsp.report.runs import RESUMED, read_curve
from evodsp.training.chains import ChainDataModule
from evodsp.training.config import WITHOUT_ADAPTERS, AdapterConfig
from evodsp.training.gradients import freeze
from evodsp.training.run_end import last_step
from evodsp.training.trainer import tell_first

if TYPE_CHECKING:
    from evodsp.training.module import TrainingModule


class LogRows(Callback):
    """The rows of the logs: sums up numbers of optimizer steps, and gives the loggers each row at the end of its last step.

    Numbers are added once a step, so that each step has the same weight. A number that some steps lack is the mean over the
    others. A step that was left out because it was not finite adds nothing.
    """

    state_key = "IntervalMeans"  # in the checkpoints of all versions

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._row: dict[str, float] = {}
        """Numbers of the row that belongs to the running step."""
        self.last: dict[str, float] = {}
        """The means of the last interval that has ended."""

    def add_step(self, numbers: Mapping[str, float]) -> None:
        """Add the numbers of one more step to the interval."""
        for name, value in numbers.items():
            total, steps = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, steps + 1

    def means(self) -> dict[str, float]:
        """The mean of each number over the steps of the interval; empty if no step has been added."""
        return {name: total / steps for name, (total, steps) in self._sums.items()}

    def end_interval(self) -> None:
        """Begin the interval of the next row."""
        self.last, self._sums = self.means(), {}

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the row that belongs to the running step."""
        self._row.update(numbers)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CurveLogger):
                logger.first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._row:
            row, self._row = {**self._row, "epoch": float(trainer.current_epoch)}, {}
            for logger in trainer.loggers:
                logger.log_metrics(row, trainer.global_step - 1)
                logger.save()

    def state_dict(self) -> dict[str, Any]:
        return {name: list(entry) for name, entry in self._sums.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums = {name: (float(total), int(steps)) for name, (total, steps) in state_dict.items()}


_FIRST = ("step", "epoch", "seconds")


class CurveLogger(Logger):
    """Writes `<folder>/curve.csv` with the columns step, epoch, seconds, every logged metric, and `RESUMED` if it was resumed.

    Rows of an existing file are kept up to the step at which a run resumes: it continues its curve and its clock, and repeated
    steps appear once. A row is appended, so that a long run does not write its whole past again and again; the file
    is rewritten when the run starts and when a metric appears for the first time. A kill leaves a file that can be read.

    Lightning's CSVLogger deletes the earlier part of a resumed run, writes a second row when validation follows a step, has no
    clock, and rewrites its file in place, so that a kill can lose all of it.
    """

    name, version = "curve", ""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.path = self.folder / "curve.csv"
        self.first_step: int | None = None
        """The step at which this run begins or resumes: later rows are repeated. None: with the first row that is logged."""
        self._begun = time.monotonic()  # not at the first row, which comes only after the first steps
        self._started: float | None = None
        self._columns: list[str] = []
        """Columns of the file; empty before this logger has written it."""
        self._last: dict[str, str] = {}
        """The last row, to which validation may add."""
        self._last_at = self._end = 0
        """Its place in the file, and the end of the file, in bytes."""
        self._unsaved: dict[int, dict[str, str]] = {}

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    log_dir = save_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to log: hyperparameters are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = step or 0
        if self._started is None:
            first = step if self.first_step is None else self.first_step
            kept = {row: values for row, values in read_curve(self.path).items() if row < first}
            last = max(kept.values(), key=lambda row: float(row["seconds"]), default={"seconds": "0"})
            self._started = self._begun - float(last["seconds"])
            self._rewrite(kept)
            if self.first_step:
                metrics = {**metrics, RESUMED: self.first_step}
        if step not in self._unsaved:
            known = self._last if self._last.get("step") == str(step) else {}
            self._unsaved[step] = {"step": str(step), "seconds": f"{time.monotonic() - self._started:.1f}", **known}
        self._unsaved[step] |= {name: f"{value:.8g}" for name, value in metrics.items()}

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that are new or have changed."""
        if not self._unsaved:
            return
        new, self._unsaved = [row for _, row in sorted(self._unsaved.items())], {}
        if self._can_append(new):
            self._append(new)
            return
        rows = read_curve(self.path)
        for row in new:
            rows[int(row["step"])] = {**rows.get(int(row["step"]), {}), **row}
        self._rewrite(rows)

    def _can_append(self, rows: Sequence[dict[str, str]]) -> bool:
        """Whether the rows fit behind the others, or over the last one, in a file that nobody else has changed."""
        if not self.path.is_file() or self.path.stat().st_size != self._end:
            return False
        first, last = int(rows[0]["step"]), int(self._last.get("step", -1))
        fits = first > last or (first == last and len(self._line(rows[0])) >= self._end - self._last_at)
        return fits and {name for row in rows for name in row} <= set(self._columns)

    def _append(self, rows: Sequence[dict[str, str]]) -> None:
        lines = [self._line(row) for row in rows]
        at = self._last_at if rows[0]["step"] == self._last.get("step") else self._end
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(b"".join(lines))
        self._note_end(rows[-1], lines, at)

    def _rewrite(self, rows: Mapping[int, dict[str, str]]) -> None:
        """Write the whole file; a kill leaves either the old or the new one."""
        names = {name for row in rows.values() for name in row}
        self._columns = [*_FIRST, *sorted(names - set(_FIRST))]
        ordered = [row for _, row in sorted(rows.items())]
        lines = [self._line(dict(zip(self._columns, self._columns, strict=True))), *map(self._line, ordered)]
        with whole_file(self.path) as partial:
            partial.write_bytes(b"".join(lines))
        self._note_end(ordered[-1] if ordered else {}, lines, 0)

    def _note_end(self, last: dict[str, str], lines: Sequence[bytes], at: int) -> None:
        """`lines` were written at byte `at`, the last one of them is the row `last`."""
        self._last, self._end = last, at + sum(map(len, lines))
        self._last_at = self._end - len(lines[-1])

    def _line(self, row: Mapping[str, str]) -> bytes:
        text = io.StringIO()
        csv.writer(text).writerow([row.get(name, "") for name in self._columns])
        return text.getvalue().encode()


def training_loggers(folder: Path, option: Any) -> list[Logger]:
    """The loggers of a training run in `folder`. `option`: `trainer.logger`, which adds one or several to those that every run
    has; false: no logger at all. A user's TensorBoardLogger takes the place of ours.
    """
    if option is False:
        return []
    added = [] if option in (None, True) else list(option) if isinstance(option, list | tuple) else [option]
    own: list[Logger] = [CurveLogger(folder)]
    if not any(isinstance(logger, TensorBoardLogger) for logger in added):
        own.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
    return [*own, *added]


def log_settings(loggers: Sequence[Logger], config_text: str, resumes: bool = False) -> None:
    """Give every logger the settings of the run as its hyper-parameters. `config_text`: the text of
    config.yaml. Only rank 0 calls this.

    Where a run `resumes`, a logger may refuse settings that have changed, as MLflow does under a fixed `run_id`. Then it keeps
    the former ones, with a warning. Each package has its own class of errors for that.
    """
    settings = parse_yaml(config_text, "config.yaml")
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            # It keeps the file of an earlier start, which may have had other settings.
            Path(logger.log_dir, logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
        try:
            logger.log_hyperparams(settings)
        except Exception as error:
            if not resumes:
                raise
            reason = one_line(str(error))
            tell_first(
                f"evodsp: warning: {type(logger).__name__} keeps the settings of an earlier start: {reason[:300]}"
            )


# The reference formulas are counted, because torch's counter does not see all operators of other backends.
_FORMULAS = Kernels.of(reference)


def pass_flops(config: ModelConfig, batch: Mapping[str, Tensor]) -> int:
    """FLOPs of the forward pass of one recycling iteration over `batch`, [batch, cycle, …], on one device.

    Only the shapes of `batch` matter, and its number of iterations does not.
    """
    model, first = _on_shapes(config, batch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(first)
    return counter.get_total_flops()


def backward_flops(
    config: ModelConfig,
    batch: Mapping[str, Tensor],
    frozen: Sequence[str],
    only: Sequence[str] = (),
    adapters: AdapterConfig = WITHOUT_ADAPTERS,
) -> int:
    """FLOPs of the backward pass of one recycling iteration, in which the parts of the model that are `frozen` (`freeze`) have
    no gradient of their weights, and what comes before the first trained weight has none at all.

    With nothing frozen it is a little less than two forward passes, because features need no gradient.
    """
    names = ("evoformer", "extra_msa", "templates")
    stacks: dict[str, Any] = {name: dataclasses.replace(getattr(config, name), checkpoint=False) for name in names}
    model, first = _on_shapes(dataclasses.replace(config, **stacks), batch)
    freeze(model, frozen, only, adapters)
    CastParameters(model).make()  # forms weights with adapters
    results = [x for x in tree_leaves(model(first)) if isinstance(x, Tensor) and x.requires_grad]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    return counter.get_total_flops()


def _on_shapes(config: ModelConfig, batch: Mapping[str, Tensor]) -> tuple[AlphaFold, dict[str, Tensor]]:
    """The model with the operators' formulas, and the features of its first iteration, without numbers."""
    with torch.device("meta"):
        model = AlphaFold(config)
    model = model.to("meta")  # buffers made from NumPy arrays are not on the meta device yet
    use_kernels(model, _FORMULAS)
    first = {name: batch[name][:, :1].to("meta") for name in model.features}
    return model, {name: value.float() if value.is_floating_point() else value for name, value in first.items()}


def training_flops(pass_flops: int, passes: int, backward_flops: int | None = None) -> int:
    """FLOPs of a training step: all passes forward, the last one backward too, which is twice its forward pass where
    `backward_flops` is not given.
    """
    return passes * pass_flops + (2 * pass_flops if backward_flops is None else backward_flops)


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
    file = device_file(device)
    if peaks is None and file is not None:
        found = load_device(file)
        peaks = (found.tflops_single, found.tflops_tf32, found.tflops_half)
    kind = 2 if "16" in precision else 1 if matmul == "high" else 0
    return None if peaks is None else peaks[kind] * TERA


def device_file(device: str) -> str | None:
    """The planner's file of a GPU of this name; None if it has none."""
    return next((file for part, file in _DEVICES.items() if _is_named(device, part)), None)


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
        adapters: AdapterConfig = WITHOUT_ADAPTERS,
    ) -> None:
        """`peak_tflops`: the peak of one device; None takes the known peak of the device. `frozen`, `only`, `adapters`: what
        is trained, as in `freeze`.
        """
        self._model, self._precision, self._matmul, self._given = model, precision, matmul, peak_tflops
        self._trained = (frozen, only, adapters)
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
            frozen, only, adapters = self._trained
            if frozen or only or adapters.rank:
                self._backward = backward_flops(self._model, batch, frozen, only, adapters)

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """One more batch has been trained on."""
        self._flops += training_flops(self._of_a_pass or 0, batch["aatype"].shape[1], self._backward)

    def percent(self, seconds: float, devices: int) -> float | None:
        """The utilisation since the last call, if `devices` shared each batch; None if the peak is not known."""
        flops, self._flops = self._flops, 0
        return None if self._peak is None else 100 * flops / (seconds * devices * self._peak)


SECONDS_BETWEEN_LINES = 20.0


class TrainingProgress(ProgressBar):
    """One bar over all steps of `fit`, with the loss and the last validation's lDDT-CA; a printed line per validation.

    If standard error is not a terminal (a log file, CI), lines replace the bar: steps, time since this start, time left, and
    the last row's numbers. The time left follows from the pace of this start, validations included, not of earlier starts.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._enabled = True
        self._begun = self._last_line = time.monotonic()
        self._first_step = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self.console.print(*(printable(str(one)) for one in args), highlight=False, markup=False, soft_wrap=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = self._last_line = time.monotonic()
        self._first_step = trainer.global_step
        if not self._enabled:
            return
        sizes = {parameter: parameter.numel() for parameter in pl_module.parameters()}
        left = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
        step, last = trainer.global_step, last_step(trainer)
        steps = (
            f"from step {step} to {last or 'no limit'}"
            if step != last
            else f"step {step} was the last; its validation is left"
        )
        count = f"{sum(sizes.values()):,} parameters"
        self.print(
            f"{count}, {steps}" if left == sum(sizes.values()) else f"{count}, of which {left:,} are trained, {steps}"
        )
        if self.console.is_terminal:
            # Rich shortens columns in a narrow window, the numbers of steps and times too. A bar has room in a wide one.
            whole, bar = Column(no_wrap=True), [BarColumn()] * (self.console.width >= _WITH_BAR)
            columns = (
                TextColumn("step"), MofNCompleteColumn(table_column=whole), *bar, TimeElapsedColumn(table_column=whole),
                TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True, table_column=whole),
                TextColumn("{task.fields[text]}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task("fit", total=last, completed=step, text="")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._bar is not None:
            text = _summary(trainer, self.console.width - _OF_STEPS)
            self._bar.update(self._task, completed=trainer.global_step, text=text)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._line(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._line(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _line(self, trainer: Trainer) -> None:
        self._last_line = time.monotonic()
        seconds, total = self._last_line - self._begun, last_step(trainer)
        step, steps = trainer.global_step, trainer.global_step - self._first_step
        left = f", {duration(seconds / steps * (total - step))} left" if total and steps else ""
        self.print(f"step {step}{f'/{total}' if total else ''}  {duration(seconds)}{left}  {_summary(trainer)}")

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


_OF_STEPS, _WITH_BAR = 46, 120
"""Columns of a terminal that steps and times take, and the fewest in which there is room for a bar."""


def _summary(trainer: Trainer, room: int = 1000) -> str:
    """The last numbers that fit into `room` letters, the most important first."""
    shown = {"loss": "train/loss", "lDDT-CA": "train/lddt_ca", "val lDDT-CA": "val/lddt_ca", "val RMSD": "val/rmsd"}
    shown |= {"samples/s": "train/samples_per_second"}
    values, text = trainer.callback_metrics, ""
    for what, name in shown.items():
        more = f"{'  ' if text else ''}{what} {float(values[name]):.3f}" if name in values else ""
        text += more if len(text) + len(more) <= room else ""
    return text
