"""Part `counts`: what one layer communicates per rank, by every method, against the paper's tables 3, 8 and 9.

A layer is the difference between three layers and two, so it is an inner one. Activations are recomputed, so that all
three phases show: forward, backward, and what the recomputation launches again. M is the sequence tensor [B, T, S, C].
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from evodsp.errors import UserError
from evodsp.parallel.group import Entry, Kind, Phase

from .methods import method_named
from .one_rank import Passes, passes
from .part import Part, Row, Tables, Tick
from .workload import Workload

PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")
BYTES = 2
"""Bytes of a number in bf16."""


@dataclass(frozen=True)
class Claim:
    """What the paper says of one method's forward pass, per layer."""

    collectives: dict[Kind, int]
    """Table 9. Its 4 of Megatron-SP are pairs (4 per block in appendix A.3). Of the ring, which it lacks: keys and values."""
    times_m: int
    """Table 3: the volume is this many M …"""
    over_n: bool = False
    """… divided by N."""

    def volume(self, ranks: int) -> Fraction:
        """The volume in units of M."""
        return Fraction(self.times_m, ranks if self.over_n else 1)


CLAIMS = {
    "dsp": Claim({"all-to-all": 2}, 2, over_n=True),
    "ulysses": Claim({"all-to-all": 4}, 4, over_n=True),
    "megatron_sp": Claim({"all-gather": 4, "reduce-scatter": 4}, 8),
    "megatron_tp": Claim({"all-reduce": 4}, 8),
    "ring": Claim({"send-receive": 2}, 2),
}


def of_one_collective(kind: Kind, ranks: int) -> Fraction:
    """Table 8, in units of M. A ring passes all shards on, as an all-gather does."""
    claims: dict[Kind, Fraction] = {
        "all-reduce": Fraction(2),
        "all-gather": Fraction(1),
        "reduce-scatter": Fraction(1),
        "all-to-all": Fraction(1, ranks),
        "send-receive": Fraction(1),
    }
    return claims[kind]


@dataclass(frozen=True)
class Layer:
    """What one layer communicates."""

    entries: Counter[Entry]
    sent_forward: int
    sent_backward: int

    @classmethod
    def between(cls, two: Passes, three: Passes) -> Layer:
        """The layer that the second pass has more than the first."""
        return cls(
            Counter(three.layers) - Counter(two.layers),
            three.sent_forward - two.sent_forward,
            three.sent_backward - two.sent_backward,
        )

    def calls(self, phase: Phase) -> Counter[Kind]:
        """Collectives of a phase, by kind."""
        found: Counter[Kind] = Counter()
        for entry, count in self.entries.items():
            if entry.phase == phase:
                found[entry.kind] += count
        return found

    def numbers(self, phase: Phase) -> int:
        """Numbers that the ledger counts in a phase."""
        return sum(entry.elements * count for entry, count in self.entries.items() if entry.phase == phase)

    def bytes(self, *phases: Phase) -> int:
        """Bytes that the ledger counts."""
        return sum(entry.bytes * count for entry, count in self.entries.items() if entry.phase in phases)


def layer_of(method: str, workload: Workload, ranks: int) -> Layer:
    """Count an inner layer, with recomputation. Raises UserError if the method cannot spread the model."""
    two, three = (
        passes(method, dataclasses.replace(workload, layers=layers, checkpoint=True), ranks) for layers in (2, 3)
    )
    return Layer.between(two, three)


def differences(method: str, workload: Workload, ranks: int, layer: Layer) -> list[str]:
    """Where the counts differ from the paper's tables or from what the method says of itself; one line each."""
    claim, m, found = CLAIMS[method], workload.sequence, []
    if layer.calls("forward") != claim.collectives:
        found.append(f"{dict(layer.calls('forward'))} forward, table 9 says {claim.collectives}")
    if Fraction(layer.numbers("forward"), m) != claim.volume(ranks):
        found.append(f"{Fraction(layer.numbers('forward'), m)} M forward, table 3 says {claim.volume(ranks)} M")
    for entry in layer.entries:
        if Fraction(entry.elements, m) != of_one_collective(entry.kind, ranks):
            expected = of_one_collective(entry.kind, ranks)
            found.append(f"an {entry.kind} of {Fraction(entry.elements, m)} M, table 8 says {expected} M")
    for phase in PHASES:
        if layer.calls(phase) != dict(method_named(method).layer_traffic(phase)):
            found.append(
                f"{dict(layer.calls(phase))} {phase}, the method says {method_named(method).layer_traffic(phase)}"
            )
    if layer.sent_forward * ranks != layer.bytes("forward") * (ranks - 1):
        found.append(f"{layer.sent_forward} bytes sent forward, not (N - 1) / N of {layer.bytes('forward')}")
    return [f"{method}, {workload.model}, {workload.tokens} tokens, {ranks} ranks: {line}" for line in found]


def row_of(method: str, workload: Workload, ranks: int) -> Row:
    """A row of the table. Its cell `differs` is empty if the paper is right."""
    claim, m = CLAIMS[method], workload.sequence
    row: Row = {"model": workload.model, "tokens": workload.tokens, "ranks": ranks, "method": method, "m_numbers": m}
    row["paper_forward_m"] = str(claim.volume(ranks))
    try:
        layer = layer_of(method, workload, ranks)
    except UserError as error:
        return row | {"refused": str(error), "differs": ""}
    row["forward_calls"] = layer.calls("forward").total()
    for phase in PHASES:
        row[f"{phase}_m"] = str(Fraction(layer.numbers(phase), m))
    row["training_m"] = str(Fraction(layer.bytes(*PHASES), BYTES * m))
    row["sent_forward_m"] = str(Fraction(layer.sent_forward, BYTES * m))
    row["sent_training_m"] = str(Fraction(layer.sent_forward + layer.sent_backward, BYTES * m))
    return row | {"refused": "", "differs": "; ".join(differences(method, workload, ranks, layer))}


def part(settings: Mapping[str, Any]) -> Part:
    """`settings`: `models`, `times` (lengths of the temporal sequence; the spatial one has 4096 tokens) and `ranks`."""
    sizes = itertools.product(settings["models"], settings["times"], settings["ranks"])
    cases = [(method, model, time, ranks) for model, time, ranks in sizes for method in CLAIMS]

    def measure(tick: Tick) -> Tables:
        rows = []
        for method, model, time, ranks in cases:
            tick(f"{method}, {model}, {time} x 4096 tokens, {ranks} ranks")
            rows.append(row_of(method, Workload(model, time), ranks))
        return {"volumes": rows}

    return Part(
        "counts",
        settings,
        ("counting.py", "one_rank.py"),
        measure,
        wrong,
    )


def wrong(tables: Tables) -> list[str]:
    """Where a count differs from the paper."""
    return [str(row["differs"]) for row in tables["volumes"] if row["differs"]]
