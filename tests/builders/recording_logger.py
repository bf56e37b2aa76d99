"""A logger that keeps what it gets, in place of one that needs a server or a package."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class RecordingLogger(Logger):
    """Writes a line of JSON for each call to `file`."""

    def __init__(self, file: str) -> None:
        super().__init__()
        if not file:
            raise ModuleNotFoundError("no module named 'records'")
        self.file = Path(file)

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._write("settings", params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._write("metrics", {"step": step, **metrics})

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write("end", status)

    def _write(self, kind: str, content: Any) -> None:
        with self.file.open("a") as file:
            print(json.dumps([kind, content]), file=file)


class FixedRunLogger(RecordingLogger):
    """Refuses settings that differ from those of an earlier start, as MLflow does under a fixed `run_id`."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        if any(kind == "settings" and content != params for kind, content in map(json.loads, lines)):
            raise RuntimeError("INVALID_PARAMETER_VALUE: Changing param values is not allowed.\nParam with key='lr'")
        super().log_hyperparams(params)
