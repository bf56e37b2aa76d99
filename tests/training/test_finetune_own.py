"""configs/finetune_own.yaml, from weights to the first loss, as its first lines say."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from evodsp import config
from evodsp.cli import main
from evodsp.config import ModelConfig, started_with
from evodsp.packaged import read_run_config
from evodsp.report.runs import read_curve
from evodsp.training.command import TrainingCLI
from evodsp.weights import by_name
from evodsp.weights.checkpoint import read_checkpoint, save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from tests.builders.processes import ROOT
from tests.builders.weights import random_model

PAE_HEAD = ("--model.heads.predicted_aligned_error=true", "--model.loss.pae=0.1")


def sources(config: ModelConfig, folder: Path) -> tuple[Path, Path]:
    """The same random weights as an .npz file with DeepMind's names, and as a checkpoint."""
    model = random_model(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():  # wide layers would overflow
            parameter.mul_(0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
    write_npz(folder / "params.npz", export_deepmind(model))
    save_model(folder / "reference.ckpt", model)
    return folder / "params.npz", folder / "reference.ckpt"


def first_row(source: Path | str, output: Path, raw: bool, *options: str) -> dict[str, str]:
    """The first row of the curve of the config's first step, of one small sample of the bundled chains."""
    words = ["fit", f"--config={ROOT}/configs/finetune_own.yaml", f"--init_from={source}", f"--output={output}"]
    words += [f"--data.{part}_dir={ROOT}/data/{name}" for part, name in FOLDERS.items()]
    words += ["--data.train.crop_size=20", "--data.train.msa_clusters=6", "--data.train.extra_msa=8"]
    words += ["--global_batch=1", "--trainer.max_steps=1", "--trainer.log_every_n_steps=1", "--trainer.accelerator=cpu"]
    observer = f"{{class_path: tests.builders.observers.FirstLoss, init_args: {{raw: {str(raw).lower()}}}}}"
    assert main([*words, f"--trainer.callbacks={observer}", "--checkpoint_every=1", *options]) == 0
    return read_curve(output / "curve.csv")[0]


FOLDERS = {"alignment": "alignments", "structure": "mmcif_files"}


def assert_grown(row: dict[str, str], out: str, *new: str) -> None:
    """The loss is the source model's, and the weighted terms of heads that are new."""
    (line,) = [line for line in out.splitlines() if line.startswith("FIRST LOSS")]
    weights = {"pae": 0.1, "experimentally_resolved": 0.01}
    scale = math.sqrt(float(row["train/residues"]))
    added = sum(weights[term] * float(row[f"train/{term}"]) for term in new) * scale
    assert added > 0 or not new
    assert float(row["train/loss"]) == pytest.approx(float(line.split()[-1]) + added, rel=2e-6)
    if "pae" in new:  # all bins alike, as far as structures of this resolution count
        assert float(row["train/pae"]) == pytest.approx(math.log(64), rel=1e-4)


def test_deepminds_weights_and_a_new_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of the config that does not go with weights of a file: another loss, a head that is not there, a first step
    that is not the source's."""
    config = ModelConfig.preset("test")
    config = dataclasses.replace(config, heads=dataclasses.replace(config.heads, experimentally_resolved=True))
    source, reference = sources(config, tmp_path)
    monkeypatch.setenv("REFERENCE", str(reference))
    sizes = ("--model.preset=test", "--model.heads.experimentally_resolved=true")
    row = first_row(source, tmp_path / "run", True, *sizes, *PAE_HEAD)
    out, error = capsys.readouterr()
    assert_grown(row, out, "pae")
    assert "new, at their initial values: heads.predicted_aligned_error (2 arrays)" in error
    assert "left out" not in error


def test_published_parameters_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a name that is taken for a file, sizes of another model than the name's, and a file that is not looked for where
    the others lie."""
    monkeypatch.setattr(by_name, "NAMES", ("test",))
    monkeypatch.setattr(config, "PUBLISHED_MODELS", ("test",))
    monkeypatch.setenv("EVODSP_WEIGHTS", str(tmp_path))
    source, reference = sources(ModelConfig.preset("test"), tmp_path)
    monkeypatch.setenv("REFERENCE", str(reference))
    source.rename(tmp_path / "params_test.npz")
    given = ("--model.loss.experimentally_resolved=0",)
    row = first_row("test", tmp_path / "run", True, *given)
    out, error = capsys.readouterr()
    assert_grown(row, out)
    assert "starts from test: " in error
    assert "new, at" not in error
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["settings"]["init_from"] == "test"


@pytest.mark.parametrize(
    ("name", "templates", "arrangement"),
    [("model_3", 0, "monomer"), ("model_1_ptm", 4, "monomer"), ("model_1_multimer_v3", 4, "multimer")],
)
def test_a_name_chooses_the_sizes(name: str, templates: int, arrangement: str, tmp_path: Path) -> None:
    """Catches a preset of another model, and samples without the templates that the model takes."""
    words = [f"--config={ROOT}/configs/finetune_own.yaml", f"--init_from={name}"]
    settings = TrainingCLI("fit", words).settings
    assert settings.model.model_config() == ModelConfig.preset(name)
    assert settings.model.arrangement == arrangement
    assert (settings.data.train.max_templates, settings.data.validation.max_templates) == (templates, templates)
    read = tmp_path / "run.yaml"
    read.write_text(f"init_from: {name}\nmodel: {{loss: {{violation: 1.0}}}}\n")
    content = read_run_config(read)  # what plan and the doctor read
    assert (content["model"]["preset"], content["data"]["train"]["max_templates"]) == (name, templates)
    read.write_text(f"init_from: {name}\nmodel: {{preset: model_5}}\n")
    assert read_run_config(read) == {"init_from": name, "model": {"preset": "model_5"}}
    file = [words[0], f"--init_from=some/where/params_{name}.npz"]
    assert TrainingCLI("fit", file).settings.model.model_config() == ModelConfig.preset(name)
    for no_name in (f"some/where/{name}", f"{name}.npz", "params_own.npz", f"some/where/{name}.ckpt"):
        assert started_with(no_name) == {}
    other = TrainingCLI("fit", [*words, "--model.preset=model_5", "--data.train.max_templates=0"]).settings
    assert other.model.model_config() == ModelConfig.preset("model_5")
    assert other.data.train.max_templates == 0


@pytest.mark.verify
@pytest.mark.parametrize("head", [(), PAE_HEAD], ids=["as_it_is", "pae"])
def test_deepminds_weights_at_full_widths(
    head: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of model_3 for which the config, and not the test, is wrong. They are chosen by the name of DeepMind's file."""
    config = ModelConfig.preset("model_3")
    stacks = {name: dataclasses.replace(getattr(config, name), blocks=2) for name in ("evoformer", "extra_msa")}
    source, reference = sources(dataclasses.replace(config, **stacks), tmp_path)
    source = source.rename(tmp_path / "params_model_3.npz")
    monkeypatch.setenv("REFERENCE", str(reference))
    row = first_row(source, tmp_path / "run", True, *(f"--model.{name}.blocks=2" for name in stacks), *head)
    out, error = capsys.readouterr()
    assert_grown(row, out, *(["pae"] if head else []))
    assert ("new, at their initial values: heads.predicted_aligned_error (2 arrays)" in error) == bool(head)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 1


@pytest.mark.verify
def test_the_demos_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that evodsp has trained does not begin another run, or not with its moving average."""
    monkeypatch.chdir(ROOT)
    demo = ["fit", "--config=configs/quickstart.yaml", f"--output={tmp_path}/demo", "--trainer.max_steps=40"]
    assert main([*demo, "--trainer.limit_val_batches=0"]) == 0
    source = tmp_path / "demo" / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(source)
    assert checkpoint["global_step"] == 40
    assert any(not torch.equal(checkpoint["ema_state_dict"][k], v) for k, v in checkpoint["state_dict"].items())
    monkeypatch.setenv("REFERENCE", str(source))
    capsys.readouterr()
    sizes = ("--model.preset=small", "--model.heads.experimentally_resolved=true")
    row = first_row(source, tmp_path / "run", False, *sizes, *PAE_HEAD)
    assert_grown(row, capsys.readouterr().out, "pae", "experimentally_resolved")
