"""Reduces the gradients of backward passes to the gradient of an optimizer step, on any number of ranks.

There are two stages. The mean over a sequence group is the gradient of ONE sample; AlphaFold2 clips its norm (supplement
1.11.3). Then comes the mean over data ranks and accumulated batches. Without clipping per sample, both stages are a single
mean over all ranks.

We use flat buffers instead of DDP's wrapper: gradients can be clipped between the stages, and a parameter that a sample does
not use needs no special case (its gradient is zero).

A sample whose loss or gradient is not finite must not reach the parameters. With clipping per sample it is left out: its
loss travels with its gradient through the mean over the sequence group, so that all of its ranks find the same, and the
number of samples that count travels through the mean over data ranks. Otherwise samples are summed before they can be told
apart, and the caller discards the whole step. Nothing here makes the host wait for the device.

A recipe counts in samples: the global batch, the learning rate's schedule, the epochs, the length of a run. So it means the
same on any number of ranks. Optimizer steps follow from it.

`model.freeze` names parameters that a run does not train, `model.train_only` those that it trains alone, `model.adapters`
weights that it keeps and trains adapters of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from evodsp.errors import UserError, nearest
from evodsp.model.adapters import adapted_weights, add_adapters
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.dtensor import local, sum_over_shards
from evodsp.parallel.group import Group, Mesh, WaitTimes
from evodsp.printing import counted
from evodsp.training.config import WITHOUT_ADAPTERS, AdapterConfig, OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Batching:
    """Division of an optimizer step's samples."""

    data_ranks: int
    """The number of ranks, or of groups of ranks that share a sample, which compute different samples at a time."""
    batch_size: int
    """The number of samples that each of them has in one batch."""
    accumulate: int
    """The number of batches in one step."""

    @property
    def samples(self) -> int:
        """Samples of one optimizer step: the global batch."""
        return self.data_ranks * self.batch_size * self.accumulate

    def steps(self, samples: int) -> int:
        """Optimizer steps after which at least `samples` samples were taken."""
        return math.ceil(samples / self.samples)

    def batches(self, samples: int) -> int:
        """Batches of a data rank in these steps."""
        return self.steps(samples) * self.accumulate

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} a step: data ranks {self.data_ranks} x data.batch_size {self.batch_size} x "
            f"accumulated batches {self.accumulate}"
        )


