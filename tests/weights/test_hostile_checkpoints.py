"""Checkpoints that were made to harm whoever reads them: each is one line, at once, before a model takes memory."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_features, load_model, load_published
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, write_openfold
from evodsp.weights.untrusted import load_checked

CONFIG = ModelConfig.preset("test")


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    torch.manual_seed(0)
    return AlphaFold(CONFIG)


def checkpoint_of(model: AlphaFold, **values: Any) -> dict[str, Any]:
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"format_version": 2, "model_config": model.config.to_dict(), "state_dict": weights, **values}


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_dict": {1: 2}}, "its state_dict is not a dictionary of arrays by name"),
        ({"state_dict": [1]}, "its state_dict is not a dictionary of arrays by name"),
        ({"ema_state_dict": {("a",): 1}}, "its ema_state_dict is not a dictionary of arrays by name"),
        ({"state_dict": {"model.x": 1}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.empty(9, device="meta")}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.eye(9).to_sparse()}}, "'model.x' is not an array of floats"),
        ({"state_dict": {"model.x": torch.zeros(1).expand(1 << 40)}}, "its arrays claim to be larger than the file"),
        ({"format_version": "9" * 5000}, r"format version '9{20,30}\.\.\.9{20,30}', but"),
        ({"model_config": {1: 2}}, "unreadable model sizes"),
        ({"model_config": {"channels": {"msa": "many"}}}, "unreadable model sizes"),
        ({"features": {1: 2}}, "unreadable feature sizes"),
    ],
)
def test_entries_of_other_types(
    values: dict[str, Any], message: str, model: AlphaFold, tmp_path: Path, no_models: None
) -> None:
    """Catches the AttributeError of a number among the names, and arrays that are numbers of nothing."""
    torch.save(checkpoint_of(model, **values), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=message) as error:
        load_features(tmp_path / "x.ckpt") if "features" in values else load_model(tmp_path / "x.ckpt")
    assert len(str(error.value)) < 500


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
    stack: str, change: dict[str, int], message: str, model: AlphaFold, tmp_path: Path, no_models: None
) -> None:
    """Catches a small file that asks for a model of terabytes."""
    sizes = dataclasses.replace(CONFIG, **{stack: dataclasses.replace(getattr(CONFIG, stack), **change)}).to_dict()
    torch.save(checkpoint_of(model, model_config=sizes), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "x.ckpt")


def test_a_parameter_file_is_compared_before_a_model_is_built(
    model: AlphaFold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_models: None
) -> None:
    """Catches a model built with as many blocks as a file claims to have."""
    arrays = export_deepmind(model)
    stacked = next(key for key in arrays if "evoformer_iteration" in key and "extra" not in key)
    arrays = {key: value[:0] if key == stacked else value for key, value in arrays.items()}
    write_npz(tmp_path / "x.npz", arrays)
    with pytest.raises(UserError, match="has the shape"):
        load_published(tmp_path / "x.npz", "test")
    tensors = export_openfold(model)
    tensors[next(iter(tensors))] = torch.zeros(1)
    write_openfold(tmp_path / "x.pt", tensors)
    with pytest.raises(UserError, match="has the shape"):
        load_published(tmp_path / "x.pt", "test")
    bomb = {
        key: torch.zeros(1).expand(1 << 40) if key == next(iter(tensors)) else value for key, value in tensors.items()
    }
    write_openfold(tmp_path / "y.pt", bomb)
    with pytest.raises(UserError, match="its arrays claim to be larger than the file"):
        load_published(tmp_path / "y.pt", "test")


def test_an_average_without_arrays_is_no_reason_to_take_other_weights(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a moving average that a file has lost, and the raw weights taken in its place without a word."""
    torch.save(checkpoint_of(model, ema_state_dict={}), path := tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"x\.ckpt.*no array"):
        load_model(path)
    assert load_model(path, raw=True).config == CONFIG
