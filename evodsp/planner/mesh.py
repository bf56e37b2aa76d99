"""Memory and time of a training step on a mesh of devices; which meshes of a number of devices are possible, and which to
take.
"""

from __future__ import annotations

import bisect
import dataclasses
import gc
import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from evodsp.config import LossConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.recomputation import Recomputed
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParameterMode, WirePrecision
from evodsp.parallel.group import Kind
from evodsp.planner.device import Device, Links, is_tight
from evodsp.planner.program import (
    HALF,
    LEAST_FIRST,
    LEAST_LAST,
    SINGLE,
    PlannedStep,
    Program,
    SampleSizes,
    recomputed_of,
)
from evodsp.planner.program import program as follow
from evodsp.planner.simulate import Item, Span, Times, free_pass, replayed, segment, simulate, spans, whole
from evodsp.printing import counted


@dataclass(frozen=True)
class Training:
    """A training that is planned."""

    model: ModelConfig
    loss: LossConfig
    sizes: SampleSizes
    recycles: int = 3
    uniform_recycling: bool = True
    global_batch: int = 128
    clip: str = "sample"
    """`sample`, `batch` or `none`, as model.optimizer.clip."""
    ema: bool = True
    half: bool = True
    tf32: bool = False
    wire: WirePrecision = "same"
    parameters: ParameterMode = "replicate"
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    samples: int = 10_000_000
    """Samples of the whole training."""
    graphs: bool | None = False
    """Whether CUDA graphs launch the stacks of blocks, which costs the host nothing; None: whichever is faster."""
    on_gpu: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of `evodsp fit` that make it this run: those that its config, or a default, gives another value, and the
    precision."""
    config: Path | None = None
    """The config file that they go with."""

    def recorded(self) -> tuple[Training, ...]:
        """This training with and without graphs, as far as that is open and `evodsp fit` has them (`check_graphs` of
        `evodsp.training.execution`): on a GPU, with whole parameters."""
        possible = self.on_gpu and self.parameters != "fsdp2"
        chosen = {False, possible} if self.graphs is None else {possible and self.graphs}
        return tuple(dataclasses.replace(self, graphs=graphs) for graphs in sorted(chosen))

    @property
    def passes(self) -> float:
        """Recycling iterations of a sample, on average."""
        return (self.recycles + 2) / 2 if self.uniform_recycling else self.recycles + 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the worst moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    features: int
    activations: int
    """The most that the model holds in a pass."""
    at: str
    """The part of the model in whose forward or backward pass that is."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average + self.features + self.activations


