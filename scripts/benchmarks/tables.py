"""Tables of measurements."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evodsp.files import whole_file


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that have the same columns, with a line of headings. The file appears whole or not at all."""
    with whole_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
