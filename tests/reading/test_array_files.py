"""NumPy's files: whatever a damaged or hostile one makes NumPy raise is one line, before memory is taken."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.errors import UserError
from evodsp.reading import array_files
from evodsp.reading.array_files import RecordedType, array_of, map_array, read_archive

FIX = "make it again"


def npy(header: str, data: bytes = b"\0" * 24) -> bytes:
    """An .npy file with any header."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


HOSTILE = {
    "a size beyond the memory": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6442450944000,), }"),
    "a negative size": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"),
    "a header that does not end": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (((("),
    "a key of bytes": npy("{'descr': '<f4', b'fortran_order': False, 'shape': (2,), }"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"),
    "another version": b"\x93NUMPY\x09\x00" + npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }")[8:],
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_numpy_raises_is_one_line(name: str, tmp_path: Path) -> None:
    """Catches a TokenError, an OverflowError, a MemoryError or a TypeError of NumPy's reader of headers."""
    (path := tmp_path / "x.npy").write_bytes(HOSTILE[name])
    with zipfile.ZipFile(archive := tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", HOSTILE[name])
    readers: list[Callable[[], Any]] = [
        lambda: map_array(path, FIX),
        lambda: array_of(HOSTILE[name], path, FIX),
        lambda: read_archive(archive, FIX),
    ]
    for read in readers:
        with pytest.raises(UserError, match=r"x\.np[yz]: .*; make it again") as error:
            read()
        assert "\n" not in str(error.value)


ASKED = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 268435456), }"
"""4 GiB: as much as a machine gives, so that nothing but a comparison refuses it."""


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_header_that_asks_for_more_than_follows_costs_no_memory(version: int, tmp_path: Path) -> None:
    """Catches an array that is made as large as a header says, and filled or refused afterwards."""
    text = ASKED.encode().ljust(117) + b"\n"
    content = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text
    (path := tmp_path / "x.npy").write_bytes(content + b"\0" * 24)
    with zipfile.ZipFile(archive := tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.npy", path.read_bytes())
    readers: list[Callable[[], Any]] = [
        lambda: map_array(path, FIX),
        lambda: array_of(path.read_bytes(), path, FIX),
        lambda: read_archive(archive, FIX),
    ]
    for read in readers:
        tracemalloc.start()  # NumPy tells it of each array
        with pytest.raises(UserError, match=r"its header asks for 4,294,967,296 bytes, but 24 follow\); make it again"):
            read()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20


def test_an_entry_that_says_more_than_it_holds(tmp_path: Path) -> None:
    """Catches an archive whose directory vouches for the size that a header asks for."""
    with zipfile.ZipFile(path := tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (200000000,), }"))
    content = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = content.index(signature) + place
        content[at : at + 4] = (900_000_000).to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"x\.npz: not a readable NumPy file \(.*\); make it again"):
        read_archive(path, FIX)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_what_is_no_single_array(tmp_path: Path) -> None:
    """Catches an archive that passes for an array, an entry that is none, and a file that is not there."""
    np.savez(path := tmp_path / "x.npz", a=np.zeros(2))
    with pytest.raises(UserError, match="several arrays"):
        array_of(path.read_bytes(), path, FIX)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("note.txt", "x")
    with pytest.raises(UserError, match=r"its entry 'note\.txt' is not an array; make it again"):
        read_archive(path, FIX)
    for read in (map_array, read_archive):
        with pytest.raises(UserError, match=r"nowhere: cannot be read \(No such file or directory\); make it again"):
            read(tmp_path / "nowhere", FIX)


def test_an_archive_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a few bytes that unpack to gigabytes; an archive that is as large as its arrays may have any size."""
    monkeypatch.setattr(array_files, "_LARGEST_UNPACKED", 1000)
    np.savez(tmp_path / "stored.npz", a=np.arange(900.0))
    assert read_archive(tmp_path / "stored.npz", FIX)["a"].sum() == sum(range(900))
    np.savez_compressed(path := tmp_path / "x.npz", a=np.zeros(9000))
    with pytest.raises(UserError, match=r"x\.npz: not a readable NumPy file \(it unpacks to .* GiB\); make it again"):
        read_archive(path, FIX)


def test_good_files(tmp_path: Path) -> None:
    """Catches arrays that are read wrong."""
    np.save(tmp_path / "x.npy", expected := np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(map_array(tmp_path / "x.npy", FIX), expected)
    np.testing.assert_array_equal(array_of((tmp_path / "x.npy").read_bytes(), "x", FIX), expected)
    np.savez(file := io.BytesIO(), a=expected)
    (tmp_path / "x.npz").write_bytes(file.getvalue())
    np.testing.assert_array_equal(read_archive(tmp_path / "x.npz", FIX)["a"], expected)


# What a pickle of NumPy's arrays says, read without calling what it names.


@pytest.mark.parametrize("state", [None, (), (3,), "<", (3, "=")], ids=str)
def test_a_type_that_names_no_byte_order(state: object) -> None:
    """Catches a file whose types have no state, or one that is too short, which ends the command with a traceback."""
    kind = RecordedType("U1")
    if state is not None:
        kind.__setstate__(state)
    assert kind.dtype("U") == np.dtype("U1")
