"""Reduces the gradients of backward passes to the gradient of an optimizer step, on any number of ranks.

There are two stages. The mean over a sequence group is the gradient of ONE sample; AlphaFold2 clips its norm (supplement
1.11.3). Then comes the mean over data ranks and accumulated batches. Without clipping per sample, both stages are a single
mean over all ranks.

We use flat buffers instead of DDP's wrapper: each stage is one all-reduce, gradients can be clipped between the stages, and a
parameter that a sample does not use needs no special case (its gradient is zero).

A sample whose loss or gradient is not finite must not reach the parameters. With clipping per sample it is left out: its loss
travels with its gradient through the mean over the sequence group, so that all of its ranks find the same, and the number of
samples that count travels through the mean over data ranks. Otherwise samples are summed before they can be told apart, and the
caller discards the whole step. Nothing here makes the host wait for the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evodsp.parallel.mesh import Mesh
from evodsp.parallel.waits import WaitTimes
from evodsp.training.dtensor import local

# In elements: each gradient starts at a multiple of this, so that vectorised kernels can be used on it.
_ALIGNMENT = 32


@dataclass(frozen=True)
class Reduced:
    """What `Gradients.finish` found out about the backward passes of a step, on the device."""

    norm: Float[Tensor, ""]
    """Norm before clipping: with clipping per sample, the mean of the norms of this rank's samples that count; otherwise the
    norm of the whole gradient, the same on all ranks."""
    counted: Bool[Tensor, " passes"]
    """Where this rank saw nothing in a pass that is not finite. With `drops_samples` these passes, and no others, are in the
    gradient. Otherwise the step has to be discarded unless all are true, on every rank, and the norm is finite."""
    clipped: Float[Tensor, ""]
    """Share of the gradients behind `norm` that were scaled down: of this rank's samples that count, or 0 or 1."""


class Gradients(ABC):
    """Gradients of a model's parameters during one optimizer step."""

    drops_samples: bool
    """Whether a pass that is not finite is left out by itself, and the mean divided by the passes that are left."""
    parameters: list[nn.Parameter]
    clip: float | None
    """Largest norm."""

    @abstractmethod
    def begin(self) -> None:
        """Clear the gradients of the last step. Called before the first backward pass of a step."""

    @abstractmethod
    def add(self, batches: int, loss: Float[Tensor, ""]) -> None:
        """Called after each backward pass. Its loss was divided by `batches`, the number of passes of this step.

        `loss`: this rank's, before that division; nan if the samples of this pass must not count.
        """

    @abstractmethod
    def finish(self) -> Reduced:
        """Called after the last backward pass: sets every rank's `.grad` to the gradient for the optimizer."""

    def discard(self) -> None:
        """Take the gradient away after `finish`, so that the optimizer changes neither parameters nor its own state."""
        for parameter in self.parameters:
            parameter.grad = None

    def not_finite(self) -> list[int]:
        """The parameters, by their number, whose gradient was not finite: of the first sample of this step that was left out,
        or of the whole step. Reads values, so it is for the rare step that needs it."""
        gradients = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        return [i for i, gradient in gradients.items() if not local(gradient).isfinite().all()]


class PlainGradients(Gradients):
    """Gradients as autograd leaves them, or FSDP2, which averages them over all ranks in the backward pass."""

    drops_samples = False

    def __init__(self, parameters: Iterable[nn.Parameter], clip: float | None) -> None:
        self.parameters, self.clip = list(parameters), clip
        self._losses: list[Tensor] = []

    def begin(self) -> None:
        self._losses = []
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, batches: int, loss: Float[Tensor, ""]) -> None:
        """autograd has added to `.grad` already."""
        self._losses.append(loss)

    def finish(self) -> Reduced:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.clip is not None:
            torch._foreach_mul_([local(gradient) for gradient in gradients], _coefficient(norm, self.clip))
        return Reduced(norm, torch.stack(self._losses).isfinite(), _exceeds(norm, self.clip))


