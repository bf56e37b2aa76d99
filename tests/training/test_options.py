"""Options from Python (`evodsp.fit`), YAML and the command line: presets, and names, which are checked before Lightning is
imported."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

import evodsp
from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.launch.environment import STOPPED
from evodsp.report.runs import read_curve
from evodsp.training import trainer
from evodsp.training.command import TrainingCLI
from evodsp.training.options import OTHER_TRAINER_OPTIONS, TrainerOptions, checked_words
from evodsp.training.run_folder import RunFolder

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


def test_the_command_line_is_lightnings() -> None:
    """Users of Lightning know its command line, and may build on it."""
    assert issubclass(TrainingCLI, LightningCLI)


def test_fit_trains_and_resumes(chains: Path, tmp_path: Path) -> None:
    """Catches options that are lost on their way, scores that are not the last ones, and a thread's run that fails for its
    signals, which only a main thread may handle."""
    quiet: dict[str, Any] = {"trainer": {"enable_progress_bar": False, "check_val_every_n_epoch": 1}}
    first = evodsp.fit(chains / "tiny.yaml", tmp_path / "run", max_steps=1, data={"samples_per_epoch": 2}, **quiet)
    assert (first.folder, first.stopped) == (tmp_path / "run", False)
    assert (first.last, first.best) == tuple(first.folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    with ThreadPoolExecutor(1) as thread:
        words: dict[str, Any] = {"max_steps": 2, "resume": True, "data": {"samples_per_epoch": 2}, **quiet}
        run = thread.submit(evodsp.fit, chains / "tiny.yaml", str(tmp_path / "run"), **words).result()
    rows = read_curve(run.folder / "curve.csv")
    assert list(rows) == [0, 1]
    assert run.scores["lddt_ca"] == float(rows[1]["val/lddt_ca"])
    assert {"lddt_ca", "rmsd", "tm_score"} <= set(run.scores)
    assert not any("/" in name for name in run.scores)
    with pytest.raises(UserError, match="belongs to an earlier run"):
        evodsp.fit(chains / "tiny.yaml", tmp_path / "run")


def test_options_become_those_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a value that YAML reads otherwise, None that is left out of a group, and an option of another name."""
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "evodsp.training.api.trained", lambda _, words: (seen.append(words), (0, RunFolder(tmp_path)))[1]
    )
    evodsp.fit(
        ["configs/quickstart.yaml", Path("configs/family.yaml")],
        tmp_path,
        max_steps=3,
        resume="best",
        overwrite=True,
        seed=0,
        model={"evoformer": {"blocks": 2}, "ema_decay": None, "freeze": ["evoformer"], "optimizer.lr": 1e-5},
        data={"train_chains": Path("a.txt")},
        trainer={"logger": {"class_path": "a.B"}},
        max_samples=None,
        kernels={"backend": "chunked"},
        **{"data.batch_size": 2},
    )
    assert seen == [[
        "--config", "configs/quickstart.yaml", "--config", "configs/family.yaml", f"--output={tmp_path}", "--ckpt_path=best",
        "--overwrite=true", "--seed=0", "--trainer.max_steps=3", "--model.evoformer.blocks=2", "--model.ema_decay=null",
        '--model.freeze=["evoformer"]', "--model.optimizer.lr=1e-05", "--data.train_chains=a.txt",
        '--trainer.logger={"class_path": "a.B"}', "--max_samples=null", "--kernels.backend=chunked", "--data.batch_size=2",
    ]]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_step": 3}, "evodsp.fit: no option 'max_step'. Did you mean 'max_steps'? See help(evodsp.fit)"),
        ({"batch_size": 3}, "no option 'batch_size'. Did you mean 'data.batch_size'?"),
        ({"data": {"batchsize": 1}}, "unknown argument '--data.batchsize'. Did you mean '--data.batch_size'?"),
        ({"kernels": 3}, "--kernels: expected a group of options"),
        ({"trainer": {"max_steps": "x"}}, "--trainer.max_steps: expected int, found 'x'"),
        ({"model": {"optimizer": {"lr": 0.0}}}, "model.optimizer.lr is 0.0, but must be above 0"),
        ({"config": "quickstrat"}, "not one of the configs that come with evodsp"),
        ({"config": ()}, "nothing to train; give a config, such as 'quickstart'"),
        ({"resume": True, "ckpt_path": "last"}, "--ckpt_path is given more than once"),
    ],
)
def test_a_mistake_is_one_line(options: dict[str, Any], said: str) -> None:
    """Catches the end of the program (SystemExit), and Python's TypeError, which names no other option."""
    with pytest.raises(UserError) as caught:
        evodsp.fit(**{"config": "quickstart", **options})
    assert said in str(caught.value)


@pytest.mark.verify_but("2-*")
@pytest.mark.parametrize(("code", "error"), [(2, UserError), (1, RuntimeError), (130, KeyboardInterrupt)])
def test_ranks_that_fail(
    code: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a run of several ranks that failed and returns as if it had trained."""
    monkeypatch.setattr("evodsp.training.command.launch", lambda ranks, words: code)
    with pytest.raises(error):
        evodsp.fit("quickstart", tmp_path / "run", parallel={"sequence": 2})
    monkeypatch.setattr("evodsp.training.command.launch", lambda ranks, words: STOPPED)
    assert evodsp.fit("quickstart", tmp_path / "run", parallel={"sequence": 2}) == evodsp.training.api.TrainedRun(
        tmp_path / "run", None, None, {}, True
    )


def test_ranks_of_another_thread(tmp_path: Path) -> None:
    """Catches Python's ValueError about signals."""
    with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match="use the command"):
        thread.submit(evodsp.fit, "quickstart", tmp_path / "run", parallel={"sequence": 2}).result()


@pytest.mark.verify
def test_two_ranks(chains: Path, tmp_path: Path) -> None:
    """Catches ranks that Python cannot start, or whose files are not found."""
    run = evodsp.fit(chains / "tiny.yaml", tmp_path / "run", max_steps=1, parallel={"sequence": 2})
    assert run.last is not None
    assert read_curve(run.folder / "curve.csv").keys() == {0}
