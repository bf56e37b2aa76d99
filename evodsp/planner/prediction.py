"""Memory and time of a prediction on each of its ranks: the model's passes without gradients, followed on shapes alone.

Memory and time come from two runs. With a limit of working memory, layers compute many equal pieces: two of them show the
memory. The time is that of layers computed whole, whose products are the same. A CPU takes other kernels than a GPU, in pieces
as large as its cache; what they hold besides is little, so a CPU's prediction is followed as a GPU's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache

from evodsp.config import ModelConfig
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.ledger import Kind
from evodsp.planner.device import Device, Links
from evodsp.planner.program import PlannedStep, Program, SampleSizes
from evodsp.planner.program import program as follow
from evodsp.planner.simulate import Times, items_of, simulate
from evodsp.planner.trace import Operation

SINGLE, HALF = 4, 2
"""Bytes of a number."""
WORKING_SHARE = 32
"""On a GPU a layer computes within this part of the device's memory, unless another amount is given."""
SAMPLES = 2
"""Pieces of a layer that are followed."""
HEAP = 16 << 20
"""Bytes that the C library keeps of freed memory, on a CPU where large blocks are given back (docs/measured.md, 'Memory of a
process'). By its own way it keeps more."""
_PARTS = {"other": "templates and embedders"}
"""Names of places that differ from the model's."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted, and how."""

    model: ModelConfig
    sizes: SampleSizes
    passes: int = 4
    """Of a seed: recycling iterations and the first pass."""
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


@dataclass(frozen=True)
class PredictionMemory:
    """Bytes of one rank at the worst moment of a prediction."""

    weights: int
    features: int
    """Of a pass, or of all passes where they wait in the same memory."""
    pair: int
    """Its shard of the pair representation."""
    msa: int
    """Its shard of the MSA representation, or of the extra MSA's, which is there at that moment."""
    layers: int
    """What else the model holds: copies of representations, what a layer makes, logits."""
    heap: int
    """On a CPU what the C library keeps of freed memory for the next tensors: at most `HEAP`."""
    at: str
    """The part of the model in which that is."""

    @property
    def total(self) -> int:
        return self.weights + self.features + self.pair + self.msa + self.layers + self.heap


def prediction_memory(what: Prediction) -> PredictionMemory:
    """Of the rank with the largest shards. Follows a pass, which takes about a second at any size."""
    program = _followed(what, min(what.ensembles, 2), what.memory)
    # Of the reduced model: without gradients, equal blocks need the same memory one after another.
    worst = max((event for event in program.events if isinstance(event, Operation)), key=lambda event: event.live)
    channels, n, place = what.model.channels, what.sizes, worst.place[0]
    number, shard = HALF if what.half else SINGLE, -(-n.residues // what.ranks)
    pair = min(pair_share(what), worst.live)
    in_extra = place.startswith("extra_msa")
    rows, width = (n.extra, channels.extra_msa) if in_extra else (n.clusters + n.templates, channels.msa)
    msa = 0 if place in ("other", "template_embedder") else min(rows * shard * width * number, worst.live - pair)
    return PredictionMemory(
        weights=program.parameters * (SINGLE + HALF if what.half else SINGLE),
        features=program.batch_bytes * what.ensembles * (1 if what.on_gpu else what.passes),
        pair=pair,
        msa=msa,
        layers=worst.live - pair - msa,
        heap=0 if what.on_gpu else min(HEAP, worst.live),
        at=_PARTS.get(place, place.replace("_", " ")),
    )


def pair_share(what: Prediction) -> int:
    """Bytes of a rank's shard of the pair representation: no pass needs less."""
    n = what.sizes.residues
    return n * -(-n // what.ranks) * what.model.channels.pair * (HALF if what.half else SINGLE)


def prediction_times(what: Prediction, device: Device, links: Links | None = None) -> Times:
    """One pass. `links`: between the ranks. Follows the pass once for each kind of feature set."""
    crowded = device.crowded(what.ranks)

    def seconds(work: Operation) -> float:
        return crowded * device.seconds(
            work.name, work.flops, work.bytes, work.launches, work.half, what.tf32, work.logits
        )

    def link(kind: Kind, counted: int) -> float:
        return links.seconds(kind, counted, what.ranks) if links is not None else 0.0

    def times(sets: int) -> Times:
        return simulate(items_of(_followed(what, sets, None), seconds), device.launch_us * 1e-6, link, device.overlaps)

    one = times(1)
    if what.ensembles == 1:
        return one
    two = times(2)  # each further set adds what the second one adds
    sums = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    for name in ("total", "device", "host", "communication", "exposed", "launches", "calls", "bytes", "flops"):
        sums[name] += (what.ensembles - 1) * (getattr(two, name) - getattr(one, name))
    return Times(**sums)


@lru_cache(maxsize=64)
def _followed(what: Prediction, sets: int, memory: int | None) -> Program:
    return follow(
        PlannedStep(
            what.model,
            what.sizes,
            ranks=what.ranks,
            half=what.half,
            plan=what.plan,
            memory=memory,
            samples=SAMPLES,
            sets=sets,
        )
    )
