"""Models as folders that travel: bitwise back; and what is damaged or hostile is one line before anything is allocated."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import evodsp
from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig, as_multimer
from evodsp.errors import UserError
from evodsp.inference.jobs import find_models
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_features, load_model, save_model
from evodsp.weights.initial import initialise
from tests.builders.weights import SMALL, random_model, same

FEATURES = FeatureConfig(crop_size=None, msa_clusters=7, extra_msa=5, max_templates=2, recycles=1)
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    model = random_model(ModelConfig.preset("test"), 0)
    model.trained_features = FEATURES
    evodsp.save_pretrained(model, made := tmp_path_factory.mktemp("pretrained") / "model")
    return made


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def with_config(folder: Path, **values: Any) -> Path:
    """The folder with entries of config.json replaced, or removed where the value is None."""
    config = {**json.loads((folder / CONFIG).read_text()), **values}
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The folder with other weights, and without their sum."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return with_config(folder, sha256=None)


@pytest.mark.parametrize("config", [SMALL, as_multimer(SMALL)], ids=["monomer", "multimer"])
def test_a_model_comes_back_bit_by_bit(config: ModelConfig, tmp_path: Path) -> None:
    """Catches a weight, a size or a feature size that is lost, in both arrangements, and files that others cannot read."""
    model = random_model(config, 1)
    model.trained_features = FEATURES
    evodsp.save_pretrained(model, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {WEIGHTS, CONFIG, CARD}
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1
    for load in (evodsp.from_pretrained, load_model):
        again = load(tmp_path / "model")
        assert same(again, model)
        assert (again.config, again.trained_features, again.training) == (config, FEATURES, False)
    evodsp.save_pretrained(again, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "model" / WEIGHTS).read_bytes()


@pytest.mark.verify
def test_the_commands_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches raw weights exported in place of their average, and a folder that the commands do not take."""
    model = random_model(ModelConfig.preset("test"), 2)
    save_model(
        file := tmp_path / "x.ckpt", model, {name: value + 1 for name, value in model.named_parameters()}, FEATURES
    )
    export = ["weights", "export", "--checkpoint", str(file), "--format", "safetensors", "--output"]
    assert main([*export, str(tmp_path / "average")]) == 0
    assert main([*export, str(tmp_path / "raw"), "--raw"]) == 0
    assert "safetensors, " in capsys.readouterr().err
    assert same(load_model(tmp_path / "raw"), model)
    assert same(load_model(tmp_path / "average"), load_model(file))
    params = tmp_path / "params.npz"
    assert main(["weights", "export", "--checkpoint", str(tmp_path / "raw"), "--output", str(params)]) == 0
    words = ["weights", "import", "--checkpoint", str(params), "--like", str(tmp_path / "raw"), "--output"]
    assert main([*words, str(tmp_path / "back.ckpt")]) == 0
    assert same(load_model(tmp_path / "back.ckpt"), model)
    assert load_features(tmp_path / "back.ckpt") == FEATURES


def test_mistakes_of_the_commands_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a model that is replaced unasked, and an option that is accepted but ignored."""
    (taken := tmp_path / "file").write_text("precious")
    before = (folder / WEIGHTS).read_bytes()
    export = ["export", "--checkpoint", str(folder), "--format", "safetensors"]
    for words, expected in (
        ([*export, "--output", str(folder)], f"{CONFIG}: exists already"),
        ([*export, "--output", str(taken)], "is a file, but a model of safetensors is a folder"),
        ([*export, "--output", str(tmp_path / "new"), "--fused"], "--fused is given with --format safetensors"),
        ([*export, "--output", str(tmp_path / "new.safetensors")], "writes a folder; name it without the suffix"),
        (["import", "--checkpoint", str(folder), "--output", str(tmp_path / "n.ckpt")], "is already a model of evodsp"),
        (["export", "--checkpoint", str(folder / WEIGHTS), "--output", str(tmp_path / "n.npz")], "give the folder: "),
    ):
        assert main(["weights", *words]) == 2, words
        error = capsys.readouterr().err
        assert expected in error or (expected.startswith(CONFIG) and "exists already" in error), error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (folder / WEIGHTS).read_bytes() == before


def test_overwriting_leaves_other_files(copy: Path) -> None:
    """Catches a repository's own files deleted, and a model of which old and new files are mixed."""
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    model = random_model(SMALL, 4)
    evodsp.save_pretrained(model, copy, overwrite=True)
    assert {path.name for path in copy.iterdir()} == {WEIGHTS, CONFIG, CARD, ".gitattributes"}
    assert same(load_model(copy), model)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """Catches a broken model that is published."""
    model = random_model(ModelConfig.preset("test"), 0)
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = torch.inf
    with pytest.raises(UserError, match=r"model: 'input_embedder.* holds numbers that are not finite"):
        evodsp.save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def _larger(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())["model_config"]
    with_config(folder, model_config={**config, "channels": {**config["channels"], "pair": 1 << 20}})


