"""Memory and time that a prediction needs of each rank: the model's passes without gradients, followed on shapes alone.

`evodsp estimate` asks for several lengths, with `--gpus` for several numbers of ranks, and `evodsp predict` for each target
before it runs.

Memory and time come from two runs. With a limit of working memory, layers compute many equal pieces: two of them show the
memory. The time is that of layers computed whole, whose products are the same. A CPU takes other kernels than a GPU, in pieces
as large as its cache; what they hold besides is little, so a CPU's prediction is followed as a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from evodsp.config import ArrangementName, ModelConfig
from evodsp.model.graphs import rounded_up, worth_recording
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.group import Kind
from evodsp.planner.device import Device, Links, free_memory, load_device, load_link, names, this_cpu
from evodsp.planner.program import HALF, MADE_ONCE, SINGLE, PlannedStep, Program, SampleSizes
from evodsp.planner.program import program as follow
from evodsp.planner.simulate import Item, Span, Times, items_of, simulate
from evodsp.planner.trace import Operation

GIB = 2**30
FEWEST_CHAINS: Mapping[ArrangementName, int] = MappingProxyType({"monomer": 1, "multimer": 2})
"""Chains of a prediction of which only the number of residues is known. More of them take little more time."""
WORKING_SHARE = 32
"""Divisor of a GPU's memory: a layer computes within this part of it, unless another amount is given."""
WORKING_CPU = 256 << 20
"""Bytes within which a layer computes on a CPU, unless another amount is given."""
SAMPLES = 2
"""Pieces of a layer that are followed."""
HEAP = 16 << 20
"""Bytes that the C library keeps of freed memory, on a CPU where large blocks are given back (docs/measured.md, 'Memory of a
process'). By its own way it keeps more."""
_PARTS = {"other": "templates and embedders"}
"""Names of places that differ from the model's."""
_SMALL_WORKING = 64 << 20
_FEW_ROWS = 1024
"""Working memory and extra rows that `changes` proposes."""
_MOST_RANKS = 64
"""Largest number of ranks that `changes` proposes."""


@dataclass(frozen=True)
class PlannedPrediction:
    """A prediction to be followed: model, sizes and settings."""

    model: ModelConfig
    sizes: SampleSizes
    passes: int = 4
    """Passes of a seed: the recycling iterations and the first pass."""
    ensembles: int = 1
    ranks: int = 1
    half: bool = False
    """bf16 layers."""
    tf32: bool = False
    on_gpu: bool = True
    """Whether the device has memory of its own: the features of later passes then wait on the host."""
    memory: int | None = None
    """Bytes for what a layer computes beside the representations; None: no limit."""
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    graphs: bool = False
    """Whether passes may be recorded."""

    @property
    def recorded(self) -> bool:
        """Whether passes are recorded and replayed."""
        return self.graphs and self.on_gpu and worth_recording(self.sizes.residues, self.passes, self.ranks)

    @property
    def padded(self) -> SampleSizes:
        """The sizes that the model sees."""
        if not self.recorded:
            return self.sizes
        names = "residues", "clusters", "extra"
        return replace(self.sizes, **{name: rounded_up(getattr(self.sizes, name)) for name in names})

    @property
    def pair_share(self) -> int:
        """Bytes of a rank's shard of the pair representation: no pass needs less."""
        return self.model.pair_share(self.sizes.residues, self.ranks, self.half)


