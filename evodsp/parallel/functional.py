"""The functions of Dynamic Sequence Parallelism (arXiv 2403.10266, table 2), for any multi-dimensional transformer.

    x = split(x, 1, mesh)                         # whole -> sharded along dimension 1
    x = switch(x, 1, 2, whole=length, mesh=mesh)  # sharded along 1 -> along 2
    x = gather(x, 2, whole=width, mesh=mesh)      # sharded along 2 -> whole

Tensors may have any rank, dimensions may be negative, and sizes need not be divisible: shards have `torch.tensor_split`'s
sizes. `whole` is the size of the sharded dimension over all shards. `start_switch` and `start_gather` return at once;
computation before `.wait()` hides the communication, in the backward pass too.

`mesh` names the ranks: a `Mesh` (its sequence group), a one-dimensional `DeviceMesh`, a process group, or a `Group`, whose
ledger then counts. Nested groups need nothing else: a tensor that one group shards along one dimension can be split,
switched and gathered by another group along its other dimensions, or along the same one.

Every backward pass is the exact transpose, so the MEAN over the group of its ranks' losses is the loss: a loss that each
rank computes from the same whole tensors counts as it is, and a loss of this rank's shard is multiplied by the number of
ranks. The mean over the group of each parameter's gradients is its gradient (`average_gradients`, DDP or FSDP compute it).

`average_gradients` is for programs that use neither DDP nor FSDP nor another framework that averages gradients.

The mask of `dropout` is a function of global positions, so that every mesh of ranks drops the same elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evodsp.parallel.collectives import Gather, Sum, Switch, shard, shard_sizes
from evodsp.parallel.exchange import Pending, start
from evodsp.parallel.group import Group, Mesh, Ranks, group_of

if TYPE_CHECKING:
    from evodsp.rng import Draws


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


BUCKET = 1 << 24
"""Number of elements of one all-reduce: enough to hide its start-up, few enough to need little memory beside the gradients."""


def average_gradients(parameters: Iterable[Tensor], mesh: Ranks) -> None:
    """Replace each `.grad` by its mean over the ranks. Call it on every rank after `backward`, before clipping.

    With a `Mesh` the mean is over all of its ranks, sequence and data. A parameter that some ranks did not use (an empty shard,
    for instance) counts as zero there; one that no rank used keeps the gradient None.
    """
    groups = [group_of(mesh)] if not isinstance(mesh, Mesh) else [mesh.sequence_group(), mesh.data_group()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.float32, device=trained[0].device)
    _mean(used, groups)
    gradients = []
    for parameter, share in zip(trained, used.tolist(), strict=True):
        if share > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        _mean(flat, groups)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets of consecutive gradients of one dtype: as many as fit into a bucket, at least one."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.numel() for g in bucket) + gradient.numel() > BUCKET
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _mean(x: Tensor, groups: list[Group]) -> None:
    """The mean over the first group's ranks, then over the second's, in place."""
    for group in groups:
        if group.size > 1:
            group.all_reduce(x).wait()
            x.div_(group.size)


def dropout(x: Tensor, rate: float, positions: Tensor, draws: Draws) -> Tensor:
    """`x` [..., C] with elements set to zero with probability `rate`, and the others divided by 1 - `rate`.

    `positions`: int64, broadcastable to [...]: the number of each vector in the WHOLE tensor, for instance `torch.arange(T
    * S).view(T, S)`, sharded like `x`. Vectors of different samples need different numbers, or they share a mask. `draws`:
    a random stream for this call, for instance `Draws.root(seed).at("attention", layer, step)`. The same stream, positions
    and rate give the same mask on one device, on any shard, and when activations are recomputed. The masks of
    `torch.nn.Dropout` are valid too, but depend on the number of ranks.

    Raises ValueError if `rate` is not in [0, 1).
    """
    from evodsp.rng import at_least  # NumPy, which the other functions do not need

    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout rate {rate} is not in [0, 1)")
    if rate == 0.0:
        return x
    channels = x.shape[-1]
    element = positions.unsqueeze(-1) * channels + torch.arange(channels, device=x.device)
    # The scale is a number, so it is not rounded to the precision of x.
    return torch.where(at_least(draws.words(element)[0], rate), x * (1.0 / (1.0 - rate)), 0.0)
