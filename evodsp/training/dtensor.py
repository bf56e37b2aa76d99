"""Tensors spread over ranks (FSDP2's) and whole ones, from one to the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(x: Tensor) -> Tensor:
    """This rank's share of a spread tensor (sharing its memory); any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(tree: Any, keep: bool = True) -> Any:
    """`tree` of containers with every spread tensor put together, on the CPU where `keep` is set, else dropped.

    A collective for each spread tensor: all ranks must call this together, with trees of the same order.
    """
    if isinstance(tree, DTensor):
        full: Tensor = tree.full_tensor().detach()
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return type(tree)((key, whole(value, keep)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(whole(value, keep) for value in tree)
    return tree


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's share of `value`, which every rank holds, if `like` is spread and of its shape; else `value` itself."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
