"""Reads learning curves, `curve.csv` of a run's folder: a row per logged step, a column per metric."""

from __future__ import annotations

import csv
from pathlib import Path

from evodsp.errors import FileFormatError
from evodsp.printing import shown

RESUMED = "resumed"
"""The column that only the first row of a resumed start has: the number of the step with which the run went on."""
_MOST_DIGITS = 15


def read_curve(path: Path) -> dict[int, dict[str, str]]:
    """The rows of a learning curve by step, without empty cells; no rows if there is no such file. A last line without its end,
    as a full disk leaves it, does not count.

    Raises FileFormatError, with the line, for a file that is no learning curve.
    """
    if not path.is_file():
        return {}
    rows: dict[int, dict[str, str]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(line for line in file if line.endswith("\n"))
            for row in reader:
                step = row.get("step")
                if step is None or not step.isdecimal() or len(step) > _MOST_DIGITS:
                    raise FileFormatError(
                        path, f"step is {shown(step)}, expected a number: no learning curve", reader.line_num
                    )
                rows[int(step)] = {name: cell for name, cell in row.items() if name is not None and cell}
        except (csv.Error, ValueError) as error:
            raise FileFormatError(path, f"no learning curve ({error})") from error
    return rows
