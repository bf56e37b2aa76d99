"""The weights that a run ends with are validated, once, and the table at its end says of which step it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.report.runs import read_curve
from evodsp.weights.checkpoint import read_checkpoint


def fit(chains: Path, output: Path, *options: str) -> int:
    """A run of epochs of four steps."""
    return main(["fit", f"--config={chains}/tiny.yaml", f"--output={output}", "--async_checkpoints=false", *options])


def validated(output: Path) -> list[int]:
    """The numbers of steps after which a validation is in the curve."""
    return [step + 1 for step, row in read_curve(output / "curve.csv").items() if row.get("val/lddt_ca")]


def table(text: str) -> list[str]:
    """The lines of the last table of scores, with the line before it."""
    lines = text.splitlines()
    first = max(number for number, line in enumerate(lines) if line.startswith("chain"))
    return lines[first - 1 : first + 2]


@pytest.mark.verify
def test_the_last_weights_are_validated(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run whose table is of a step long before its end, a last checkpoint written before the validation of its step
    or without it, raw weights scored at the end, a resumed run without a last validation, or with one that is
    logged under another step."""
    output = tmp_path / "run"
    assert fit(chains, output, "--trainer.max_steps=2", "--checkpoint_every=1") == 0
    title, header, row = table(capsys.readouterr().out)
    assert (title, header.split()[0], row.split()[0]) == ("scores after step 2:", "chain", "1abc_A")
    assert validated(output) == [2]
    saved = read_checkpoint(output / "checkpoints/last.ckpt")
    score = float(read_curve(output / "curve.csv")[1]["val/lddt_ca"])
    scores = saved["callbacks"]["BestCheckpoint"]
    assert saved["global_step"] == 2
    assert float(scores["current_score"]) == pytest.approx(score, abs=1e-6), "written before the validation of its step"
    same = ["--config", str(chains / "tiny.yaml"), "--output", str(output), "--ckpt_path", "last"]
    assert main(["validate", *same]) == 0
    assert table(capsys.readouterr().out)[1:] == [header, row]
    assert fit(chains, output, "--trainer.max_steps=3", "--ckpt_path=last") == 0
    assert table(capsys.readouterr().out)[0] == "scores after step 3:"
    assert validated(output) == [2, 3]


@pytest.mark.verify_but("epochs")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--trainer.max_steps=2", "--trainer.val_check_interval=2"], [2], id="an interval's step"),
        pytest.param(["--trainer.max_epochs=1", "--trainer.max_steps=-1", "--trainer.val_check_interval=2",
                      "--data.samples_per_epoch=3"], [2, 3], id="epochs"),
        pytest.param(["--trainer.max_steps=1", "--trainer.check_val_every_n_epoch=5"], [1], id="sparse epochs"),
        pytest.param(["--trainer.max_steps=1", "--trainer.val_check_interval=00:01:00:00"], [1], id="a time"),
        pytest.param(["--trainer.max_steps=1", "--trainer.accumulate_grad_batches=2", "--data.samples_per_epoch=4",
                      "--trainer.val_check_interval=4"], [1], id="accumulated"),
        pytest.param(["--trainer.max_steps=1", "--trainer.limit_val_batches=0"], [], id="none wanted"),
    ],
)  # fmt: skip
def test_one_validation_after_the_last_step(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[int]
) -> None:
    """Catches a second validation where one coincides with the end, and intervals whose last validation is forgotten."""
    assert fit(chains, tmp_path / "run", "--trainer.callbacks=tests.builders.observers.Validations", *options) == 0
    out = capsys.readouterr().out
    assert [int(line.split()[-1]) for line in out.splitlines() if line.startswith("validation after")] == expected
    assert validated(tmp_path / "run") == expected
    assert ("scores after step" in out) == bool(expected)


@pytest.mark.verify
def test_a_signal_in_the_last_validation(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that was stopped in its last validation and never repeats it, because no step is left, and one that
    promises a further step."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    options = ("--trainer.max_steps=2", "--data.validation_chains=[1abc_A,2abc_B]")
    sends = "--trainer.callbacks=tests.builders.signal_to_itself.TerminateInValidation"
    assert fit(chains, stopped, *options, sends) == 75
    assert validated(stopped) == []
    capsys.readouterr()
    assert fit(chains, stopped, *options, "--ckpt_path=auto") == 0
    written = capsys.readouterr()
    found = table(written.out)
    assert found[0] == "scores after step 2:"
    assert " parameters, step 2 was the last; its validation is left\nstep 2/2 " in written.err
    assert fit(chains, whole, *options) == 0
    assert table(capsys.readouterr().out) == found
    assert validated(stopped) == validated(whole) == [2]
    assert read_checkpoint(stopped / "checkpoints/last.ckpt")["global_step"] == 2
    assert (stopped / "checkpoints/best.ckpt").is_file()
    assert fit(chains, stopped, *options, "--ckpt_path=auto") == 0
    assert "scores after" not in capsys.readouterr().out, "validated again, although nothing was left to do"
