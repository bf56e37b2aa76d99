"""configs/family.yaml and configs/family_finetune.yaml, as their first lines say, on the bundled proteins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.packaged import read_run_config
from evodsp.weights.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
DATA = {
    "alignment_dir": "alignments", "structure_dir": "mmcif_files", "train_chains": "train.txt",
    "validation_chains": "validation.txt", "test_chains": "validation.txt", "template_chains": "train.txt",
}  # fmt: skip
SMALLER = ["--trainer.limit_val_batches=1", "--data.train.msa_clusters=6", "--model.evoformer.blocks=1"]


@pytest.mark.verify
def test_both_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a recipe whose second step does not begin with the first one's weights, crops the chains, or has another model;
    and templates that are not those of the training chains."""
    first, second = tmp_path / "family", tmp_path / "family_finetune"
    words = ["fit", f"--config={ROOT}/configs/family.yaml"]
    options = [*(f"--data.{name}={ROOT}/data/{place}" for name, place in DATA.items()), *SMALLER]
    assert main([*words, *options, f"--output={first}", "--trainer.max_steps=2"]) == 0
    log = capfd.readouterr().err
    assert re.search(r"templates of s001_A: \d+ templates of 11 hits", log)
    # A held-out chain is compared with all training chains, one of them with the others.
    assert re.search(r"templates of s005_A: \d+ templates of 12 hits", log)
    words.append(f"--config={ROOT}/configs/family_finetune.yaml")
    start = f"--init_from={first}/checkpoints/last.ckpt"
    none = "--model.optimizer.lr=1.0e-12"
    assert main([*words, *options, f"--output={second}", start, none, "--trainer.max_steps=1"]) == 0
    before, after = (read_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (first, second))
    for name, value in before["ema_state_dict"].items():
        torch.testing.assert_close(after["state_dict"][name], value, rtol=0, atol=1e-9)
    settings = [read_run_config(folder / "config.yaml") for folder in (first, second)]
    assert [one["data"]["train"]["crop_size"] for one in settings] == [64, None]
    for one in settings:
        del one["model"]["optimizer"]
    assert settings[0]["model"] == settings[1]["model"]
