"""Reading texts, JSON and YAML of the user: gzip is transparent, and every failure is a UserError of one line.

Only this module calls PyYAML, which raises any exception at all.
"""

from __future__ import annotations

import codecs
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from gzip import GzipFile
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from evodsp.errors import FileFormatError, UserError
from evodsp.printing import LONGEST_REASON, quoted


class TooLargeError(FileFormatError):
    """A file that unpacks to more than anything of its kind does."""


_GZIP_MAGIC = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# A gzipped file may unpack to this many bytes. The largest public alignments have some hundred million; an archive made to fill
# the memory (a decompression bomb) has no such limit.
LARGEST_UNPACKED = 1 << 32
BLOCK = 1 << 20
"""Bytes of a block of `text_blocks`."""


def text_of(path: str | Path, data: bytes | None = None) -> bytes:
    """The text of a file as bytes, unpacked if it is gzipped (whatever its name), without a byte-order mark.

    `data`: the file's content, if it was read already. Raises UserError if the file cannot be read, FileFormatError if it is
    empty, binary or a broken gzip archive.
    """
    return check_text(path, content_of(path, data))


def text_blocks(path: str | Path, data: bytes | None = None) -> Iterator[bytes]:
    """`text_of`, block by block, so that a large file is never in memory as a whole."""
    return _checked(path, _blocks(path, data, LARGEST_UNPACKED))


def content_of(path: str | Path, data: bytes | None = None) -> bytes:
    """The content of a file, unpacked if it is gzipped, or of `data`, its bytes, if they were read already.

    Raises UserError if the file cannot be read, FileFormatError if it is a broken gzip archive.
    """
    if data is None:
        with _readable(path):
            data = Path(path).read_bytes()
    return unpack(path, data)


def lines_of(path: str | Path, data: bytes | None = None) -> list[str]:
    """The lines of `text_of`, decoded."""
    return [line.decode() for line in text_of(path, data).splitlines()]


def unpack(source: str | Path, data: bytes, most: int | None = None) -> bytes:
    """`data`, or its content if it is gzipped. `most`: bytes that it may unpack to; None: `LARGEST_UNPACKED`.

    Raises FileFormatError if it is a broken gzip archive, or too large.
    """
    if not data.startswith(_GZIP_MAGIC):
        return data
    return b"".join(_blocks(source, data, LARGEST_UNPACKED if most is None else most))


def _blocks(source: str | Path, data: bytes | None, most: int) -> Iterator[bytes]:
    """The content of `content_of` in blocks. `most`: bytes to which an archive may unpack."""
    with _readable(source), Path(source).open("rb") if data is None else io.BufferedReader(io.BytesIO(data)) as raw:
        if not raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
            yield from iter(lambda: raw.read(BLOCK), b"")
            return
        size = 0
        try:
            with GzipFile(fileobj=raw) as archive:
                while block := archive.read(BLOCK):
                    size += len(block)
                    if size > most:
                        limit = f"{most / 2**30:.3g} GiB"
                        raise TooLargeError(
                            source, f"unpacks to more than {limit}: this is no alignment or structure; remove it"
                        )
                    yield block
        except (EOFError, OSError, zlib.error) as error:
            raise FileFormatError(source, f"broken gzip archive ({error}); download or write it again") from error


@contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Turns the operating system's errors into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from error


def check_text(source: str | Path, data: bytes) -> bytes:
    """`data` without a byte-order mark, and without the zero byte at the end that entries of HH-suite's databases have.

    Raises FileFormatError if it is empty or not UTF-8 text.
    """
    return b"".join(_checked(source, [data]))


def _checked(source: str | Path, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """`check_text` of the blocks of a text."""
    decoder, lines, is_empty, zero = codecs.getincrementaldecoder("utf-8")(), 1, True, None
    for number, (block, following) in enumerate(pairwise(chain(blocks, [None]))):
        assert block is not None
        if number == 0:
            if block.startswith(_UTF16):
                raise FileFormatError(source, "the text is UTF-16, as some editors call 'Unicode'; save it as UTF-8", 1)
            block = block.removeprefix(b"\xef\xbb\xbf")
        if following is None:
            block = block.removesuffix(b"\0")
        if not block.isascii() or decoder.getstate()[0]:
            try:
                decoder.decode(block, following is None)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start)
                message = "not a text file (bytes that are not UTF-8); save it as plain text in UTF-8"
                raise FileFormatError(source, message, line) from error
        if zero is None and b"\0" in block:
            zero = lines + block.count(b"\n", 0, block.index(b"\0"))
        lines += block.count(b"\n")
        is_empty = is_empty and not block.strip()
        if zero is None:
            yield block
    if is_empty:
        raise FileFormatError(source, "the file is empty; write it again or remove it")
    if zero is not None:
        raise FileFormatError(source, "not a text file (it holds zero bytes); save it as plain text", zero)


def read_json(path: str | Path, fix: str) -> Any:
    """The content of a JSON file. `fix` ends the message of the FileFormatError that a broken or hostile file raises."""
    return json_of(path, text_of(path), fix)


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


_LARGEST_NUMBER = 1 << 1024
"""Python neither prints nor reads whole numbers of some thousand digits."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, whose errors are its own and name their line."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # of a number, a base64 text or a key
            raise _error(quoted(error), node.start_mark) from error
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise _error("a number of too many digits", node.start_mark)
        return value


def read_yaml(path: Path | Any) -> Any:
    """The content of a YAML file. `path`: may be a packaged resource.

    Raises UserError if it cannot be read, FileFormatError if it is not YAML in UTF-8.
    """
    return parse_yaml(_text(path), path)


def parse_yaml(text: str, source: Path | Any) -> Any:
    """The content of a text. `source` names it in messages."""
    with _one_line(source):
        return _Loader(text).get_single_data()


def compose_yaml(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, with their lines; None if it is empty. Raises as `read_yaml` does for the same reasons."""
    text = _text(path)
    # The values too: the library that reads the file next would fail on a number of 5,000 digits.
    parse_yaml(text, path)
    with _one_line(path):
        return yaml.compose(text, _Loader)


def _text(path: Path | Any) -> str:
    try:
        text: str = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, f"not a text in UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    return text


@contextmanager
def _one_line(source: Any) -> Iterator[None]:
    """Turn whatever is raised inside into a FileFormatError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        mark = getattr(error, "problem_mark", None)
        reason = quoted(getattr(error, "problem", None) or error, LONGEST_REASON)
        line = None if mark is None else mark.line + 1
        raise FileFormatError(source, f"not YAML that evodsp reads ({reason}); correct it", line) from error


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
