"""From the gradient of one backward pass to the one that the optimizer takes, on any number of ranks.

There are two stages. The mean within a sequence group is the gradient of ONE sample; AlphaFold2 clips its norm (supplement
1.11.3). Then comes the mean over data ranks and accumulated batches. Without clipping per sample the two collapse into one
mean over all ranks.

Own flat buffers instead of DDP's wrapper: one all-reduce a stage, a place between the stages to clip at, and a parameter that
a sample does not use (its gradient is zero, on whatever rank) is no special case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evodsp.parallel.mesh import Mesh
from evodsp.training.dtensor import local

# In numbers: each gradient begins at a multiple of this, so that vectorised kernels may be used on it.
_ALIGNMENT = 32


class Gradients(ABC):
    """Gradients of a model's parameters in the course of one optimizer step."""

    @abstractmethod
    def begin(self) -> None:
        """Forget those of the last step. Before the step's first backward pass."""

    @abstractmethod
    def add(self, batches: int) -> None:
        """After each backward pass. Its loss was divided by `batches`, the number of passes of this step."""

    @abstractmethod
    def finish(self) -> Float[Tensor, ""]:
        """After the last backward pass: every rank's `.grad` is what the optimizer takes. The norm before clipping: clipped
        per sample, the mean of the norms of this rank's samples; else that of the whole gradient, the same on all ranks."""


class PlainGradients(Gradients):
    """Gradients where autograd (or FSDP2, which averages over all ranks in the backward pass) leaves them."""

    def __init__(self, parameters: Iterable[nn.Parameter], clip: float | None) -> None:
        self.parameters, self.clip = list(parameters), clip

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, batches: int) -> None:
        pass

    def finish(self) -> Float[Tensor, ""]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.clip is not None:
            torch._foreach_mul_([local(gradient) for gradient in gradients], _coefficient(norm, self.clip))
        return norm


class FlatGradients(Gradients):
    """Gradients as views of one flat tensor.

    `mesh`: None for one process. `clip`: largest norm, of each sample's gradient with `per_sample` (then a backward pass must
    be of one sample), else of the whole; None for no clipping.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh | None, clip: float | None, per_sample: bool
    ) -> None:
        self.parameters, self.mesh, self.clip = list(parameters), mesh, clip
        self.per_sample = per_sample and clip is not None
        first = self.parameters[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            raise ValueError("parameters of several types or devices do not fit one flat gradient")
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in self.parameters]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = [
            part[: p.numel()].view_as(p) for part, p in zip(self._flat.split(sizes), self.parameters, strict=True)
        ]
        self._total = torch.zeros_like(self._flat) if self.per_sample else None
        self._norms: list[Tensor] = []

    def begin(self) -> None:
        self._norms = []
        for flat in (self._flat, self._total):
            if flat is not None:
                flat.zero_()
        # Anew each time: `zero_grad` elsewhere cuts the tie. autograd adds to what it finds, in place.
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def add(self, batches: int) -> None:
        if self._total is None or self.clip is None:
            return
        if self.mesh is not None:
            _mean(self._flat, self.mesh.sequence_group().handle)
        norm = self._flat.norm() * batches
        self._total.add_(self._flat * _coefficient(norm, self.clip))
        self._flat.zero_()
        self._norms.append(norm)

    def finish(self) -> Float[Tensor, ""]:
        if self._total is not None:
            self._flat.copy_(self._total)
            if self.mesh is not None:
                _mean(self._flat, self.mesh.data_group().handle)
            return torch.stack(self._norms).mean()
        if self.mesh is not None:
            _mean(self._flat, dist.group.WORLD)
        norm = self._flat.norm()
        if self.clip is not None:
            self._flat.mul_(_coefficient(norm, self.clip))
        return norm


def _coefficient(norm: Float[Tensor, ""], clip: float) -> Float[Tensor, ""]:
    """What a gradient of `norm` is multiplied by, so that its norm is at most `clip`."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)


def _mean(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """The mean over the group, in place; the very same bits on all of its ranks."""
    size = dist.get_world_size(group)
    if size > 1:
        dist.all_reduce(x, group=group)
        x.div_(size)
