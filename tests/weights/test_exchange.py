"""A trained model survives export to OpenFold's and DeepMind's formats, and parameter files can be used directly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import is_parameter_file, load_features, load_model, save_model
from evodsp.weights.config import published_features
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, write_openfold
from tests.builders.weights import random_model, same

ROOT = Path(__file__).resolve().parents[2]
TEST = ModelConfig.preset("test")
FORMATS = [("deepmind", ".npz"), ("openfold", ".pt"), ("openfold-legacy", ".pt")]


def evodsp(*words: str | Path) -> None:
    assert main([str(word) for word in words]) == 0, words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `make demo` after two training steps, with noise added because many parameters start at zero."""
    folder = tmp_path_factory.mktemp("demo")
    rows = [f"--data.{part}.{kind}=4" for part in ("train", "validation") for kind in ("msa_clusters", "extra_msa")]
    config = (ROOT / "configs" / "quickstart.yaml").read_text().replace("data/", f"{ROOT}/data/")
    (folder / "quickstart.yaml").write_text(config)
    few = [f"--model.{stack}.blocks={blocks}" for stack, blocks in (("evoformer", 2), ("extra_msa", 1))]
    few += ["--model.structure_module.iterations=1", "--data.train.crop_size=16", "--trainer.limit_val_batches=0"]
    evodsp("fit", "--config", folder / "quickstart.yaml", "--output", folder, "--trainer.max_steps=2", *rows, *few)
    last = folder / "checkpoints" / "last.ckpt"
    model, generator = load_model(last), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_model(folder / "trained.ckpt", model, features=load_features(last))
    return folder / "trained.ckpt"


def predicted(checkpoint: Path, output: Path) -> Path:
    """The folder of a prediction with this checkpoint."""
    sizes = ["--msa_clusters=4", "--extra_msa=4", "--recycles=0", "--device=cpu"]
    inputs: list[str | Path] = [
        "--fasta",
        ROOT / "data/fasta/s001_A.fasta",
        "--alignments",
        ROOT / "data/alignments/s001_A",
    ]
    evodsp("predict", *inputs, "--checkpoint", checkpoint, "--output", output, *sizes)
    return output / "s001_A"


def structure_lines(folder: Path) -> list[str]:
    """The structure file without the fingerprint of the parameters' file."""
    lines = (folder / "seed_0.cif").read_text().splitlines()
    return [line for line in lines if line.split()[3:4] != ["checkpoint"]]


@pytest.mark.verify
def test_a_trained_model_predicts_the_same_after_every_format(trained: Path, tmp_path: Path) -> None:
    """Catches a bit or a size that is lost, and parameters that are exchanged, in export and import."""
    before, model, features = predicted(trained, tmp_path / "before"), load_model(trained), load_features(trained)
    for fused in ([], ["--fused"]):
        for name, suffix in FORMATS:
            out, back = tmp_path / f"{name}{suffix}", tmp_path / f"{name}.ckpt"
            evodsp(
                "weights", "export", "--checkpoint", trained, "--output", out, "--format", name, "--overwrite", *fused
            )
            evodsp("weights", "import", "--checkpoint", out, "--output", back, "--like", trained, "--overwrite")
            found = load_model(back)
            assert found.config == model.config
            assert load_features(back) == features != FeatureConfig()
            assert same(model, found)
            if not fused:
                after = predicted(back, tmp_path / name)
                assert (before / "seed_0_scores.json").read_bytes() == (after / "seed_0_scores.json").read_bytes()
                assert structure_lines(before) == structure_lines(after)
    assert (before / "seed_0.cif").stat().st_size > 10_000


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


def test_a_preset_has_no_place_beside_a_checkpoint(tmp_path: Path) -> None:
    """Catches `--preset` silently ignored."""
    save_model(path := tmp_path / "x.ckpt", AlphaFold(TEST))
    for load in (load_model, load_features):
        with pytest.raises(UserError, match="holds its model's sizes itself"):
            load(path, preset="test")


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
