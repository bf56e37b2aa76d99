"""Averages gradients over ranks, for programs that use neither DDP nor FSDP nor another framework that averages them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from evodsp.parallel.group import Group
from evodsp.parallel.mesh import Mesh, Ranks, group_of

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
