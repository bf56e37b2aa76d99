"""Settings of `evodsp selftest`. Importing this costs nothing (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import POSITIVE, SIZE, UserError, check_numbers, nearest

SCALING_PARTS = {
    "environment": 60.0, "collectives": 60.0, "speed": 180.0, "blocks": 300.0, "training": 240.0, "scaling": 240.0,
    "killed": 45.0, "stopped": 45.0,
}  # fmt: skip
"""The parts of `--scaling`, and the seconds after which each is ended."""


@dataclass(frozen=True)
class SelftestConfig:
    """Devices and limits of a check of a machine. Raises UserError if a value is out of range."""

    cpu: int | None = None
    """Number of CPU processes to check in place of the GPUs; null: all GPUs of this machine."""
    jobs: int | None = None
    """Number of checks of one device that run at once; null: half as many as this machine has cores."""
    limit: float = 300.0
    """Seconds after which a check is ended and counts as failed. Parts of --scaling have limits of their own."""
    scaling: bool = False
    """Check and measure what several GPUs do together, in about ten minutes, in place of the other checks: on all GPUs of this
    machine, or on the ranks that torchrun, srun or mpirun has started. Results are written as they come."""
    parts: str | None = None
    """Parts of --scaling to run, with commas between them; null: all. They are environment, collectives, speed, blocks,
    training, scaling, killed and stopped."""
    output: Path | None = None
    """Report of --scaling, which must end in .json; a page is written beside it. null: scaling.json. `evodsp plan` takes it as
    --device."""

    def __post_init__(self) -> None:
        check_numbers(self, {"cpu": SIZE, "jobs": SIZE, "limit": POSITIVE}, "--")
        if not self.scaling and (self.parts or self.output):
            raise UserError("--parts and --output are options of --scaling; add --scaling, or leave them out")
        if self.output is not None and self.output.suffix != ".json":
            raise UserError(f"--output is {self.output}, but the report needs a name that ends in .json")
        for name in self.chosen:
            if name not in SCALING_PARTS:
                raise UserError(
                    f"--parts names '{name}', but the parts are {', '.join(SCALING_PARTS)}.{nearest(name, SCALING_PARTS)}"
                )

    @property
    def chosen(self) -> list[str]:
        """The parts of --scaling to run."""
        return list(SCALING_PARTS) if self.parts is None else self.parts.split(",")

    @property
    def report(self) -> Path:
        """The report of --scaling."""
        return self.output or Path("scaling.json")
