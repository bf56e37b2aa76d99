"""Dynamic Sequence Parallelism for any multi-dimensional transformer (arXiv 2403.10266).

It needs torch only; `dropout` needs NumPy too.

    mesh = init_mesh(sequence=4)
    x = split(x, 1, mesh)                          # whole on every rank -> this rank's shard of dimension 1
    x = switch(x, 1, 2, whole=length, mesh=mesh)   # sharded along dimension 1 -> sharded along dimension 2
    x = gather(x, 2, whole=width, mesh=mesh)       # sharded along dimension 2 -> whole on every rank

`parallelize` does this for a model from a list of its submodules and the axes along which they compute. `functional`
explains the gradients, `stages` the wrapper; `exchange` offers the same functions by the names of the Evoformer's axes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evodsp.parallel.exchange import Pending
    from evodsp.parallel.functional import (
        average_gradients,
        dropout,
        gather,
        split,
        start_gather,
        start_switch,
        switch,
        total,
    )
    from evodsp.parallel.group import Group, Ledger, Mesh, init_mesh
    from evodsp.parallel.stages import Stage, parallelize

_HOMES = {
    "exchange": ("Pending",),
    "functional": (
        "average_gradients", "dropout", "gather", "split", "start_gather", "start_switch", "switch", "total",
    ),
    "group": ("Group", "Ledger", "Mesh", "init_mesh"),
    "stages": ("Stage", "parallelize"),
}  # fmt: skip

__all__ = [
    "Group", "Ledger", "Mesh", "Pending", "Stage", "average_gradients", "dropout", "gather", "init_mesh", "parallelize",
    "split", "start_gather", "start_switch", "switch", "total",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch only when a function is used, because `--help` reads the settings of this package."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
