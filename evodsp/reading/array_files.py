"""Reading NumPy's files, .npy and .npz: the only place that calls `numpy.load`, because it raises any exception at all.

Pickles in them are never read. The size of an archive is compared with what its entries say before one is unpacked.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from evodsp.errors import FileFormatError, UserError, shortened

_LARGEST_UNPACKED = 1 << 30
"""Bytes that a compressed archive may unpack to. Parameters of AlphaFold2 take 370 MB, and are not compressed."""


def map_array(path: str | Path, fix: str) -> np.ndarray:
    """The array of an .npy file, mapped into memory. `fix` ends the message of the FileFormatError for any other file."""
    try:
        array: np.ndarray = np.load(path, allow_pickle=False, mmap_mode="r")
        return array.view(np.ndarray)  # still mapped; a memmap object is slow to slice
    except Exception as error:  # NumPy compiles the header, which may be any text
        raise _not_readable(path, error, fix) from error


def array_of(data: bytes, source: str | Path, fix: str) -> np.ndarray:
    """The array of an .npy file's content. `source` names the file in messages."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise TypeError("an archive of several arrays")
        return array
    except Exception as error:
        raise _not_readable(source, error, fix) from error


def read_archive(path: str | Path, fix: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name. Raises FileFormatError for any other file, UserError if it is not there."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > max(_LARGEST_UNPACKED, Path(path).stat().st_size):
            raise ValueError(f"it unpacks to {size / 2**30:.3g} GiB")
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:
        raise _not_readable(path, error, fix) from error
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise FileFormatError(path, f"its entry '{shortened(key)}' is not an array; {fix}")
    return arrays


def _not_readable(source: str | Path, error: Exception, fix: str) -> UserError:
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{source}: cannot be read ({error.strerror}); {fix}")
    return FileFormatError(source, f"not a readable NumPy file ({shortened(error)}); {fix}")
