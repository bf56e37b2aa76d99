"""PyTorch's sharded tensors (FSDP2's DTensor): which tensors are sharded, and conversions between whole and sharded ones.

Their module takes half a second to import. Where nothing has imported it, there is no such tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_MODULE = "torch.distributed.tensor"


def is_dtensor(x: Any) -> bool:
    """Whether `x` is one of PyTorch's sharded tensors."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor (it shares its memory); any other tensor is returned as it is."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]


def sum_over_shards(x: Tensor, like: Tensor) -> Tensor:
    """Sum of `x` over the ranks that hold the shards of `like`, a collective; `x` itself if `like` is not sharded."""
    if not is_dtensor(like):
        return x
    from torch.distributed.tensor import DTensor, Partial, Replicate  # imported already: `like` is one

    placements = [Partial() if p.is_shard() else Replicate() for p in like.placements]  # type: ignore[attr-defined]
    return DTensor.from_local(x, like.device_mesh, placements, run_check=False).full_tensor()  # type: ignore[attr-defined]


def gather_tree(tree: Any, keep: bool = True) -> Any:
    """Copy nested containers with every sharded tensor gathered to the CPU (`keep`), or dropped (None).

    Each sharded tensor is a collective: all ranks must call this together, with containers in the same order.
    """
    if is_dtensor(tree):
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
    if not is_dtensor(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # imported already: `like` is one

    found: Tensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return found


def shard_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with each tensor sharded as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {name: shard_like(v, parameters[index]) if isinstance(v, Tensor) else v for name, v in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}