def _header(length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + b"{}")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000]),
        "model.safetensors: not a readable safetensors file",
    ),
    "a header of any size": (_header(1 << 40), "not a readable safetensors file"),
    "a pickle": (lambda folder: torch.save({"a": torch.zeros(3)}, folder / WEIGHTS), "not a readable safetensors file"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "but no file model.safetensors; copy the folder again"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "has model.safetensors and README.md, but no file config"),
    "another program's": (
        lambda folder: (folder / CONFIG).write_text('{"model_type": "bert", "architectures": ["BertModel"]}'),
        "config.json: model_type is 'bert', but must be 'evodsp': this is another program's model",
    ),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "config.json:1: not JSON"),
    "large JSON": (lambda folder: (folder / CONFIG).write_text(" " * (2 << 20)), "config.json: larger than 1 MiB"),
    "an unknown key": (
        lambda folder: with_config(folder, feature={}),
        "unknown key 'feature'. Did you mean 'features'?",
    ),
    "no sizes": (lambda folder: with_config(folder, model_config=None), "it lacks model_config"),
    "from the future": (
        lambda folder: with_config(folder, format_version=9, evodsp_version="7.0", new_part={}),
        "config.json: written by evodsp '7.0' in format version 9, but this evodsp",
    ),
    "other sizes": (_larger, "has the shape"),
    "a strange sum": (lambda folder: with_config(folder, sha256=[1]), "damaged, or not the weights of config.json"),
    "an unknown array": (
        lambda folder: with_weights(folder, lambda w: {**w, "x": torch.zeros(1)}),
        "the model has no parameter for array 'x'",
    ),
    "not finite": (
        lambda folder: with_weights(folder, lambda w: {name: value * torch.nan for name, value in w.items()}),
        "holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line_before_a_model_is_built(name: str, copy: Path, no_models: None) -> None:
    """Catches a traceback, memory that a few bytes ask for, weights of another model, and a key that is ignored."""
    change, expected = BAD[name]
    change(copy)
    with pytest.raises(UserError) as caught:
        evodsp.from_pretrained(copy)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(copy))
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_found(copy: Path) -> None:
    """Catches predictions with weights that a disk or a copy has damaged."""
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-5] ^= 4
    (copy / WEIGHTS).write_bytes(data)
    with pytest.raises(UserError, match="damaged, or not the weights"):
        load_model(copy)


def test_other_sizes_of_features_are_another_model(copy: Path, folder: Path) -> None:
    """Catches earlier predictions that are kept although config.json says that the model is used in another way."""
    features = json.loads((copy / CONFIG).read_text())["features"]
    with_config(copy, features={**features, "recycles": 3})
    first, second = find_models([folder, copy])
    assert first.digest != second.digest
    assert (first.name, second.name) == ("model", "copy")
    with_config(copy, features=features)
    (copy / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    assert len(find_models([folder, copy])) == 1


def test_a_run_begins_with_a_folder(folder: Path, copy: Path) -> None:
    """Catches weights that do not arrive, and damaged ones that are trained on."""
    model = AlphaFold(ModelConfig.preset("test"))
    done = initialise(model, folder)
    assert (done.taken, done.new, done.left_out) == (done.of, (), ())
    assert same(model, load_model(folder))
    with_config(copy, sha256="0" * 64)
    with pytest.raises(UserError, match="damaged, or not the weights"):
        initialise(model, copy)


def test_a_run_cannot_go_on_from_weights_alone(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches Lightning's traceback for a folder without an optimizer's state."""
    words = ["fit", "--config", "quickstart", "--output", str(tmp_path / "run"), f"--ckpt_path={copy}"]
    assert main(words) == 2
    assert f"holds weights, but not the state of a run, which --ckpt_path resumes; begin with --init_from {copy}" in (
        capsys.readouterr().err
    )


@pytest.mark.verify
def test_estimate_takes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that does not know folders, or estimates with other sizes than the folder's."""
    assert main(["estimate", "--residues", "16", "--checkpoint", str(folder)]) == 0
    assert "2 passes a seed, 7 MSA rows, 5 extra ones" in capsys.readouterr().out
