"""Dynamic Sequence Parallelism on any multi-dimensional transformer: the four functions of the paper (arXiv 2403.10266).

    mesh = init_mesh(sequence=4)
    x = split(x, 1, mesh)                     # whole on every rank -> this rank's shard of axis 1
    x = switch(x, 1, 2, whole=length, mesh=mesh)   # sharded along axis 1 -> along axis 2
    x = gather(x, 2, whole=width, mesh=mesh)       # sharded along axis 2 -> whole

Backward passes are exact transposes: the MEAN over the group of its ranks' losses is the loss, and the mean over the group
of each parameter's gradients its gradient. `exchange` offers the same by named axes, `collectives` launched early.
"""

from __future__ import annotations

from torch import Tensor

from evodsp.parallel.collectives import Gather, Switch, shard, start
from evodsp.parallel.layout import shard_sizes
from evodsp.parallel.mesh import Mesh, init_mesh

__all__ = ["Mesh", "gather", "init_mesh", "split", "switch"]


def split(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """This rank's shard along `dim` of a tensor that every rank of the sequence group holds."""
    return shard(x, dim % x.ndim, mesh.sequence_group())


def switch(x: Tensor, from_dim: int, to_dim: int, whole: int, mesh: Mesh) -> Tensor:
    """All-to-all: `x`, sharded along `from_dim` with `whole` entries in all, comes back sharded along `to_dim`."""
    group, source, target = mesh.sequence_group(), from_dim % x.ndim, to_dim % x.ndim
    sizes = shard_sizes(whole, group.size), shard_sizes(x.shape[target], group.size)
    return start(x, Switch(group, source, target, *sizes)).wait()


def gather(x: Tensor, dim: int, whole: int, mesh: Mesh) -> Tensor:
    """All-gather: `x`, sharded along `dim` with `whole` entries in all, comes back whole. Backward is a reduce-scatter."""
    group = mesh.sequence_group()
    return start(x, Gather(group, dim % x.ndim, shard_sizes(whole, group.size))).wait()
