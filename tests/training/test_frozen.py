"""`--model.freeze`: runs that train a part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.training.command import TrainingCLI
from evodsp.weights.checkpoint import read_checkpoint, save_model
from tests.builders.training import CommandPool
from tests.builders.weights import random_model

FROZEN = ("evoformer", "extra_msa_stack.blocks.0.pair_stack", "*embedder")
PARTS = (
    "evoformer.",
    "extra_msa_stack.blocks.0.pair_stack.",
    "input_embedder.",
    "recycling_embedder.",
    "extra_msa_embedder.",
)
"""The beginnings of the names of what `FROZEN` names."""


def words(chains: Path, output: Path, *options: str, frozen: tuple[str, ...] = FROZEN, steps: int = 2) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--model.freeze={list(frozen)}",
            f"--trainer.max_steps={steps}", "--trainer.limit_val_batches=0", *options]  # fmt: skip


def saved(output: Path) -> dict[str, Any]:
    return read_checkpoint(output / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def source(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for a run to begin with, none of which is zero."""
    folder = tmp_path_factory.mktemp("source")
    config = TrainingCLI("fit", words(chains, folder)[1:]).settings.model.model_config()
    model = random_model(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    save_model(folder / "source.ckpt", model)
    return folder / "source.ckpt"


@pytest.fixture(scope="module")
def whole(chains: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(chains, output, f"--init_from={source}", steps=3)) == 0
    return output


def test_frozen_weights_stay_and_have_no_state(source: Path, whole: Path) -> None:
    """Weights that drift by the optimizer or the moving average, others that stay, and state of an optimizer without use."""
    first, last = read_checkpoint(source)["state_dict"], saved(whole)
    frozen = {name for name in first if name.removeprefix("model.").startswith(PARTS)}
    for kind in ("state_dict", "ema_state_dict"):
        still = {name for name in first if torch.equal(first[name], last[kind][name])}
        assert frozen <= still
        assert not [name for name in still if name.startswith("model.structure_module.") and name.endswith(".weight")]
    (optimizer,) = last["optimizer_states"]
    assert len(optimizer["param_groups"][0]["params"]) == len(first) - len(frozen) > 0


def test_a_resumed_run_is_the_uninterrupted_run(
    chains: Path, source: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """State of the optimizer that a resume gives to other parameters; other parts frozen or trained without a word."""
    assert main(words(chains, tmp_path / "run", f"--init_from={source}")) == 0
    assert "5,669 parameters, of which 2,916 are trained" in capsys.readouterr().err
    assert main(words(chains, tmp_path / "run", "--ckpt_path=last", steps=3)) == 0
    found, expected = saved(tmp_path / "run"), saved(whole)
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, expected[kind][name]) for name, value in found[kind].items())
    capsys.readouterr()
    assert main(words(chains, tmp_path / "run", "--ckpt_path=last", frozen=FROZEN[:1], steps=4)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.freeze was" in line
    assert "--init_from" in line


def test_a_run_that_trained_all_cannot_resume_with_frozen_parts(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's traceback about the sizes of groups, for a checkpoint of a version that knew no frozen parts."""
    assert main(words(chains, tmp_path / "run", frozen=())) == 0
    checkpoint = saved(tmp_path / "run")
    del checkpoint["settings"]["model.freeze"]
    torch.save(checkpoint, tmp_path / "former.ckpt")
    capsys.readouterr()
    assert main(words(chains, tmp_path / "run", f"--ckpt_path={tmp_path}/former.ckpt", steps=4)) == 2
    assert "model.freeze was [] and is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (
            ("evofromer",),
            "'evofromer' names no parameter of this model. Did you mean 'evoformer'? Its parts are input_emb",
        ),
        (("*",), "'*' names all parameters, so that nothing is left to train"),
    ],
)
def test_patterns_that_cannot_be_meant(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: tuple[str, ...], said: str
) -> None:
    """A misspelt part that is trained, and a run that trains nothing."""
    assert main(words(chains, tmp_path / "run", frozen=frozen)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--parallel.parameters=zero1",), marks=pytest.mark.verify),
        pytest.param(("--model.optimizer.clip=batch",), marks=pytest.mark.verify),
        ("--parallel.parameters=fsdp2", "--model.optimizer.clip=batch"),
    ],
)
def test_ranks_train_the_same_part(
    commands: CommandPool, chains: Path, source: Path, whole: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """FSDP2 that waits for gradients which never come, hooks on parameters that have none, and another part on each mesh."""
    run = words(chains, tmp_path / "run", f"--init_from={source}", "--parallel.sequence=2", *options, steps=3)
    outcomes = commands.evodsp(2, *run)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    found, expected = saved(tmp_path / "run"), saved(whole)
    for name, value in found["state_dict"].items():
        if name.removeprefix("model.").startswith(PARTS):
            assert torch.equal(value, expected["state_dict"][name]), name
    assert len(found["optimizer_states"][0]["state"]) == len(expected["optimizer_states"][0]["state"])


def test_a_part_is_trained_alone(chains: Path, source: Path, tmp_path: Path) -> None:
    """Catches parts that are trained besides, a part that is not, and FLOPs of a whole backward pass."""
    options = (f"--init_from={source}", "--model.train_only=[structure_module]", "--overwrite=true")
    assert main(words(chains, tmp_path / "run", *options, frozen=())) == 0
    first, last = read_checkpoint(source)["state_dict"], saved(tmp_path / "run")["state_dict"]
    moved = {name.split(".")[1] for name, x in last.items() if not torch.equal(x, first[name])}
    assert moved == {"structure_module"}
    assert main(words(chains, tmp_path / "run", *options, frozen=("structure_module.angle*",))) == 0
    last = saved(tmp_path / "run")["state_dict"]
    moved = {name.split(".")[2] for name, x in last.items() if not torch.equal(x, first[name])}
    assert moved
    assert not any(part.startswith("angle") for part in moved)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--model.train_only=[head]"],
            "model.train_only: 'head' names no parameter of this model. Did you mean 'heads'?",
        ),
        (
            ["--model.train_only=[heads]", "--model.freeze=[heads]"],
            "model.freeze: 'heads' names all that model.train_only trains ('heads'), so that nothing is left to train",
        ),
    ],
)
def test_a_wrong_part_is_one_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path}/run", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
