"""Runs that are asked to stop: they save within the step, say how to go on, and go on as if they had not stopped."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from evodsp.cli import main
from evodsp.report.runs import RESUMED, read_curve
from evodsp.training import command
from evodsp.training.logs import MEASURED
from evodsp.training.run_end import Interruption, StopRequest, deadline
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders import training
from tests.builders.processes import begin
from tests.builders.signal_to_itself import STEP
from tests.builders.small_run import PATIENCE_S
from tests.builders.training import CommandPool


def words(chains: Path, output: Path, *options: str) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", "--trainer.max_steps=5", "--checkpoint_every=100",
            "--trainer.limit_val_batches=0", *options]  # fmt: skip


def sends(name: str) -> str:
    return f"--trainer.callbacks=tests.builders.signal_to_itself.{name}"


@pytest.fixture(scope="module")
def uninterrupted(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of the run that nothing stops, with a validation after each two steps, which changes no weight."""
    output = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(validating(chains, output, "--trainer.val_check_interval=2")) == 0
    return output


def assert_same_end(one: Path, other: Path) -> None:
    found, expected = (read_checkpoint(output / "checkpoints/last.ckpt") for output in (one, other))
    assert found["global_step"] == expected["global_step"] == 5
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, expected[kind][name]) for name, value in found[kind].items())


@pytest.mark.verify
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("User", 75, "stopped by SIGUSR1; the last checkpoint of step"),
        ("Interrupt", 130, "interrupted; the last checkpoint of step"),
    ],
)
def test_a_signal_stops_the_run_with_a_checkpoint(
    chains: Path,
    uninterrupted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    said: str,
) -> None:
    """As SIGTERM does (`test_run.py`)."""
    stopped = tmp_path / "stopped"
    late: list[int] = []
    monkeypatch.setattr(command, "tell_stopped", lambda: signal.raise_signal(signal.SIGTERM))
    former = signal.signal(signal.SIGTERM, lambda number, _: late.append(number))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert main(words(chains, stopped, sends(name))) == code
    assert late == []
    assert f"{said} {STEP + 1} is {stopped}" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == handlers
    signal.signal(signal.SIGTERM, former)
    assert read_checkpoint(stopped / "checkpoints/last.ckpt")["global_step"] == STEP + 1
    assert not (stopped / "run.lock").exists()
    assert main(words(chains, stopped, "--ckpt_path=auto")) == 0
    assert_same_end(stopped, uninterrupted)
    assert list(read_curve(stopped / "curve.csv")) == list(read_curve(uninterrupted / "curve.csv"))


@pytest.mark.verify
def test_a_signal_to_one_rank_stops_both(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """A rank that leaves alone, with the other one waiting for it."""
    output = tmp_path / "run"
    outcomes = commands.evodsp(2, *words(chains, output, "--parallel.sequence=2", sends("TerminateRank1")))
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes
    assert "another rank's request" in outcomes[0].error
    assert read_checkpoint(output / "checkpoints/last.ckpt")["global_step"] == STEP + 1


def validating(chains: Path, output: Path, *options: str) -> list[str]:
    """Words of a run that scores two chains."""
    given = [word for word in words(chains, output) if "limit_val_batches" not in word]
    return [*given, "--data.validation_chains=[1abc_A,2abc_B]", "--trainer.num_sanity_val_steps=0", *options]


@pytest.mark.verify
@pytest.mark.parametrize(
    "every",
    [pytest.param("2", id="within an epoch"), pytest.param("1.0", id="at its end")],
)
def test_a_signal_in_a_validation(
    chains: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], every: str
) -> None:
    """A pre-empted job that is killed in a long validation; a validation that is lost on resume, or goes on with half of its
    chains; a row of the curve that is lost because validation is the first to log."""
    whole, stopped = uninterrupted if every == "2" else tmp_path / "whole", tmp_path / "stopped"
    option = f"--trainer.val_check_interval={every}"
    assert main(validating(chains, stopped, option, sends("TerminateInValidation"))) == 75
    said = capsys.readouterr()
    assert "scored 1" in said.out
    at = read_checkpoint(stopped / "checkpoints/last.ckpt")["global_step"]
    assert at == {"2": 2, "1.0": 4}[every]
    assert "val/lddt_ca" not in read_curve(stopped / "curve.csv")[at - 1]
    assert main(validating(chains, stopped, option, "--ckpt_path=auto")) == 0
    assert whole == uninterrupted or main(validating(chains, whole, option)) == 0
    assert_same_end(stopped, whole)
    assert curve(stopped) == curve(whole)
    assert (stopped / "checkpoints/best.ckpt").is_file()


