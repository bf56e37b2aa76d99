"""A layer that was made parallel by hand, compared with one device; and two mistakes that its outputs do not show.

    python -m scripts.examples.check_parallel
    python -m scripts.examples.check_parallel --plant reduce-scatter      (or: mean)

The layer attends along a sequence that is spread over ranks: queries are a rank's own, keys and values are gathered. Then it
multiplies each position by a gate, which it computes from a mean over all positions.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evodsp.parallel import Group, gather, split, total
from evodsp.parallel.testing import check

POSITIONS, WIDTH = 7, 4


class Layer(nn.Module):
    """Attention and a gate, for [batch, positions, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.summary, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.whole(self.keys(x)).chunk(2, -1)
        x = x + (self.query(x) @ keys.mT).softmax(-1) @ values
        return x * self.gate(self.mean(self.summary(x))).sigmoid()

    def whole(self, x: Tensor) -> Tensor:
        return x

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


class Sharded(Layer):
    """The layer on a rank that holds some of the positions. `plant`: the mistake to make."""

    def __init__(self, layer: Layer, group: Group, plant: str) -> None:
        super().__init__()
        self.load_state_dict(layer.state_dict())
        self.group, self.plant = group, plant

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(split(x, 1, self.group))

    def whole(self, x: Tensor) -> Tensor:
        if self.plant != "reduce-scatter":
            return gather(x, 1, POSITIONS, self.group)
        # Own keys get gradients from own queries only: the backward pass has no reduce-scatter.
        parts = [*gather(x.detach(), 1, POSITIONS, self.group).tensor_split(self.group.size, 1)]
        parts[self.group.rank] = x
        return torch.cat(parts, 1)

    def mean(self, x: Tensor) -> Tensor:
        share = x.sum(1, keepdim=True) / POSITIONS
        return Total.apply(share, self.group) if self.plant == "mean" else total(share, self.group)


class Total(torch.autograd.Function):
    """The sum over ranks. Its backward pass takes the sum of gradients twice: a 1/N is forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        dist.all_reduce(y := x.clone(), group=group.handle)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(found := gradient.clone(), group=ctx.group.handle)
        return ctx.group.size * found, None


def main(plant: str) -> None:
    try:
        print(check(Layer(), (torch.randn(1, POSITIONS, WIDTH),), partial(Sharded, plant=plant)))
    except AssertionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=("none", "reduce-scatter", "mean"), default="none")
    main(parser.parse_args().plant)
