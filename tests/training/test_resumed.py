"""A run that resumes with other settings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from evodsp.cli import main
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.geometry.residues import RESTYPES
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from evodsp.training.chains import Chains
from evodsp.training.checks import Settings
from evodsp.training.command import TrainingCLI
from evodsp.training.config import RunConfig, TrainingConfig
from evodsp.training.options import Rule
from evodsp.training.run_folder import KEY, RULES, began_with, changes, recorded
from evodsp.weights.checkpoint import read_checkpoint, sizes_by_name
from tests.builders.training_chains import SEQUENCES


@pytest.fixture(scope="module")
def stopped(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run of 3 steps."""
    output = tmp_path_factory.mktemp("runs") / "run"
    assert fit(chains, output, "--trainer.max_steps=3", keep_batches(output)) == 0
    return output


@pytest.fixture(scope="module")
def settings(chains: Path) -> Settings:
    """Of that run."""
    return TrainingCLI("fit", ["--config", str(chains / "tiny.yaml")]).settings


def keep_batches(output: Path) -> str:
    observer = {"class_path": "tests.builders.observers.KeepBatches", "init_args": {"folder": f"{output}_batches"}}
    return f"--trainer.callbacks={json.dumps(observer)}"


def fit(chains: Path, output: Path, *options: str) -> int:
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), "--trainer.limit_val_batches=0"]
    return main([*words, *options])


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


def chain_of(batch: dict[str, Tensor]) -> str:
    """The chain that a batch of one sample is a crop of."""
    letters = "".join(RESTYPES[code] for code in batch["aatype"][0, 0].tolist())
    (key,) = [key for key, sequence in SEQUENCES.items() if letters in sequence]
    return key


