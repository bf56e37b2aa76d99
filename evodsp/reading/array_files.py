"""Reading NumPy's files, .npy and .npz, and arrays in pickles: the only place that calls `numpy.load`, because it raises
any exception at all.

A pickle's arrays are read without unpickling a NumPy object and without calling anything that the file names. A pickle names
functions and calls them, and even NumPy's own `ndarray.__setstate__` trusts the file: a made-up dtype turns bytes into
pointers. So nothing of NumPy takes part here. The standard library's unpickler finds stand-ins alone, which record what
NumPy's constructors were to be called with; an array is formed from its recorded shape, type and bytes, once these fit
together.

`pickle` alone has no such mode, `numpy.load` either runs everything or refuses everything, and fickling, picklescan and
skops judge or refuse files instead of reading them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from evodsp.errors import FileFormatError, UserError
from evodsp.printing import quoted, shown

_LARGEST_UNPACKED = 1 << 30
"""Bytes that a compressed archive may unpack to. Parameters of AlphaFold2 take 370 MB, and are not compressed."""


def map_array(path: str | Path, fix: str) -> np.ndarray:
    """The array of an .npy file, mapped into memory. `fix` ends the message of the FileFormatError for any other file."""
    try:
        with Path(path).open("rb") as file:
            _check_header(file, os.fstat(file.fileno()).st_size)
        array: np.ndarray = np.load(path, allow_pickle=False, mmap_mode="r")
        return array.view(np.ndarray)  # still mapped; a memmap object is slow to slice
    except Exception as error:  # NumPy compiles the header, which may be any text
        raise _not_readable(path, error, fix) from error


def array_of(data: bytes, source: str | Path, fix: str) -> np.ndarray:
    """The array of an .npy file's content. `source` names the file in messages."""
    try:
        return _array(data)
    except Exception as error:
        raise _not_readable(source, error, fix) from error


def read_archive(path: str | Path, fix: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name. Raises FileFormatError for any other file, UserError if it is not there."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > max(_LARGEST_UNPACKED, Path(path).stat().st_size):
                raise ValueError(f"it unpacks to {size / 2**30:.3g} GiB")
            for entry in archive.infolist():
                data = archive.read(entry)  # reserves what there is, not what the entry says
                if not data.startswith(npy.MAGIC_PREFIX):
                    raise FileFormatError(path, f"its entry '{quoted(entry.filename)}' is not an array; {fix}")
                arrays[entry.filename.removesuffix(".npy")] = _array(data)
    except FileFormatError:
        raise
    except Exception as error:
        raise _not_readable(path, error, fix) from error
    return arrays


def _array(data: bytes) -> np.ndarray:
    """The array of an .npy file's content. Raises anything."""
    if data.startswith(b"PK"):
        raise TypeError("an archive of several arrays")
    _check_header(io.BytesIO(data), len(data))
    array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _check_header(file: io.BufferedIOBase, size: int) -> None:
    """Raise ValueError, or anything, unless the array that the header of an .npy file describes fits into its `size` bytes."""
    is_first = npy.read_magic(file) == (1, 0)
    shape, _, dtype = (npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0)(file)
    asked, follow = math.prod(shape) * dtype.itemsize, size - file.tell()
    if asked > follow:
        raise ValueError(f"its header asks for {asked:,} bytes, but {follow:,} follow")


def _not_readable(source: str | Path, error: Exception, fix: str) -> UserError:
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{source}: cannot be read ({error.strerror}); {fix}")
    return FileFormatError(source, f"not a readable NumPy file ({quoted(error)}); {fix}")


_LONGEST_CODE = 8
"""Letters of a type."""
_MOST_AXES = 32
"""NumPy's limit."""


class RecordedArray:
    """An array of the file, before anything is made of it."""

    def __init__(self, *_: object) -> None:
        self._state: object = None

    def __setstate__(self, state: object) -> None:
        self._state = state

    @property
    def objects(self) -> list[Any]:
        """The elements of an array of Python objects; none if it is no such array."""
        match self._state:
            case (_, _, _, _, list() as objects):
                return objects
        return []

    def array(self, kinds: str) -> np.ndarray:
        """The array, over the bytes of the file. `kinds`: the letters of NumPy's types that may be in it, such as 'iu'.

        Raises ValueError if it is of another type, or if its shape does not fit its bytes.
        """
        match self._state:
            case (int(), tuple() as shape, RecordedType() as kind, bool() as is_fortran, bytes() as data):
                dtype = kind.dtype(kinds)
            case _:
                raise ValueError("no plain array")
        if len(shape) > _MOST_AXES or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise ValueError(f"an array of shape {shown(shape)}")
        # A shape that does not fit the bytes is a ValueError of reshape; the bytes are those of the file, so they are bounded.
        return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


class RecordedType:
    """A dtype of the file: its code, such as 'U1', and its byte order."""

    def __init__(self, code: object = "", *_: object) -> None:
        self._code, self._state = code, None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def dtype(self, kinds: str) -> np.dtype:
        """The type of that name. Raises ValueError if its kind is not one of `kinds`."""
        order = self._state[1] if isinstance(self._state, tuple) and len(self._state) > 1 else "="
        code = self._code
        plain = isinstance(code, str) and code[:1].isalpha() and code[1:].isdecimal() and len(code) < _LONGEST_CODE
        if not plain or order not in ("<", ">", "=", "|"):
            raise ValueError(f"an array of type {shown(code)}")
        try:
            dtype = np.dtype(f"{order}{code}")
        except TypeError as error:
            raise ValueError(f"an array of type {code!r}") from error
        if dtype.kind not in kinds or not dtype.itemsize:
            raise ValueError(f"an array of type {code!r}")
        return dtype


_STAND_INS: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): "numpy.ndarray",  # an argument only: a text can neither be called nor changed
    ("numpy", "dtype"): RecordedType,
    ("numpy.core.multiarray", "_reconstruct"): RecordedArray,
    ("numpy._core.multiarray", "_reconstruct"): RecordedArray,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks to call '{module}.{name}'") from None


def recorded(data: bytes) -> object:
    """The object that a pickle describes: dictionaries, lists, tuples, texts, numbers, and `RecordedArray`s.

    Raises ValueError, with the reason, for any other content and for a damaged pickle. Nothing that the pickle names is called.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise ValueError(quoted(error)) from error
