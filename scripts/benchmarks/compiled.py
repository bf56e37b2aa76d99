"""Time of an Evoformer block, forward and backward with dropout, uncompiled and under `compile: blocks`, on one CPU thread.

    python -m scripts.benchmarks.compiled --preset small --sequences 32 --residues 64

Seconds of CPU time, which other programs on the machine change little; the two ways take turns. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import time
from collections.abc import Callable

import torch

from evodsp.config import ModelConfig
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.rng import Draws
from evodsp.training.compilation import regions


def step_of(preset: str, sequences: int, residues: int, compiled: bool) -> Callable[[], None]:
    """A forward and a backward pass of a stack of one block."""
    config = ModelConfig.preset(preset)
    torch.manual_seed(0)
    stack = EvoformerStack(
        config.channels.msa, config.channels.pair, dataclasses.replace(config.evoformer, blocks=1, checkpoint=False)
    )
    if compiled:
        for region in regions(stack):
            region.compile(fullgraph=True, dynamic=False)
    m = torch.randn(1, sequences, residues, config.channels.msa, requires_grad=True)
    z = torch.randn(1, residues, residues, config.channels.pair, requires_grad=True)
    ones = torch.ones(1, sequences, residues), torch.ones(1, residues, residues)
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0)]))

    def step() -> None:
        m_out, z_out = stack(m.view_as(m), z.view_as(z), *ones, keys)
        (m_out.sum() + z_out.sum()).backward()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", help="sizes of the model")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--residues", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = options.preset, options.sequences, options.residues
    ways = {"none": step_of(*sizes, compiled=False), "blocks": step_of(*sizes, compiled=True)}
    first = {name: seconds(step) for name, step in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, step in ways.items():
            times[name].append(seconds(step))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread, {options}")
    print("compile   first step (s)   median (ms)   fastest (ms)   slowest (ms)")
    for name, found in times.items():
        numbers = 1000 * statistics.median(found), 1000 * min(found), 1000 * max(found)
        print(f"{name:8}{first[name]:16.1f}" + "".join(f"{number:14.1f}" for number in numbers))


if __name__ == "__main__":
    main()
