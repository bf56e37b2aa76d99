"""Checkpoints: what was saved is loaded, also by earlier versions; what cannot be, or would harm its reader, is one line."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import (
    check_same_model,
    load_features,
    load_model,
    load_published,
    load_sizes,
    read_checkpoint,
    save_model,
)
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, write_openfold
from evodsp.weights.parameter_file import FORMAT_VERSION, upgrade
from evodsp.weights.untrusted import load_checked

CONFIG = ModelConfig.preset("test")


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    torch.manual_seed(0)
    return AlphaFold(CONFIG)


@pytest.fixture
def saved(model: AlphaFold, tmp_path: Path) -> Path:
    """A checkpoint without a moving average."""
    save_model(path := tmp_path / "saved.ckpt", model)
    return path


def changed(path: Path, **values: Any) -> Path:
    """A copy of the checkpoint with entries replaced."""
    torch.save({**torch.load(path, weights_only=True), **values}, new := path.with_name("changed.ckpt"))
    return new


# ---- What was saved ----


def test_a_file_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second reading of thousands of arrays: to tell whose file it is, or for the features beside the model."""
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **named: (read.append(given), load(*given, **named))[1])
    for reader in (load_model, load_sizes):
        read.clear()
        reader(saved)
        assert len(read) == 1, reader


def test_names_that_wrappers_leave_are_understood(model: AlphaFold, saved: Path) -> None:
    """Catches a checkpoint of a compiled or sharded model whose names are called unknown, and two values of one weight."""
    plain = read_checkpoint(saved)["state_dict"]
    inner = ("blocks.0", "blocks.0._fsdp_wrapped_module")
    wrapped = {
        name.replace("model.", "_forward_module.model._orig_mod.").replace(*inner): value
        for name, value in plain.items()
    }
    loaded = load_model(changed(saved, state_dict=wrapped))
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))
    twice = {**plain, "model._orig_mod.input_embedder.left.bias": plain["model.input_embedder.left.bias"] + 1}
    both = r"'model.input_embedder.left.bias' and 'model._orig_mod.*two names of one array"
    with pytest.raises(UserError, match=both):
        load_model(changed(saved, state_dict=twice))


def test_saving_leaves_one_whole_file(model: AlphaFold, saved: Path) -> None:
    """Catches temporary files that saving leaves behind."""
    save_model(saved, model)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_feature_sizes_come_back_as_saved(model: AlphaFold, saved: Path) -> None:
    """Catches a feature size that is lost (none here is the default, because a lost one would then go unseen), and old
    checkpoints refused because of `ensembles`, which used to be a feature size."""
    assert load_features(saved) == FeatureConfig()
    features = FeatureConfig(
        crop_size=None, msa_clusters=7, extra_msa=5, max_templates=2, recycles=1, masked_msa_fraction=0.25
    )
    save_model(saved, model, features=features)
    assert load_features(saved) == features
    older = {**dataclasses.asdict(FeatureConfig(msa_clusters=7)), "ensembles": 1}
    assert load_features(changed(saved, format_version=1, features=older)) == FeatureConfig(msa_clusters=7)


def test_only_sizes_that_matter_must_agree(saved: Path) -> None:
    """Catches a run refused because of another dropout or recomputation, and one with other sizes accepted."""
    checkpoint = read_checkpoint(saved)
    other = dataclasses.replace(CONFIG.evoformer, msa_dropout=0.5, checkpoint=True)
    check_same_model(saved, checkpoint, dataclasses.replace(CONFIG, evoformer=other))
    other = dataclasses.replace(CONFIG.evoformer, blocks=3)
    with pytest.raises(UserError, match=r"model\.evoformer\.blocks 2, but the config says 3"):
        check_same_model(saved, checkpoint, dataclasses.replace(CONFIG, evoformer=other))


# ---- Version 1 ----

HEADS = {
    "distogram": "distogram", "masked_msa": "masked_msa", "plddt": "plddt", "experimentally_resolved": "resolved",
    "predicted_aligned_error": "pae",
}  # fmt: skip


