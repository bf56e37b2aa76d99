"""Reading a PyTorch file that a stranger may have written, without running any code in it.

`load_checked` reads what consists of tensors, numbers, texts and containers: evodsp's checkpoints. `load_untrusted` reads files
of other programs too.

A pickle names classes and functions, and unpickling calls them. torch's `weights_only` unpickler refuses every unknown name,
and so it refuses OpenFold's training checkpoints, whose hyperparameters are `ml_collections.ConfigDict` objects. Here an inert
class stands in for each unknown name: it accepts any arguments and any state, and discards them. The module that a name belongs
to is never imported, so no code of the file can run. Tensors, numbers, strings and containers are read as usual.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from evodsp.errors import UserError
from evodsp.reading.quoting import quoted

_HOSTILE_MODULES = (
    *("os", "posix", "nt", "sys", "subprocess", "pty", "shutil", "socket"),
    *("importlib", "runpy", "ctypes", "code", "pickle"),
)
_HOSTILE_BUILTINS = (
    *("__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "input"),
    *("locals", "open", "setattr", "vars"),
)
"""No training program stores anything of these modules, or these functions; a file that names one was made to run commands."""


def load_checked(file: Path | bytes) -> Any:
    """What `torch.save` put into a file (a path, or its content), on the CPU; of a path, memory-mapped.

    Raises any exception if it is damaged or holds other objects than tensors, numbers, texts and containers.
    """
    is_content = isinstance(file, bytes)
    opened = io.BytesIO(file) if isinstance(file, bytes) else str(file)
    return torch.load(opened, map_location="cpu", weights_only=True, mmap=not is_content)


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
                f"{path}: asks to call '{quoted(hostile[0])}' when it is read; nothing was run, but do not trust this file"
            )
        with safe_globals([_stand_in(name) for name in names]):
            return load_checked(path)
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
