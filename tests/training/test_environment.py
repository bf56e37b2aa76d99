"""Settings from environment variables, and what a run leaves in its user's environment: nothing outside of its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evodsp.cli import main


def test_variables_count_less_than_the_config(
    chains: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches variables that nobody reads, and another order than Lightning's: defaults, variables, config, options."""
    for name, value in {"SEED": 5, "DATA__BATCH_SIZE": 7, "CHECKPOINT_EVERY": 17, "TRAINER__MAX_EPOCHS": 9}.items():
        monkeypatch.setenv(f"EVODSP_{name}", str(value))
    assert main(["fit", f"--config={chains}/tiny.yaml", "--checkpoint_every=3", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["seed"] == 5
    assert config["trainer"]["max_epochs"] == 9
    assert config["data"]["batch_size"] == 1, "the config's"
    assert config["checkpoint_every"] == 3, "the option's"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EVODSP_CHECKPOINT_EVERY", "-3", "EVODSP_CHECKPOINT_EVERY: checkpoint_every is -3, but must be at least 1"),
        ("EVODSP_TRAINER__GRADIENT_CLIP_VAL", "lots", "EVODSP_TRAINER__GRADIENT_CLIP_VAL: trainer.gradient_clip_val: expec"),
        ("EVODSP_MODEL__OPTIMIZER__LR", "fast", "EVODSP_MODEL__OPTIMIZER__LR: model.optimizer.lr: expected float, found"),
        ("EVODSP_DATA", "/x", "EVODSP_DATA: data: expected a group of options"),
        ("EVODSP_TRAINER__MAX_STEP", "3", "MAX_STEP: no such setting. Did you mean 'EVODSP_TRAINER__MAX_STEPS'?"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, said: str,
) -> None:  # fmt: skip
    """Catches a wrong value that is blamed on the config file, which is right; a misspelled variable that does nothing."""
    monkeypatch.setenv(name, value)
    assert main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "tiny.yaml" not in error
    assert len(error.splitlines()) == 1


PROGRAM = """
import sys
from evodsp.cli import main
config, output = sys.argv[1:]
assert main(["fit", f"--config={config}", f"--output={output}", "--trainer.max_steps=1"]) == 0
assert main(["validate", f"--config={config}", f"--output={output}", "--ckpt_path=last"]) == 0
"""


@pytest.mark.verify
def test_files_are_written_in_the_output_folder_only(chains: Path, tmp_path: Path) -> None:
    """Catches `lightning_logs/` and `checkpoints/` in the working directory, caches in the home folder, temporary files that
    stay. (matplotlib, which torchmetrics imports where there is one, keeps a list of fonts in a folder of its own.)"""
    empty = {name: tmp_path / name.lower() for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    working = tmp_path / "working"
    for folder in (*empty.values(), working):
        folder.mkdir()
    variables = {**os.environ, **{name: str(folder) for name, folder in empty.items()}, "OMP_NUM_THREADS": "1"}
    variables["MPLCONFIGDIR"] = str(tmp_path / "fonts")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{chains}/tiny.yaml", f"{tmp_path}/run"],
        cwd=working, env={**variables, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "baseline.json",
        "checkpoints",
        "config.yaml",
        "curve.csv",
        "tensorboard",
        "validate.csv",
    }
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt"}
    written = [path for folder in (working, *empty.values()) for path in folder.rglob("*")]
    assert not written, written