class FlatGradients(Gradients):
    """Gradients as views of one flat tensor.

    `mesh`: None for one process. `clip`: largest norm, or None. With `per_sample` it bounds the gradient of each sample, and a
    backward pass must hold one sample; otherwise it bounds the whole gradient. `waits`: measures waits for other ranks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh | None,
        clip: float | None,
        per_sample: bool,
        waits: WaitTimes | None = None,
    ) -> None:
        self.parameters, self.mesh, self.clip, self._waits = list(parameters), mesh, clip, waits
        self.drops_samples = per_sample and clip is not None
        first = self.parameters[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            raise ValueError("parameters have several types or devices; one flat gradient needs a single one")
        self._sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in self.parameters]
        self._flat = torch.zeros(sum(self._sizes) + _ALIGNMENT, dtype=first.dtype, device=first.device)
        parts = self._flat[:-_ALIGNMENT].split(self._sizes)
        self._views = [part[: p.numel()].view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        self._total = torch.zeros_like(self._flat) if self.drops_samples else None
        self._blamed: Tensor | None = None
        """Norms of the rows of the first gradient of this step that is not finite, or of the last one."""
        self._finite = torch.ones((), dtype=torch.bool, device=first.device)
        """Whether all passes of this step were finite so far."""
        self._batches = 1
        self._norms: list[Tensor] = []
        self._counted: list[Tensor] = []

    def begin(self) -> None:
        self._norms, self._counted, self._blamed = [], [], None
        self._finite = torch.ones_like(self._finite)
        for flat in (self._flat, self._total):
            if flat is not None:
                flat.zero_()
        # Set `.grad` in each step, because `zero_grad` elsewhere removes it. autograd adds to an existing `.grad` in place.
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def add(self, batches: int, loss: Float[Tensor, ""]) -> None:
        self._batches = batches
        if self._total is None or self.clip is None:
            # The sum so far is this rank's own: the first pass after which it is not finite is the cause.
            self._counted.append(loss.isfinite() & (self._flat.norm().isfinite() | ~self._finite))
            self._finite = self._finite & self._counted[-1]
            return
        self._flat[-1] = loss
        if self.mesh is not None:
            self._average(self._flat, self.mesh.sequence_group().handle)
        rows = torch.linalg.vector_norm(self._flat[:-_ALIGNMENT].view(-1, _ALIGNMENT), dim=1)
        norm = rows.norm() * batches
        counts = norm.isfinite() & self._flat[-1].isfinite()
        self._flat.mul_(_coefficient(norm, self.clip))
        self._flat[-1] = 1  # counts the samples
        self._total.add_(self._flat.masked_fill_(~counts, 0))
        self._flat.zero_()
        self._blamed = rows if self._blamed is None else torch.where(self._finite, rows, self._blamed)
        self._finite = self._finite & counts
        self._norms.append(norm.masked_fill(~counts, 0))
        self._counted.append(counts)

    def finish(self) -> Reduced:
        counted = torch.stack(self._counted)
        if self._total is not None:
            data = self.mesh.data_group().handle if self.mesh is not None else None
            if self.mesh is not None and dist.get_world_size(data) > 1:
                self._sum(self._total, data)
            # Each sample was divided by all passes of a step on one data rank.
            torch.div(self._total, self._total[-1].clamp(min=1) / self._batches, out=self._flat)
            norms, number = torch.stack(self._norms), counted.sum().clamp(min=1)
            return Reduced(norms.sum() / number, counted, _exceeds(norms, self.clip).sum() / number)
        if self.mesh is not None:
            self._average(self._flat, dist.group.WORLD)
        norm = self._flat.norm()
        if self.clip is not None:
            self._flat.mul_(_coefficient(norm, self.clip))
        return Reduced(norm, counted, _exceeds(norm, self.clip))

    def _sum(self, x: Tensor, group: dist.ProcessGroup | None) -> None:
        """The sum over the group, in place."""
        work = dist.all_reduce(x, group=group, async_op=True)
        if self._waits is None:
            work.wait()
        else:
            self._waits.wait(work)

    def _average(self, x: Tensor, group: dist.ProcessGroup | None) -> None:
        """The mean over the group, in place, bitwise identical on all of its ranks."""
        size = dist.get_world_size(group)
        if size > 1:
            self._sum(x, group)
            x.div_(size)

    def not_finite(self) -> list[int]:
        if self._blamed is None:
            return super().not_finite()
        rows = [size // _ALIGNMENT for size in self._sizes]
        return [i for i, part in enumerate(self._blamed.split(rows)) if not part.isfinite().all()]


def _coefficient(norm: Float[Tensor, ""], clip: float) -> Float[Tensor, ""]:
    """Factor that scales a gradient of norm `norm` down to a norm of at most `clip`; 1 if the norm is nan, so that the gradient
    still shows where."""
    return (clip / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)


def _exceeds(norms: Float[Tensor, "..."], clip: float | None) -> Float[Tensor, "..."]:
    """1 where a gradient of this norm is scaled down, 0 elsewhere."""
    return (norms > (math.inf if clip is None else clip)).float()
