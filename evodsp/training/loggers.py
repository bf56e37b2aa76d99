"""Where a training run's numbers go: always `curve.csv` and TensorBoard, and whatever loggers the user adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from evodsp.reading.yaml_files import parse_yaml
from evodsp.training.csv_logger import CurveLogger
from evodsp.training.progress import report


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
    """Give every logger the settings of the run as its hyper-parameters. `config_text`: of config.yaml. Rank 0 only.

    Where a run `resumes`, a logger may refuse settings that have changed, as MLflow does under a fixed `run_id`. Then it keeps
    the former ones, with a warning. Each package has its own class of errors for that.
    """
    settings = parse_yaml(config_text, "config.yaml")
    for logger in loggers:
        if isinstance(
            logger, TensorBoardLogger
        ):  # it keeps the file of an earlier start, which may have had other settings
            Path(logger.log_dir, logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
        try:
            logger.log_hyperparams(settings)
        except Exception as error:
            if not resumes:
                raise
            reason = " ".join(str(error).split())
            report(f"evodsp: warning: {type(logger).__name__} keeps the settings of an earlier start: {reason[:300]}")
