"""A configuration, a model or sizes that do not fit raise a UserError that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.errors import UserError
from scripts.benchmarks.fake_ranks import fake_group
from scripts.paper.config import TransformerConfig
from scripts.paper.methods import METHODS, Groups, method_named
from scripts.paper.transformer import Transformer

pytestmark = pytest.mark.verify

CONFIG = TransformerConfig(layers=1, width=12, heads=3)
LATENTS = (1, 4, 5, 4, 4)


@pytest.mark.parametrize("name", ["ulysses", "megatron_sp", "megatron_tp"])
def test_heads_must_be_divisible(name: str) -> None:
    """Catches heads that are cut in two, or dropped, where a method gives each rank whole heads."""
    words = f"{name} on 2 ranks: the number of heads is 3, but must be a multiple .* use one of 1, 3 ranks, or dsp"
    with pytest.raises(UserError, match=words):
        METHODS[name].check(CONFIG, (4, 4), 2)
    with fake_group(2) as group, pytest.raises(UserError, match=words):
        METHODS[name].apply(Transformer(CONFIG), Groups(group.handle))


@pytest.mark.parametrize("name", ["ulysses", "megatron_sp", "ring"])
def test_time_must_be_divisible(name: str) -> None:
    """Catches shards of different sizes where a method takes them to be equal: ranks would exchange wrong data."""
    words = f"{name} on 3 ranks: the number of time steps is 5, but must be a multiple .* use one of 1, 5 ranks, or dsp"
    with pytest.raises(UserError, match=words):
        METHODS[name].check(CONFIG, (5, 4), 3)
    with fake_group(3) as group:
        parallel = METHODS[name].apply(Transformer(CONFIG), Groups(group.handle))
        with pytest.raises(UserError, match=words):
            parallel(torch.zeros(LATENTS))


@pytest.mark.parametrize("name", ["one_device", "dsp"])
def test_dsp_has_no_such_limit(name: str) -> None:
    """Catches a limit that the method does not have."""
    METHODS[name].check(CONFIG, (5, 4), 4)


def test_unknown_method() -> None:
    """Catches a KeyError instead of the nearest name."""
    with pytest.raises(
        UserError, match=r"there is no method 'ulises'; use one of one_device, dsp, .* Did you mean 'ulysses'\?"
    ):
        method_named("ulises")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        ({"layers": "2"}, "layers is '2', but must be a whole number"),
        ({"heads": 2.0}, "heads is 2.0, but must be a whole number"),
        ({"width": 14}, "width is 14, but must be even and a multiple of heads, which is 3"),
        ({"width": 9}, "width is 9, but must be even"),
        ({"dropout": 1.0}, "dropout is 1.0, but must be at least 0 and below 1"),
        ({"axes": ["space", "time"]}, r"axes is \['space', 'time'\], but must be \['time', 'space'\] or"),
        ({"axes": "time"}, "axes is 'time', but must be a list"),
        ({"patch": [1, 2]}, r"patch is \[1, 2\], but must be three sizes of at least 1"),
        ({"patch": [1, 0, 2]}, r"patch is \[1, 0, 2\], but must be three sizes"),
        ({"checkpoint": "no"}, "checkpoint is 'no', but must be true or false"),
        ({"head": 3}, r"unknown config key 'head'. Did you mean 'heads'\?"),
    ],
)
def test_wrong_settings(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Catches a setting that fails later, deep inside torch, or is silently ignored."""
    values = {"layers": 1, "width": 12, "heads": 3} | changes
    path = tmp_path / "model.yaml"
    path.write_text("".join(f"{key}: {value!r}\n" for key, value in values.items()))
    with pytest.raises(UserError, match=f"model.yaml: {words}"):
        TransformerConfig.load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers: 1\nwidth: 12\n", "lacks the setting 'heads'; add it"),
        ("- 1\n", "has no settings; give key: value lines"),
        ("layers: [1\n", "not YAML"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str | None, words: str) -> None:
    """Catches a traceback for a file that is missing or of another kind."""
    path = tmp_path / "model.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        TransformerConfig.load(path)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 5, 4, 4), r"latents have the shape \[1, 3, 5, 4, 4\], but must be \[B, 4, T, H, W\]"),
        ((4, 5, 4, 4), "latents have the shape"),
        ((1, 4, 5, 4, 3), r"patches of \[1, 2, 2\] do not divide; crop or pad"),
    ],
)
def test_latents_that_do_not_fit(shape: tuple[int, ...], words: str) -> None:
    """Catches pixels that are dropped, or an error of torch's reshape."""
    with pytest.raises(UserError, match=words):
        CONFIG.token_sizes(shape)
