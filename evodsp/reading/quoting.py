"""Text of others within our own: what acts is escaped, and what is long is cut and says so.

Messages quote names in files and answers of servers. Control characters among them (escape sequences, carriage returns) would
command a terminal: colour it, rename its window, overwrite what stands there. Marks that change the direction of text, and
letters of no width, make a name look like another one. They are written as Python writes them, such as \\x1b and \\u202e. A
user name and password in an address are left out.
"""

from __future__ import annotations

import re
import reprlib

LONGEST_LINE = 2000
"""Characters of a message. The longest that we write lists all options of a group."""
LONGEST_QUOTED = 80
"""Characters of somebody else's text within a message."""
LONGEST_REASON = 200
"""Characters of what a library says is wrong."""
_LONGEST_VALUE = 60
_ACTS = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, all but tab and the end of a line
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # directions, ends of lines and paragraphs, no width
    "\ud800-\udfff]"  # bytes of a file's name that are no UTF-8, and halves of letters: no file can hold them
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


def printable(text: str) -> str:
    """`text` with everything escaped that would act on a terminal or a page, and without passwords in addresses.

    The ends of lines and tabs stay. Escaping twice is escaping once.
    """
    return _ACTS.sub(lambda found: found[0].encode("unicode_escape").decode(), _LOGIN.sub("…@", text))


def one_line(message: str) -> str:
    """A message of ours, which may quote anything, as one printable line. The middle of a very long one is left out."""
    line = " ".join(printable(message).split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} […] {line[-LONGEST_LINE // 4 :]}"


def quoted(words: object, most: int | None = None) -> str:
    """What somebody else has written, for use within a message: the first `most` characters of a text, of bytes, or of what a
    library's error says (the error's name if it says nothing)."""
    is_error = isinstance(words, BaseException)
    most = most or (LONGEST_REASON if is_error else LONGEST_QUOTED)
    begun = (words if isinstance(words, str | bytes) else str(words))[
        : 4 * most
    ]  # blanks that follow one another are one
    line = " ".join(printable(begun.decode("utf-8", "replace") if isinstance(begun, bytes) else begun).split())
    if is_error and not line:
        return type(words).__name__
    return line if len(line) <= most else f"{line[:most]}…"


def shown(value: object) -> str:
    """A value from elsewhere, for use within a message: as Python writes it, without inner parts and the middle where it is
    long. Bytes are shown as the text that they should be."""
    return _values.repr(value.decode(errors="replace") if isinstance(value, bytes) else value)


_values = reprlib.Repr()
_values.maxlevel, _values.maxstring, _values.maxlong, _values.maxother = 3, *3 * [_LONGEST_VALUE]
