"""Whether what a checkpoint is to hold could be read again. Callbacks and plugins of a user may give any object."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from evodsp.errors import UserError
from evodsp.reading.pickles import PickleRefused
from evodsp.weights.foreign import foreign
from evodsp.weights.untrusted import load_checked

_OURS = ("state_dict", "ema_state_dict", "optimizer_states")
"""Entries with many tensors, which no user writes."""


def check_saved(checkpoint: Mapping[str, Any]) -> None:
    """Raise UserError that names the first callback, or entry of the checkpoint, whose state would not be read again.

    Without this, it would be the resumed run that finds out.
    """
    entries = {
        f"checkpoint entry '{key}'": value for key, value in checkpoint.items() if key not in (*_OURS, "callbacks")
    }
    states = {f"callback {key}: state_dict": value for key, value in checkpoint.get("callbacks", {}).items()}
    for name, value in {**states, **entries}.items():
        if found := _problem(value):
            raise UserError(
                f"{name} {found}, so no run could resume from the checkpoint; give only numbers, strings, lists, dictionaries "
                "and tensors, or allow a class with torch.serialization.add_safe_globals"
            )


def _problem(value: Any) -> str | None:
    """Why `value` could not be written to a checkpoint and read again; None if it could."""
    file = io.BytesIO()
    try:
        torch.save(apply_to_collection(value, Tensor, _emptied), file)
    except Exception as error:  # any object may refuse in its own way
        return f"cannot be written ({' '.join(str(error).split())})"
    try:
        load_checked(file.getvalue())
    except PickleRefused as error:
        return f"would not be read again: {error}"
    except Exception as error:
        names = foreign(io.BytesIO(file.getvalue())) or [type(error).__name__]
        return f"holds {', '.join(names)}, which is not read from a file"
    return None


def _emptied(tensor: Tensor) -> Tensor:
    """A stand-in without numbers. A tensor of another class is kept, because that class may be refused."""
    return torch.empty(0) if type(tensor) in (Tensor, torch.nn.Parameter) else tensor
