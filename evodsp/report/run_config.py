"""Settings of `evodsp report`. Importing this costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReportConfig:
    """Whose learning curves to draw, and where to."""

    runs: list[Path]
    """Output folders of `evodsp fit`."""
    output: Path = Path("report.html")
    """The page. An earlier one is replaced."""
