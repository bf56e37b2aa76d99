"""Models and checkpoint files for the tests of weights."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evodsp.config import HeadsConfig, ModelConfig, TemplateConfig
from evodsp.model.alphafold import AlphaFold

Arrays = dict[str, Tensor]
# All sizes differ, so that a transposed or wrongly split axis is found.
SMALL = dataclasses.replace(
    ModelConfig.preset("test"),
    templates=TemplateConfig(
        enabled=True, channels=15, blocks=3, pair_heads=3, pair_head_width=7, triangle_channels=11,
        attention_heads=2, attention_head_width=13,
    ),
    heads=HeadsConfig(plddt_channels=8, experimentally_resolved=True, predicted_aligned_error=True),
)  # fmt: skip


def random_model(config: ModelConfig, seed: int) -> AlphaFold:
    """A model with random parameters. Initialisation sets many to zero or one, which would hide exchanged arrays."""
    model = AlphaFold(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def same(model: AlphaFold, other: AlphaFold) -> bool:
    """Whether both models have the same parameter names and bitwise the same values."""
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(name == other_name and torch.equal(x, y) for (name, x), (other_name, y) in pairs)


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """`arrays` with `prefix` before each name."""
    return {f"{prefix}{key}": value for key, value in arrays.items()}


def averaged(arrays: Arrays) -> Arrays:
    """A stand-in for the moving average of `arrays`."""
    return {key: value + 1 for key, value in arrays.items()}


@contextmanager
def foreign_module(name: str, **members: Any) -> Iterator[types.ModuleType]:
    """A module that exists only inside the block. Classes among `members` are pickled as its members."""
    parts = name.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    made = {full: types.ModuleType(full) for full in names}
    for key, value in members.items():
        if isinstance(value, type):
            value.__module__, value.__qualname__ = name, key
        setattr(made[name], key, value)
    sys.modules.update(made)
    try:
        yield made[name]
    finally:
        for full in names:
            del sys.modules[full]


class _FieldReference:
    """As in ml_collections: a value and its type in a separate object."""

    def __init__(self, value: Any) -> None:
        self._field_type, self._value, self._ops = type(value), value, [len]


class _ConfigDict:
    """As in ml_collections: all values are in the instance's `_fields`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._fields = {key: _ConfigDict(value) if isinstance(value, dict) else value for key, value in values.items()}
        self._locked = True

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("the class of the file was used")


class _AttributeDict(dict[str, Any]):
    """As in Lightning: a subclass of dict."""


def save_training_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Save as OpenFold's training does: `save_hyperparameters` adds objects of classes that are not installed here."""
    hyperparameters = _AttributeDict(learning_rate=1e-3)
    module = "ml_collections.config_dict.config_dict"
    with (
        foreign_module(module, ConfigDict=_ConfigDict, FieldReference=_FieldReference),
        foreign_module("pytorch_lightning.utilities.parsing", AttributeDict=_AttributeDict),
    ):
        hyperparameters["config"] = _ConfigDict({"globals": {"c_z": _FieldReference(128)}, "ema": {"decay": 0.999}})
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**content, "hyper_parameters": hyperparameters, "epoch": 3}, path)


def save_deepspeed_checkpoint(folder: Path, arrays: Arrays, tag: str = "checkpoint", stage: int = 2) -> None:
    """Write the folder that Lightning and DeepSpeed write for OpenFold: 16-bit weights and a 32-bit moving average."""
    states = folder / tag / f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    module = prefixed("model.", {key: value.bfloat16() for key, value in arrays.items()})
    content = {"module": module, "ema": {"params": averaged(arrays), "decay": 0.999}, "dp_world_size": 8}
    save_training_checkpoint(states, content)
    (folder / tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"not read")
    (folder / "latest").write_text(f"{tag}\n")
