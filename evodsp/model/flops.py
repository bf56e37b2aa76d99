"""Counts the model's floating-point operations, from which a device's utilisation follows: matrix products only, 2 n m k
each.

The model is run on shapes alone (the meta device) while torch counts, so the number cannot differ from the program. Other
work (norms, softmax, activations that are recomputed in the backward pass) does not count as useful.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.frozen import freeze
from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import Kernels
from evodsp.model.primitives import use_kernels

# The reference formulas are counted, because torch's counter does not see all operators of other backends.
_FORMULAS = Kernels.of(reference)


def pass_flops(config: ModelConfig, batch: Mapping[str, Tensor]) -> int:
    """FLOPs of the forward pass of one recycling iteration over `batch`, [batch, cycle, …], on one device.

    Only the shapes of `batch` matter, and its number of iterations does not.
    """
    model, first = _on_shapes(config, batch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(first)
    return counter.get_total_flops()


def backward_flops(
    config: ModelConfig, batch: Mapping[str, Tensor], frozen: Sequence[str], only: Sequence[str] = ()
) -> int:
    """FLOPs of the backward pass of one recycling iteration, in which the parts of the model that are `frozen` (`freeze`) have
    no gradient of their weights, and what comes before the first trained weight has none at all.

    With nothing frozen it is a little less than two forward passes, because features need no gradient.
    """
    names = ("evoformer", "extra_msa", "templates")
    stacks: dict[str, Any] = {name: dataclasses.replace(getattr(config, name), checkpoint=False) for name in names}
    model, first = _on_shapes(dataclasses.replace(config, **stacks), batch)
    freeze(model, frozen, only)
    results = [x for x in tree_leaves(model(first)) if isinstance(x, Tensor) and x.requires_grad]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    return counter.get_total_flops()


def _on_shapes(config: ModelConfig, batch: Mapping[str, Tensor]) -> tuple[AlphaFold, dict[str, Tensor]]:
    """The model with the operators' formulas, and the features of its first iteration, without numbers."""
    with torch.device("meta"):
        model = AlphaFold(config)
    model = model.to("meta")  # buffers made from NumPy arrays are not on the meta device yet
    use_kernels(model, _FORMULAS)
    first = {name: batch[name][:, :1].to("meta") for name in model.features}
    return model, {name: value.float() if value.is_floating_point() else value for name, value in first.items()}


def training_flops(pass_flops: int, passes: int, backward_flops: int | None = None) -> int:
    """FLOPs of a training step: all passes forward, the last one backward too, which is twice its forward pass where
    `backward_flops` is not given.
    """
    return passes * pass_flops + (2 * pass_flops if backward_flops is None else backward_flops)
