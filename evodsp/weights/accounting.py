"""Check that a parameter file has exactly a model's arrays, and name the first one that is missing, unknown or misshapen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from evodsp.errors import UserError, nearest


def check_arrays(
    arrays: Mapping[str, np.ndarray | Tensor],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    shown: Callable[[str], str] = str,
) -> None:
    """Raise UserError that names the first array which is missing, unknown or of another shape, and both shapes.

    `expected`: shape of each array of the model. `source`: the file, for the message. `shown`: translates a name of `expected`
    into the name that the file uses.
    """
    if missing := sorted(expected.keys() - arrays.keys()):
        key = missing[0]
        others = [shown(name) for name in arrays.keys() - expected.keys()]
        raise UserError(
            f"{source}: no array '{shown(key)}' of shape {expected[key]}{_and_more(missing)}."
            f"{nearest(shown(key), others)} Is it another model's file?"
        )
    if unknown := sorted(arrays.keys() - expected.keys()):
        key = unknown[0]
        raise UserError(
            f"{source}: the model has no parameter for array '{shown(key)}' of shape {tuple(arrays[key].shape)}"
            f"{_and_more(unknown)}; is it another model's file?"
        )
    if misshapen := [key for key, shape in expected.items() if tuple(arrays[key].shape) != shape]:
        key = misshapen[0]
        raise UserError(
            f"{source}: array '{shown(key)}' has the shape {tuple(arrays[key].shape)}, but the model needs "
            f"{expected[key]}{_and_more(misshapen)}; is it another model's file?"
        )


def multimer_error(source: str) -> UserError:
    """The error for a file of an AlphaFold-Multimer model."""
    return UserError(
        f"{source}: holds an AlphaFold-Multimer model, but evodsp has monomer models only; "
        "give a monomer file, such as params_model_1_ptm.npz or finetuning_ptm_2.pt"
    )


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
