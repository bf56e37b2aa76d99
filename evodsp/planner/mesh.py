"""Memory and time of a training step on one mesh of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evodsp.config import LossConfig, ModelConfig
from evodsp.model.recomputation import Recomputed
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParameterMode, WirePrecision
from evodsp.parallel.group import Kind
from evodsp.planner.device import Device, Links, is_tight
from evodsp.planner.program import HALF, SINGLE, PlannedStep, Program, SampleSizes
from evodsp.planner.program import program as follow
from evodsp.planner.simulate import Item, Span, Times, free_pass, replayed, segment, simulate, spans, whole


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
    """What the Evoformer recomputes in the backward pass."""
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
    again = {"checkpoint": recomputed.blocks, "checkpoint_projections": recomputed.projections}
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
