"""Reading text files and JSON of the user: gzip is transparent, and every failure is a UserError of one line."""

from __future__ import annotations

import io
import json
import zlib
from gzip import GzipFile
from pathlib import Path
from typing import Any

from evodsp.errors import FileFormatError, UserError


class TooLargeError(FileFormatError):
    """A file that unpacks to more than anything of its kind does."""


_GZIP_MAGIC = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# A gzipped file may unpack to this many bytes. The largest public alignments have some hundred million; an archive made to fill
# the memory (a decompression bomb) has no such limit.
LARGEST_UNPACKED = 1 << 32
_UNPACKED_AT_ONCE = 1 << 24


def read_bytes(path: str | Path) -> bytes:
    """The text of a file as bytes, unpacked if it is gzipped (whatever its name), without a byte-order mark.

    Raises UserError if the file cannot be read, FileFormatError if it is empty, binary or a broken gzip archive.
    """
    return check_text(path, content_of(path))


def content_of(path: str | Path, data: bytes | None = None) -> bytes:
    """The content of a file, unpacked if it is gzipped, or of `data`, its bytes, if they were read already.

    Raises UserError if the file cannot be read, FileFormatError if it is a broken gzip archive.
    """
    if data is None:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error
    return unpack(path, data)


def text_of(path: str | Path, data: bytes | None = None) -> bytes:
    """`read_bytes(path)`, or the same unpacking and checks of `data`, the file's content, if it was read already."""
    return check_text(path, content_of(path, data))


def lines_of(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of `text_of`, decoded."""
    return [line.decode() for line in text_of(path, data).splitlines()]


def unpack(source: str | Path, data: bytes, most: int | None = None) -> bytes:
    """`data`, or its content if it is gzipped. `most`: bytes that it may unpack to; None: `LARGEST_UNPACKED`.

    Raises FileFormatError if it is a broken gzip archive, or too large.
    """
    most = LARGEST_UNPACKED if most is None else most
    if not data.startswith(_GZIP_MAGIC):
        return data
    blocks, size = [], 0
    try:
        with GzipFile(fileobj=io.BytesIO(data)) as archive:
            while block := archive.read(_UNPACKED_AT_ONCE):
                size += len(block)
                if size > most:
                    limit = f"{most / 2**30:.3g} GiB"
                    raise TooLargeError(
                        source, f"unpacks to more than {limit}: this is no alignment or structure; remove it"
                    )
                blocks.append(block)
    except (EOFError, OSError, zlib.error) as error:
        raise FileFormatError(source, f"broken gzip archive ({error}); download or write it again") from error
    return b"".join(blocks)


def check_text(source: str | Path, data: bytes) -> bytes:
    """`data` without a byte-order mark, and without the zero byte at the end that entries of HH-suite's databases have.

    Raises FileFormatError if it is empty or not UTF-8 text.
    """
    data = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\0")
    if not data.strip():
        raise FileFormatError(source, "the file is empty; write it again or remove it")
    if data.startswith(_UTF16):
        raise FileFormatError(source, "the text is UTF-16, as some editors call 'Unicode'; save it as UTF-8", 1)
    if not data.isascii() or b"\0" in data:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise FileFormatError(
                source, "not a text file (bytes that are not UTF-8); save it as plain text in UTF-8", line
            ) from error
        if b"\0" in data:
            line = data.count(b"\n", 0, data.index(b"\0")) + 1
            raise FileFormatError(source, "not a text file (it holds zero bytes); save it as plain text", line)
    return data


def read_json(path: str | Path, fix: str) -> Any:
    """The content of a JSON file. `fix` ends the message of the FileFormatError that a broken or hostile file raises."""
    return json_of(path, read_bytes(path), fix)


def json_of(path: str | Path, data: bytes, fix: str) -> Any:
    """The content of JSON that was read already. `path` names it in messages, `fix` ends them."""
    try:
        content = json.loads(data)
        if b"\\u" in data:  # halves of a character may be written so, and no file could hold them again
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UnicodeError as error:
        raise FileFormatError(path, f"JSON with text that is not UTF-8; {fix}") from error
    except json.JSONDecodeError as error:
        raise FileFormatError(path, f"not JSON ({error.msg}); {fix}", error.lineno) from error
    except RecursionError as error:
        raise FileFormatError(path, f"JSON that is nested too deeply; {fix}") from error
    except ValueError as error:  # a number of thousands of digits
        raise FileFormatError(path, f"JSON with a number that is too long; {fix}") from error
