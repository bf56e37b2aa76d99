"""Parameters that a run does not train: `model.freeze` and `model.train_only`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError, nearest
from evodsp.model.alphafold import AlphaFold


def freeze(model: nn.Module, patterns: Sequence[str], only: Sequence[str] = ()) -> None:
    """Let the parameters of the model that a pattern names require no gradient, and if there are patterns of those that are
    trained alone, all that these do not name."""
    for name, parameter in model.named_parameters():
        if _is_frozen(name, patterns, only):
            parameter.requires_grad_(False)


def _is_frozen(name: str, patterns: Sequence[str], only: Sequence[str]) -> bool:
    return any(_names(pattern, name) for pattern in patterns) or (
        bool(only) and not any(_names(pattern, name) for pattern in only)
    )


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_patterns(config: ModelConfig, patterns: Sequence[str], only: Sequence[str] = ()) -> None:
    """Raise UserError for a pattern that names no parameter of the model, and for patterns that leave none to train.

    `only`: the patterns of those that are trained alone.
    """
    if not patterns and not only:
        return
    with torch.device("meta"):
        parameters = [name for name, _ in AlphaFold(config).named_parameters()]
    for setting, given in (("model.freeze", patterns), ("model.train_only", only)):
        for pattern in given:
            if not any(_names(pattern, name) for name in parameters):
                parts = {part for name in parameters for part in _parts(name)}
                raise UserError(
                    f"{setting}: '{pattern}' names no parameter of this model.{nearest(pattern, parts)} Its parts are "
                    f"{', '.join(dict.fromkeys(name.partition('.')[0] for name in parameters))}"
                )
    if all(_is_frozen(name, patterns, only) for name in parameters):
        what = "names all parameters" if not only else f"names all that model.train_only trains ({_listed(only)})"
        raise UserError(f"model.freeze: {_listed(patterns)} {what}, so that nothing is left to train")


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names the parameter, or a part of the model that it is in."""
    return any(fnmatchcase(part, pattern) for part in _parts(name))


def _parts(name: str) -> list[str]:
    """The parameter's name and those of the parts that it is in: a, a.b, a.b.c."""
    words = name.split(".")
    return [".".join(words[: end + 1]) for end in range(len(words))]


def _listed(patterns: Collection[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)
