"""Means of what the optimizer steps report, over the steps since the last row of the logs.

A row of `curve.csv` that showed the numbers of one step would leave out all others. The sums are in the checkpoint, so a row
does not depend on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback


class IntervalMeans(Callback):
    """Sums up numbers of optimizer steps. A step that was left out because it was not finite adds nothing.

    Numbers are added once a step, so that each step has the same weight. A number that some steps lack is the mean over the
    others.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self.row: dict[str, float] = {}
        """The means of the last row."""

    def add(self, numbers: Mapping[str, float]) -> None:
        """The numbers of one more step."""
        for name, value in numbers.items():
            total, steps = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, steps + 1

    def means(self) -> dict[str, float]:
        """The mean of each number; none if no step has been added."""
        return {name: total / steps for name, (total, steps) in self._sums.items()}

    def end_row(self) -> None:
        """Begin the next row."""
        self.row, self._sums = self.means(), {}

    def state_dict(self) -> dict[str, Any]:
        return {name: list(entry) for name, entry in self._sums.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums = {name: (float(total), int(steps)) for name, (total, steps) in state_dict.items()}