def resumed(chains: Path, stopped: Path, output: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The fourth step, after a resume with other settings: checkpoints before and after it, and its batch."""
    last = stopped / "checkpoints" / "last.ckpt"
    words = (f"--ckpt_path={last}", "--trainer.max_steps=4", *options)
    assert fit(chains, output, keep_batches(output), *words) == 0
    batch = torch.load(f"{output}_batches/3.pt")
    return read_checkpoint(last), read_checkpoint(output / "checkpoints" / "last.ckpt"), batch


@pytest.mark.verify
def test_the_next_step_is_that_of_the_new_settings(
    chains: Path, stopped: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that says that a setting is applied, and a step that keeps its former value."""
    kept = chain_of(
        torch.load(f"{stopped}_batches/2.pt")
    )  # two samples draw each of two chains: the next is the other one
    changed = {"model.ema_decay": 0.1, "model.loss.distogram": 5.0, "model.loss.violation": 1.0}
    changed |= {"model.evoformer.pair_dropout": 0.75, "model.structure_module.dropout": 0.6}
    changed |= {"trainer.gradient_clip_val": 0.02, "data.train_chains": f"[{kept}]"}
    options = [f"--{name}={value}" for name, value in changed.items()]
    before, after, batch = resumed(chains, stopped, tmp_path / "run", *options)
    error = capsys.readouterr().err
    assert all(f"evodsp: {name} was " in error for name in changed)
    assert "evodsp: training set was 2 chains (" in error
    assert chain_of(batch) == kept

    def step(config: TrainingConfig, clip: float = 0.02) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return next_weights(before, config, clip, batch, torch.float32)

    former, loss = settings.model, settings.model.loss
    new = dataclasses.replace(
        former,
        ema_decay=0.1,
        loss=dataclasses.replace(loss, distogram=5.0, violation=1.0),
        evoformer=dataclasses.replace(former.evoformer, pair_dropout=0.75),
        structure_module=dataclasses.replace(former.structure_module, dropout=0.6),
    )
    weights, average = step(new)
    assert largest_difference(weights, after["state_dict"]) < 2e-5
    assert largest_difference(average, after["ema_state_dict"]) < 2e-5
    for config in (
        dataclasses.replace(new, loss=dataclasses.replace(new.loss, distogram=loss.distogram)),
        dataclasses.replace(new, loss=dataclasses.replace(new.loss, violation=loss.violation)),
        dataclasses.replace(new, evoformer=former.evoformer),
        dataclasses.replace(new, structure_module=former.structure_module),
    ):
        assert largest_difference(step(config)[0], weights) > 2e-4
    assert largest_difference(step(new, 0.1)[0], weights) > 2e-4
    assert largest_difference(step(dataclasses.replace(new, ema_decay=former.ema_decay))[1], average) > 2e-4


NEW_FEATURES = {
    "crop_size": 8, "msa_clusters": 3, "extra_msa": 2, "recycles": 3, "uniform_recycling": "false", "masked_msa_fraction": 0.9,
    "masked_uniform": 0.7, "masked_profile": 0.05, "masked_same": 0.2, "clamp_fape_fraction": 0.0,
}  # fmt: skip


@pytest.mark.verify
def test_the_next_sample_has_the_new_features(
    chains: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that says that a setting of the features is applied, and samples that keep its former value.

    A sample depends on its number and the settings only, so a run that has the new settings from its start is the oracle.
    """
    options = [f"--data.train.{name}={value}" for name, value in NEW_FEATURES.items()]
    _, _, batch = resumed(chains, stopped, tmp_path / "run", *options)
    error = capsys.readouterr().err
    told = {line.split()[1] for line in error.splitlines() if " was " in line}
    assert {f"data.train.{name}" for name in NEW_FEATURES} <= told
    assert fit(chains, tmp_path / "new", keep_batches(tmp_path / "new"), "--trainer.max_steps=4", *options) == 0
    expected = torch.load(tmp_path / "new_batches" / "3.pt")
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(batch[name], value, rtol=0, atol=0)
    assert batch["msa_feat"].shape[1:4] == (4, 3, 8)
    assert batch["extra_msa"].shape[2] <= 2
    assert batch["bert_mask"].mean() > 0.5
    assert batch["use_clamped_fape"].eq(0).all()


@pytest.mark.verify
def test_the_next_step_has_the_new_precision(
    chains: Path, stopped: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights or Adam's state that stay in the checkpoint's precision; kernels that change without a line."""
    options = ("--trainer.precision=64-true", "--kernels.backend=reference")
    before, after, batch = resumed(chains, stopped, tmp_path / "run", *options)
    error = capsys.readouterr().err
    assert "trainer.precision was 32-true and is 64-true from the next sample on" in error
    line = "kernels changed: kernels.backend was auto and is reference; the numbers stay the same, up to rounding"
    assert f"evodsp: {line}\n" in error
    weights, average = next_weights(before, settings.model, 0.1, batch, torch.float64)
    assert largest_difference(weights, after["state_dict"]) < 5e-9
    assert largest_difference(average, after["ema_state_dict"]) < 5e-9
    single, _ = next_weights(before, settings.model, 0.1, batch, torch.float32)
    assert largest_difference(weights, single) > 1e-7


def test_every_setting_has_a_rule(settings: Settings) -> None:
    """A new setting that a resumed run takes, or ignores, without anyone having decided which; a rule that there is not."""
    assert settings.by_name.keys() == RULES.keys()
    assert set(RULES.values()) == set(get_args(Rule))
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert all(f"| {rule} |" in text for rule in get_args(Rule))
    # The sizes of the model are those that a checkpoint has to have.
    sizes = {f"model.{name}" for name in sizes_by_name(settings.model.model_config())}
    applied = {name for name in sizes if RULES[name] != "refused"}
    assert all(name.endswith(("dropout", "checkpoint", "checkpoint_projections")) for name in applied)


def test_what_changes_no_number_is_one_line() -> None:
    """A mesh that changes without a word, or with the words of a setting that changes the samples."""
    saved = {"parallel.sequence": 1, "ranks": 1, "parallel.parameters": "replicate", "plan.stream_bias": False}
    saved |= {"global_batch": None, "parallel.wire": "same"}
    now = {"parallel.sequence": 2, "ranks": 4, "parallel.parameters": "replicate", "plan.stream_bias": True}
    now |= {"global_batch": 8, "parallel.wire": "bf16", "compile": "blocks"}  # compile: not in older checkpoints
    same = "the numbers stay the same, up to rounding"
    assert changes(Path("a.ckpt"), {"settings": saved}, now) == [
        "parallel.wire was same and is bf16 from the next sample on",
        f"mesh changed: parallel.sequence was 1 and is 2, ranks was 1 and is 4; {same}",
        f"plan changed: plan.stream_bias was false and is true; {same}",
        f"computation changed: global_batch was null and is 8; {same}",
    ]
    assert changes(Path("a.ckpt"), {}, now) == []


def test_a_new_order_of_alignments_is_said() -> None:
    """Catches a run of an earlier version that draws other rows without a word, and a line where nothing changes: in a run that
    has begun with the order, and in one that reads a store, whose rows are joined already."""
    chains = Chains(["a"], validation=[], test=[], store=MagicMock(spec=ChainFiles))
    files, store = (recorded({"init_from": None, "data.store": one}, 1, chains) for one in (None, "store"))
    earlier = {"settings": {name: value for name, value in files.items() if name != "order of alignments"}}
    line = "order of alignments was by name and is uniref90, bfd, mgnify, others from the next sample on"
    assert changes(Path("a.ckpt"), earlier, files) == [line]
    assert changes(Path("a.ckpt"), {"settings": files}, files) == []
    assert changes(Path("a.ckpt"), {"settings": store}, store) == []


@pytest.mark.verify_but("data.samples_per_epoch=8-4")
@pytest.mark.parametrize(
    ("setting", "former"),
    [("seed=5", "0"), ("data.samples_per_epoch=8", "4")],
)
def test_what_cannot_change_is_refused(
    chains: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, former: str
) -> None:
    """Samples drawn from another seed, or an epoch that ends at another place, although config.yaml says otherwise."""
    last = stopped / "checkpoints" / "last.ckpt"
    assert fit(chains, tmp_path / "run", f"--ckpt_path={last}", f"--{setting}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    name, _, value = setting.partition("=")
    assert f"{name} was {former} and is {value} now" in line
    assert not (tmp_path / "run").exists()


def training_set(**changed: Any) -> str:
    """What a checkpoint keeps of a set of four chains."""
    chains = {"train": ["a", "b"], "distilled": ["c", "d"], "weights": np.array([1.0, 2.0]), "distilled_weights": None}
    of_run = Chains(store=MagicMock(spec=ChainFiles), validation=[], test=[], **{**chains, **changed})
    return str(recorded({"init_from": None}, 1, of_run)["training set"])


def test_what_is_drawn_how_often_is_recorded() -> None:
    """Catches a resume that says nothing of chains that are drawn more often than before, or that are now taken from the
    other set."""
    changed: list[dict[str, Any]] = [
        {}, {"weights": np.array([1.0, 3.0])}, {"weights": None}, {"distilled_weights": np.array([1.0, 2.0])},
        {"distilled_weights": np.array([2.0, 1.0])}, {"train": ["b", "a"]}, {"train": ["a", "b", "c"], "distilled": ["d"]},
    ]  # fmt: skip
    found = [training_set(**change) for change in changed]
    assert len(set(found)) == len(changed)
    assert all(text.startswith("4 chains (checksum ") for text in found)
    assert training_set() == found[0]


def test_a_resumed_run_names_the_weights_that_it_began_with() -> None:
    """Catches a resumed run whose config names other weights of the file than it began with, or that forgets new ones."""
    saved = {KEY: {"init_from": "first.ckpt", "raw": True}}
    assert began_with(RunConfig(), saved) == RunConfig(init_from="first.ckpt", raw=True)
    other = RunConfig(init_from="other.ckpt")
    assert began_with(other, saved) == other
    assert began_with(RunConfig(), {}) == began_with(RunConfig(), {KEY: {"init_from": None}}) == RunConfig()


def next_weights(
    checkpoint: Mapping[str, Any], config: TrainingConfig, clip: float, batch: dict[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and their moving average after one more step, on `batch` of one sample, by their names in a checkpoint.

    The learning rate is constant, the seed 0, and the gradient clipped per sample; all of it in `dtype`.
    """
    model = AlphaFold(config.model_config()).to(dtype).train()
    named = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(checkpoint["state_dict"][name])
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    draws = [Draws.root(0).at("dropout").at(index) for index in batch["sample_index"].tolist()]
    loss, _ = total_loss(model(batch, draws), batch, config.loss, config.heads, model.exchange)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    state, adam, averages = checkpoint["optimizer_states"][0]["state"], config.optimizer, {}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(named.items()):
            gradient = gradients[number] * min(1.0, clip / norm)
            mean = adam.beta1 * state[number]["exp_avg"].to(dtype) + (1 - adam.beta1) * gradient
            square = adam.beta2 * state[number]["exp_avg_sq"].to(dtype) + (1 - adam.beta2) * gradient**2
            step = int(state[number]["step"]) + 1
            corrected = (square / (1 - adam.beta2**step)).sqrt() + adam.eps
            parameter -= adam.lr * mean / (1 - adam.beta1**step) / corrected
            # The average's decay rises: (1 + update) / (10 + update), of update number `step`.
            decay = min(config.ema_decay or 0.0, (1 + step) / (10 + step))
            averages[name] = decay * checkpoint["ema_state_dict"][name].to(dtype) + (1 - decay) * parameter
    return {name: parameter.detach() for name, parameter in named.items()}, averages


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Over all arrays."""
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())
