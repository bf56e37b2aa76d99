"""`evodsp weights import` and `export`: a model survives every format, and parameter files can be used directly."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import is_parameter_file, load_features, load_model, save_model
from evodsp.weights.config import preset_of, published_features
from evodsp.weights.deepmind import export_deepmind, read_npz, write_npz
from evodsp.weights.openfold import export_openfold, write_openfold
from tests.builders.weights import random_model, same
from tests.shared import load


def weights(*words: str | Path) -> int:
    return main(["weights", *map(str, words)])


def test_golden_parameters_through_both_commands(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an array dropped, duplicated, transposed, split at the wrong head, or of another shape than DeepMind's, commands
    that lose or change a bit, or write other sizes than the file's into the checkpoint."""
    checkpoint, output = tmp_path / "made" / "model.ckpt", tmp_path / "made" / "params.npz"
    assert (
        weights("import", "--checkpoint", golden / "params.npz", "--output", checkpoint, "--preset", "model_1_ptm") == 0
    )
    assert "model_1_ptm" in capsys.readouterr().err
    config = load_model(checkpoint).config
    assert (config.evoformer.blocks, config.extra_msa.blocks, config.templates.blocks) == (2, 1, 1)
    assert load_features(checkpoint) == published_features("model_1_ptm")
    assert weights("export", "--checkpoint", checkpoint, "--output", output) == 0
    expected, found = load(golden / "params.npz"), read_npz(output)
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        assert found[key].tobytes() == value.tobytes(), key
    assert {path.name for path in checkpoint.parent.iterdir()} == {"model.ckpt", "params.npz"}


def test_the_average_is_exported_unless_raw_is_asked_for(tmp_path: Path) -> None:
    """Catches averaged and raw weights exchanged on export."""
    model = AlphaFold(ModelConfig.preset("test"))
    save_model(path := tmp_path / "x.ckpt", model, {name: value + 1 for name, value in model.named_parameters()})
    assert weights("export", "--checkpoint", path, "--output", tmp_path / "raw.npz", "--raw", "--fused") == 0
    assert weights("export", "--checkpoint", path, "--output", tmp_path / "average.npz") == 0
    raw, average = read_npz(tmp_path / "raw.npz"), read_npz(tmp_path / "average.npz")
    expected = export_deepmind(model, fused=True)
    assert raw.keys() == expected.keys()
    assert all(np.array_equal(raw[key], value) for key, value in expected.items())
    key = "alphafold/alphafold_iteration/evoformer/left_single//bias"
    np.testing.assert_allclose(average[key], raw[key] + 1)


def test_mistakes_exit_with_2_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, an overwritten file, and a file read with another model's sizes."""
    write_npz(params := tmp_path / "mine.npz", export_deepmind(AlphaFold(ModelConfig.preset("test"))))
    (taken := tmp_path / "taken.ckpt").write_text("precious")
    new, file = tmp_path / "new.ckpt", tmp_path / "new.npz"
    config = ModelConfig.preset("test")
    save_model(existing := tmp_path / "existing.ckpt", AlphaFold(config))
    longer = dataclasses.replace(config, evoformer=dataclasses.replace(config.evoformer, blocks=3))
    save_model(deeper := tmp_path / "deeper.ckpt", AlphaFold(longer))
    for words, expected in {
        ("import", "--checkpoint", params, "--output", new): "does not say which model it is; give --preset",
        ("import", "--checkpoint", params, "--output", new, "--preset", "tst"): "Did you mean 'test'?",
        ("import", "--checkpoint", params, "--output", new, "--preset", "small"): "but the model needs",
        ("import", "--checkpoint", params, "--output", taken, "--preset", "test"): "exists already",
        ("import", "--checkpoint", params, "--output", tmp_path, "--preset", "test"): "is a folder",
        ("import", "--checkpoint", taken, "--output", new, "--preset", "test"): "neither DeepMind's",
        ("import", "--checkpoint", params, "--output", new, "--preset", "test", "--like", existing): "leave one out",
        ("import", "--checkpoint", params, "--output", new, "--like", deeper): "but the model needs",
        ("import", "--checkpoint", params, "--output", new, "--like", params): "NumPy's .npz, not a checkpoint",
        ("import", "--checkpoint", existing, "--output", new): "is already an evodsp checkpoint",
        ("export", "--checkpoint", taken, "--output", file): "neither a checkpoint nor a parameter file",
        ("export", "--checkpoint", params, "--output", file): "does not say which model it is; give --preset",
        ("export", "--checkpoint", existing, "--output", file, "--preset", "test"): "holds its model's sizes itself",
        ("export", "--checkpoint", existing, "--output", new): "end it in .npz or .pt, or give --format",
        ("export", "--checkpoint", existing, "--output", file, "--format", "openfld"): "openfold-legacy",
    }.items():
        assert weights(*words) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("evodsp: error: "), words
        assert error.count("\n") == 1
        assert expected in error
    assert not new.exists()
    assert not file.exists()
    assert taken.read_text() == "precious"
    assert weights("import", "--checkpoint", params, "--output", taken, "--preset", "test", "--overwrite") == 0
    assert load_model(taken).config == ModelConfig.preset("test")


