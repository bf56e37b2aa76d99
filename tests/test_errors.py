"""Messages for users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from evodsp.errors import FileFormatError, Range, SettingError, UserError, check_numbers


@dataclass
class Settings:
    steps: int | None = 1
    rate: float = 0.5


RANGES = {"steps": Range(1), "rate": Range(0)}


def test_a_message_is_one_line_of_modest_length() -> None:
    """Catches names and values of a file that make several lines of a message, or a page."""
    assert (
        str(FileFormatError("a.json", "no 'line\nbreak\r\nof\u2028three'", 3)) == "a.json:3: no 'line break of three'"
    )
    message = str(UserError(f"a.json: {'x' * 100_000} is no number; correct it"))
    assert len(message) < 2000
    assert (message[:8], message[-12:]) == ("a.json: ", "; correct it")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 1.5}, "--steps is 1.5, but must be a whole number at least 1"),
        ({"rate": "x"}, "--rate is 'x', but must be a number at least 0"),
        ({"steps": 0}, "--steps is 0, but must be at least 1"),
        ({"rate": float("inf")}, "--rate is inf, but must be finite"),
    ],
)
def test_numbers_out_of_range_are_named(given: dict[str, Any], said: str) -> None:
    """Catches a fraction that is taken for a count, and a setting that is not looked at."""
    with pytest.raises(SettingError, match=said):
        check_numbers(Settings(**given), RANGES, "--")


def test_numbers_in_range_are_taken() -> None:
    """Catches a setting that is off (None), and options of no dataclass, for which whole numbers and others are alike."""
    check_numbers(Settings(None, 0.25), RANGES, "--")
    check_numbers({"steps": 1.5, "rate": 2}, RANGES, "--")