@dataclass(frozen=True)
class PredictionMemory:
    """Bytes of one rank at the worst moment of a prediction."""

    weights: int
    features: int
    """Input features of a pass, or of all passes where they wait in the same memory."""
    pair: int
    """The rank's shard of the pair representation."""
    msa: int
    """The rank's shard of the MSA representation, or of the extra MSA's if that is alive at the worst moment."""
    layers: int
    """All else that the model holds: copies of representations, results of a layer, logits."""
    recorded: int
    """The inputs and the memory of a recorded pass, which launched passes, such as the next recording's first, cannot use."""
    heap: int
    """Freed memory that the C library keeps on a CPU for the next tensors: at most `HEAP`."""
    at: str
    """The part of the model with the worst moment."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by what they hold."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "at"}


@dataclass(frozen=True)
class Machine:
    """Hardware of one rank; ranks on a CPU share a machine."""

    name: str
    free: int
    """Bytes that a program may take of it."""
    shared: bool
    """Whether all ranks take their memory from it."""
    device: Device | None
    """Rates of its device; None for a device of an unknown kind."""
    links: Links | None = None

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """A device of this machine, with the memory that is free now."""
        if device.type != "cuda":
            return cls("this machine", free_memory(), True, this_cpu())
        name = torch.cuda.get_device_name(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        known = next((own for own in names("device") if own.upper() in name.upper()), None)
        return cls(name, free, False, *_rates(known)) if known else cls(name, free, False, None)

    @classmethod
    def named(cls, name: str) -> Machine:
        """An idle device by the name of its kind or by the path of its file. Raises UserError."""
        device, links = _rates(name)
        return cls(device.name, device.usable, not device.on_gpu, device, links)

    def free_for(self, ranks: int) -> int:
        """Bytes that each of the ranks may take."""
        return self.free // ranks if self.shared else self.free

    def fits(self, total: int, ranks: int) -> bool:
        """Whether each of the ranks may take `total` bytes."""
        return total * (ranks if self.shared else 1) <= self.free


def _rates(name: str) -> tuple[Device, Links]:
    device = load_device(name)
    return device, Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)


def working_memory_of(device: Device) -> int:
    """Bytes within which a layer computes on a device of this kind, unless another amount is given."""
    return int(device.memory_gib * GIB) // WORKING_SHARE if device.on_gpu else WORKING_CPU


@dataclass(frozen=True)
class PredictionNeeds:
    """Memory and time of a prediction on each of its ranks."""

    what: PlannedPrediction
    memory: PredictionMemory
    one_pass: Times | None
    """Time and communication of a pass; None on a device of an unknown kind."""
    recording: float = 0.0
    """Time of a recording: the host launches a pass, and records it."""

    @property
    def seconds(self) -> float | None:
        """Time of all passes of a seed, the first of its sizes."""
        return None if self.one_pass is None else self.what.passes * self.one_pass.total + self.recording

    def line(self, name: str, free: int) -> str:
        """For a terminal: the memory of a rank, what is `free` for it, and the time of a seed."""
        each = f" on each of {self.what.ranks} ranks" if self.what.ranks > 1 else ""
        time = "" if self.seconds is None else f"; about {duration(self.seconds)} a seed"
        return f"{name}: needs {size(self.memory.total)}{each}, {size(free)} free{time}"


def prediction_needs(what: PlannedPrediction, device: Device | None, links: Links | None = None) -> PredictionNeeds:
    """Memory of the rank with the largest shards, and time. `links`: between the ranks."""
    if device is None:
        return PredictionNeeds(what, prediction_memory(what), None)
    recording = 0.0
    if what.recorded:
        launched = prediction_times(what, device, links, launched=True)
        recording = launched.total + launched.host
    return PredictionNeeds(what, prediction_memory(what), prediction_times(what, device, links), recording)


def prediction_memory(what: PlannedPrediction) -> PredictionMemory:
    """Memory of the rank with the largest shards. Follows a pass, which takes about a second at any size."""
    program = _followed(what, min(what.ensembles, 2), what.memory)
    # Of the reduced model: without gradients, equal blocks need the same memory one after another.
    worst = max((event for event in program.events if isinstance(event, Operation)), key=lambda event: event.live)
    channels, n, place = what.model.channels, what.padded, worst.place[0]
    number, shard = HALF if what.half else SINGLE, -(-n.residues // what.ranks)
    pair = min(what.pair_share, worst.live)
    in_extra = place.startswith("extra_msa")
    rows, width = (n.extra, channels.extra_msa) if in_extra else (n.clusters + n.templates, channels.msa)
    msa = 0 if place in ("other", "template_embedder") else min(rows * shard * width * number, worst.live - pair)
    return PredictionMemory(
        weights=program.parameters * (SINGLE + HALF if what.half else SINGLE),
        features=program.batch_bytes * what.ensembles * (1 if what.on_gpu else what.passes),
        pair=pair,
        msa=msa,
        layers=worst.live - pair - msa,
        recorded=worst.live + program.batch_bytes * what.ensembles if what.recorded else 0,
        heap=0 if what.on_gpu else min(HEAP, worst.live),
        at=_PARTS.get(place, place.replace("_", " ")),
    )


def prediction_times(
    what: PlannedPrediction, device: Device, links: Links | None = None, launched: bool = False
) -> Times:
    """Times of one pass. `links`: between the ranks. Follows the pass once for each kind of feature set. `launched`: also of a
    prediction whose passes are replayed.
    """

    def link(kind: Kind, counted: int) -> float:
        return links.seconds(kind, counted, what.ranks) if links is not None else 0.0

    def times(sets: int) -> Times:
        items = _mean_pass(items_of(_followed(what, sets, None), device, what.ranks, what.tf32), what.passes)
        launch_s = 0.0 if what.recorded and not launched else device.launch_us * 1e-6
        return simulate(items, launch_s, link, device.overlaps)

    one = times(1)
    if what.ensembles == 1:
        return one
    two = times(2)  # each further set adds what the second one adds
    sums = {f.name: getattr(one, f.name) for f in fields(one)}
    for name in ("total", "device", "host", "communication", "exposed", "launches", "calls", "bytes", "flops"):
        sums[name] += (what.ensembles - 1) * (getattr(two, name) - getattr(one, name))
    return Times(**sums)


def _mean_pass(items: list[Item], passes: int) -> Iterator[Item]:
    """The items of a pass, each with its share of what is made once for all passes."""
    for item in items:
        if isinstance(item, Span) and item.place == MADE_ONCE:
            item = replace(item, seconds=item.seconds / passes, operators=item.operators / passes)
        yield item


@lru_cache(maxsize=64)
def _followed(what: PlannedPrediction, sets: int, memory: int | None) -> Program:
    return follow(
        PlannedStep(
            what.model,
            what.padded,
            ranks=what.ranks,
            half=what.half,
            plan=what.plan,
            memory=memory,
            samples=SAMPLES,
            sets=sets,
        )
    )


def changes(what: PlannedPrediction, fits: Callable[[PlannedPrediction], bool]) -> list[str]:
    """Options of `evodsp predict` with which it fits, each by itself; if there is none, the ones that fit together; empty if
    nothing helps."""
    single = dict(_smaller(what))
    found = [option for option, changed in single.items() if fits(replace(what, **changed))]
    more = _more_ranks(what, fits)
    if found or more:
        return [*found, *more]
    together = replace(what, **{name: value for changed in single.values() for name, value in changed.items()})
    options = " ".join(single)
    if options and fits(together):
        return [options]
    return [f"{options} {option}".strip() for option in _more_ranks(together, fits)]


def _smaller(what: PlannedPrediction) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options that need less memory, and what each changes in the prediction."""
    if what.recorded:
        yield "--cuda_graphs false", {"graphs": False}
    if not what.half:
        yield "--precision bf16", {"half": True}
    if what.memory is None or what.memory > _SMALL_WORKING:
        yield "--working_memory 64MiB", {"memory": _SMALL_WORKING}
    if what.sizes.extra > _FEW_ROWS:
        yield f"--extra_msa {_FEW_ROWS}", {"sizes": replace(what.sizes, extra=_FEW_ROWS)}


def _more_ranks(what: PlannedPrediction, fits: Callable[[PlannedPrediction], bool]) -> list[str]:
    """The least power of two of ranks that fits."""
    most = min(_MOST_RANKS, what.sizes.residues, what.sizes.clusters)
    for ranks in (2**power for power in range(1, most.bit_length())):
        if ranks > what.ranks and fits(replace(what, ranks=ranks)):
            return [f"--parallel.sequence {ranks}"]
    return []


def duration(seconds: float) -> str:
    """Seconds, rounded as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**20:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"
