"""Changes of a file's bytes, as damage, other programs and ill will make them, drawn from a generator."""

from __future__ import annotations

import gzip
import json
import math
import re
from random import Random
from typing import Any

from evodsp.errors import UserError
from evodsp.reading.text_files import parse_yaml

NUMBERS = [
    *b"0 -1 1 0.5 127 128 255 65536 2147483647 2147483648 9223372036854775808 99999999999999999999999".split(),
    *b"1e308 1e400 nan inf -inf null true [] {} . ? 0x10 1_000 1e999999999 2020-01-01 9999-99-99".split(),
    *(b"9" * 5000, b"", "١٢".encode(), "²".encode()),
]
WORDS = [
    *b"> // # #=GF #=GC - . ~ * ' \" ; _ loop_ data_ save_ [ ] { } , : \\ / .. %n &a *a << ${oc.env:HOME} ${ !!binary".split(),
    *b"HETATM ATOM TER MODEL ENDMDL SEQRES MSE HOH UNK Query Q T No ../../etc/passwd <script>".split(),
    *(
        b"\0",
        b"\n",
        b"\r",
        b"\r\n",
        b"\t",
        b" ",
        b"\x0b",
        b"\x0c",
        b"\x1c",
        b"\x1b[31m",
        b"\xff",
        b"\x85",
        b"\xed\xa0\x80",
    ),
    *(text.encode() for text in ("\x85", "\u2028", "\u202e", "\ufeff", "\u200b", "é", "😀")),
]
OPENING = [b"[", b"{", b"(", b'{"a":', b"{a: ", b"- ", b"]", b")\x85", b"(t", b"\x85", b"\x86", b"a:\n ", b"${"]
"""What nests: brackets of JSON and YAML, tuples and lists of pickles."""
WORDS_OF_BYTES = [b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80", b"\x01" + b"\0" * 7]
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, math.nan, math.inf),
    *(
        "",
        "x",
        "\x1b[31m",
        "../../x",
        "\ud800",
        "\u202e",
        "line\nbreak",
        "a" * 3000,
        "2020-01-01",
        "9999-99-99",
        "<script>",
    ),
    *([], {}, [[]], {"a": 1}, [1, 2, 3], [None], {"": {}}),
]
_LARGEST = 400_000
"""Bytes of a changed file. Readers' times are measured with files that fit a person's disk many times."""


def mutated(rng: Random, name: str, data: bytes, others: list[bytes]) -> bytes:
    """The changed content of a file called `name`. `others`: contents to take pieces from."""
    if name.endswith((".json", ".jsonl", ".index", ".yaml")) and rng.random() < 0.5:
        changed = _json(rng, data)
        if changed is not None:
            return changed
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 10))):
        data = rng.choice(_CHANGES)(rng, data, others)[:_LARGEST]
    return data


def _bits(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 32)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _bytes(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8))
    return data[:at] + rng.choice(WORDS_OF_BYTES)[:size] + data[at + size :]


def _truncated(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _without(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 1, 2, 5, 20, 200)) :]


def _spliced(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    start, size, at = rng.randrange(len(other) + 1), rng.choice((1, 10, 80, 500)), rng.randrange(len(data) + 1)
    return data[:at] + other[start : start + size] + data[at + rng.choice((0, size)) :]


def _inserted(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(WORDS) + data[at:]


def _repeated(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at : at + rng.choice((1, 1, 4, 100))] * rng.choice((2, 10, 1000)) + data[at:]


def _lines(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    lines = data.splitlines(keepends=True) or [b"\n"]
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[a]
        case 1:
            lines.insert(b, lines[a])
        case 2:
            lines[a], lines[b] = lines[b], lines[a]
        case 3:
            lines[a] = lines[a][: _LARGEST // 1000] * rng.choice((2, 100, 3000))
        case 4:
            del lines[min(a, b) : max(a, b)]
        case 5:
            lines = lines[b:] + lines[:b]
    return b"".join(lines)


def _numbers(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    return _replaced(rng, data, rb"-?\d+(\.\d+)?", [*NUMBERS, *NUMBERS[:12]])


def _words(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    found = re.findall(rb"\S+", data[:100_000]) or [b"x"]
    return _replaced(rng, data, rb"\S+", [rng.choice(found), rng.choice(NUMBERS), rng.choice(WORDS), b""])


def _replaced(rng: Random, data: bytes, pattern: bytes, values: list[bytes]) -> bytes:
    places = list(re.finditer(pattern, data[:100_000]))
    if not places:
        return data
    place = rng.choice(places)
    return data[: place.start()] + rng.choice(values) + data[place.end() :]


def _nested(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(OPENING) * rng.choice((3, 100, 1500, 30_000)) + data[at:]


def _encoded(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    text = data.decode("latin-1")
    match rng.randrange(7):
        case 0:
            return text.encode("utf-16")
        case 1:
            return b"\xef\xbb\xbf" + data
        case 2:
            return text.replace("a", "ä").encode("latin-1")
        case 3:
            return text.replace("a", "ä").encode()
        case 4:
            return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\0")))
        case 5:
            return gzip.compress(data, 1, mtime=0)
        case _:
            return text.swapcase().encode("latin-1", "replace")


_CHANGES = [_bits, _bytes, _truncated, _without, _spliced, _inserted, _repeated, _lines, _lines]
_CHANGES += [_numbers, _numbers, _words, _nested, _encoded]


def _json(rng: Random, data: bytes) -> bytes | None:
    """A JSON or YAML text with another value somewhere in it; None if it is neither."""
    try:
        value = json.loads(data)
    except ValueError:
        try:
            value = parse_yaml(data.decode(), "the case")
        except (UserError, UnicodeDecodeError):
            return None
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _other(rng, value)
    return json.dumps(value, default=str, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _other(rng: Random, value: Any) -> Any:
    """Another value: of a container, mostly a part of it is changed."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.1:
        deep: Any = rng.choice(VALUES)
        for _ in range(rng.choice((0, 0, 0, 0, 3, 900))):
            deep = [deep]
        return deep
    changed: Any = value.copy()
    at: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(7):
        case 0:
            del changed[at]
        case 1 if isinstance(changed, dict):
            changed[str(rng.choice(VALUES))] = value[at]
        case 1:
            several = rng.choice((1, 1000))
            changed += [value[at]] * (min(several, 10) if isinstance(value[at], dict | list) else several)
        case _:
            changed[at] = _other(rng, value[at])
    return changed
