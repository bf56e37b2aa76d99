"""What the methods communicate, against the paper's tables 3, 8 and 9."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from scripts.paper.config import TransformerConfig
from scripts.paper.methods import METHODS
from scripts.paper.tests.runs import Case, run_on_fake_ranks, traffic_of_formulas

pytestmark = pytest.mark.verify

RANKS = 8
CASE = Case(TransformerConfig(layers=2, width=16, heads=8), (1, 4, 8, 4, 16))

# Per layer (two blocks): how many collectives of which volume, in units of M. Table 9 counts Megatron-SP's in pairs.
FORWARD = {
    "one_device": {},
    "dsp": {"all-to-all": (2, Fraction(1, RANKS))},
    "ulysses": {"all-to-all": (4, Fraction(1, RANKS))},
    "megatron_tp": {"all-reduce": (4, 2)},
    "megatron_sp": {"all-gather": (4, 1), "reduce-scatter": (4, 1)},
    "ring": {"send-receive": (2, 1)},
}
BACKWARD = FORWARD | {
    "megatron_sp": {"all-gather": (8, 1), "reduce-scatter": (4, 1)},  # gathers the inputs of linear layers again
    "ring": {"send-receive": (4, 1)},  # keys, values, and their gradients
}
RECOMPUTED = FORWARD | {
    "dsp": {},
    "megatron_sp": {"all-gather": (4, 1), "reduce-scatter": (2, 1)},  # a block's last one is not needed
}
VOLUMES = {
    "dsp": Fraction(2, RANKS),
    "ulysses": Fraction(4, RANKS),
    "megatron_tp": 8,
    "megatron_sp": 8,
    "ring": 2,
    "one_device": 0,
}
"""The paper's table 3."""


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_moves_what_the_paper_says(name: str) -> None:
    """Catches a collective too many or too few, on the wrong tensor, or entered in the wrong phase."""
    config = dataclasses.replace(CASE.config, checkpoint=True)
    cases = [Case(dataclasses.replace(config, layers=layers), CASE.latents) for layers in (2, 3)]
    two, three = (run_on_fake_ranks(name, case, RANKS) for case in cases)
    two.subtract(three)
    layer = {key: -count for key, count in two.items() if count}
    expected = {
        (phase, kind, share * CASE.sequence): count
        for phase, table in (("forward", FORWARD), ("backward", BACKWARD), ("recompute", RECOMPUTED))
        for kind, (count, share) in table[name].items()
    }
    assert layer == expected
    assert sum(key[2] * count for key, count in layer.items() if key[0] == "forward") == VOLUMES[name] * CASE.sequence
    assert three == traffic_of_formulas(name, cases[1], RANKS)


def test_only_switches_between_blocks_are_not_recomputed() -> None:
    """Catches a checkpoint around the hooks that switch: DSP would launch its all-to-alls again."""
    case = dataclasses.replace(CASE, config=dataclasses.replace(CASE.config, checkpoint=True))
    assert run_on_fake_ranks("dsp", case, RANKS) == run_on_fake_ranks("dsp", CASE, RANKS)