@dataclass(frozen=True)
class Estimate:
    """A training step on a mesh."""

    data: int
    sequence: int
    memory: Memory
    usable: int
    """Bytes that a device has for it."""
    recomputed: Recomputed
    """Recomputation of the Evoformer in the backward pass."""
    step_s: float
    """Seconds of an optimizer step, of `global_batch` samples."""
    batches: int
    """Samples of a step that each data rank computes, one after another."""
    one: Times
    """The pass with gradients of one sample."""
    free_pass_s: float
    """A pass without gradients."""
    gradients_s: float
    """Reducing the gradients of a sample within its sequence group."""
    reduction_s: float
    """Reducing those of a step over data ranks, as far as the backward pass does not hide it."""
    update_s: float
    """Optimizer, moving average and casts of a step."""
    global_batch: int
    block: Times
    """The forward pass of one Evoformer block by itself."""
    graphs: bool = False
    """Whether CUDA graphs launch the stacks."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable

    @property
    def tight(self) -> bool:
        """Whether it fits, but with less room than `MARGIN`."""
        return self.fits and is_tight(self.memory.total, self.usable)

    @property
    def devices(self) -> int:
        return self.data * self.sequence

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s

    @property
    def sample_s(self) -> float:
        """Seconds of one sample, from its first pass to its gradient."""
        return self.step_s / self.batches


def traced(training: Training, sequence: int, recomputed: Recomputed) -> Program:
    """The pass with gradients on rank 0 of `sequence`, which holds the largest shards. `recomputed`: of the Evoformer."""
    again: dict[str, Any] = {"checkpoint": recomputed.blocks, "checkpoint_projections": recomputed.projections}
    model = dataclasses.replace(training.model, evoformer=dataclasses.replace(training.model.evoformer, **again))
    return follow(
        PlannedStep(
            model,
            training.sizes,
            training.loss,
            ranks=sequence,
            half=training.half,
            wire=training.wire,
            plan=training.plan,
            on_gpu=training.on_gpu,
        )
    )


@dataclass(frozen=True)
class TracedPass:
    """A traced pass, with the times of its operators on a device."""

    program: Program
    few: list[Item]
    """The items of the reduced model."""

    @classmethod
    def of(cls, program: Program, training: Training, device: Device, devices: int) -> TracedPass:
        """A pass with the times of `device`, where `devices` of them work at once."""
        return cls(program, spans(program.events, device, devices, training.tf32))

    @property
    def items(self) -> list[Item]:
        """The items of the whole model."""
        return whole(self.few, self.program.repeats)


def estimate(
    training: Training,
    traced_pass: TracedPass,
    recomputed: Recomputed,
    data: int,
    sequence: int,
    device: Device,
    links: Links,
) -> Estimate:
    """The step on `data` x `sequence` devices. `recomputed`: what the Evoformer of `traced_pass` recomputes."""

    def link(kind: Kind, counted: int) -> float:
        return links.seconds(kind, counted, sequence)

    program, launch_s = traced_pass.program, device.launch_us * 1e-6
    launched = replayed if training.graphs else list
    items: list[Item] = list(launched(traced_pass.items))
    one = simulate(items, launch_s, link, device.overlaps)
    block_items = launched(segment(traced_pass.few, ("evoformer", 1)))
    block = simulate(block_items, launch_s, link, device.overlaps, keep_intervals=True)
    free = simulate(free_pass(items), launch_s, link, device.overlaps).total
    numbers, batches = program.parameters, training.global_batch // data
    gradients_s, reduction_s = _reductions(training, numbers, data, sequence, links, one.total * 2 / 3)
    update_s = _update_s(training, numbers, batches, data * sequence, sequence, device)
    step_s = batches * (one.total + (training.passes - 1) * free + gradients_s) + reduction_s + update_s
    return Estimate(
        data=data,
        sequence=sequence,
        memory=memory(training, program, items, data * sequence, batches),
        usable=device.usable,
        recomputed=recomputed,
        step_s=step_s,
        batches=batches,
        one=one,
        free_pass_s=free,
        gradients_s=gradients_s,
        reduction_s=reduction_s,
        update_s=update_s,
        global_batch=training.global_batch,
        block=block,
        graphs=bool(training.graphs),
    )


def memory(training: Training, program: Program, items: list[Item], ranks: int, batches: int) -> Memory:
    """The parts that last for the whole step, and the most that the pass holds (`evodsp.training.gradients`)."""
    numbers = program.parameters
    whole, shard = SINGLE * numbers, SINGLE * -(-numbers // ranks)
    sharded = training.parameters == "fsdp2"
    flat = 2 if training.clip == "sample" and batches * ranks > 1 else 1
    worst = max((item for item in items if isinstance(item, Span)), key=lambda item: item.peak)
    return Memory(
        weights=(shard if sharded else whole) + (HALF * numbers if training.half and not sharded else 0),
        gradients=shard if sharded else flat * whole,
        optimizer=2 * (whole if training.parameters == "replicate" else shard),
        average=(shard if sharded else whole) if training.ema else 0,
        features=program.batch_bytes * (training.recycles + 1),
        activations=worst.peak,
        at=f"{worst.place[0]}, {worst.phase}",
    )


def _reductions(
    training: Training, numbers: int, data: int, sequence: int, links: Links, backward_s: float
) -> tuple[float, float]:
    """Seconds for the gradients of each sample, and for those of each step (`evodsp.training.gradients`)."""
    counted, ranks = 2 * SINGLE * numbers, data * sequence
    if training.parameters == "fsdp2":
        # Units of one block: their gathers and reductions run beside the blocks; what does not fit shows.
        each = (3 * HALF if training.half else 3 * SINGLE) * numbers + SINGLE * numbers
        return max(0.0, links.seconds("all-gather", each, ranks) - backward_s), 0.0
    after = links.seconds("broadcast", SINGLE * numbers, ranks) if training.parameters == "zero1" else 0.0
    if training.clip == "sample":
        within = links.seconds("all-reduce", counted, sequence)
        return within, links.apart("all-reduce", counted, data, stride=sequence) + after
    hidden_s = 0.0 if training.graphs and sequence > 1 else backward_s  # no other collective runs beside a replayed one
    return 0.0, max(0.0, links.seconds("all-reduce", counted, ranks) - hidden_s) + after


def _update_s(training: Training, numbers: int, batches: int, ranks: int, sequence: int, device: Device) -> float:
    """Seconds of what touches all parameters, which memory traffic bounds. Bytes a number, read and written."""
    casts = 28 if training.half else 0  # concatenated and cast, and their gradients likewise
    # Norm, scale, mask, sum and zero; the mean over the sequence group.
    of_sample = 36 + (8 if sequence > 1 else 0) if training.clip == "sample" else 8
    adam = 28 / (1 if training.parameters == "replicate" else ranks)
    of_step = 8 + adam + (12 if training.ema else 0)
    share = 1 / ranks if training.parameters == "fsdp2" else 1.0
    moved = numbers * share * (batches * (casts + of_sample) + of_step)
    return device.crowded(ranks) * moved / (device.memory_gbps * device.memory_efficiency * 1e9)


MOST_RANKS = 64
"""Sequence groups larger than this are only planned if they are asked for."""


@dataclass(frozen=True)
class Comparison:
    """All meshes that were planned."""

    training: Training
    device: Device
    links: Links
    estimates: list[Estimate]
    best: Estimate | None
    """The fastest one that fits; None if none does."""
    alone: Estimate
    """One device, whether it fits or not: what efficiency is measured against."""
    fewer: Estimate | None = None
    """A mesh of fewer devices that is no slower than the best one; None if there is none."""

    def efficiency(self, one: Estimate) -> float:
        """Samples a second of a device, relative to one device alone."""
        return (one.samples_per_s / one.devices) / self.alone.samples_per_s

    def hours(self, one: Estimate) -> float:
        """Hours that the whole training takes on a mesh."""
        return self.training.samples / one.samples_per_s / 3600


def possible(training: Training, devices: int, sequence: int | None = None) -> list[int]:
    """Sizes of sequence groups: divisors of `devices` whose data ranks divide the batch. Raises UserError if there is none."""
    n, batch = training.sizes, training.global_batch
    most = min(n.residues, n.clusters + n.templates, devices)
    wanted = [sequence] if sequence is not None else list(range(1, min(most, MOST_RANKS) + 1))
    if sequence is not None and sequence > most:
        raise UserError(
            f"--sequence is {sequence}, but one sample of {n.residues} residues and {n.clusters + n.templates} MSA rows on "
            f"{counted(devices, 'device')} takes at most {counted(most, 'rank')}"
        )
    if sequence is not None and devices % sequence:
        raise UserError(f"--gpus is {devices}, which is not a multiple of --sequence, {sequence}; change one of them")
    found = [k for k in wanted if devices % k == 0 and batch % (devices // k) == 0]
    if not found:
        least = -(-devices // batch)
        raise UserError(
            f"no mesh of {counted(devices, 'device')} divides a global batch of {counted(batch, 'sample')}; a sequence "
            f"group takes at most {counted(min(most, MOST_RANKS), 'rank')} and must take at least {least}: change --gpus or "
            "--global_batch"
        )
    return found


def compare(
    training: Training, devices: int, device: Device, links: Links, sequence: int | None = None, auto: bool = True
) -> Comparison:
    """Plan the possible meshes, from small sequence groups to large ones, up to the first that is slower than an earlier one
    which fits, because larger ones only communicate more. Smaller groups, with which devices have nothing to do, are planned
    likewise, on fewer devices.

    `auto`: each mesh recomputes only as much of the Evoformer as its memory demands. Otherwise as the model's config says.
    """
    groups = possible(training, devices, sequence)
    smaller = [2**k for k in range(groups[0].bit_length()) if 2**k < groups[0]] if sequence is None else []
    # No search for unreachable objects: this import makes half a million that stay, and the search takes a third of its time.
    collects = gc.isenabled()
    gc.disable()
    # PyTorch needs its compiler's module for shapes. Imported before the fork: each process would take a second for it.
    importlib.import_module("torch._dynamo")
    if collects:
        gc.enable()
    # The processes live for seconds: what they could collect is little.
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.disable) as pool:
        planned = Planned(training, device, links, auto, pool)
        of_one = planned.start(1)

        def follow(groups: list[int]) -> list[Estimate]:
            found: list[Estimate] = []
            while groups and not _slower(found):
                now, groups = groups[:2], groups[2:]
                programs = [of_one if group == 1 else planned.start(group) for group in now]
                found += [
                    planned.estimate(program.result(), _data_ranks(training.global_batch, devices // group), group)
                    for group, program in zip(now, programs, strict=True)
                ]
            return found

        estimates = follow(groups)
        best, fewer = _fastest(estimates), _fastest(follow(smaller))
        alone = planned.estimate(of_one.result(), 1, 1)
    if best is None or fewer is None or fewer.step_s > best.step_s:
        fewer = None
    return Comparison(training, device, links, estimates, best, alone, fewer)


def _data_ranks(batch: int, most: int) -> int:
    """The largest divisor of a batch that is at most `most`."""
    return next(ranks for ranks in range(most, 0, -1) if batch % ranks == 0)


def _fastest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest mesh that fits, of equally fast ones that of the smallest groups."""
    return min((one for one in estimates if one.fits), key=lambda one: (one.step_s, one.sequence), default=None)


