"""OpenFold3's pre-parsed alignments: all alignments of a chain in one NumPy archive (`.npz`).

Its script preparse_alignments_of3.py writes them with `numpy.savez_compressed`. Each entry is named after an alignment file
without its suffix (`uniref90_hits`) and holds a pickled dictionary: `msa`, letters `<U1 [N, L]`, upper or lower case;
`deletion_matrix`, int64 [N, L]; `metadata`, the names of the rows, texts [N], which are numbered where there are none.
"""

from __future__ import annotations

import contextlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int8, Integer

from evodsp.data.formats.fasta import EITHER_CASE, byte_table
from evodsp.data.records import Alignment
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import GAP
from evodsp.printing import quoted
from evodsp.reading import text_files
from evodsp.reading.array_files import RecordedArray, recorded

_FIX = "make it again from its .a3m and .sto files"
_LETTERS = byte_table(EITHER_CASE | {"-": GAP, ".": GAP})
_ENTRY = ".npy"
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }"
"""That of an array with a single Python object: how NumPy wraps a dictionary."""


def parse_preparsed(
    path: str | Path, data: bytes | None = None, *, is_wanted: Callable[[str], bool] = lambda _: True
) -> list[Alignment]:
    """The alignments of a chain, sorted by name. `is_wanted`: the function that tells from its name whether an alignment is
    read. `data`: as in `parse_a3m`.

    Nothing that the pickles name is called (`recorded_pickle`). Raises FileFormatError for a file that is no such archive, that
    unpacks to more than 4 GiB, or with another content than the one described above.
    """
    content = text_files.content_of(path, data)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = {entry.filename.removesuffix(_ENTRY): entry for entry in archive.infolist()}
            wanted = sorted(
                name for name, entry in entries.items() if entry.filename.endswith(_ENTRY) and is_wanted(name)
            )
            # An entry is not read beyond the size that the archive gives for it.
            if sum(entries[name].file_size for name in wanted) > text_files.LARGEST_UNPACKED:
                limit = f"{text_files.LARGEST_UNPACKED / 2**30:.3g} GiB"
                raise FileFormatError(path, f"unpacks to more than {limit}: this is no alignment; remove it")
            return [_alignment(f"{path}:{quoted(name)}", archive.read(entries[name])) for name in wanted]
    except (UserError, MemoryError):
        raise
    except Exception as error:  # zipfile raises any exception at all
        raise FileFormatError(path, f"not a readable NumPy archive ({quoted(error)}); {_FIX}") from error


def _alignment(source: str, entry: bytes) -> Alignment:
    """The alignment of one entry of the archive. `source` names it in messages."""
    try:
        match recorded(_pickle_of(entry)):
            case RecordedArray(
                objects=[{"msa": RecordedArray() as msa, "deletion_matrix": RecordedArray() as deletions, **others}]
            ):
                residues, counts = _codes(msa.array("U")), _counts(deletions.array("iu"))
                names = _names(others.get("metadata"), len(residues))
            case _:
                raise ValueError("no dictionary with the arrays msa and deletion_matrix")
    except ValueError as error:
        raise FileFormatError(source, f"not an alignment as OpenFold3 stores it: {error}; {_FIX}") from error
    if counts.shape != residues.shape:
        raise FileFormatError(source, f"letters of shape {residues.shape}, deletions of shape {counts.shape}; {_FIX}")
    return Alignment(source, names, residues, counts)


def _names(metadata: object, rows: int) -> tuple[str, ...]:
    """The names of the rows; their numbers where the archive has no text for each."""
    if isinstance(metadata, RecordedArray):
        with contextlib.suppress(ValueError):
            names = metadata.array("U")
            # NumPy makes a text of any number, which Python refuses with a SystemError.
            if names.shape == (rows,) and _points(names).max(initial=0) <= sys.maxunicode:
                return tuple(names.tolist())
    return tuple(f"row {number}" for number in range(1, rows + 1))


def _pickle_of(entry: bytes) -> bytes:
    """The pickle in an .npy file that holds one Python object. Raises ValueError if it holds anything else.

    NumPy writes one header for such a file, so it is compared instead of parsed.
    """
    start = len(_MAGIC) + 2
    end = start + int.from_bytes(entry[len(_MAGIC) : start], "little")
    if not entry.startswith(_MAGIC) or b" ".join(entry[start:end].split()) != _HEADER:
        raise ValueError("its header is not that of a dictionary")
    return entry[end:]


def _codes(letters: np.ndarray) -> Int8[np.ndarray, "N L"]:
    """Residue codes of an array of letters. Raises ValueError for other shapes, longer texts and other characters."""
    if letters.ndim != 2 or not letters.size or letters.dtype.itemsize != 4:
        raise ValueError(f"letters of shape {letters.shape} and type {letters.dtype}")
    points = np.ascontiguousarray(_points(letters))
    is_byte = points < len(_LETTERS)
    codes = np.frombuffer(np.where(is_byte, points, 0).astype(np.uint8).tobytes().translate(_LETTERS), np.int8)
    codes = codes.reshape(points.shape)
    if (illegal := np.argwhere(codes > GAP)).size:
        row, column = (int(at) for at in illegal[0])
        raise ValueError(f"character number {points[row, column]} in row {row + 1}, column {column + 1}")
    return codes


def _points(texts: np.ndarray) -> np.ndarray:
    """The numbers of the characters of texts, those of a text side by side in the last axis."""
    return texts.view(np.dtype(np.uint32).newbyteorder(texts.dtype.byteorder))


def _counts(deletions: np.ndarray) -> Integer[np.ndarray, "N L"]:
    """Numbers of deleted residues. Raises ValueError for numbers that are none."""
    if deletions.ndim != 2 or not deletions.size:
        raise ValueError(f"deletions of shape {deletions.shape}")
    if deletions.min() < 0 or deletions.max() > np.iinfo(np.int32).max:
        raise ValueError(f"deletions from {deletions.min()} to {deletions.max()}")
    return np.ascontiguousarray(deletions.astype(np.min_scalar_type(int(deletions.max()))))
