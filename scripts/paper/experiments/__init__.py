"""The paper's experiments as data: `table4.yaml` and others. `cases` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..workload import Workload

HERE = Path(__file__).parent
TABLES = ("table4", "table6", "table7", "figure8")
METHODS = ("dsp", "ulysses", "megatron_sp", "megatron_tp", "ring")
"""DSP first. With one GPU there is no method: `one_device`."""


@dataclass(frozen=True)
class Case:
    """A bar of one of the paper's figures."""

    table: str
    """Name of the experiment's file."""
    place: str
    """`intra-node`, `inter-node`, or nothing."""
    method: str
    sequence: int
    """Ranks that share a sample."""
    data: int
    """Groups of such ranks."""
    workload: Workload
    """Of one such group. Activations are recomputed: without that, the paper's sizes do not fit into its GPUs."""
    training: bool

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.sequence * self.data

    @property
    def name(self) -> str:
        """Unique among all cases, and fit for a file's name."""
        sizes = f"{self.workload.model}-t{self.workload.time}-b{self.workload.batch}"
        return f"{self.table}-{sizes}-{self.sequence}x{self.data}-{self.method}"


def settings(name: str) -> dict[str, Any]:
    """What the file of this name holds."""
    found: dict[str, Any] = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    return found


def cases(table: str) -> Iterator[Case]:
    """All bars of an experiment."""
    found = settings(table)
    for row in found["rows"]:
        model, time, place = row["model"], row["time"], row.get("place", "")
        for ranks, batch in row.get("batch", {}).items():
            for method in METHODS if ranks > 1 else ["one_device"]:
                workload = Workload(model, time, batch=batch, checkpoint=True)
                yield Case(table, place, method, ranks, 1, workload, found["training"])
        for method, (sequence, data) in row.get("parallel", {}).items():
            yield Case(table, place, method, sequence, data, Workload(model, time, checkpoint=True), found["training"])
