"""Options: `model.preset` in YAML and on the command line, and names, which are checked before Lightning is imported."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.training import trainer
from evodsp.training.command import TrainingCLI
from evodsp.training.options import OTHER_TRAINER_OPTIONS, TrainerOptions, checked_words

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


def test_the_saved_config_gives_the_same_model(config: str, tmp_path: Path) -> None:
    """A file that says `preset: small` and not the sizes given beside it, or the sizes twice with different values."""
    words = ["--config", config, "--model.evoformer.blocks=1"]
    (tmp_path / "config.yaml").write_text(TrainingCLI("fit", words).config_text())
    assert sizes("--config", str(tmp_path / "config.yaml")) == with_blocks(SMALL, 1)


def test_the_trainers_names_are_those_of_lightning() -> None:
    """Catches an option of Lightning's that is refused, and one that a misspelt name is taken for."""
    listed = set(OTHER_TRAINER_OPTIONS) | set(asdict(TrainerOptions()))
    assert listed == set(inspect.signature(Trainer.__init__).parameters) - {"self"}


def test_the_documentation_has_the_options_that_cannot_work() -> None:
    """Catches an option that is refused and missing from the table, and one that the table has and that is no option."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table = page.partition("| option of `trainer` |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    options = {re.findall(r"`(\w+)", cell)[0] for cell in cells}
    assert options <= set(OTHER_TRAINER_OPTIONS) | set(asdict(TrainerOptions()))
    assert set(trainer._MUST_BE) <= options
    classes = {name for cell in cells for name in re.findall(r"of the class `(\w+)`", cell)}
    assert classes == {kind.__name__ for kind in trainer._NOT_CALLBACKS}


def test_a_misspelt_option_of_the_trainer_is_found_without_lightning() -> None:
    """Catches seconds of waiting for a mistake of one letter."""
    code = (
        "import sys\nfrom evodsp.cli import main\nassert main(['fit', '--trainer.max_step', '3']) == 2\n"
        "print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "unknown argument '--trainer.max_step'. Did you mean '--trainer.max_steps'?" in done.stderr
    assert done.stdout == "[]\n"


def test_options_that_the_quick_help_leaves_out_are_taken() -> None:
    """Catches options of Lightning, and those of its classes, that are refused."""
    names = ("barebones", "logger.class_path", "callbacks+", "callbacks.monitor", "strategy.init_args.x", "help")
    checked_words("fit", [word for name in names for word in (f"--trainer.{name}", "1")])
    with pytest.raises(UserError, match=r"write --trainer\.max_steps 3"):
        checked_words("fit", ["trainer.max_steps=3"])
