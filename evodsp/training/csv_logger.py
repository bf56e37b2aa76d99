"""The learning curve as one CSV file: a row per logged step, a column per metric. A resumed run continues the same file."""

from __future__ import annotations

import csv
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from evodsp.files import whole_file
from evodsp.report.curve import read_curve


class CurveLogger(Logger):
    """Writes `<folder>/curve.csv` with the columns step, epoch, seconds and every logged metric.

    Rows of an existing file are kept up to the first step logged now: a resumed run continues its curve and its clock, and
    repeated steps appear once. Lightning's CSVLogger would start a new file.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._rows: dict[int, dict[str, str]] = {}
        self._begun = time.monotonic()  # not at the first row, which comes only after the first steps
        self._started: float | None = None
        self._unsaved = False

    @property
    def path(self) -> Path:
        return self.folder / "curve.csv"

    @property
    def name(self) -> str:
        return "curve"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def log_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing to log: hyperparameters are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = step or 0
        if self._started is None:
            self._rows = {row: values for row, values in read_curve(self.path).items() if row < step}
            last = max(self._rows.values(), key=lambda row: float(row["seconds"]), default={"seconds": "0"})
            self._started = self._begun - float(last["seconds"])
        row = self._rows.setdefault(step, {"step": str(step), "seconds": f"{time.monotonic() - self._started:.1f}"})
        row.update({name: f"{value:.8g}" for name, value in metrics.items()})
        self._unsaved = True

    @rank_zero_only
    def save(self) -> None:
        """Rewrite the file; a kill leaves either the old or the new one."""
        if not self._unsaved:
            return
        first = ["step", "epoch", "seconds"]
        names = sorted({name for row in self._rows.values() for name in row} - set(first))
        with whole_file(self.path) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*first, *names], restval="")
            writer.writeheader()
            writer.writerows(row for _, row in sorted(self._rows.items()))
        self._unsaved = False

    def finalize(self, status: str) -> None:
        self.save()