def version_1_name(name: str) -> str:
    """A parameter's name in version 1, which had no module for the MSA stack and none for all heads."""
    for new, old in HEADS.items():
        name = name.replace(f"heads.{new}.", f"{old}_head.")
    return name.replace(".msa_stack.transition.", ".msa_transition.").replace(".msa_stack.", ".")


@pytest.fixture
def version_1(tmp_path: Path) -> tuple[AlphaFold, Path]:
    """A model, and a version 1 checkpoint of it: raw weights, and a moving average that is larger by 1."""
    heads = dataclasses.replace(CONFIG.heads, experimentally_resolved=True, predicted_aligned_error=True)
    model = AlphaFold(dataclasses.replace(CONFIG, heads=heads))
    path = tmp_path / "old.ckpt"
    average = {name: value + 1 for name, value in model.named_parameters()}
    save_model(path, model, average, FeatureConfig())
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    for key in ("state_dict", "ema_state_dict"):
        checkpoint[key] = {version_1_name(name): value for name, value in checkpoint[key].items()}
    checkpoint["format_version"] = 1
    torch.save(checkpoint, path)
    return model, path


def test_version_1_loads(version_1: tuple[AlphaFold, Path]) -> None:
    """Catches a renamed parameter that is lost, raw and averaged weights exchanged, and `raw` ignored."""
    model, path = version_1
    assert any("blocks.0.msa_transition." in name for name in torch.load(path, weights_only=True)["state_dict"])
    for raw in (True, False):
        loaded = load_model(path, raw=raw)
        assert not loaded.training
        assert loaded.config == model.config
        parameters = dict(loaded.named_parameters())
        for name, value in model.named_parameters():
            assert torch.equal(parameters[name], value if raw else value + 1)


def test_a_training_run_resumes_from_version_1(version_1: tuple[AlphaFold, Path]) -> None:
    """Catches old names or another order in what Lightning loads. Adam's state is assigned by order."""
    model, path = version_1
    checkpoint = torch.load(path, weights_only=True)
    upgrade(checkpoint)
    assert checkpoint["format_version"] == FORMAT_VERSION
    assert list(checkpoint["state_dict"]) == [f"model.{name}" for name in model.state_dict()]


# ---- What is refused, before a model takes memory ----


