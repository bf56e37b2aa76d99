"""`evodsp predict --example`: the protein and the small trained model that come with evodsp."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.data.formats.fasta import parse_fasta
from evodsp.errors import UserError
from evodsp.inference.config import EXAMPLE, PredictConfig
from evodsp.inference.pages.residue_charts import peptide_bonds
from evodsp.inference.results import read_result, read_structure
from evodsp.inference.score.scores import write_report
from evodsp.packaged import packaged_folder
from evodsp.weights.checkpoint import load_sizes


def test_the_first_prediction_is_a_fold(tmp_path: Path) -> None:
    """Catches an example whose model no longer fits the code, one that it was trained on, and a chain drawn as a line because
    its peptide bonds are broken."""
    output, data = tmp_path / "out", packaged_folder("data")
    assert main(["predict", "--example", "--device", "cpu", "--output", str(output)]) == 0
    assert (output / "index.html").is_file()
    assert EXAMPLE not in (data / "train.txt").read_text().split()
    result = read_result(output / "synthetic_protein")
    bonds = peptide_bonds(read_structure(result, result.best))
    (output / "synthetic_protein").rename(output / EXAMPLE)  # the name of the true structure
    [row] = write_report(output, data / "mmcif_files", {"example": [EXAMPLE]}, tmp_path / "scores")
    assert row.lddt_ca > 0.75
    assert not bonds.traced
    assert bonds.long <= 5, bonds.note


def test_what_the_example_brings_can_be_replaced(tmp_path: Path) -> None:
    """Catches an example that predicts the user's file, or that takes the packaged model although another is named."""
    config = PredictConfig(example=True, weights="model_1_ptm", output=tmp_path)
    assert config.checkpoints == []
    [fasta] = config.sources
    assert fasta == packaged_folder("data") / "example_model" / "synthetic_protein.fasta"
    [own], [chain] = (parse_fasta(path) for path in (fasta, packaged_folder("data") / "fasta" / f"{EXAMPLE}.fasta"))
    assert own.letters == chain.letters
    with pytest.raises(UserError, match=r"--example is given beside mine\.fasta; it brings a protein"):
        PredictConfig(example=True, inputs=(Path("mine.fasta"),), output=tmp_path)


def test_the_family_model_is_one_of_the_familys_recipe() -> None:
    """Catches a recipe whose model can no longer begin with data/family_model."""
    recipe = yaml.safe_load((packaged_folder("configs") / "family.yaml").read_text())["model"]
    groups = ("extra_msa", "evoformer", "structure_module", "templates")
    small = ModelConfig.preset(recipe["preset"])
    changed = {name: dataclasses.replace(getattr(small, name), **recipe[name]) for name in groups}
    without = dict.fromkeys(("dropout", "msa_dropout", "pair_dropout"), 0.0)

    def sizes(config: ModelConfig) -> dict[str, dict[str, object]]:
        return {name: value for name, value in dataclasses.asdict(config).items() if name not in groups} | {
            name: {**dataclasses.asdict(getattr(config, name)), **without} for name in groups
        }

    assert sizes(load_sizes(packaged_folder("data") / "family_model")[0]) == sizes(
        dataclasses.replace(small, **changed)
    )
