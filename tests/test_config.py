"""Configuration: round trips and misspelt keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from evodsp.config import PRESETS, ModelConfig
from evodsp.errors import UserError


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_round_trip(name: str) -> None:
    """Catches a nested part that a checkpoint would lose."""
    config = ModelConfig.preset(name)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_unknown_key_names_the_nearest() -> None:
    """Catches a misspelt key that is silently ignored."""
    with pytest.raises(UserError, match=r"'evoformer.block'.*'blocks'"):
        ModelConfig.from_dict({"evoformer": {"block": 3}})
    with pytest.raises(UserError, match="Did you mean 'model_1'"):
        ModelConfig.preset("model1")


def test_quickstart_trains_the_small_preset() -> None:
    """Catches sizes in the YAML that drift from the preset of the same name."""
    path = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
    model = yaml.safe_load(path.read_text())["model"]
    sizes = {f.name: model[f.name] for f in dataclasses.fields(ModelConfig) if f.name in model}
    small = ModelConfig.preset("small")
    assert dataclasses.replace(ModelConfig.from_dict(sizes), extra_msa=small.extra_msa) == small
    assert small.extra_msa.msa_head_width == sizes["extra_msa"]["msa_head_width"]


def test_the_package_offers_its_main_classes() -> None:
    """Catches a broken lazy import of `evodsp.AlphaFold` and `evodsp.ModelConfig`."""
    import evodsp

    assert evodsp.ModelConfig is ModelConfig
    assert evodsp.AlphaFold(evodsp.ModelConfig.preset("test")).config == ModelConfig.preset("test")
    with pytest.raises(AttributeError, match="has no attribute 'AlphaFolds'"):
        _ = evodsp.AlphaFolds
