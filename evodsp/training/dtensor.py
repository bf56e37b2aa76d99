"""Conversions between full tensors and FSDP2's sharded ones (DTensor)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(x: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor (it shares its memory); any other tensor is returned as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def gather_tree(tree: Any, keep: bool = True) -> Any:
    """Copy nested containers with every sharded tensor gathered to the CPU (`keep`), or dropped (None).

    Each sharded tensor is a collective: all ranks must call this together, with containers in the same order.
    """
    if isinstance(tree, DTensor):
        full: Tensor = tree.full_tensor().detach()
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return type(tree)((key, gather_tree(value, keep)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(gather_tree(value, keep) for value in tree)
    return tree


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of `value` if `like` is sharded and has the same shape; otherwise `value` itself.

    `value` is the full tensor on every rank, so nothing is communicated.
    """
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
