"""Reading NumPy's files, .npy and .npz: the only place that calls `numpy.load`, because it raises any exception at all.

Pickles in them are never read. NumPy reserves the memory that a header asks for before it reads, so what a header asks for is
compared with what follows it first, and the size of an archive with what its entries say before one is unpacked.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from evodsp.errors import FileFormatError, UserError
from evodsp.reading.quoting import quoted

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
