from __future__ import annotations

from pathlib import Path

from evodsp.report.curve import read_curve
from evodsp.training.csv_logger import CurveLogger


def logged(folder: Path, steps: list[int]) -> None:
    logger = CurveLogger(folder)
    for step in steps:
        logger.log_metrics({"train/loss": step / 2}, step)
    logger.finalize("success")


def test_metrics_of_one_step_share_a_row_and_late_columns_fit(tmp_path: Path) -> None:
    """Validation metrics appear later than training's: a header written once loses them."""
    logger = CurveLogger(tmp_path)
    logger.log_metrics({"train/loss": 2.0, "epoch": 0}, 0)
    logger.save()
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.log_metrics({"val/lddt_ca": 0.5}, 1)
    logger.save()
    rows = read_curve(tmp_path / "curve.csv")
    assert {k: v for k, v in rows[1].items() if k != "seconds"} == {
        "step": "1",
        "train/loss": "1",
        "val/lddt_ca": "0.5",
    }
    assert rows[0]["epoch"] == "0"


def test_a_resumed_run_continues_its_curve_without_doubled_steps(tmp_path: Path) -> None:
    """Lightning's CSVLogger deletes the earlier part."""
    logged(tmp_path, [0, 1, 2, 3])
    logged(tmp_path, [2, 3, 4])
    assert list(read_curve(tmp_path / "curve.csv")) == [0, 1, 2, 3, 4]
    assert not list(tmp_path.glob(".curve*"))


def test_a_fresh_run_replaces_the_curve(tmp_path: Path) -> None:
    logged(tmp_path, [0, 1, 2, 3])
    logged(tmp_path, [0, 1])
    assert list(read_curve(tmp_path / "curve.csv")) == [0, 1]
