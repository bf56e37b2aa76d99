"""A run that resumes with other settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.report.curve import read_curve
from evodsp.weights.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def stopped(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run of 3 steps."""
    output = tmp_path_factory.mktemp("runs") / "run"
    assert fit(chains, output, "--trainer.max_steps=3") == 0
    return output


def fit(chains: Path, output: Path, *options: str) -> int:
    return main(["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options])


def test_changed_settings_hold_from_the_next_sample_on(
    chains: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's learning rate and Adam's decay, which Lightning restores, instead of the command line's."""
    changed = (
        "model.optimizer.lr=0.004",
        "model.optimizer.beta2=0.9",
        "model.optimizer.eps=0.001",
        "model.ema_decay=0.5",
    )
    changed += ("model.optimizer.schedule=cosine", "model.optimizer.total_samples=9", "trainer.gradient_clip_val=0.01")
    options = [f"--{setting}" for setting in changed]
    last = stopped / "checkpoints" / "last.ckpt"
    assert fit(chains, tmp_path / "run", f"--ckpt_path={last}", "--trainer.max_steps=5", *options) == 0
    out, error = capsys.readouterr()
    told = {line.split()[1]: line for line in (out + error).splitlines() if line.endswith("from the next sample on")}
    assert told.keys() == {setting.split("=")[0] for setting in changed} | {"trainer.max_steps"}
    assert told["model.optimizer.lr"] == "evodsp: model.optimizer.lr was 0.01 and is 0.004 from the next sample on"
    rates = {step: float(row["train/lr"]) for step, row in read_curve(tmp_path / "run" / "curve.csv").items()}
    # Of step number 3 and 4, after a warm-up of 2: half a cosine over 6 steps.
    assert [rates[3], rates[4]] == pytest.approx([0.004 * 0.9330127, 0.004 * 0.75])
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    (group,) = saved["optimizer_states"][0]["param_groups"]
    assert (group["betas"], group["eps"], group["initial_lr"]) == ((0.9, 0.9), 0.001, 0.004)
    assert saved["settings"]["trainer.gradient_clip_val"] == 0.01


@pytest.mark.parametrize(("setting", "former"), [("seed=5", 0), ("data.samples_per_epoch=8", 4)])
def test_what_cannot_change_is_refused(
    chains: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, former: int
) -> None:
    """Samples drawn from another seed, or an epoch that ends at another place, although config.yaml says otherwise."""
    last = stopped / "checkpoints" / "last.ckpt"
    assert fit(chains, tmp_path / "run", f"--ckpt_path={last}", f"--{setting}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    name, _, value = setting.partition("=")
    assert f"{name} was {former} and is {value} now" in line
    assert not (tmp_path / "run").exists()
