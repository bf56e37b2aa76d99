"""Configuration: round trips and misspelt keys."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest

from evodsp.config import PRESETS, EvoformerConfig, LossConfig, ModelConfig, field_names
from evodsp.errors import SettingError, UserError
from evodsp.training.config import DataConfig, DistillationConfig, OptimizerConfig, RunConfig, TrainingConfig


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


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("evoformer", "msa_heads", 0, "model.evoformer.msa_heads is 0, but must be at least 1"),
        ("extra_msa", "pair_head_width", -3, "model.extra_msa.pair_head_width is -3, but must be at least 1"),
        ("evoformer", "blocks", -1, "model.evoformer.blocks is -1, but must be at least 0"),
        ("evoformer", "msa_dropout", 1.0, "model.evoformer.msa_dropout is 1.0, but must be at least 0 and below 1"),
        ("templates", "pair_dropout", -0.1, "model.templates.pair_dropout is -0.1, but must be at least 0 and below 1"),
        ("structure_module", "dropout", float("nan"), "model.structure_module.dropout is nan"),
        ("channels", "single", 0, "model.channels.single is 0, but must be at least 1"),
        ("heads", "plddt_bins", 1, "model.heads.plddt_bins is 1, but must be at least 2"),
        ("heads", "pae_max_error", 0.0, "model.heads.pae_max_error is 0.0, but must be above 0"),
        ("embedder", "recycle_min_distance", 30.0, "is 30.0, but must be below model.embedder.recycle_max_distance"),
    ],
)
def test_a_number_out_of_range(part: str, name: str, value: float, said: str) -> None:
    """Catches a traceback from the middle of the model, or a model that trains on nonsense."""
    config = ModelConfig()
    with pytest.raises(UserError) as caught:
        dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{name: value})})
    assert said in str(caught.value)


def test_blocks_that_are_recomputed() -> None:
    """Catches a number of blocks below 0, and a setting that is one but is refused."""
    for allowed in (True, False, "auto", 0, 7):
        assert ModelConfig(evoformer=EvoformerConfig(checkpoint=allowed)).evoformer.checkpoint == allowed
    with pytest.raises(UserError) as caught:
        ModelConfig(evoformer=EvoformerConfig(checkpoint=-1))
    said = "model.evoformer.checkpoint is -1, but must be true, false, auto, or a number of blocks"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "settings", [LossConfig, OptimizerConfig, TrainingConfig, DataConfig, DistillationConfig, RunConfig]
)
def test_every_number_has_a_range(settings: type) -> None:
    """Catches a new setting without a range: a run that trains on nonsense."""
    hints = get_type_hints(settings)
    kinds = {name: {int, float} & {hints[name], *get_args(hints[name])} for name in field_names(settings)}
    nonsense = [(name, kind(-1)) for name, found in kinds.items() for kind in found]
    nonsense += [(name, math.nan) for name, found in kinds.items() if float in found]
    assert nonsense
    for name, value in nonsense:
        with pytest.raises(SettingError, match=rf"{name} is {value}, but must be "):
            settings(**{name: value})


def test_the_smallest_numbers_are_allowed() -> None:
    """Catches a bound that is one too high."""
    stack = EvoformerConfig(blocks=0, msa_heads=1, msa_dropout=0.0)
    assert ModelConfig(evoformer=stack).evoformer == stack


def test_the_ranges_are_for_sizes_only() -> None:
    """Catches the bounds of sizes applied to the optimizer's numbers: no warm-up is a warm-up of 0 steps."""
    config = TrainingConfig(optimizer=OptimizerConfig(warmup_samples=0, total_samples=0, drop_samples=0))
    assert config.optimizer.warmup_samples == 0


def test_the_package_offers_its_main_classes() -> None:
    """Catches a broken lazy import of `evodsp.AlphaFold` and `evodsp.ModelConfig`."""
    import evodsp

    assert evodsp.ModelConfig is ModelConfig
    assert evodsp.AlphaFold(evodsp.ModelConfig.preset("test")).config == ModelConfig.preset("test")
    with pytest.raises(AttributeError, match="has no attribute 'AlphaFolds'"):
        _ = evodsp.AlphaFolds
