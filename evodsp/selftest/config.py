"""Settings of `evodsp selftest`. Importing this costs nothing (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from evodsp.ranges import POSITIVE, SIZE, check_numbers


@dataclass(frozen=True)
class SelftestConfig:
    """Devices and limits of a check of a machine. Raises UserError if a value is out of range."""

    cpu: int | None = None
    """Number of CPU processes to check in place of the GPUs; null: all GPUs of this machine."""
    jobs: int | None = None
    """Number of checks of one device that run at once; null: half as many as this machine has cores."""
    limit: float = 300.0
    """Seconds after which a check is ended and counts as failed."""

    def __post_init__(self) -> None:
        check_numbers(self, {"cpu": SIZE, "jobs": SIZE, "limit": POSITIVE}, "--")
