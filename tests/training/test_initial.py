"""Runs that begin with the weights of a file: `--init_from`, configs/finetune_own.yaml and configs/family_finetune.yaml."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evodsp import config
from evodsp.cli import main
from evodsp.config import ModelConfig, started_with
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.packaged import read_run_config
from evodsp.report.runs import read_curve
from evodsp.training.checks import check_run
from evodsp.training.command import TrainingCLI
from evodsp.weights import by_name
from evodsp.weights.checkpoint import read_checkpoint, save_model
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.initial import initialise
from evodsp.weights.names import parameter_names
from evodsp.weights.openfold import export_openfold, write_openfold
from tests.builders.processes import ROOT
from tests.builders.training import CommandPool, changed, words
from tests.builders.weights import SMALL, random_model, same

OPTIONS = ("--trainer.max_steps=1", "--trainer.callbacks=tests.builders.observers.FirstLoss", "--checkpoint_every=1")


@pytest.fixture(scope="module")
def sources(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same random weights as own.ckpt, deepmind.npz and openfold.pt, of tiny.yaml's sizes; the moving
    average in own.ckpt is the weights plus one.
    """
    folder = tmp_path_factory.mktemp("sources")
    config = TrainingCLI("fit", words(chains, folder / "run")[1:]).settings.model.model_config()
    model = random_model(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    save_model(folder / "own.ckpt", model, {name: value + 1 for name, value in model.named_parameters()})
    write_npz(folder / "deepmind.npz", export_deepmind(model))
    return folder


def test_the_first_loss_is_the_source_models(
    chains: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that do not arrive, or that an optimizer or the moving average replaces. DeepMind's: below."""
    monkeypatch.setenv("REFERENCE", str(sources / "own.ckpt"))
    assert main(words(chains, tmp_path / "run", f"--init_from={sources}/own.ckpt", *OPTIONS, "--raw")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FIRST LOSS")]
    row = read_curve(tmp_path / "run" / "curve.csv")[0]
    assert float(row["train/loss"]) == pytest.approx(float(line.split()[-1]), rel=1e-6)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 1


def test_a_model_of_complexes_starts_from_one_of_single_chains(tmp_path: Path) -> None:
    """Catches columns that are not those of the same letter, offset or residue type: on one chain, the first representations of
    the model of complexes must be those of the other."""
    alone = random_model(SMALL, 3).double()
    save_model(tmp_path / "a.ckpt", alone)
    config = dataclasses.replace(SMALL, arrangement="multimer")
    several = random_model(config, 4).double()
    outcome = initialise(several, tmp_path / "a.ckpt")
    lacking = {name: several.get_parameter(name) for name in outcome.new}
    at_zero = several.input_embedder.relative_position.weight[:, 65:]
    assert not at_zero.any()
    assert outcome.of - outcome.taken == sum(value.numel() for value in (*lacking.values(), at_zero))
    assert "new, at zero: 8 of 73 columns of input_embedder.relative_position.weight" in outcome.lines("a.ckpt")
    assert {name.split(".")[0] for name in (*outcome.new, *outcome.left_out)} == {
        "template_embedder",
        "template_torsion_embedder",
    }
    types, rows = torch.arange(40).remainder(21)[None], torch.zeros(1, 3, 40, 49, dtype=torch.double)
    places = torch.arange(40)[None]
    common = {"residue_index": places, "msa_feat": rows}
    one_hot = torch.nn.functional.one_hot(types, 21).double()
    ids = {name: torch.ones_like(places) for name in ("asym_id", "entity_id", "sym_id")}
    of_chain = common | {"target_feat": torch.nn.functional.pad(one_hot, (1, 0))}
    of_complex = common | {"target_feat": one_hot} | ids
    both = [(alone, of_chain), (several, of_complex)]
    found = [
        (
            model.input_embedder.msa_representation(features["target_feat"], features["msa_feat"]),
            model.input_embedder.left(features["target_feat"]),
            model.input_embedder.right(features["target_feat"]),
            model.input_embedder.relative_position(features, slice(0, 40), slice(0, 40)),
            model.heads.masked_msa.logits(torch.ones(1, SMALL.channels.msa, dtype=torch.double))[..., :22],
        )
        for model, features in both
    ]
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    parameters = dict(several.named_parameters())
    shared = [name for name, _ in alone.named_parameters() if ".blocks." in name and "template" not in name]
    assert shared
    assert all(torch.equal(parameters[name], alone.get_parameter(name)) for name in shared)


@pytest.mark.verify_but("evoformer")
@pytest.mark.parametrize("stack", ["evoformer", "extra_msa_stack"])
def test_with_a_block_more_stacks_compute_what_they_did(stack: str, tmp_path: Path) -> None:
    """Catches an outer product or a pair stack that reads another block's m or z: but for the pair bias of attention within the
    MSA, a stack that begins with the outer product computes the same."""
    alone = random_model(SMALL, 3).double()
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if "row_attention.pair_bias" in name:
                parameter.zero_()
    save_model(tmp_path / "a.ckpt", alone)
    more: dict[str, Any] = {
        part: dataclasses.replace(getattr(SMALL, part), blocks=getattr(SMALL, part).blocks + 1)
        for part in ("evoformer", "extra_msa")
    }
    several = AlphaFold(dataclasses.replace(SMALL, arrangement="multimer", **more)).double()
    outcome = initialise(several, tmp_path / "a.ckpt")
    assert not [name for name in outcome.left_out if ".blocks." in name and "template" not in name]
    generator, channels = torch.Generator().manual_seed(0), SMALL.channels
    c_m = channels.msa if stack == "evoformer" else channels.extra_msa
    m, z = (torch.randn(shape, generator=generator).double() for shape in ((1, 5, 7, c_m), (1, 7, 7, channels.pair)))
    masks = torch.ones(1, 5, 7).double(), torch.ones(1, 7, 7).double()
    with torch.no_grad():
        found = [getattr(model.eval(), stack)(m, z, *masks) for model in (several, alone)]
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_a_model_of_single_chains_does_not_start_from_one_of_complexes(tmp_path: Path) -> None:
    """Catches weights of complexes that come into a model whose layers stand for something else."""
    config = dataclasses.replace(SMALL, arrangement="multimer")
    save_model(tmp_path / "a.ckpt", random_model(config, 3))
    with pytest.raises(UserError, match=r"trained with model\.arrangement multimer, but the config says monomer"):
        initialise(random_model(SMALL, 4), tmp_path / "a.ckpt")


PARTS = {"templates": dataclasses.replace(SMALL.templates, enabled=False)}
PARTS |= {"heads": dataclasses.replace(SMALL.heads, predicted_aligned_error=False)}
LARGE, REDUCED = SMALL, dataclasses.replace(SMALL, **PARTS)


def written(path: Path, model: AlphaFold) -> Path:
    """`model` in a file of the kind that the name says."""
    if path.suffix == ".npz":
        write_npz(path, export_deepmind(model))
    elif path.suffix == ".pt":
        write_openfold(path, export_openfold(model, legacy=True))
    else:
        save_model(path, model)
    return path


@pytest.mark.verify_but("a.npz")
@pytest.mark.parametrize("name", ["a.ckpt", "a.npz", "a.pt"])
def test_parts_may_be_new_or_left_out(tmp_path: Path, name: str) -> None:
    """A head without weights refused, overwritten, or not told; the arrays of the other parts exchanged."""
    full = random_model(LARGE, 1)
    source = written(tmp_path / name, full)
    model = random_model(REDUCED, 2)
    done = initialise(model, source)
    weights = dict(full.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    assert done.taken == done.of == sum(value.numel() for value in model.parameters())
    assert not done.new
    lines = done.lines("a")
    assert "template" in lines[-1]
    assert "aligned_error" in lines[-1] or "aux_heads.tm (2 arrays)" in lines[-1]

    small = written(tmp_path / f"small_{name}", model)
    grown, before = random_model(LARGE, 4), dict(random_model(LARGE, 4).named_parameters())
    done = initialise(grown, small)
    assert set(done.new) == weights.keys() - dict(model.named_parameters()).keys()
    for key, value in grown.named_parameters():
        assert torch.equal(value, before[key] if key in done.new else weights[key])
    assert not done.left_out


def _cut(sizes: ModelConfig, **parts: dict[str, int]) -> ModelConfig:
    changed = {part: dataclasses.replace(getattr(sizes, part), **values) for part, values in parts.items()}
    return dataclasses.replace(sizes, **changed)


@pytest.mark.verify_but("a.ckpt")
@pytest.mark.parametrize("name", ["a.ckpt", "a.npz", "a.pt"])
def test_other_sizes_are_one_line_that_names_the_setting(tmp_path: Path, name: str) -> None:
    """Blocks of a deeper model taken in part, or a line that names an array and not what to change."""
    source = written(tmp_path / name, random_model(SMALL, 1))
    for part, field, value in (
        ("evoformer", "blocks", 1),
        ("evoformer", "triangle_channels", 8),
        ("heads", "plddt_channels", 9),
    ):
        model = random_model(_cut(SMALL, **{part: {field: value}}), 2)
        before = copy.deepcopy(model)
        with pytest.raises(UserError, match=rf"^--init_from .*model\.{part}\.{field}") as raised:
            initialise(model, source)
        assert "\n" not in str(raised.value)
        assert same(model, before)


def test_damaged_files_and_strangers(tmp_path: Path) -> None:
    """Numbers that are not finite spread into a new run, half of a parameter's arrays, and a file of another model taken as one
    without any part."""
    model = random_model(SMALL, 1)
    arrays = export_deepmind(model)
    key = min(arrays)
    write_npz(tmp_path / "nan.npz", {**arrays, key: arrays[key] * np.nan})
    with pytest.raises(UserError, match="not finite"):
        initialise(model, tmp_path / "nan.npz")
    lost = next(name.keys[-1] for name in parameter_names(SMALL, fused=False) if len(name.keys) > 1)
    write_npz(tmp_path / "half.npz", {key: array for key, array in arrays.items() if key != lost})
    with pytest.raises(UserError, match=f"no array '{re.escape(lost)}'.*is it damaged"):
        initialise(model, tmp_path / "half.npz")
    write_npz(tmp_path / "other.npz", {"conv/w": np.ones((2, 2), np.float32)})
    with pytest.raises(UserError, match="none of the model's parameters"):
        initialise(model, tmp_path / "other.npz")


def test_one_command_line_begins_and_resumes(
    chains: Path, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is queued again begins anew, or needs the file of its first weights still; an average that forgets these
    weights faster than its decay of 0.9 says, before or after the resume."""
    source = tmp_path / "source.ckpt"
    shutil.copy(sources / "own.ckpt", source)
    few = ("--trainer.limit_val_batches=0",)
    same = words(chains, tmp_path / "run", f"--init_from={source}", "--ckpt_path=auto", *few)
    assert main([*same, "--trainer.max_steps=1"]) == 0
    said = capsys.readouterr().err
    assert "starts from" in said
    assert "memory and time: --dry_run true plans them" in said
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    first = read_checkpoint(last)
    assert_averaged(first, read_checkpoint(source)["ema_state_dict"])
    source.unlink()
    again = TrainingCLI("fit", same[1:]).settings
    assert check_run("fit", again).start == last
    # Without the file the run is still one that has begun with it; with another one it would be a lie.
    assert main(words(chains, tmp_path / "run", "--ckpt_path=last", "--trainer.max_steps=2", *few)) == 0
    assert "starts from" not in capsys.readouterr().err
    assert f"init_from: {source}" in (tmp_path / "run" / "config.yaml").read_text()
    second = read_checkpoint(last)
    assert second["global_step"] == 2
    assert_averaged(second, first["ema_state_dict"])
    with pytest.raises(UserError, match=f"init_from was {source} and is {sources}/own.ckpt now"):
        check_run("fit", changed(again, f"init_from: {sources}/own.ckpt"))


def assert_averaged(checkpoint: dict[str, Any], before: dict[str, torch.Tensor]) -> None:
    """The average is that of one update from `before`."""
    for name, average in checkpoint["ema_state_dict"].items():
        torch.testing.assert_close(average, 0.9 * before[name] + 0.1 * checkpoint["state_dict"][name])


@pytest.mark.verify
@pytest.mark.parametrize("parameters", ["zero1", "fsdp2"])
def test_every_mesh_begins_with_the_weights(
    commands: CommandPool, chains: Path, sources: Path, tmp_path: Path, parameters: str
) -> None:
    """Weights that rank 0 alone has, or that were sharded before they were read."""
    run = words(chains, tmp_path / "run", "--init_from", str(sources / "deepmind.npz"), "--trainer.max_steps=1")
    run += [f"--parallel.parameters={parameters}", "--parallel.sequence=2", "--model.optimizer.clip=batch"]
    first, second = commands.evodsp(2, *run, "--model.optimizer.lr=1e-30")
    assert (first.code, second.code) == (0, 0), (first, second)
    assert ("starts from" in first.error, "starts from" in second.error) == (True, False)
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    expected = read_checkpoint(sources / "own.ckpt")["state_dict"]
    assert saved["state_dict"].keys() == expected.keys()
    for weights in (saved["state_dict"], saved["ema_state_dict"]):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


PAE_HEAD = ("--model.heads.predicted_aligned_error=true", "--model.loss.pae=0.1")


def written_twice(config: ModelConfig, folder: Path) -> tuple[Path, Path]:
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
    source, reference = written_twice(config, tmp_path)
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
    source, reference = written_twice(ModelConfig.preset("test"), tmp_path)
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
    source, reference = written_twice(dataclasses.replace(config, **stacks), tmp_path)
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


BUNDLED = {
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
    options = [*(f"--data.{name}={ROOT}/data/{place}" for name, place in BUNDLED.items()), *SMALLER]
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