def _slower(estimates: Sequence[Estimate]) -> bool:
    """Whether the last mesh is slower than one before it that fits."""
    return any(one.fits and one.step_s < estimates[-1].step_s for one in estimates[:-1])


class Planned:
    """Follows passes in other processes, and chooses what each mesh recomputes: what takes least time for its bytes first."""

    def __init__(self, training: Training, device: Device, links: Links, auto: bool, pool: Executor) -> None:
        self._training, self._device, self._links, self._pool = training, device, links, pool
        evoformer = training.model.evoformer
        self._blocks = evoformer.blocks
        self._searches = auto and self._blocks >= LEAST_FIRST + LEAST_LAST
        self._unsearched = Recomputed(self._blocks) if auto else recomputed_of(evoformer)
        """Recomputation where nothing is searched for."""

    def start(self, sequence: int) -> Future[Program]:
        """Begin to follow the pass of a group of `sequence` ranks."""
        first = Recomputed(0, LEAST_FIRST) if self._searches else self._unsearched
        return self._pool.submit(traced, self._training, sequence, first)

    def estimate(self, program: Program, data: int, sequence: int) -> Estimate:
        """A mesh. `program`: what `start` made for its groups."""
        traced_pass = TracedPass.of(program, self._training, self._device, data * sequence)
        recomputed = self._unsearched
        if self._searches:
            recomputed, traced_pass = self._cheapest(traced_pass, data, sequence)
        planned = (
            estimate(training, traced_pass, recomputed, data, sequence, self._device, self._links)
            for training in self._training.recorded()
        )
        return min(planned, key=lambda one: one.step_s)

    def _cheapest(self, projecting: TracedPass, data: int, sequence: int) -> tuple[Recomputed, TracedPass]:
        """Least recomputation with which the step fits: the projections of some blocks; if these do not suffice, some
        blocks whole and the projections of the others; at last everything. `projecting`: a pass that recomputes some
        projections.
        """
        blocks = self._blocks
        if (kept := self._most_kept(projecting, data, sequence)) is not None:
            return Recomputed(0, blocks - kept), _keeping(projecting, blocks, kept)
        mixed = self._traced(Recomputed(LEAST_FIRST, blocks - LEAST_FIRST), data, sequence)
        if (kept := self._most_kept(mixed, data, sequence)) is not None:
            return Recomputed(blocks - kept, kept), _keeping(mixed, blocks, kept)
        return Recomputed(blocks), self._traced(Recomputed(blocks), data, sequence)

    def _most_kept(self, traced_pass: TracedPass, data: int, sequence: int) -> int | None:
        """The largest number of last blocks, which keep more, that fits with `MARGIN`, from `LEAST_LAST` to all but
        `LEAST_FIRST`; None if none does."""
        ranks, batches = data * sequence, self._training.global_batch // data

        def fits(kept: int) -> bool:
            changed = _keeping(traced_pass, self._blocks, kept)
            found = memory(self._training, changed.program, changed.items, ranks, batches)
            return not is_tight(found.total, self._device.usable)

        least, most = LEAST_LAST, self._blocks - LEAST_FIRST
        if fits(most):  # as a rule
            return most
        # Memory grows with the number of blocks that are kept.
        fitting = bisect.bisect_left(range(least, most), True, key=lambda kept: not fits(kept))
        return least + fitting - 1 if fitting else None

    def _traced(self, recomputed: Recomputed, data: int, sequence: int) -> TracedPass:
        program = self._pool.submit(traced, self._training, sequence, recomputed).result()
        return TracedPass.of(program, self._training, self._device, data * sequence)


def _keeping(mixed: TracedPass, blocks: int, kept: int) -> TracedPass:
    """The pass with `kept` last blocks, which keep more, from one that was traced with another number."""
    repeats = mixed.program.repeats
    first, last = (repeat for repeat in repeats if repeat.part == "evoformer")
    others = [repeat for repeat in repeats if repeat.part != "evoformer"]
    changed = [*others, replace(first, times=blocks - kept - 3), replace(last, times=kept - 2)]
    return replace(mixed, program=replace(mixed.program, repeats=changed))