def batching(global_batch: int | None, data_ranks: int, batch_size: int, accumulate: int) -> Batching:
    """The division of `global_batch` samples; None: `accumulate` batches a step, of `batch_size` samples on each data rank.

    `accumulate`: trainer.accumulate_grad_batches. Raises UserError if `global_batch` does not divide, or if both are given.
    """
    if global_batch is None:
        return Batching(data_ranks, batch_size, accumulate)
    if accumulate != 1:
        raise UserError(
            f"global_batch is {global_batch}, which sets how many batches are accumulated, but "
            f"trainer.accumulate_grad_batches is {accumulate}; give one of them"
        )
    at_once = data_ranks * batch_size
    if global_batch % at_once:
        raise UserError(
            f"global_batch is {global_batch}, but must be a multiple of {at_once} (data ranks {data_ranks} x data.batch_size "
            f"{batch_size}); use another global_batch, data.batch_size, parallel.sequence or number of devices"
        )
    return Batching(data_ranks, batch_size, global_batch // at_once)


def learning_rate(sample: int, batch: int, config: OptimizerConfig, total_samples: int) -> float:
    """Learning rate (supplement 1.11.3): a warm-up, then constant with one drop, or a cosine.

    It holds for the optimizer step of samples `sample` (from 0) to `sample` + `batch` - 1, in a run of
    `total_samples`.
    """
    warmup = config.warmup_samples
    if sample < warmup:
        # The rate of the first step is above zero; the last step of the warm-up has the full rate.
        return config.lr * min(sample + batch, warmup) / warmup
    if config.schedule == "constant":
        return config.lr * (config.drop_factor if sample >= config.drop_samples else 1.0)
    # The last step has exactly `final_lr`.
    progress = min(1.0, (sample - warmup) / max(1, total_samples - batch - warmup))
    return config.final_lr + (config.lr - config.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def freeze(
    model: nn.Module,
    patterns: Sequence[str],
    only: Sequence[str] = (),
    adapters: AdapterConfig = WITHOUT_ADAPTERS,
    seed: int = 0,
) -> None:
    """Let the parameters of the model that a pattern names require no gradient, and if there are patterns of those that are
    trained alone, or adapters, all that these do not name. Add the adapters, drawn from `seed`."""
    for name, parameter in model.named_parameters():
        if _is_frozen(name, patterns, only, adapters):
            parameter.requires_grad_(False)
    if adapters.rank:
        draws = torch.Generator().manual_seed(seed)
        add_adapters(model, adapters.rank, lambda name: _is_adapted(name, patterns, only, adapters), draws)


def _is_frozen(name: str, patterns: Sequence[str], only: Sequence[str], adapters: AdapterConfig) -> bool:
    return _is_named(name, patterns) or (bool(only or adapters.rank) and not _is_named(name, only))


def _is_adapted(name: str, patterns: Sequence[str], only: Sequence[str], adapters: AdapterConfig) -> bool:
    return _is_named(name, adapters.parts) and not _is_named(name, [*patterns, *only])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_patterns(config: TrainingConfig) -> None:
    """Raise UserError for a pattern of parameters that names none of the model, and for patterns that leave none to train."""
    patterns, only, adapters = config.freeze, config.train_only, config.adapters
    if not patterns and not only and not adapters.rank:
        return
    with torch.device("meta"):
        model = AlphaFold(config.model_config())
    parameters = [name for name, _ in model.named_parameters()]
    # A model need not have both of the stacks that are the default.
    of_adapters = adapters.parts if adapters.rank and adapters.parts != WITHOUT_ADAPTERS.parts else []
    for setting, given in (
        ("model.freeze", patterns),
        ("model.train_only", only),
        ("model.adapters.parts", of_adapters),
    ):
        for pattern in given:
            if not any(_names(pattern, name) for name in parameters):
                parts = {part for name in parameters for part in _parts(name)}
                raise UserError(
                    f"{setting}: '{pattern}' names no parameter of this model.{nearest(pattern, parts)} Its parts are "
                    f"{', '.join(dict.fromkeys(name.partition('.')[0] for name in parameters))}"
                )
    freeze(model, patterns, only, adapters)
    if adapters.rank and not adapted_weights(model):
        raise UserError(
            f"model.adapters: {_listed(adapters.parts)} names no matrix that may have an adapter of rank {adapters.rank}: both "
            "sides must be longer, and model.freeze and model.train_only must not name it; name other parts, or a lower rank"
        )
    if not trained(model):
        what = "names all parameters" if not only else f"names all that model.train_only trains ({_listed(only)})"
        raise UserError(f"model.freeze: {_listed(patterns)} {what}, so that nothing is left to train")


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    return any(_names(pattern, name) for pattern in patterns)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names the parameter, or a part of the model that it is in."""
    return any(fnmatchcase(part, pattern) for part in _parts(name))


def _parts(name: str) -> list[str]:
    """The parameter's name and those of the parts that it is in: a, a.b, a.b.c."""
    words = name.split(".")
    return [".".join(words[: end + 1]) for end in range(len(words))]


def _listed(patterns: Collection[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)


# In elements: each gradient starts at a multiple of this, so that vectorised kernels can be used on it.
_ALIGNMENT = 32


@dataclass(frozen=True)
class Reduced:
    """The findings of `Gradients.finish` about the backward passes of a step, as tensors on the device."""

    norm: Float[Tensor, ""]
    """Norm before clipping: with clipping per sample, the mean of the norms of this rank's samples that count; otherwise the
    norm of the whole gradient, the same on all ranks."""
    counted: Bool[Tensor, " passes"]
    """True for each pass in which this rank met finite numbers only. With `drops_samples` these passes, and no others, are in
    the gradient. Otherwise the step has to be discarded unless all are true, on every rank, and the norm is finite."""
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

        `loss`: this rank's loss before that division; nan if the samples of this pass must not count.
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
        or of the whole step. It synchronises with the device: call it only when a step has failed."""
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
        """Keep the loss: autograd has added to `.grad` already."""
        self._losses.append(loss)

    def finish(self) -> Reduced:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        # In fp64 for the reason that `_norm` gives; a parameter's gradient has no rows of one size.
        norms = torch._foreach_norm([local(gradient) for gradient in gradients], 2.0, torch.float64)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        norm = sum_over_shards(norm.square(), gradients[0]).sqrt().to(gradients[0].dtype)
        if self.clip is not None:
            torch._foreach_mul_([local(gradient) for gradient in gradients], _coefficient(norm, self.clip))
        return Reduced(norm, torch.stack(self._losses).isfinite(), _exceeds(norm, self.clip))


class FlatGradients(Gradients):
    """All gradients live in one flat buffer; its last 32 numbers are scratch space for subclasses.

    `mesh`: the ranks; None for one process. `waits`: the clock that measures waits for other ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh | None, waits: WaitTimes | None = None) -> None:
        self.parameters, self.mesh, self._waits = list(parameters), mesh, waits
        first = self.parameters[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            raise ValueError("parameters have several types or devices; one flat gradient needs a single one")
        self._sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in self.parameters]
        self._flat = torch.zeros(sum(self._sizes) + _ALIGNMENT, dtype=first.dtype, device=first.device)
        parts = self._flat[:-_ALIGNMENT].split(self._sizes)
        self._views = [part[: p.numel()].view_as(p) for part, p in zip(parts, self.parameters, strict=True)]
        self._finite = torch.ones((), dtype=torch.bool, device=first.device)
        """Whether all passes of this step were finite so far."""
        self._counted: list[Tensor] = []

    def begin(self) -> None:
        self._counted, self._finite = [], torch.ones_like(self._finite)
        self._flat.zero_()
        # Set `.grad` in each step, because `zero_grad` elsewhere removes it. autograd adds to an existing `.grad` in place.
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def _wait(self, work: Any) -> None:
        if self._waits is None:
            work.wait()
        else:
            self._waits.wait(work)


class SampleGradients(FlatGradients):
    """The norm of each sample's gradient is at most `clip`. A backward pass must hold one sample."""

    drops_samples = True

    def __init__(
        self, parameters: Iterable[nn.Parameter], mesh: Mesh | None, clip: float, waits: WaitTimes | None = None
    ) -> None:
        super().__init__(parameters, mesh, waits)
        self.clip = self._most = clip
        self._total = torch.zeros_like(self._flat)
        self._blamed: Tensor | None = None
        """Norms of the rows of the first gradient of this step that is not finite, or of the last one."""
        self._batches = 1
        self._norms: list[Tensor] = []

    def begin(self) -> None:
        super().begin()
        self._norms, self._blamed = [], None
        self._total.zero_()

    def add(self, batches: int, loss: Float[Tensor, ""]) -> None:
        self._batches = batches
        self._flat[-1] = loss
        if self.mesh is not None:
            group = self.mesh.sequence_group()
            self._sum(self._flat, group)
            if group.size > 1:
                self._flat.div_(group.size)
        rows = _row_norms(self._flat[:-_ALIGNMENT])
        norm = rows.norm() * batches
        counts = norm.isfinite() & self._flat[-1].isfinite()
        self._flat.mul_(_coefficient(norm, self._most))
        self._flat[-1] = 1  # counts the samples
        self._total.add_(self._flat.masked_fill_(~counts, 0))
        self._flat.zero_()
        self._blamed = rows if self._blamed is None else torch.where(self._finite, rows, self._blamed)
        self._finite = self._finite & counts
        self._norms.append(norm.masked_fill(~counts, 0))
        self._counted.append(counts)

    def finish(self) -> Reduced:
        counted = torch.stack(self._counted)
        if self.mesh is not None:
            self._sum(self._total, self.mesh.data_group())
        # Each sample was divided by all passes of a step on one data rank.
        torch.div(self._total, self._total[-1].clamp(min=1) / self._batches, out=self._flat)
        norms, number = torch.stack(self._norms), counted.sum().clamp(min=1)
        return Reduced(norms.sum() / number, counted, _exceeds(norms, self.clip).sum() / number)

    def not_finite(self) -> list[int]:
        assert self._blamed is not None, "called after a pass"
        rows = [size // _ALIGNMENT for size in self._sizes]
        return [i for i, part in enumerate(self._blamed.split(rows)) if not part.isfinite().all()]

    def _sum(self, x: Tensor, group: Group) -> None:
        """The sum over the group, in place, bitwise identical on all of its ranks."""
        if group.size > 1:
            self._wait(group.all_reduce(x))


class BatchGradients(FlatGradients):
    """The norm of the gradient of the whole batch is at most `clip`, or not bounded (None).

    On several ranks the mean is taken bucket by bucket, while the last backward pass of the step still computes the gradients
    of the first layers: a bucket is sent when the last of its parameters has its gradient, and the ones before it are sent. All
    ranks therefore send the same buckets in the same order, also where a sample does not use a parameter.
    """

    drops_samples = False

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh | None,
        clip: float | None,
        batches: int = 1,
        waits: WaitTimes | None = None,
        bucket_bytes: int = 25 << 20,
        early: bool = True,
    ) -> None:
        """`batches`: the number of backward passes in a step. `bucket_bytes`: the least size of a bucket, as in PyTorch's
        DDP. `early`: False sends all buckets after the backward pass. Recorded stacks with collectives need that: beside a
        replay, no other communicator may work, unless all ranks order the two alike.
        """
        super().__init__(parameters, mesh, waits)
        self.clip, self._batches = clip, batches
        self._group = None if mesh is None else mesh.all_ranks()
        self._ranks = 1 if self._group is None else self._group.size
        self._buckets = self._divided(bucket_bytes // self._flat.element_size())
        """Slices of the flat gradient, from its end to its start: backward passes meet the last layers first."""
        self._missing: list[int] = []
        """Parameters of each bucket that have no gradient of the last pass yet."""
        self._sent: list[Any] = []
        self._norms: list[Tensor] = []
        """Norms of this rank's own gradient, one for each bucket that was sent."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, at=bucket: self._arrived(at))
            for parameter, bucket in zip(self.parameters, self._bucket_of, strict=True)
            if self._ranks > 1 and early
        ]

    def close(self) -> None:
        """Take the hooks off the parameters: a later fit would send these buckets as well."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        super().begin()
        self._missing = [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]
        self._sent, self._norms = [], []

    def add(self, batches: int, loss: Float[Tensor, ""]) -> None:
        if self._ranks > 1 and self._is_last:
            self._send(len(self._buckets))  # also those with parameters that this sample does not use
            norm = torch.stack(self._norms).norm()
        else:
            norm = _norm(self._flat)
        # The sum so far is this rank's own: the first pass after which it is not finite is the cause.
        self._counted.append(loss.isfinite() & (norm.isfinite() | ~self._finite))
        self._finite = self._finite & self._counted[-1]

    def finish(self) -> Reduced:
        for work in self._sent:
            self._wait(work)
        if self._ranks > 1:
            self._flat.div_(self._ranks)
        norm = _norm(self._flat)
        if self.clip is not None:
            self._flat.mul_(_coefficient(norm, self.clip))
        return Reduced(norm, torch.stack(self._counted), _exceeds(norm, self.clip))

    @property
    def _is_last(self) -> bool:
        """Whether the backward pass that runs, or has just ended, is the last of its step."""
        return len(self._counted) == self._batches - 1

    def _divided(self, numbers: int) -> list[slice]:
        """Slices of the flat gradient of at least `numbers` numbers each. Notes the bucket of each parameter."""
        buckets, self._bucket_of = list[slice](), [0] * len(self.parameters)
        stop = start = sum(self._sizes)
        for number in reversed(range(len(self.parameters))):
            start -= self._sizes[number]
            self._bucket_of[number] = len(buckets)
            if stop - start >= numbers or number == 0:
                buckets.append(slice(start, stop))
                stop = start
        return buckets

    def _arrived(self, bucket: int) -> None:
        """Called when the gradient of a parameter of this bucket is complete."""
        if not self._is_last:
            return
        self._missing[bucket] -= 1
        complete = len(self._sent)
        while complete < len(self._buckets) and self._missing[complete] == 0:
            complete += 1
        self._send(complete)

    def _send(self, count: int) -> None:
        """Start the sums of the first `count` buckets, as far as they are not under way."""
        assert self._group is not None
        for bucket in self._buckets[len(self._sent) : count]:
            gradient = self._flat[bucket]
            self._norms.append(_norm(gradient))
            self._sent.append(self._group.all_reduce(gradient))


def _row_norms(flat: Float[Tensor, " numbers"]) -> Float[Tensor, " rows"]:
    """Norms of rows of `_ALIGNMENT` numbers."""
    return torch.linalg.vector_norm(flat.view(-1, _ALIGNMENT), dim=1)


def _norm(flat: Float[Tensor, " numbers"]) -> Float[Tensor, ""]:
    """Norm of a vector, by its rows.

    On a CPU torch adds the squares of one long vector in order. In fp32 the norm of a million numbers is then 1e-4 too small,
    and the norm of AlphaFold2's gradient 1e-2.
    """
    return _row_norms(flat).norm()


def _coefficient(norm: Float[Tensor, ""], clip: float) -> Float[Tensor, ""]:
    """Factor that scales a gradient of norm `norm` down to a norm of at most `clip`; 1 if the norm is nan, so that the gradient
    still shows where."""
    return (clip / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)


def _exceeds(norms: Float[Tensor, "..."], clip: float | None) -> Float[Tensor, "..."]:
    """1 where a gradient of this norm is scaled down, 0 elsewhere."""
    return (norms > (math.inf if clip is None else clip)).float()
