"""A profiler trace of an Evoformer stack on local ranks: when collectives run, and what is computed at the same time.

    python -m scripts.benchmarks.trace [--ranks 2] [--output scripts/benchmarks/results/trace]

Draws OUTPUT.png and writes its intervals to OUTPUT.csv. A compute interval has the name of its sub-layer; in the backward pass
autograd's sequence numbers tell which. A collective is named after the schedule: its number within the block, its sub-layer,
its block. On CPUs the cores that compute also copy the messages, so the trace shows that collectives are launched early enough,
not that time is saved.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.traffic import RETURN, Sizes, inner_block
from evodsp.parallel.collectives import Collective, Transfer
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.pending import Pending

from .trace_drawing import draw

RESULTS = Path(__file__).parent / "results"
LAYER, LAUNCH, AWAIT, PASS = "layer ", "launch ", "await ", "pass "
"""Prefixes of the annotations in the trace."""


@dataclass(frozen=True)
class Interval:
    """An interval of a pass. Times are in ms since the start of the pass."""

    direction: str
    what: str
    """`compute`, `collective` or `await`."""
    name: str
    start: float
    end: float
    awaited: float = 0.0
    """For a collective: when this rank began to wait for it."""
    hidden: float = 0.0
    """For a collective: how long this rank computed between launch and wait, in ms."""


@dataclass
class _NamedTransfer(Transfer):
    """A transfer whose wait is annotated in the trace."""

    name: str = ""

    def wait(self) -> Tensor:
        with record_function(AWAIT + self.name):
            return super().wait()


@dataclass(frozen=True)
class _Named(Collective):
    """A collective whose launch and wait are annotated in the trace."""

    inner: Collective
    name: str

    def launch(self, x: Tensor, backward: bool = False) -> Transfer:
        with record_function(LAUNCH + self.name):
            transfer = self.inner.launch(x, backward)
        return _NamedTransfer(transfer.work, transfer.pieces, transfer.dim, transfer.sent, transfer.waits, self.name)

    def traced(self, x: Tensor) -> Tensor:
        return self.inner.traced(x)

    def buffer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.inner.buffer_shape(shape)

    def pieces(self, received: Tensor, shape: Sequence[int]) -> tuple[tuple[Tensor, ...], int]:
        return self.inner.pieces(received, shape)

    def transpose(self) -> _Named:
        return _Named(self.inner.transpose(), self.name)

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.inner.result_shape(shape)

    def volume(self, shape: Sequence[int]) -> int:
        return self.inner.volume(shape)


class TracedExchange(ShardedExchange):
    """Gives each collective the next of `names`."""

    def __init__(self, group: Group, names: Iterator[str]) -> None:
        super().__init__(group)
        self._names = names

    def _launched(self, x: Tensor, collective: Collective, exact: bool) -> Pending:
        return super()._launched(x, _Named(collective, next(self._names)), exact)


def name_layers(stack: EvoformerStack) -> None:
    """Annotate each sub-layer in the trace."""
    for number, block in enumerate(stack.blocks):
        for part in (block.msa_stack, block.pair_stack):
            for name, layer in part.named_children():
                _name(layer, f"{name} {number}")


def _name(module: nn.Module, name: str) -> None:
    entered: list[record_function] = []

    def before(module: nn.Module, inputs: Any) -> None:
        entered.append(record_function(LAYER + name))
        entered[-1].__enter__()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def run(group: Group, sequences: int, residues: int, blocks: int) -> list[Any]:
    """The profiler's events of one forward and backward pass, after a warm-up."""
    channels = ModelConfig().channels
    config = dataclasses.replace(EvoformerConfig(), blocks=blocks, checkpoint=False)
    n = Sizes(group.size, group.rank, 1, sequences, residues, channels.msa, channels.pair, config)
    stack = EvoformerStack(channels.msa, channels.pair, config)
    exchange = TracedExchange(group, iter(()))
    use_exchange(stack, exchange)
    name_layers(stack)
    masks = torch.ones(1, sequences, residues), torch.ones(1, residues, residues)

    def both_passes() -> None:
        exchange._names = iter(_numbered(n))
        m = exchange.shard(torch.randn(1, sequences, residues, channels.msa), "seq").requires_grad_()
        z = exchange.shard(torch.randn(1, residues, residues, channels.pair), "j").requires_grad_()
        with record_function(PASS + "forward"):
            m, z = stack(m, z, *masks)
        total = m.sum() + z.sum()
        with record_function(PASS + "backward"):
            total.backward()

    both_passes()
    dist.barrier(group.handle)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        both_passes()
    return list(profiler.profiler.kineto_results.events())


def _numbered(n: Sizes) -> list[str]:
    """The names of all collectives in order, from the schedule. The last block does not switch m back to S."""
    table = [(place, call.layer) for place, call in enumerate(inner_block(n), 1)]
    names = [f"{place} {layer} {block}" for block in range(n.config.blocks) for place, layer in table]
    last = n.config.blocks - 1
    return [name for name in names if not name.endswith(f"{RETURN} {last}")]