@pytest.mark.verify_but("nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_numbers_that_are_not_finite_are_refused_in_every_format(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a model of NaN that is imported or loaded without a word, also one of which float32 makes infinity."""
    model = AlphaFold(ModelConfig.preset("test"))
    save_model(like := tmp_path / "like.ckpt", model)
    key, name = "alphafold/alphafold_iteration/evoformer/left_single//bias", "input_embedder.linear_tf_z_i.bias"
    arrays, tensors = export_deepmind(model), export_openfold(model)
    write_npz(npz := tmp_path / "params.npz", {**arrays, key: np.full(arrays[key].shape, value)})
    torch.save({**tensors, name: torch.full_like(tensors[name], value, dtype=torch.float64)}, pt := tmp_path / "of.pt")
    for path, array in ((npz, key), (pt, name)):
        assert weights("import", "--checkpoint", path, "--like", like, "--output", tmp_path / "new.ckpt") == 2
        assert f"{path}: '{array}' holds numbers that are not finite" in capsys.readouterr().err
    with torch.no_grad():
        model.input_embedder.left.bias.copy_(torch.tensor(value))
    save_model(own := tmp_path / "own.ckpt", model)
    assert weights("export", "--checkpoint", own, "--output", tmp_path / "new.npz") == 2
    assert f"{own}: 'input_embedder.left.bias' holds numbers that are not finite" in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_the_preset_is_read_off_the_name() -> None:
    """Catches model_1 taken for model_1_ptm, and a multimer file taken for a monomer's."""
    for name in ("model_1", "model_1_ptm", "model_5_ptm", "model_1_multimer", "model_3_multimer_v3"):
        assert preset_of(Path(f"params/params_{name}.npz")) == name
    for name in ("params_model_6", "params_model_1_multimer_v4", "params_model_12", "weights"):
        with pytest.raises(UserError, match="--preset"):
            preset_of(Path(f"{name}.npz"))


def test_feature_sizes_of_the_published_models() -> None:
    """Catches a published model with another model's feature sizes."""
    sizes = {name: published_features(name) for name in ("model_1", "model_2_ptm", "model_3", "model_4", "model_5_ptm")}
    assert [f.extra_msa for f in sizes.values()] == [5120, 1024, 5120, 5120, 1024]
    assert [f.max_templates for f in sizes.values()] == [4, 4, 0, 0, 0]
    assert {(f.msa_clusters, f.recycles, f.crop_size) for f in sizes.values()} == {(512, 3, None)}
    names = "model_1_multimer_v3", "model_4_multimer_v3", "model_1_multimer_v2", "model_5_multimer"
    multimer = [published_features(name) for name in names]
    assert [(f.msa_clusters, f.extra_msa, f.recycles) for f in multimer] == [
        (512, 2048, 20), (512, 1152, 20), (256, 1152, 3), (256, 1152, 3),
    ]  # fmt: skip
    assert published_features("small") == FeatureConfig()


TEST = ModelConfig.preset("test")
FORMATS = [("deepmind", ".npz"), ("openfold", ".pt"), ("openfold-legacy", ".pt")]


def evodsp(*words: str | Path) -> None:
    assert main([str(word) for word in words]) == 0, words


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "suffix"), FORMATS)
def test_a_model_is_the_same_after_every_format(name: str, suffix: str, fused: bool, tmp_path: Path) -> None:
    """Catches a bit or a size that is lost, and parameters that are exchanged, in export and import."""
    model, features = random_model(TEST, 0), FeatureConfig(msa_clusters=7, extra_msa=5, recycles=1)
    save_model(own := tmp_path / "own.ckpt", model, features=features)
    out, back = tmp_path / f"out{suffix}", tmp_path / "back.ckpt"
    words = ["--checkpoint", own, "--output", out, "--format", name, *["--fused"][: int(fused)]]
    evodsp("weights", "export", *words)
    evodsp("weights", "import", "--checkpoint", out, "--output", back, "--like", own)
    assert load_model(back).config == TEST
    assert load_features(back) == features
    assert same(load_model(back), model)


