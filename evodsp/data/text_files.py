"""Reading text files of the user: gzip is transparent, and every failure is a UserError of one line."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from evodsp.errors import FileFormatError, UserError

_GZIP_MAGIC = b"\x1f\x8b"


def read_bytes(path: str | Path) -> bytes:
    """The text of a file as bytes, unpacked if it is gzipped (whatever its name), without a byte-order mark.

    Raises UserError if the file cannot be read, FileFormatError if it is empty, binary or a broken gzip archive.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    return check_text(path, unpack(path, data))


def text_of(path: str | Path, data: bytes | None = None) -> bytes:
    """`read_bytes(path)`, or the same unpacking and checks of `data`, the file's content, if it was read already."""
    return read_bytes(path) if data is None else check_text(path, unpack(path, data))


def lines_of(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of `text_of`, decoded."""
    return [line.decode() for line in text_of(path, data).splitlines()]


def unpack(source: str | Path, data: bytes) -> bytes:
    """`data`, or its content if it is gzipped."""
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise FileFormatError(source, f"broken gzip archive ({error}); download or write it again") from error


def check_text(source: str | Path, data: bytes) -> bytes:
    """`data` without a byte-order mark; raises FileFormatError if it is empty or not UTF-8 text."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise FileFormatError(source, "the file is empty; write it again or remove it")
    if not data.isascii() or b"\0" in data:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise FileFormatError(
                source, "not a text file (bytes that are not UTF-8); save it as plain text", line
            ) from error
        if b"\0" in data:
            line = data.count(b"\n", 0, data.index(b"\0")) + 1
            raise FileFormatError(source, "not a text file (it holds zero bytes); save it as plain text", line)
    return data


def stem(path: str | Path) -> str:
    """The file's name without `.gz` and without its last suffix: `1abc.cif.gz` -> `1abc`."""
    return Path(Path(path).name.removesuffix(".gz")).stem
