"""The functions of Dynamic Sequence Parallelism (arXiv 2403.10266, table 2), for any multi-dimensional transformer.

    x = split(x, 1, mesh)                         # whole -> sharded along dimension 1
    x = switch(x, 1, 2, whole=length, mesh=mesh)  # sharded along 1 -> along 2
    x = gather(x, 2, whole=width, mesh=mesh)      # sharded along 2 -> whole

Tensors may have any rank, dimensions may be negative, and sizes need not be divisible: shards have
`torch.tensor_split`'s sizes. `whole` is the size of the sharded dimension over all shards. `start_switch` and
`start_gather` return at once; computation before `.wait()` hides the communication, in the backward pass too.

`mesh` names the ranks: a `Mesh` (its sequence group), a one-dimensional `DeviceMesh`, a process group, or a `Group`, whose
ledger then counts. Nested groups need nothing else: a tensor that one group shards along one dimension can be split, switched
and gathered by another group along its other dimensions, or along the same one.

Every backward pass is the exact transpose, so the MEAN over the group of its ranks' losses is the loss: a loss that each rank
computes from the same whole tensors counts as it is, and a loss of this rank's shard is multiplied by the number of ranks. The
mean over the group of each parameter's gradients is its gradient (`average_gradients`, DDP or FSDP compute it).
"""

from __future__ import annotations

from torch import Tensor

from evodsp.parallel.collectives import Gather, Sum, Switch, shard
from evodsp.parallel.layout import shard_sizes
from evodsp.parallel.mesh import Ranks, group_of
from evodsp.parallel.pending import Pending, start


def split(x: Tensor, dim: int, mesh: Ranks) -> Tensor:
    """This rank's shard, along `dim`, of a tensor that every rank of the group holds whole. Nothing is communicated."""
    return shard(x, _dimension(x, dim), group_of(mesh))


def switch(x: Tensor, from_dim: int, to_dim: int, whole: int, mesh: Ranks) -> Tensor:
    """All-to-all: change the sharded dimension from `from_dim`, whose full size is `whole`, to `to_dim`."""
    return start_switch(x, from_dim, to_dim, whole, mesh).wait()


def gather(x: Tensor, dim: int, whole: int, mesh: Ranks) -> Tensor:
    """All-gather: the whole tensor, from shards along `dim`, whose full size is `whole`. Backward is a reduce-scatter."""
    return start_gather(x, dim, whole, mesh).wait()


def total(x: Tensor, mesh: Ranks) -> Tensor:
    """All-reduce: the sum over ranks, on every rank, for sums over a sharded dimension. Backward is an all-reduce too."""
    return start(x, Sum(group_of(mesh))).wait()


def start_switch(x: Tensor, from_dim: int, to_dim: int, whole: int, mesh: Ranks) -> Pending:
    """Launch `switch`; `.wait()` gives the result."""
    group, source, target = group_of(mesh), _dimension(x, from_dim), _dimension(x, to_dim)
    if source == target:
        raise ValueError(f"a switch from dimension {from_dim} to dimension {to_dim} of {x.ndim}: they are the same")
    sizes = shard_sizes(whole, group.size), shard_sizes(x.shape[target], group.size)
    return start(x, Switch(group, source, target, *sizes))


def start_gather(x: Tensor, dim: int, whole: int, mesh: Ranks) -> Pending:
    """Launch `gather`; `.wait()` gives the result."""
    group = group_of(mesh)
    return start(x, Gather(group, _dimension(x, dim), shard_sizes(whole, group.size)))


def _dimension(x: Tensor, dim: int) -> int:
    """`dim` counted from the front. Raises IndexError, as torch does, if `x` has no such dimension."""
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dimension {dim} of a tensor of shape {list(x.shape)}; expected {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim
