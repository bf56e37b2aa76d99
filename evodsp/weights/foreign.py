"""Objects that are not read from a checkpoint: `torch.load(weights_only=True)` refuses what could run a stranger's code."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from evodsp.errors import UserError


def foreign(file: str | Path | io.BytesIO) -> list[str]:
    """The classes and functions in a file of `torch.save` that are not read, such as 'datetime.date'. Sorted.

    None of a file that is damaged, or of another kind.
    """
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a damaged file can raise any exception
        return []


def refuse_foreign(path: str | Path) -> None:
    """Raise UserError if a checkpoint, which could not be read, holds such objects."""
    if names := foreign(path):
        raise UserError(
            f"{path}: not a readable checkpoint: it holds {', '.join(names)}, which evodsp does not read because it could run "
            "a stranger's code; give one without them. If a callback of yours wrote it, call "
            "torch.serialization.add_safe_globals in the callback's file, and let its state_dict return only numbers, strings, "
            "lists, dictionaries and tensors"
        )
