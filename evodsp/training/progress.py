"""Progress of a training run: a bar on a terminal, otherwise a line every 20 seconds."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evodsp.printing import duration, printable
from evodsp.training.run_end import last_step

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
            columns = (
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[text]}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task("fit", total=last, completed=step, text="")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, text=_summary(trainer))
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


def _summary(trainer: Trainer) -> str:
    shown = {"loss": "train/loss", "lDDT-CA": "train/lddt_ca", "samples/s": "train/samples_per_second"}
    shown |= {"val lDDT-CA": "val/lddt_ca", "val RMSD": "val/rmsd"}
    values = trainer.callback_metrics
    return "  ".join(f"{text} {float(values[name]):.3f}" for text, name in shown.items() if name in values)
