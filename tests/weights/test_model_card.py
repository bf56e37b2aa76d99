"""The card of a model tells what the files of its run say, and no path of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import evodsp
from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.pretrained import model_card
from tests.builders.weights import random_model

CONFIG = """
init_from: /home/someone/secret/first.ckpt
data:
  train_chains: /home/someone/secret/train.txt
  validation_chains: [1abc_A, 2abc_B]
  alignment_dir: ../other/alignments
  store: null
  exclude_like: /home/someone/validation.txt
  exclude_identity: 0.3
model:
  ema_decay: 0.99
  loss: {backbone_fape: 2.0, violation: 0.0}
  optimizer: {lr: 0.002, schedule: "cosine | <b>"}
"""
CURVE = """step,epoch,seconds,train/loss,val/lddt_ca,val/lddt_ca/1abc_A,val/rmsd
9,0,1.0,5.0,,,
19,0,2.0,4.0,0.61234567,0.5,2.5
39,0,3,3.0,0.8,0.7,2.0
"""
BASELINE = '{"lddt_ca": 0.5, "validation_chains": 2, "copies": []}'


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return random_model(ModelConfig.preset("test"), 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    for name, text in {"config.yaml": CONFIG, "curve.csv": CURVE, "baseline.json": BASELINE}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_data_recipe_and_scores_are_those_of_the_run(model: AlphaFold, run: Path) -> None:
    """Catches scores of another step, a setting that is lost, and a path of the machine that is published."""
    checkpoint = {"global_step": 30, "samples_per_step": 8, "ema_state_dict": {}}
    card = model_card("a name", model, run / "checkpoints" / "best.ckpt", checkpoint)
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.splitlines() if line.startswith("| "))
    assert rows["data.train_chains"] == "train.txt"
    assert rows["data.alignment_dir"] == "alignments"
    assert rows["data.validation_chains"] == r"\['1abc_A', '2abc_B'\]"
    assert (rows["data.exclude_like"], rows["data.exclude_identity"]) == ("validation.txt", "0.3")
    (run / "config.yaml").write_text(CONFIG.replace("/home/someone/validation.txt", "null"))
    assert "exclude" not in model_card("a", model, run / "checkpoints" / "best.ckpt", checkpoint)
    assert rows["init_from"] == "first.ckpt"
    assert rows["model.optimizer.schedule"] == r"cosine \| \<b\>"
    assert rows["model.loss.backbone_fape"] == "2.0"
    assert not {"data.store", "model.loss.violation"} & rows.keys()
    assert (rows["lDDT-CA (0 to 1)"], rows["RMSD of CA (Å)"]) == ("0.6123", "2.5")
    assert "someone" not in card
    assert "after 30 steps of 8 samples each" in card
    assert "after 20 steps" in card
    assert "copying the nearest training chain (0 of 2 chains) scores an lDDT-CA of 0.500" in card
    assert "# a name" in card
    assert "best.ckpt: the moving average of the weights." in card


def test_a_card_names_the_limit_that_ended_the_run(model: AlphaFold, run: Path) -> None:
    """Catches ten million samples, the default of the other limit, beside 40 steps; and a limit left out that came first."""
    for steps, row in (40, "| trainer.max_steps | 40 |"), (-1, "| max_samples | 10000000 |"):
        (run / "config.yaml").write_text(f"max_samples: 10000000\ntrainer: {{max_steps: {steps}}}\n")
        card = model_card("a", model, run / "checkpoints" / "best.ckpt", {})
        assert row in card
        assert card.count("max_") - card.count("max_steps | -1") == 1
    (run / "config.yaml").write_text("max_samples: 100\ntrainer: {max_steps: 40}\n")
    counts = {"global_step": 13, "samples_per_step": 8}
    assert "| max_samples | 100 |" in model_card("a", model, run / "checkpoints" / "best.ckpt", counts)


def test_raw_weights_are_not_given_the_scores_of_the_average(model: AlphaFold, run: Path) -> None:
    """Catches a card that praises weights for the scores of others."""
    card = model_card(
        "a", model, run / "checkpoints" / "best.ckpt", {"global_step": 30, "ema_state_dict": {}}, raw=True
    )
    assert "best.ckpt: the raw weights." in card
    assert "scores of the moving average, not of these raw weights" in card


def test_a_checkpoint_before_the_first_validation_has_no_scores(model: AlphaFold, run: Path) -> None:
    """Catches scores of later weights."""
    card = model_card("a", model, run / "checkpoints" / "last.ckpt", {"global_step": 10})
    assert "no validation scores up to these weights" in card


def test_without_a_run_the_card_says_so(model: AlphaFold, run: Path, tmp_path: Path) -> None:
    """Catches a card with the data of a folder that happens to be near, and published parameters without their licence."""
    assert "says nothing of them" in model_card("a", model, run / "elsewhere.ckpt", {})
    assert "CC BY 4.0" in model_card("a", model, Path("params_model_1_ptm.npz"))
    evodsp.save_pretrained(model, tmp_path / "made", checkpoint=None)
    text = (tmp_path / "made" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: evodsp\n")
    assert "# made" in text
