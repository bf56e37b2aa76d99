"""A learning curve in one CSV file: a row per logged step, columns as they come, and a resumed run goes on in the same file."""

from __future__ import annotations

import csv
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class CurveLogger(Logger):
    """Writes `<folder>/curve.csv` with the columns step, epoch, seconds and every metric logged.

    Rows of a file found there are kept up to the first step logged now: a resumed run continues its curve (and its clock), and
    steps done twice are in it once. Lightning's own CSVLogger starts a new file each time.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._rows: dict[int, dict[str, str]] = {}
        self._begun = time.monotonic()  # not at the first row: the steps up to it take time too
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
        """Hyperparameters are in config.yaml."""

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
        """Write the file anew, whole or not at all."""
        if not self._unsaved:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        first = ["step", "epoch", "seconds"]
        names = sorted({name for row in self._rows.values() for name in row} - set(first))
        partial = self.path.with_name(f".curve.{os.getpid()}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*first, *names], restval="")
            writer.writeheader()
            writer.writerows(row for _, row in sorted(self._rows.items()))
        partial.replace(self.path)
        self._unsaved = False

    def finalize(self, status: str) -> None:
        self.save()


def read_curve(path: Path) -> dict[int, dict[str, str]]:
    """The rows of a learning curve by step; none if there is no such file. Empty cells are left out."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {int(row["step"]): {name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)}
