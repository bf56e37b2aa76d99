"""The layout of the matrices that triangle multiplication multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evodsp.model.layers import TriangleMultiplication
from evodsp.model.sharded import Sharded


class BatchedProducts(TorchDispatchMode):
    """Collects the operands of batched matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bmm:
            self.operands += args[:2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("edges", ["outgoing", "incoming"])
def test_products_get_matrices_without_gaps(edges: Any) -> None:
    """Catches operands or a gradient with channels last: a CPU copies and multiplies such matrices one after another."""
    module = TriangleMultiplication(6, 4, edges)
    with BatchedProducts() as seen:
        z = torch.randn(1, 5, 5, 6, requires_grad=True)
        pair = Sharded.whole(z, "j", torch.ones(1, 5, 5))
        pair += module(pair)
        pair.x.sum().backward()
    assert len(seen.operands) == 2 + 4
    assert all(1 in x.stride()[1:] for x in seen.operands)
