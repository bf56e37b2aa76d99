"""What the programs of this folder have in common beside the model: how they start and end, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Result = tuple[list[float], dict[str, Any]]
"""The loss of each step, and the trained parameters."""


def mean_over_ranks(loss: Tensor) -> float:
    """The mean of all ranks' losses, to print. The ranks of a sequence group have the same loss."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def show(losses: list[float]) -> None:
    """Print the losses in a line."""
    print("losses", *(f"{loss:.12f}" for loss in losses), flush=True)


def run(train: Callable[..., Result], frameworks: Iterable[str] = ()) -> None:
    """Train on the ranks that torchrun started, `--sequence` of them with the same sample. The last rank prints the losses.

    `frameworks`: names of which `--framework` gives `train` one; without names there is no such option.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequence", type=int, default=2, help="ranks that share a sample")
    if names := list(frameworks):
        parser.add_argument("--framework", choices=names, default=names[0])
    dist.init_process_group("gloo")
    losses, _ = train(**vars(parser.parse_args()))
    if dist.get_rank() == dist.get_world_size() - 1:  # of a pipeline, the last stage knows the loss
        show(losses)
    dist.barrier()
    dist.destroy_process_group()