def intervals(events: list[Any]) -> list[Interval]:
    """The intervals of both passes."""
    named = {
        prefix: sorted((e for e in events if e.name().startswith(prefix)), key=lambda e: e.start_ns())
        for prefix in (LAYER, LAUNCH, AWAIT, PASS, "gloo:")
    }
    if len(named[LAUNCH]) != len(named["gloo:"]):
        raise RuntimeError(f"{len(named[LAUNCH])} collectives were launched, but the trace has {len(named['gloo:'])}")
    layer_of = {
        e.sequence_nr(): layer.name().removeprefix(LAYER)
        for layer in named[LAYER]
        for e in events
        if e.sequence_nr() >= 0 and _within(e, layer) and "Backward" not in e.name()
    }
    found: list[Interval] = []
    for whole in named[PASS]:
        direction, origin = whole.name().removeprefix(PASS), whole.start_ns()

        def ms(ns: int, origin: int = origin) -> float:
            return (ns - origin) / 1e6

        waits = [e for e in named[AWAIT] if _within(e, whole)]
        if direction == "forward":
            pieces = [
                (e.name().removeprefix(LAYER), e.start_ns(), e.end_ns()) for e in named[LAYER] if _within(e, whole)
            ]
        else:
            pieces = _backward_pieces(events, whole, layer_of)
        compute = list(_without(pieces, [(e.start_ns(), e.end_ns()) for e in waits]))
        found += [Interval(direction, "compute", name, ms(start), ms(end)) for name, start, end in compute]
        found += [
            Interval(direction, "await", e.name().removeprefix(AWAIT), ms(e.start_ns()), ms(e.end_ns())) for e in waits
        ]
        for launch, moving in zip(named[LAUNCH], named["gloo:"], strict=True):
            if not _within(launch, whole):
                continue
            name = launch.name().removeprefix(LAUNCH)
            wait = next(e for e in waits if e.name().removeprefix(AWAIT) == name)
            hidden = sum(max(0, min(end, wait.start_ns()) - max(start, launch.end_ns())) for _, start, end in compute)
            found.append(
                Interval(
                    direction,
                    "collective",
                    name,
                    ms(launch.start_ns()),
                    ms(moving.end_ns()),
                    ms(wait.start_ns()),
                    hidden / 1e6,
                )
            )
    return found


def _within(inner: Any, outer: Any) -> bool:
    return (
        inner.start_thread_id() == outer.start_thread_id()
        and outer.start_ns() <= inner.start_ns()
        and inner.end_ns() <= outer.end_ns()
    )


def _backward_pieces(events: list[Any], whole: Any, layer_of: dict[int, str]) -> list[tuple[str, int, int]]:
    """Autograd nodes, grouped by the sub-layer that created them. A node without a known sub-layer joins the previous group."""
    prefix = "autograd::engine::evaluate_function: "
    nodes = sorted((e for e in events if e.name().startswith(prefix) and _within(e, whole)), key=lambda e: e.start_ns())
    pieces: list[tuple[str, int, int]] = []
    for node in nodes:
        name = layer_of.get(node.sequence_nr(), pieces[-1][0] if pieces else "")
        if not name:
            continue
        if pieces and pieces[-1][0] == name:
            pieces[-1] = name, pieces[-1][1], node.end_ns()
        else:
            pieces.append((name, node.start_ns(), node.end_ns()))
    return pieces


def _without(pieces: list[tuple[str, int, int]], holes: list[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """`pieces` without their overlap with `holes`, which are sorted."""
    for name, start, end in pieces:
        for hole_start, hole_end in holes:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                yield name, start, hole_start
            start = hole_end
        if start < end:
            yield name, start, end


def _rank(rank: int, ranks: int, rendezvous: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    handle = dist.group.WORLD
    assert handle is not None  # created one line above
    found = intervals(run(Group(handle), arguments.sequences, arguments.residues, arguments.blocks))
    dist.barrier()
    if rank == 0:
        with arguments.output.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["pass", "what", "name", "start_ms", "end_ms", "awaited_ms", "compute_before_await_ms"])
            for x in found:
                numbers = (f"{value:.3f}" for value in (x.start, x.end, x.awaited, x.hidden))
                writer.writerow([x.direction, x.what, x.name, *numbers])
        draw(found, arguments.output.with_suffix(".png"), f"rank 0 of {ranks}, gloo, {arguments.blocks} blocks")
        for direction in ("forward", "backward"):
            print(f"\n{direction}: compute between launch and wait, ms")
            for x in found:
                if x.what == "collective" and x.direction == direction:
                    print(f"  {x.name:24}{x.hidden:8.1f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences of the MSA (default: 64)")
    parser.add_argument("--residues", type=int, default=128, help="residues (default: 128)")
    parser.add_argument("--blocks", type=int, default=2, help="Evoformer blocks (default: 2)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "trace", help="path of the files to write, without suffix"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (arguments.ranks, f"{folder}/rendezvous", arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
