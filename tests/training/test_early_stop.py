"""`early_stop`: a run whose validations do not get better ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.training import CommandPool


def words(chains: Path, output: Path, *options: str, steps: int = 40) -> list[str]:
    """A run of two steps between validations that learns nothing."""
    given = [
        "fit",
        f"--config={chains}/tiny.yaml",
        f"--output={output}",
        "--model.optimizer.lr=1e-30",
        "--early_stop=2",
    ]
    return [*given, "--data.samples_per_epoch=2", f"--trainer.max_steps={steps}", *options]


def test_a_run_ends_when_validations_do_not_get_better(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that goes on, one that ends at once, and a resume that forgets how many there were."""
    output = tmp_path / "run"
    assert main(words(chains, output, steps=4)) == 0
    assert "ended early" not in capsys.readouterr().out
    assert main(words(chains, output, "--ckpt_path=last")) == 0
    steps = read_checkpoint(output / "checkpoints" / "last.ckpt")["global_step"]
    assert steps == 6, "one validation that is the best, and two after it"
    assert "ended early: val/lddt_ca has not risen above " in capsys.readouterr().out


@pytest.mark.verify
def test_several_validations_of_an_epoch_and_two_ranks(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: CommandPool
) -> None:
    """Catches a run that ends in its first epoch without a line, and ranks of which one goes on."""
    often = words(chains, tmp_path / "often", "--trainer.val_check_interval=0.25", "--trainer.limit_val_batches=1")
    often[often.index("--data.samples_per_epoch=2")] = "--data.samples_per_epoch=8"
    assert main(often) == 0
    assert "ended early: " in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "often" / "checkpoints" / "last.ckpt")["global_step"] == 6
    two = words(chains, tmp_path / "two", "--parallel.sequence=2")
    assert [outcome.code for outcome in commands.evodsp(2, *two)] == [0, 0]
    assert read_checkpoint(tmp_path / "two" / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_a_run_without_validation_cannot_end_by_it(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--data.validation_chains=null", "--trainer.limit_val_batches=0"):
        assert main(words(chains, tmp_path / "run", option)) == 2
        assert "early_stop is 2, but the run validates nothing" in capsys.readouterr().err
