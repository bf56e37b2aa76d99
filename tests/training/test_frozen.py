"""`--model.freeze`, `train_only` and `adapters`: runs that train a part of the model, or adapters of its weights."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.model.adapters import is_adapter
from evodsp.training.command import TrainingCLI
from evodsp.training.config import AdapterConfig, TrainingConfig
from evodsp.training.gradients import check_patterns
from evodsp.weights.checkpoint import load_model, read_checkpoint, save_model
from tests.builders import small_model
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


@pytest.mark.verify
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


@pytest.mark.verify
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


@pytest.mark.verify
@pytest.mark.parametrize(
    "options",
    [
        ("--parallel.parameters=zero1",),
        ("--model.optimizer.clip=batch",),
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
    assert main(words(chains, tmp_path / "run", *options, frozen=(), steps=1)) == 0
    first, last = read_checkpoint(source)["state_dict"], saved(tmp_path / "run")["state_dict"]
    moved = {name.split(".")[1] for name, x in last.items() if not torch.equal(x, first[name])}
    assert moved == {"structure_module"}
    assert main(words(chains, tmp_path / "run", *options, frozen=("structure_module.angle*",), steps=1)) == 0
    last = saved(tmp_path / "run")["state_dict"]
    moved = {name.split(".")[2] for name, x in last.items() if not torch.equal(x, first[name])}
    assert moved
    assert not any(part.startswith("angle") for part in moved)


ADAPTERS = ("--model.adapters.rank=2", "--model.train_only=[heads]")


@pytest.fixture(scope="module")
def adapted(chains: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    assert main(words(chains, output, f"--init_from={source}", *ADAPTERS, frozen=(), steps=3)) == 0
    return output


def test_weights_stay_and_their_adapters_are_trained(source: Path, adapted: Path) -> None:
    """Catches weights that are trained besides, adapters that are not, state of an optimizer for what is kept, and a model that
    is read without its adapters."""
    first, last = read_checkpoint(source)["state_dict"], saved(adapted)
    adapters = {name for name in last["state_dict"] if is_adapter(name)}
    assert last["state_dict"].keys() == first.keys() | adapters
    assert {name.split(".")[1] for name in adapters} == {"extra_msa_stack", "evoformer"}
    for kind in ("state_dict", "ema_state_dict"):
        moved = {name for name in first if not torch.equal(first[name], last[kind][name])}
        assert {name.split(".")[1] for name in moved} == {"heads"}
        still = {name for name in adapters if not last[kind][name].any()}
        # Of these chains' MSAs no row is left for the extra MSA.
        assert all("extra_msa_stack.blocks.0.msa_stack" in name for name in still)
    trained = len(adapters) + len([name for name in first if name.startswith("model.heads.")])
    assert len(last["optimizer_states"][0]["param_groups"][0]["params"]) == trained
    for raw, kind in ((True, "state_dict"), (False, "ema_state_dict")):
        model, values = load_model(adapted / "checkpoints/last.ckpt", raw=raw), last[kind]
        for name, parameter in model.named_parameters():
            expected = values[f"model.{name}"]
            if f"model.{name}_up" in values:
                expected = expected + values[f"model.{name}_up"] @ values[f"model.{name}_down"]
                assert name.startswith("extra") or not torch.equal(parameter, values[f"model.{name}"]), name
            torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.verify
def test_a_dry_run_says_what_it_would_train(
    chains: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table of other numbers than those that are trained, a plan of another run, a warning of the real run that is
    not said, and a dry run that writes."""
    run = words(chains, tmp_path / "run", f"--init_from={source}", *ADAPTERS, "--dry_run=true", frozen=(), steps=4)
    assert main(run) == 0
    told = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "run").exists()
    rows = {row[1]: row[2:] for line in told if len(row := line.split()) == 5 and row[-1][0].isdigit()}
    whole = sum(value.numel() for value in read_checkpoint(source)["state_dict"].values())
    heads, adapters = rows["heads"], int(rows["all"][2].replace(",", ""))
    assert rows["all"][:2] == [f"{whole:,}", heads[0]]
    assert heads[:2] == [heads[1]] * 2
    assert rows["structure_module"][1:] == ["0", "0"]
    assert adapters == sum(int(rows[part][2].replace(",", "")) for part in ("evoformer", "extra_msa_stack")) > 1000
    assert "evodsp: length: 4 samples in 4 steps, 1 sample a step" in "\n".join(told)
    [memory] = [number for number, line in enumerate(told) if "evodsp: memory of each device, planned: " in line]
    assert "evodsp: time, planned for this CPU: at most " in told[memory + 1]
    assert "trained on" not in told[-1]
    score = ["validate", *run[1:], f"--ckpt_path={source}"]
    assert main([word for word in score if not word.startswith("--init_from")]) == 2
    assert "dry_run is true, but evodsp validate trains nothing; leave it out" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    run.remove("--trainer.limit_val_batches=0")
    assert main([*run, "--data.train.crop_size=null", "--data.train_chains=[1abc_A,2abc_B]"]) == 0
    said = capsys.readouterr().err
    assert "memory and time are not planned: data.train.crop_size is null" in said
    assert "warning: this run trains on the CPU, because trainer.accelerator is cpu" in said
    assert "warning: 1 of 1 scored chains are trained on" in said


