"""Configuration: round trips and misspelt keys."""

from __future__ import annotations

import pytest

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
