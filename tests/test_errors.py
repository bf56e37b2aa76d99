"""Messages for users."""

from __future__ import annotations

from evodsp.errors import FileFormatError, UserError


def test_a_message_is_one_line_of_modest_length() -> None:
    """Catches names and values of a file that make several lines of a message, or a page."""
    assert (
        str(FileFormatError("a.json", "no 'line\nbreak\r\nof\u2028three'", 3)) == "a.json:3: no 'line break of three'"
    )
    message = str(UserError(f"a.json: {'x' * 100_000} is no number; correct it"))
    assert len(message) < 2000
    assert (message[:8], message[-12:]) == ("a.json: ", "; correct it")
