"""The archive that a server with ColabFold's protocol sends: gzipped tar, of A3M files for several sequences.

Nothing is written while it is taken apart, and names of files in it have no effect. The headers are read here, not by tarfile's
reader, which follows extended headers of any size and depth, fills gaps of sparse files with zeros, and goes back where a file
has a negative size. The servers write plain entries.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator

from evodsp.errors import FileFormatError
from evodsp.printing import quoted
from evodsp.reading.answers import BadAnswerError
from evodsp.reading.text_files import TooLargeError, unpack
from evodsp.search.searcher import Found

FIRST = 101
"""The number of the first sequence of a request."""
_BLOCK = 512
_MOST_FILES = 100
"""A3M files of an archive; ColabFold's servers send three."""
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}\.a3m", re.ASCII)
_QUERY = re.compile(rb"\s*>(\d{1,9})\s*\n")


def split(archive: bytes, sequences: int, most: int, address: str) -> list[Found]:
    """The A3M files of an archive, one set for each of the sequences, which are numbered from `FIRST` on.

    `most`: bytes that it may unpack to. `address`: of the server, for messages. Raises BadAnswerError if it is something else.
    """
    files: list[dict[str, bytes]] = [{} for _ in range(sequences)]
    names = set()
    for name, content in _alignments(archive, most, address):
        names.add(name)
        if len(names) > _MOST_FILES:
            raise BadAnswerError(f"{address}: the answer holds more than {_MOST_FILES} alignment files; try again")
        for number, alignment in _records(content, name, address):
            if not 0 <= number < sequences:
                raise BadAnswerError(f"{address}: {name} holds the record {number + FIRST}, which was not asked for")
            files[number][name] = alignment
    return [Found(found) for found in files]


def _alignments(archive: bytes, most: int, address: str) -> Iterator[tuple[str, bytes]]:
    """The A3M files of an archive with their names, without folders."""
    try:
        if not archive.startswith(b"\x1f\x8b"):
            raise tarfile.HeaderError("not gzipped")
        for name, content in _members(unpack(address, archive, most)):
            if _NAME.fullmatch(name := name.rpartition("/")[2]):
                yield name, content
    except TooLargeError as error:
        limit = f"{most / 2**20:,.0f} MiB (--msa_server_limits.answer_mib)"
        raise BadAnswerError(f"{address}: the answer unpacks to more than {limit}") from error
    except (tarfile.TarError, FileFormatError) as error:
        why = quoted(str(error).removeprefix(f"{address}: "))
        raise BadAnswerError(
            f"{address}: the answer is no gzipped tar archive of alignments ({why}); try again"
        ) from error


def _members(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The plain files of an uncompressed archive. Whatever else there is, is passed over. Raises TarError."""
    place = 0
    while place < len(content) and (header := content[place : place + _BLOCK]).strip(b"\0"):
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        place += _BLOCK
        if not 0 <= member.size <= len(content) - place:
            raise tarfile.ReadError(f"a file of {member.size} bytes, where {len(content) - place:,} follow")
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield member.name, content[place : place + member.size]
        place += -(-member.size // _BLOCK) * _BLOCK


def _records(content: bytes, name: str, address: str) -> Iterator[tuple[int, bytes]]:
    """The alignments of an A3M file, with the numbers of their sequences from 0. Each ends with a zero byte."""
    for found in re.finditer(rb"[^\0]+", content):
        alignment = found[0]
        if not alignment.strip():
            continue
        header = _QUERY.match(alignment)
        if header is None:
            raise BadAnswerError(
                f"{address}: {name} holds an alignment that does not begin with the number of a sequence"
            )
        yield int(header[1]) - FIRST, alignment