@pytest.mark.verify
def test_a_resumed_run_has_its_adapters(
    chains: Path, source: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches adapters that a resume draws anew, and other adapters in a resumed run without a word."""
    run = words(chains, tmp_path / "run", *ADAPTERS, frozen=())
    assert main([*run, f"--init_from={source}"]) == 0
    assert main(words(chains, tmp_path / "run", "--ckpt_path=last", *ADAPTERS, frozen=(), steps=3)) == 0
    found, expected = saved(tmp_path / "run"), saved(adapted)
    for kind in ("state_dict", "ema_state_dict"):
        assert all(torch.equal(value, expected[kind][name]) for name, value in found[kind].items())
    for other, said in (("rank=3", "rank was 2 and is 3"), ("parts=[evoformer]", "parts was ")):
        given = [f"--model.adapters.{other}", *ADAPTERS[other.startswith("rank") :]]
        capsys.readouterr()
        assert main(words(chains, tmp_path / "run", "--ckpt_path=last", *given, frozen=(), steps=4)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"model.adapters.{said}" in line


def test_a_trained_model_is_exported_scored_and_begun_with_without_adapters(
    chains: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches adapters in files of other programs or in a run that begins with the model, and a validation of weights alone."""
    checkpoint = adapted / "checkpoints/last.ckpt"
    expected = load_model(checkpoint).state_dict()
    folder = tmp_path / "folder"
    assert main(["weights", "export", f"--checkpoint={checkpoint}", f"--output={folder}", "--format=safetensors"]) == 0
    assert all(torch.equal(value, expected[name]) for name, value in load_model(folder).state_dict().items())
    assert main(words(chains, tmp_path / "next", f"--init_from={checkpoint}", frozen=(), steps=1)) == 0
    assert not any(map(is_adapter, saved(tmp_path / "next")["state_dict"]))
    scores = []
    for source in (checkpoint, folder):
        score = [
            "validate",
            f"--config={chains}/tiny.yaml",
            f"--output={tmp_path}/scores",
            f"--ckpt_path={source}",
            *ADAPTERS,
        ]
        assert main(score) == 0
        scores.append((tmp_path / "scores" / "validate.csv").read_text())
    assert scores[0] == scores[1]
    capsys.readouterr()


def test_damaged_adapters_are_one_line(adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback about a name or a shape."""
    checkpoint = saved(adapted)
    name = next(name for name in checkpoint["ema_state_dict"] if name.endswith("_up"))
    for damage in (lambda weights: weights.pop(name), lambda weights: weights.update({name: weights[name][:, :1]})):
        spoilt = dict(checkpoint, ema_state_dict=dict(checkpoint["ema_state_dict"]))
        damage(spoilt["ema_state_dict"])
        if name not in spoilt["ema_state_dict"]:
            spoilt["ema_state_dict"][name.replace("_up", "_down") + ".weight_up"] = checkpoint["ema_state_dict"][name]
        torch.save(spoilt, tmp_path / "spoilt.ckpt")
        assert main(["weights", "export", f"--checkpoint={tmp_path}/spoilt.ckpt", f"--output={tmp_path}/x.npz"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "its adapters do not fit its weights" in line


def test_a_model_need_not_have_both_stacks() -> None:
    """Catches adapters by default that a model without an extra MSA stack, such as family.yaml's, refuses."""
    sizes = small_model.config()
    sizes = replace(sizes, extra_msa=replace(sizes.extra_msa, blocks=0))
    given = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    check_patterns(TrainingConfig(**given, adapters=AdapterConfig(rank=2)))
    with pytest.raises(UserError, match="'extra_msa_stack' names no parameter of this model"):
        check_patterns(TrainingConfig(**given, adapters=AdapterConfig(rank=2, parts=["extra_msa_stack"])))
