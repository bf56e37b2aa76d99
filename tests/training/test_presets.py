"""`model.preset` in YAML and on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.training.command import TrainingCLI

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ModelConfig.preset("small")


def sizes(*words: str) -> ModelConfig:
    """The sizes that `evodsp fit` gets from a command line."""
    return TrainingCLI("fit", list(words)).settings.model.model_config()


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A YAML file that names a preset and overrides one of its sizes."""
    path = tmp_path / "a.yaml"
    path.write_text("model: {preset: small, evoformer: {blocks: 8}}\n")
    return str(path)


def with_blocks(model: ModelConfig, blocks: int) -> ModelConfig:
    return dataclasses.replace(model, evoformer=dataclasses.replace(model.evoformer, blocks=blocks))


def test_a_preset_gives_exactly_its_sizes(config: str) -> None:
    """Sizes that are lost on the way from the preset to the model, or a preset that overrides what stands beside it."""
    assert sizes() == ModelConfig()
    assert sizes("--model.preset", "small") == SMALL
    assert sizes("--model.preset=test") == ModelConfig.preset("test")
    assert sizes("--config", config) == with_blocks(SMALL, 8)
    assert sizes("--model.evoformer.blocks", "3", "--model.preset", "small") == with_blocks(SMALL, 3)


def test_the_last_preset_wins_and_keeps_overrides(config: str) -> None:
    """A preset on the command line that is ignored because a file names one."""
    assert sizes("--config", config, "--model.preset", "test") == with_blocks(ModelConfig.preset("test"), 8)
    assert sizes("--config", config, "--model.preset", "null") == with_blocks(ModelConfig(), 8)


@pytest.mark.parametrize(
    ("name", "msa", "pair", "structure"), [("quickstart.yaml", 0.05, 0.08, 0.05), ("real_proteins.yaml", 0.0, 0.0, 0.0)]
)
def test_small_runs_train_the_small_preset(name: str, msa: float, pair: float, structure: float) -> None:
    """Sizes in the YAML that drift from the preset of the same name; only dropout is the recipe's own."""
    stacks = {
        stack: dataclasses.replace(getattr(SMALL, stack), msa_dropout=msa, pair_dropout=pair)
        for stack in ("evoformer", "extra_msa")
    }
    structure_module = dataclasses.replace(SMALL.structure_module, dropout=structure)
    expected = dataclasses.replace(SMALL, structure_module=structure_module, **stacks)
    assert sizes("--config", str(CONFIGS / name)) == expected


def test_print_config_shows_the_sizes_of_the_preset(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--print_config ends the first of the two parses, which does not know the preset's sizes yet."""
    assert main(["fit", "--config", config, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)["model"]
    assert printed.pop("preset") == "small"
    found = {field.name: printed[field.name] for field in dataclasses.fields(ModelConfig)}
    assert ModelConfig.from_dict(found) == with_blocks(SMALL, 8)


def test_an_unknown_preset_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nmodel:\n  preset: smal\n")
    assert main(["fit", "--config", str(tmp_path / "a.yaml")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/a.yaml:3: model.preset: no preset 'smal'. Did you mean 'small'? Use one of model_1," in error
    assert error.count("\n") == 1


def test_help_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = text.partition("--model.preset ")[2].partition(" --")[0]
    assert "model_1_ptm" in shown
    assert "small" in shown
    assert "default: null" in shown


def test_the_saved_config_gives_the_same_model(chains: Path, tmp_path: Path) -> None:
    """A file that says `preset: test` and not the sizes given beside it, or the sizes twice with different values."""
    data = yaml.safe_load((chains / "tiny.yaml").read_text())
    data["model"] = {"preset": "test", "evoformer": {"blocks": 1}}
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(data))
    words = ["--config", str(tmp_path / "preset.yaml"), "--output", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    assert main(["fit", *words]) == 0
    assert sizes("--config", str(tmp_path / "run" / "config.yaml")) == with_blocks(ModelConfig.preset("test"), 1)
