"""Reduces the gradients of backward passes to the gradient of an optimizer step, on any number of ranks.

There are two stages. The mean over a sequence group is the gradient of ONE sample; AlphaFold2 clips its norm (supplement
1.11.3). Then comes the mean over data ranks and accumulated batches. Without clipping per sample, both stages are a single
mean over all ranks.

We use flat buffers instead of DDP's wrapper: each stage is one all-reduce, gradients can be clipped between the stages, and a
parameter that a sample does not use needs no special case (its gradient is zero).
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

# In elements: each gradient starts at a multiple of this, so that vectorised kernels can be used on it.
_ALIGNMENT = 32


class Gradients(ABC):
    """Gradients of a model's parameters during one optimizer step."""

    @abstractmethod
    def begin(self) -> None:
        """Clear the gradients of the last step. Called before the first backward pass of a step."""

    @abstractmethod
    def add(self, batches: int) -> None:
        """Called after each backward pass. Its loss was divided by `batches`, the number of passes of this step."""

    @abstractmethod
    def finish(self) -> Float[Tensor, ""]:
        """Called after the last backward pass: sets every rank's `.grad` to the gradient for the optimizer.

        Returns the norm before clipping: with clipping per sample, the mean of the norms of this rank's samples; otherwise the
        norm of the whole gradient, the same on all ranks.
        """


class PlainGradients(Gradients):
    """Gradients as autograd leaves them, or FSDP2, which averages them over all ranks in the backward pass."""

    def __init__(self, parameters: Iterable[nn.Parameter], clip: float | None) -> None:
        self.parameters, self.clip = list(parameters), clip

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, batches: int) -> None:
        """autograd has added to `.grad` already."""

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

    `mesh`: None for one process. `clip`: largest norm, or None. With `per_sample` it bounds the gradient of each sample, and a
    backward pass must hold one sample; otherwise it bounds the whole gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh | None, clip: float | None, per_sample: bool
    ) -> None:
        self.parameters, self.mesh, self.clip = list(parameters), mesh, clip
        self.per_sample = per_sample and clip is not None
        first = self.parameters[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            raise ValueError("parameters have several types or devices; one flat gradient needs a single one")
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
        # Set `.grad` in each step, because `zero_grad` elsewhere removes it. autograd adds to an existing `.grad` in place.
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
    """Factor that scales a gradient of norm `norm` down to a norm of at most `clip`."""
    return (clip / (norm + 1e-6)).clamp(max=1.0)


def _mean(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """The mean over the group, in place, bitwise identical on all of its ranks."""
    size = dist.get_world_size(group)
    if size > 1:
        dist.all_reduce(x, group=group)
        x.div_(size)
