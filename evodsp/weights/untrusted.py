"""Reading a PyTorch file from another program without running any code in it.

A pickle names classes and functions, and unpickling calls them. torch's `weights_only` unpickler refuses every unknown name,
and so it refuses OpenFold's training checkpoints, whose hyperparameters are `ml_collections.ConfigDict` objects. Here an inert
class stands in for each unknown name: it accepts any arguments and any state, and discards them. The module that a name belongs
to is never imported, so no code of the file can run. Tensors, numbers, strings and containers are read as usual.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from evodsp.errors import UserError

_HOSTILE_MODULES = (
    *("os", "posix", "nt", "sys", "subprocess", "pty", "shutil", "socket"),
    *("importlib", "runpy", "ctypes", "code", "pickle"),
)
_HOSTILE_BUILTINS = (
    *("__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input"),
    *("locals", "open", "setattr", "vars"),
)
"""No training program stores anything of these modules, or these functions; a file that names one was made to run commands."""


class Inert:
    """Takes the place of an object whose class is unknown. It keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertDict:
    """Takes the place of a dictionary of an unknown class. torch's unpickler fills dictionaries of three types only."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


def load_untrusted(path: Path) -> Any:
    """What `torch.save` put into `path`, on the CPU, memory-mapped; objects of unknown classes are `Inert` objects.

    Raises UserError if the file names functions that only an attack needs, or is damaged.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        if hostile := sorted(name for name in names if _is_hostile(name)):
            raise UserError(
                f"{path}: asks to call '{hostile[0]}' when it is read; nothing was run, but do not trust this file"
            )
        with safe_globals([_stand_in(name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise UserError(
            f"{path}: not a readable checkpoint: damaged, or with objects that evodsp cannot skip; "
            "save its dictionary of parameters alone, with torch.save"
        ) from error


def _is_hostile(name: str) -> bool:
    """Whether only a file that was made to run commands names this. Its stand-in would be inert; the user should still know."""
    module, _, attribute = name.rpartition(".")
    return attribute in _HOSTILE_BUILTINS if module == "builtins" else name.partition(".")[0] in _HOSTILE_MODULES


def _stand_in(name: str) -> type:
    """A new empty class that the unpickler takes for `name` (module and class, joined by dots)."""
    module, _, attribute = name.rpartition(".")
    parent = _InertDict if attribute.lower().endswith("dict") else Inert
    return type(attribute, (parent,), {"__module__": module, "__qualname__": attribute})
