"""Checkpoints of earlier versions still load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.parameter_file import FORMAT_VERSION, upgrade

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
    config = ModelConfig.preset("test")
    heads = dataclasses.replace(config.heads, experimentally_resolved=True, predicted_aligned_error=True)
    model = AlphaFold(dataclasses.replace(config, heads=heads))
    path = tmp_path / "old.ckpt"
    average = {name: value + 1 for name, value in model.named_parameters()}
    save_model(path, model, average, FeatureConfig())
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    for key in ("state_dict", "ema_state_dict"):
        checkpoint[key] = {version_1_name(name): value for name, value in checkpoint[key].items()}
    checkpoint["format_version"] = 1
    torch.save(checkpoint, path)
    return model, path


@pytest.mark.parametrize("raw", [True, False])
def test_version_1_loads(version_1: tuple[AlphaFold, Path], raw: bool) -> None:
    """Catches a renamed parameter that is lost, or that is read from the wrong set of weights."""
    model, path = version_1
    assert any("blocks.0.msa_transition." in name for name in torch.load(path, weights_only=True)["state_dict"])
    loaded = dict(load_model(path, raw=raw).named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(loaded[name], value if raw else value + 1, rtol=0, atol=0)


def test_a_training_run_resumes_from_version_1(version_1: tuple[AlphaFold, Path]) -> None:
    """Catches old names or another order in what Lightning loads. Adam's state is assigned by order."""
    model, path = version_1
    checkpoint = torch.load(path, weights_only=True)
    upgrade(checkpoint)
    assert checkpoint["format_version"] == FORMAT_VERSION
    assert list(checkpoint["state_dict"]) == [f"model.{name}" for name in model.state_dict()]


def test_a_later_version_is_refused(version_1: tuple[AlphaFold, Path]) -> None:
    """Catches weights of an unknown, later version that are loaded anyway."""
    _, path = version_1
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "format_version": FORMAT_VERSION + 1}, path)
    with pytest.raises(UserError, match=f"format version {FORMAT_VERSION + 1}"):
        load_model(path)