def curve(output: Path) -> dict[int, dict[str, str]]:
    """Everything in the curve but what is measured, and where a run was resumed."""
    return {
        step: {name: cell for name, cell in row.items() if name not in ("seconds", RESUMED, *MEASURED)}
        for step, row in read_curve(output / "curve.csv").items()
    }


@pytest.mark.verify
def test_a_signal_to_one_rank_in_a_validation(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Ranks of which one leaves the validation and the other waits for it."""
    options = ("--trainer.val_check_interval=2", "--parallel.sequence=2", sends("TerminateInValidation"))
    outcomes = commands.evodsp(2, *validating(chains, tmp_path / "run", *options))
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes
    assert all("scored 1" in outcome.out for outcome in outcomes)
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == 2


def test_a_time_limit_that_is_over(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restart by torchrun, which trains a step again and again."""
    assert main(words(chains, tmp_path / "run", "--trainer.max_time=00:00:00:00")) == 75
    assert "the time limit is over" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.verify
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_time_limit_ends_a_running_run(
    commands: CommandPool, chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    """A limit that is looked at when the run begins only, that counts the time of the first start when the run resumes, or that
    one rank finds to be over before the other."""
    given = [
        word for word in words(chains, tmp_path / "run", f"--parallel.sequence={ranks}") if "max_steps" not in word
    ]
    limited = [*given, "--trainer.max_steps=1000000", "--trainer.max_time=00:00:00:20", "--ckpt_path=auto"]
    reached = [0]
    for _ in range(2):
        if ranks == 1:
            assert main(limited) == 75
            said = capsys.readouterr().err
        else:
            outcomes = commands.evodsp(ranks, *limited)
            assert [outcome.code for outcome in outcomes] == [75] * ranks, outcomes
            said = outcomes[0].error
        assert "stopped by the time limit; the last checkpoint of step" in said
        reached.append(read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"])
        assert reached[-1] > reached[-2]
        assert max(read_curve(tmp_path / "run/curve.csv")) == reached[-1] - 1


def test_the_earlier_limit_counts() -> None:
    """The end of the job ignored, or taken for the time of saving."""
    assert deadline(None, 100.0, 120.0, {}) == math.inf
    assert deadline(50.0, 100.0, 120.0, {"SLURM_JOB_END_TIME": "1000"}) == 150
    assert deadline(5000.0, 100.0, 120.0, {"SLURM_JOB_END_TIME": "1000"}) == 880
    assert deadline(None, 100.0, None, {"SLURM_JOB_END_TIME": "1000"}) == math.inf
    assert StopRequest(deadline=1.0).asked
    assert not StopRequest().asked


def test_an_interrupt_is_kept() -> None:
    """Catches a Ctrl-C before the first step that ends with Lightning's code and no word on the checkpoint, because it was not
    noted, or was forgotten with a further error while the run ends."""
    seen, trainer, module = Interruption(), Trainer(logger=False, enable_checkpointing=False), LightningModule()
    for exception, happened in ((RuntimeError(), False), (KeyboardInterrupt(), True), (RuntimeError(), True)):
        seen.on_exception(trainer, module, exception)
        assert seen.happened == happened


@pytest.mark.verify
def test_ctrl_c_says_where_the_last_checkpoint_is(chains: Path, tmp_path: Path) -> None:
    """Lightning ends an interrupted run with exit code 1 and no hint."""
    last, deadline = tmp_path / "run/checkpoints/last.ckpt", time.monotonic() + PATIENCE_S
    command = training.words(chains, tmp_path / "run", "--trainer.max_steps=100000", "--checkpoint_every=2")
    with begin([sys.executable, "-m", "evodsp", *command]) as process:
        while not last.is_file():
            assert time.monotonic() < deadline, "the run did not come that far"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "checkpoints/last.ckpt; resume with --ckpt_path last" in error.splitlines()[-1]
    assert "Traceback" not in error
