"""Dynamic Sequence Parallelism for any multi-dimensional transformer: the four functions of the paper (arXiv 2403.10266).

    mesh = init_mesh(sequence=4)
    x = split(x, 1, mesh)                          # whole on every rank -> this rank's shard of dimension 1
    x = switch(x, 1, 2, whole=length, mesh=mesh)   # sharded along dimension 1 -> sharded along dimension 2
    x = gather(x, 2, whole=width, mesh=mesh)       # sharded along dimension 2 -> whole on every rank

Backward passes are exact transposes. The MEAN over the group of its ranks' losses is the loss, and the mean over the group of
each parameter's gradients is its gradient. `exchange` offers the same by named axes; `pending` launches collectives early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evodsp.parallel.functional import gather, split, switch
    from evodsp.parallel.mesh import Mesh, init_mesh

__all__ = ["Mesh", "gather", "init_mesh", "split", "switch"]


def __getattr__(name: str) -> Any:
    """Import torch only when something is used: settings live in this package too, and `--help` reads them."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from evodsp.parallel import functional, mesh

    return getattr(mesh if name in ("Mesh", "init_mesh") else functional, name)
