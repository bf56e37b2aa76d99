"""The numbers of a training run: means over the steps of a row, the learning curve, and the loggers that get each row.

Three things differ from Lightning's way. A row of the logs is the mean over the steps since the last row: a row of one step's
numbers would leave out all others. A row is written before the checkpoint of its step: a run that is killed in between would
resume behind the row, and the curve would lack it. The curve is one CSV file, which a resumed run continues.
"""

from __future__ import annotations

import csv
import io
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from evodsp.files import whole_file
from evodsp.printing import one_line
from evodsp.reading.text_files import parse_yaml
from evodsp.report.runs import RESUMED, read_curve
from evodsp.training.trainer import tell_first


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
        """Where this run begins or resumes: rows from this step on are repeated. None: with the first row that is logged."""
        self._begun = time.monotonic()  # not at the first row, which comes only after the first steps
        self._started: float | None = None
        self._columns: list[str] = []
        """Columns of the file; empty before this logger has written it."""
        self._last: dict[str, str] = {}
        """The last row, to which validation may add."""
        self._last_at = self._end = 0
        """Where it begins in the file, and where the file ends."""
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
