"""What callbacks and plugins of a user put into checkpoints and no run reads: the resumed run names it, and the way out."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.training.run_folder import RunFolder
from evodsp.weights.checkpoint import read_checkpoint


@pytest.mark.verify
def test_a_state_that_is_refused_is_read_once_its_class_is_allowed(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches days of training behind a message whose way out leads nowhere."""

    def fit(*options: str) -> int:
        remembers = "--trainer.callbacks=tests.builders.observers.Remembers"
        return main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path / 'run'}", remembers, *options])

    assert fit("--trainer.max_steps=1") == 0
    assert fit("--trainer.max_steps=2", "--ckpt_path=last") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "it holds datetime.date, which evodsp does not read" in said
    assert "torch.serialization.add_safe_globals" in said
    with torch.serialization.safe_globals([datetime.date]):
        assert fit("--trainer.max_steps=2", "--ckpt_path=last") == 0


def test_a_file_that_is_refused_is_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps lost: a whole file is called damaged, and the run goes on from an older one. Or a lost bit is not noticed any
    more."""
    run = RunFolder(tmp_path, keep_last=2)
    run.checkpoints.mkdir()
    torch.save({"step": 1}, run.checkpoints / "last-1.ckpt")
    torch.save({"step": 2, "weights": torch.randn(100), "when": datetime.date(2026, 11, 25)}, run.last)
    for read in (run.newest_intact, lambda: read_checkpoint(run.last)):
        with pytest.raises(UserError, match=r"holds datetime\.date.*add_safe_globals") as caught:
            read()
        assert "damaged" not in str(caught.value)
    data = bytearray(run.last.read_bytes())
    data[len(data) // 2] ^= 4
    run.last.write_bytes(data)
    assert run.newest_intact() == run.checkpoints / "last-1.ckpt"
    assert "is damaged" in capsys.readouterr().err
