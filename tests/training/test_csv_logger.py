from __future__ import annotations

from pathlib import Path

from evodsp.report.runs import RESUMED, read_curve
from evodsp.training.logs import CurveLogger


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


def test_a_step_that_is_made_again_has_none_of_its_former_values(tmp_path: Path) -> None:
    """Catches a validation of a step that was undone, in the row of the step that took its place."""
    for values in ({"train/loss": 1.0, "val/lddt_ca": 0.5}, {"train/loss": 2.0}):
        logger = CurveLogger(tmp_path)
        logger.log_metrics(values, 2)
        logger.finalize("success")
    assert [name for name in read_curve(tmp_path / "curve.csv")[2] if name.startswith("val/")] == []


def test_a_fresh_run_replaces_the_curve(tmp_path: Path) -> None:
    logged(tmp_path, [0, 1, 2, 3])
    logged(tmp_path, [0, 1])
    assert list(read_curve(tmp_path / "curve.csv")) == [0, 1]


def test_rows_are_appended(tmp_path: Path) -> None:
    """A run of a million rows that rewrites all of them with each; validation, which is logged later, in a row of its own."""
    logger = CurveLogger(tmp_path)
    path = tmp_path / "curve.csv"

    def log(step: int, metrics: dict[str, float]) -> int:
        logger.log_metrics(metrics, step)
        logger.save()
        return path.stat().st_ino  # a rewritten file is another one

    log(0, {"train/loss": 1.0, "val/loss": 2.0})
    files = [log(1, {"train/loss": 3.0}), log(1, {"val/loss": 4.0}), log(2, {"train/loss": 5.0})]
    assert len(set(files)) == 1
    assert len(path.read_text().splitlines()) == 4
    assert log(3, {"train/loss": 6.0, "new": 1.0}) not in files
    log(4, {"train/loss": 0.125})
    log(4, {"train/loss": 7.0})  # a shorter row in place of a longer one
    log(2, {"val/loss": 8.0})
    rows = read_curve(path)
    assert [row.get("train/loss") for row in rows.values()] == ["1", "3", "5", "6", "7"]
    assert {step: row["val/loss"] for step, row in rows.items() if "val/loss" in row} == {0: "2", 1: "4", 2: "8"}
    assert len(path.read_text().splitlines()) == 6


def test_a_curve_that_a_full_disk_cut_short(tmp_path: Path) -> None:
    """A number of which the first digits are there, taken for the number; a run that goes on behind half a row."""
    logged(tmp_path, [0, 1, 2])
    path = tmp_path / "curve.csv"
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_curve(path)) == [0, 1]
    logged(tmp_path, [3])
    assert [row["train/loss"] for row in read_curve(path).values()] == ["0", "0.5", "1.5"]


def test_a_curve_that_somebody_changes(tmp_path: Path) -> None:
    """Rows written at the place where the file used to end; a run that ends because its file is gone."""
    logger = CurveLogger(tmp_path)
    path = tmp_path / "curve.csv"
    for step in range(5):
        logger.log_metrics({"train/loss": step / 2}, step)
        logger.save()
        if step == 1:
            path.write_text(path.read_text().replace("0.5", "0.500"))
        if step == 3:
            path.unlink()
    assert {step: float(row["train/loss"]) for step, row in read_curve(path).items()} == {4: 2.0}


def test_a_resumed_start_is_marked_once(tmp_path: Path) -> None:
    """Catches a resume that the curve does not tell, one in each row, the mark of a first start, and a mark that outlives the
    rows behind it."""
    for first, steps in ((0, (0, 1, 2, 3)), (2, (3, 5)), (4, (5, 7)), (2, (3, 4))):
        logger = CurveLogger(tmp_path)
        logger.first_step = first
        for step in steps:
            logger.log_metrics({"train/loss": 1.0}, step)
            logger.save()
        marks = {step: row[RESUMED] for step, row in read_curve(tmp_path / "curve.csv").items() if RESUMED in row}
        assert marks == {0: {}, 2: {3: "2"}, 4: {3: "2", 5: "4"}}[first] or (steps == (3, 4) and marks == {3: "2"})
