"""The one interface of all methods that spread a `Transformer` over ranks.

    groups = Groups(handle)                       # the ranks; two ledgers
    method.check(config, sizes, groups.size)      # UserError: why not, and what to change
    parallel = method.apply(model, groups)        # the same weights on every rank; changes `model`
    output = parallel(latents)                    # whole latents in and out, on every rank
    loss(output).backward()                       # every rank computes the same loss
    method.reduce_gradients(parallel)             # what a training step needs before the optimizer
    gradients = method.gradients(parallel)        # instead: whole gradients, by the one-device model's names

The patches are embedded, and turned back into latents, on every rank alike; the layers between the two are spread.
`groups.layer_ledger` records what the layers communicate, `groups.end_ledger` what it takes to enter and leave them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel import average_gradients
from evodsp.parallel.group import Group, Kind, Ledger, Phase
from evodsp.rng import Draws

from ..config import TransformerConfig
from ..transformer import Transformer

Counts = Mapping[Kind, int]
"""Numbers of collectives."""


class RingGroup(Group):
    """A group whose ranks can also pass tensors on to their neighbours."""

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor], first_tag: int = 0) -> list[Any]:
        """Begin to send tensors to the next rank and to receive those of the previous one. Returns what to `wait()` for.

        Sends and receives are launched together: a rank that sent first and received later would wait for ranks that do the
        same. `first_tag` tells hops apart that are under way at the same time.
        """
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = []
        for tag, (arriving, leaving) in enumerate(zip(received, sent, strict=True), first_tag):
            operations += [
                dist.P2POp(dist.isend, leaving, group=self.handle, tag=tag, group_peer=following),
                dist.P2POp(dist.irecv, arriving, group=self.handle, tag=tag, group_peer=previous),
            ]
        return dist.batch_isend_irecv(operations)


class Groups:
    """The ranks that share a sample, once for the layers and once for the model's ends, each with a ledger."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self.layers, self.ends = RingGroup(handle, Ledger()), Group(handle, Ledger())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layers.size

    @property
    def layer_ledger(self) -> Ledger:
        """What the layers communicated."""
        assert self.layers.ledger is not None
        return self.layers.ledger

    @property
    def end_ledger(self) -> Ledger:
        """What it took to enter the layers and to leave them."""
        assert self.ends.ledger is not None
        return self.ends.ledger


class Parallel(nn.Module):
    """A transformer on several ranks. `model` holds this rank's parameters, under the names of the one-device model."""

    def __init__(self, model: Transformer, method: Method, groups: Groups) -> None:
        super().__init__()
        self.model, self.method, self.groups = model, method, groups

    def forward(self, latents: Float[Tensor, "B c T H W"], draws: Draws | None = None) -> Float[Tensor, "B c T H W"]:
        """What the one-device model returns for the same arguments."""
        self.method.check_sizes(self.model.config.token_sizes(latents.shape), self.groups.size)
        return self.run(latents, draws)

    def run(self, latents: Tensor, draws: Draws | None) -> Tensor:
        """The forward pass, after the sizes are checked."""
        return self.model(latents, draws)


class Method(ABC):
    """A way to spread a transformer over ranks. It has no state; `Parallel` has."""

    name: str
    """Its name in configurations, results and plots."""
    title: str
    """Its name in prose."""

    @abstractmethod
    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        """Spread `model`, whose weights are equal on all ranks, and whose modules are changed.

        Raises UserError if the method cannot spread it over this number of ranks.
        """

    @abstractmethod
    def layer_traffic(self, phase: Phase) -> Counts:
        """Collectives of one layer with two axes, each of the volume that `volume` says.

        `recompute`: what activation checkpointing (`TransformerConfig.checkpoint`) adds to the backward pass.
        """

    def model_traffic(self, phase: Phase, layers: int) -> Counts:
        """Collectives of all layers, with two axes."""
        return {kind: layers * count for kind, count in self.layer_traffic(phase).items()}

    def check(self, config: TransformerConfig, sizes: Sequence[int], ranks: int) -> None:
        """Raise UserError if a model, or tokens of the given sizes (time first), cannot be spread over `ranks` ranks."""
        self.check_model(config, ranks)
        self.check_sizes(sizes, ranks)

    def check_model(self, config: TransformerConfig, ranks: int) -> None:
        """Raise UserError if the model cannot be spread over `ranks` ranks."""
        return

    def check_sizes(self, sizes: Sequence[int], ranks: int) -> None:
        """Raise UserError if tokens of the given sizes cannot be spread over `ranks` ranks."""
        return

    def partition(self, parallel: Parallel) -> dict[str, int]:
        """Parameters of which a rank holds a slice, and the dimension along which it is cut."""
        return {}

    def reduce_gradients(self, parallel: Parallel) -> None:
        """After `backward`: give each parameter, or slice of one, its gradient. What a training step does, if DDP does not."""
        cut = self.partition(parallel)
        whole = [parameter for name, parameter in parallel.model.named_parameters() if name not in cut]
        average_gradients(whole, parallel.groups.layers)

    def gradients(self, parallel: Parallel) -> dict[str, Tensor]:
        """The whole gradients by the one-device model's names, on every rank, after `backward`. Includes `reduce_gradients`."""
        self.reduce_gradients(parallel)
        groups, cut = parallel.groups, self.partition(parallel)
        found = {}
        for name, parameter in parallel.model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad
            if name in cut:
                slices = [torch.empty_like(parameter.grad) for _ in range(groups.size)]
                dist.all_gather(slices, parameter.grad.contiguous(), group=groups.layers.handle)
                found[name] = torch.cat(slices, cut[name])
        return found


def volume(kind: Kind, ranks: int) -> Fraction:
    """Numbers that one collective of a sequence tensor moves per rank, in units of that tensor's size M (the paper's table 8).

    It counts as `evodsp.parallel.group` does.
    """
    sizes: dict[Kind, Fraction] = {"all-reduce": Fraction(2), "all-to-all": Fraction(1, ranks)}
    return sizes.get(kind, Fraction(1))


def must_divide(ranks: int, size: int, what: str, method: str) -> None:
    """Raise UserError if `ranks` does not divide a size."""
    if size % ranks:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise UserError(
            f"{method} on {ranks} ranks: {what} is {size}, but must be a multiple of the number of ranks; "
            f"use one of {', '.join(map(str, divisors))} ranks, or dsp, which needs no divisible size"
        )
