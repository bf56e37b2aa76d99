"""Reading a PyTorch file that a stranger may have written, without running any code in it.

`load_checked` reads what consists of tensors, numbers, texts and containers: evodsp's checkpoints. Its pickle is followed first
(`evodsp.reading.pickles`). `load_untrusted` reads files of other programs too.

A pickle names classes and functions, and unpickling calls them. torch's `weights_only` unpickler refuses every unknown name,
and so it refuses OpenFold's training checkpoints, whose hyperparameters are `ml_collections.ConfigDict` objects. Here an inert
class stands in for each unknown name: it accepts any arguments and any state, and discards them. The module that a name belongs
to is never imported, so no code of the file can run. Tensors, numbers, strings and containers are read as usual.
"""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from evodsp.errors import UserError
from evodsp.reading.pickles import PickleRefused, check_pickle
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


_OPCODES = frozenset(
    (
        *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *(
            "BINUNICODE",
            "SHORT_BINSTRING",
            "EMPTY_TUPLE",
            "TUPLE",
            "TUPLE1",
            "TUPLE2",
            "TUPLE3",
            "EMPTY_LIST",
            "APPEND",
        ),
        *(
            "APPENDS",
            "EMPTY_DICT",
            "SETITEM",
            "SETITEMS",
            "EMPTY_SET",
            "BINPUT",
            "LONG_BINPUT",
            "BINGET",
            "LONG_BINGET",
        ),
        *("GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
    )
)
"""Those that torch's `weights_only` unpickler knows."""
_LARGEST_PICKLE = 1 << 28
"""Bytes. The arrays are not in it."""


def load_checked(file: Path | bytes) -> Any:
    """What `torch.save` put into a file (a path, or its content), on the CPU; of a path, memory-mapped.

    Raises PickleRefused if its pickle would harm the reader, and any other exception if it is damaged or holds other objects.
    """

    def opened() -> Any:
        return io.BytesIO(file) if isinstance(file, bytes) else str(file)

    with zipfile.ZipFile(opened()) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise PickleRefused("it is compressed, which torch.save does not do")
            if entry.file_size > archive.start_dir:  # where the list of its entries begins
                raise ValueError(f"its entry {quoted(entry.filename)} is larger than the file")
            if entry.filename.endswith("data.pkl") and entry.file_size > _LARGEST_PICKLE:
                raise PickleRefused(f"all but its arrays is larger than {_LARGEST_PICKLE >> 20} MiB")
    # torch's reader of archives, so that this is the pickle that is read in the end.
    check_pickle(torch._C.PyTorchFileReader(opened()).get_record("data.pkl"), _OPCODES)
    return torch.load(opened(), map_location="cpu", weights_only=True, mmap=not isinstance(file, bytes))


def refused(path: str | Path, error: PickleRefused) -> UserError:
    """The message for a file with such a pickle."""
    return UserError(
        f"{path}: not a readable checkpoint: {error}; save its dictionary of parameters alone, with torch.save"
    )


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
    except PickleRefused as error:
        raise refused(path, error) from error
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
