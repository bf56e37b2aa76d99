"""Counts the model's floating-point operations, from which a device's utilisation follows: matrix products only, 2 n m k
each.

The model is run on shapes alone (the meta device) while torch counts, so the number cannot differ from the program. Other
work (norms, softmax, activations that are recomputed in the backward pass) does not count as useful.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import reference
from evodsp.model.kernels.operators import Kernels
from evodsp.model.primitives import use_kernels

# The reference formulas are counted, because torch's counter does not see all operators of other backends.
_FORMULAS = Kernels.of(reference)


def pass_flops(config: ModelConfig, batch: Mapping[str, Tensor]) -> int:
    """FLOPs of the forward pass of one recycling iteration over `batch`, [batch, cycle, …], on one device.

    Only the shapes of `batch` matter, and its number of iterations does not.
    """
    with torch.device("meta"):
        model = AlphaFold(config)
    model = model.to("meta")  # buffers made from NumPy arrays are not on the meta device yet
    use_kernels(model, _FORMULAS)
    first = {name: batch[name][:, :1].to("meta") for name in model.features}
    first = {name: value.float() if value.is_floating_point() else value for name, value in first.items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(first)
    return counter.get_total_flops()


def training_flops(pass_flops: int, passes: int) -> int:
    """FLOPs of a training step: all passes forward, the last one backward too, which is twice its forward pass."""
    return (passes + 2) * pass_flops