@pytest.mark.verify_but("deepmind-.npz")
@pytest.mark.parametrize(("name", "suffix"), FORMATS)
def test_a_parameter_file_is_used_as_it_is(name: str, suffix: str, tmp_path: Path) -> None:
    """Catches `predict --checkpoint params_model_1_ptm.npz` refused, and a file's kind decided by its suffix."""
    model = random_model(TEST, 0)
    for path in (tmp_path / f"x{suffix}", tmp_path / "x.ckpt"):
        if name == "deepmind":
            write_npz(path, export_deepmind(model))
        else:
            write_openfold(path, export_openfold(model, legacy=name == "openfold-legacy"))
        assert is_parameter_file(path)
        loaded = load_model(path, preset="test")
        assert not loaded.training
        assert same(loaded, model)
        assert load_features(path, preset="model_2_ptm") == published_features("model_2_ptm")
        with pytest.raises(UserError, match="give --preset"):
            load_model(path)
        with pytest.raises(UserError, match="give --preset"):
            load_features(path)
        with pytest.raises(UserError, match="Did you mean 'test'"):
            load_features(path, preset="tst")
        with pytest.raises(UserError, match="is it another model's file"):
            load_model(path, preset="small")


def test_the_name_of_a_parameter_file_says_the_preset(tmp_path: Path) -> None:
    """Catches the feature sizes of another model than the file's name says."""
    write_openfold(tmp_path / "x.pt", export_openfold(AlphaFold(TEST)))
    for name, preset in (("finetuning_ptm_2", "model_1_ptm"), ("finetuning_no_templ_1", "model_3")):
        shutil.copy(tmp_path / "x.pt", path := tmp_path / f"{name}.pt")
        assert load_features(path) == published_features(preset)
        with pytest.raises(UserError, match=r"the model needs|no array"):  # the file is narrower than the preset
            load_model(path)


def test_a_file_is_converted_without_a_checkpoint_between(tmp_path: Path) -> None:
    """Catches bits lost, and a preset not passed on, in a conversion from DeepMind's format to OpenFold's."""
    model = random_model(TEST, 0)
    write_npz(tmp_path / "a.npz", export_deepmind(model))
    evodsp("weights", "export", "--checkpoint", tmp_path / "a.npz", "--preset=test", "--output", tmp_path / "b.pt")
    evodsp("weights", "export", "--checkpoint", tmp_path / "b.pt", "--preset=test", "--output", tmp_path / "c.npz")
    assert same(load_model(tmp_path / "c.npz", preset="test"), model)


def test_the_weights_of_the_last_step_of_openfolds_training(tmp_path: Path) -> None:
    """Catches `--raw` ignored on import."""
    raw, averaged = (export_openfold(random_model(TEST, seed)) for seed in (0, 1))
    lightning = {f"model.{key}": value for key, value in raw.items()}
    torch.save({"state_dict": lightning, "ema": {"params": averaged}}, path := tmp_path / "x.pt")
    words = ("weights", "import", "--checkpoint", path, "--preset=test", "--output")
    evodsp(*words, tmp_path / "averaged.ckpt")
    evodsp(*words, tmp_path / "raw.ckpt", "--raw")
    assert same(load_model(tmp_path / "raw.ckpt"), random_model(TEST, 0))
    assert same(load_model(tmp_path / "averaged.ckpt"), random_model(TEST, 1))
