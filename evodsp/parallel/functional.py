"""The four functions of Dynamic Sequence Parallelism (arXiv 2403.10266), for any multi-dimensional transformer."""

from __future__ import annotations

from torch import Tensor

from evodsp.parallel.collectives import Gather, Switch, shard
from evodsp.parallel.layout import shard_sizes
from evodsp.parallel.mesh import Mesh
from evodsp.parallel.pending import start


def split(x: Tensor, dim: int, mesh: Mesh) -> Tensor:
    """This rank's shard, along `dim`, of a tensor that every rank of the sequence group holds whole."""
    return shard(x, dim % x.ndim, mesh.sequence_group())


def switch(x: Tensor, from_dim: int, to_dim: int, whole: int, mesh: Mesh) -> Tensor:
    """All-to-all: change the sharded dimension from `from_dim`, whose full size is `whole`, to `to_dim`."""
    group, source, target = mesh.sequence_group(), from_dim % x.ndim, to_dim % x.ndim
    sizes = shard_sizes(whole, group.size), shard_sizes(x.shape[target], group.size)
    return start(x, Switch(group, source, target, *sizes)).wait()


def gather(x: Tensor, dim: int, whole: int, mesh: Mesh) -> Tensor:
    """All-gather: the whole tensor, from shards along `dim`, whose full size is `whole`. Backward is a reduce-scatter."""
    group = mesh.sequence_group()
    return start(x, Gather(group, dim % x.ndim, shard_sizes(whole, group.size))).wait()