class Runs:
    """What its pickle says to call."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_torch_is_not_told_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint that runs a command where the variable is set by which torch trusts whatever it loads."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"state_dict": Runs(tmp_path / "ran")}, tmp_path / "x.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_checked(tmp_path / "x.ckpt")
    assert not (tmp_path / "ran").exists()


Weights = dict[str, Any]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_dict": [1]}, "its state_dict is not a dictionary of arrays by name"),
        ({"ema_state_dict": {("a",): 1}}, "its ema_state_dict is not a dictionary of arrays by name"),
        ({"state_dict": {"model.x": 1}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.empty(9, device="meta")}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.eye(9).to_sparse()}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.zeros(1).expand(1 << 40)}}, "its arrays claim to be larger than the file"),
        ({"format_version": FORMAT_VERSION + 1}, f"format version {FORMAT_VERSION + 1}, but"),
        ({"format_version": "9" * 5000}, r"format version '9{20,30}\.\.\.9{20,30}', but"),
        ({"model_config": {1: 2}}, "unreadable model sizes"),
        ({"model_config": {"channels": {"msa": "many"}}}, "unreadable model sizes"),
        ({"model_config": {**CONFIG.to_dict(), "chanels": {}}}, "Did you mean 'channels'"),
        ({"features": {1: 2}}, "unreadable feature sizes"),
        ({"features": {"msa_cluster": 3}}, "'features.msa_cluster'. Did you mean 'msa_clusters'"),
        ({"features": [3]}, "'features' is a list"),
    ],
)
def test_entries_that_nobody_wrote(values: dict[str, Any], message: str, saved: Path, no_models: None) -> None:
    """Catches the AttributeError of a number among the names, arrays that are numbers of nothing, and unknown versions or sizes
    that are ignored."""
    path = changed(saved, **values)
    with pytest.raises(UserError, match=message) as error:
        load_features(path) if "features" in values else load_model(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, name: w.pop(name), "no array '{}'"),
        (lambda w, name: w.update({"model.extra": torch.zeros(1)}), "no parameter for array 'extra'"),
        (lambda w, name: w.update({name: torch.zeros(99)}), "'{}' has the shape"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[Weights, str], object], message: str, saved: Path, no_models: None
) -> None:
    """Catches parameters that silently keep their random initial values."""
    weights = torch.load(saved, weights_only=True)["state_dict"]
    change(weights, name := min(weights))
    with pytest.raises(UserError, match=message.format(name.removeprefix("model."))):
        load_model(changed(saved, state_dict=weights))


@pytest.mark.parametrize(
    ("stack", "change", "message"),
    [
        ("evoformer", {"blocks": 10**9}, "evoformer.blocks is 1000000000, but no model has more than 512"),
        ("structure_module", {"angle_blocks": 10**9}, "angle_blocks is 1000000000, but no model"),
        ("evoformer", {"blocks": 3}, "no array 'evoformer.blocks.2"),
        ("channels", {"pair": 10**6}, "has the shape"),
        ("channels", {"pair": 10**15}, "unreadable model sizes"),
    ],
)
def test_sizes_are_compared_with_the_arrays_before_a_model_is_built(
    stack: str, change: dict[str, int], message: str, saved: Path, no_models: None
) -> None:
    """Catches a small file that asks for a model of terabytes."""
    sizes = dataclasses.replace(CONFIG, **{stack: dataclasses.replace(getattr(CONFIG, stack), **change)}).to_dict()
    with pytest.raises(UserError, match=message):
        load_model(changed(saved, model_config=sizes))


def test_a_parameter_file_is_compared_before_a_model_is_built(
    model: AlphaFold, tmp_path: Path, no_models: None
) -> None:
    """Catches a model built with as many blocks as a file claims to have."""
    arrays = export_deepmind(model)
    stacked = next(key for key in arrays if "evoformer_iteration" in key and "extra" not in key)
    write_npz(tmp_path / "x.npz", {**arrays, stacked: arrays[stacked][:0]})
    tensors = export_openfold(model)
    first = next(iter(tensors))
    write_openfold(tmp_path / "x.pt", {**tensors, first: torch.zeros(1)})
    write_openfold(tmp_path / "y.pt", {**tensors, first: torch.zeros(1).expand(1 << 40)})
    for name, message in {"x.npz": "has the shape", "x.pt": "has the shape", "y.pt": "claim to be larger"}.items():
        with pytest.raises(UserError, match=message):
            load_published(tmp_path / name, "test")


def test_an_average_without_arrays_is_no_reason_to_take_other_weights(saved: Path) -> None:
    """Catches a moving average that a file has lost, and the raw weights taken in its place without a word."""
    path = changed(saved, ema_state_dict={})
    with pytest.raises(UserError, match=r"changed\.ckpt.*no array"):
        load_model(path)
    assert load_model(path, raw=True).config == CONFIG


def test_a_bit_that_is_lost_is_named(model: AlphaFold, saved: Path) -> None:
    """Catches predictions with wrong weights, a traceback where the name of a parameter is damaged, and one for a file that is
    cut short."""
    content = saved.read_bytes()
    numbers = next(iter(model.parameters())).detach().numpy().tobytes()
    for at in (content.index(numbers) + 3, content.index(b"structure_module") + 1):
        broken = bytearray(content)
        broken[at] ^= 4
        saved.write_bytes(broken)
        with pytest.raises(UserError, match=r"saved\.ckpt: damaged \(.* has another checksum\); copy it again"):
            load_model(saved)
    saved.write_bytes(content[:-1000])
    with pytest.raises(UserError, match="cut short"):
        read_checkpoint(saved)
