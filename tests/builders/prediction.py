"""Small helpers for tests of prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def silent(line: str) -> None:
    """Print no progress."""


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
