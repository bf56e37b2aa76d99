"""Every array of a parameter file is accounted for: what is missing, unknown or misshapen is named, with both shapes."""

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
    """Raise UserError naming the first array that is missing, unknown or misshapen, and both shapes.

    `shown`: how the file itself calls an array, where it has other names than `expected`.
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


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
