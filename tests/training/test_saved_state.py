"""What callbacks and plugins of a user put into checkpoints: named at once if no run could read it again."""

from __future__ import annotations

import collections
import datetime
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.report.curve import read_curve
from evodsp.training.run_folder import RunFolder
from evodsp.training.saved_state import check_saved
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.training import CommandPool


class Own(torch.Tensor):
    """A tensor of a user's class."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime.date(2026, 11, 25), "holds datetime.date,"),
        (np.float64(0.5), "holds numpy._core.multiarray.scalar, numpy.dtype,"),
        (Path("run"), "holds pathlib.PosixPath,"),
        (torch.zeros(2).as_subclass(Own), f"holds {__name__}.Own,"),
        (threading.Lock(), "cannot be written (cannot pickle"),
    ],
)
def test_what_would_not_be_read_again_is_named(value: Any, expected: str) -> None:
    """A callback's state, or an entry that it adds to the checkpoint, for which a resumed run calls the file damaged."""
    for checkpoint, name in (
        ({"callbacks": {"Good": {"best": 1.0}, "Mine": {"seen": [1, {"at": value}]}}}, "callback Mine: state_dict"),
        ({"callbacks": {}, "notes": (value,)}, "checkpoint entry 'notes'"),
    ):
        with pytest.raises(UserError) as caught:
            check_saved(checkpoint)
        message = str(caught.value)
        assert message.startswith(f"{name} {expected}")
        assert "\n" not in message


def test_what_is_read_again_is_allowed() -> None:
    """A state refused that resumes today: of Lightning's callbacks, with tensors in any container, or empty."""
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)]
    state = {
        "tensors": tensors,
        "counts": collections.Counter("aab"),
        "tuple": (1, None, b"x", {2}),
        "size": torch.Size([1]),
    }
    check_saved(
        {"callbacks": {"Mine": state, "Other": {}}, "lr_schedulers": [state], "state_dict": {"a": torch.ones(1)}}
    )


def fit(chains: Path, output: Path, *options: str) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", *options]


def remembers(**arguments: int) -> str:
    return f"--trainer.callbacks={{class_path: tests.builders.observers.Remembers, init_args: {arguments}}}"


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_stops_before_it_loses_steps(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    """A run of days whose checkpoints cannot be read: noticed only when it resumes, or not before the first save although the
    state was there from the start; a file beside which older ones are deleted."""
    options = (
        "--trainer.max_steps=4",
        "--checkpoint_every=1",
        "--trainer.limit_val_batches=0",
        "--async_checkpoints=false",
    )
    assert main(fit(chains, tmp_path / "run", *options, remembers(step=step))) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("evodsp: error: callback Remembers: state_dict holds datetime.date,")
    last = tmp_path / "run/checkpoints/last.ckpt"
    if step:
        assert read_checkpoint(last)["global_step"] == step - 1
    else:
        assert not last.exists()
        assert not read_curve(tmp_path / "run/curve.csv")


def test_all_ranks_stop(chains: Path, tmp_path: Path, commands: CommandPool) -> None:
    """A rank that waits for ever for one that has found such a state."""
    words = fit(chains, tmp_path / "run", "--parallel.sequence=2", "--trainer.max_steps=2", remembers(only_rank=0))
    outcomes = commands.evodsp(2, *words)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert "callback Remembers: state_dict holds datetime.date" in outcomes[0].error


def test_a_run_without_checkpoints_may_hold_anything(chains: Path, tmp_path: Path) -> None:
    """A run stopped for a state that it never saves."""
    options = ("--trainer.max_steps=1", "--trainer.enable_checkpointing=false", "--trainer.limit_val_batches=0")
    assert main(fit(chains, tmp_path / "run", *options, remembers())) == 0


def test_a_class_that_is_allowed_is_saved_and_read(chains: Path, tmp_path: Path) -> None:
    """The way out that the message names leads nowhere."""
    with torch.serialization.safe_globals([datetime.date]):
        assert main(fit(chains, tmp_path / "run", "--trainer.max_steps=1", remembers())) == 0
        assert main(fit(chains, tmp_path / "run", "--trainer.max_steps=2", "--ckpt_path=last", remembers())) == 0


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
