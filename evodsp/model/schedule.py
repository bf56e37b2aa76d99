"""The communication plan: choices between ways of communicating that compute the same; and the order of a block's steps.

A sub-layer (`evodsp.model.primitives.SubLayer`) says along which axes it takes and leaves its representation. Where and when a
block sends a representation from one axis to another follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from evodsp.parallel.config import Axis

Representation = Literal["msa", "pair"]


def representation(axes: Sequence[Axis]) -> Representation:
    """The representation to which axes belong."""
    return "msa" if axes[0] in ("seq", "res") else "pair"


class Step(NamedTuple):
    """A sub-layer of a block; or the bias that it projects from the other representation."""

    name: str
    layer: Any
    """A `SubLayer`."""
    dropout: Any = None
    """Its `Dropout`; None: it has none."""
    of_bias: bool = False

    @property
    def changes(self) -> Representation:
        """The representation whose update the sub-layer computes."""
        return representation(self.layer.leaves or self.layer.takes)

    @property
    def needs(self) -> dict[Representation, tuple[Axis, ...]]:
        """The representations that the step reads or changes, and the axes along which each may be sharded."""
        layer = self.layer
        if self.of_bias:
            return {representation(layer.reads): layer.reads}
        return {self.changes: layer.leaves, representation(layer.takes): layer.takes}


def next_axis(steps: Sequence[Step], which: Representation, otherwise: Axis) -> Axis:
    """The axis along which a representation must be first: that of the first step that takes one axis only, or `otherwise`."""
    needed = (step.needs.get(which, ()) for step in steps)
    return next((axes[0] for axes in needed if len(axes) == 1), otherwise)


def axis_after(now: Axis, steps: Sequence[Step], which: Representation, otherwise: Axis) -> Axis:
    """The axis to which a representation that is on `now` is sent before `steps`: it stays if the first that needs it takes it
    there. `otherwise`: if none needs it.
    """
    axes = next((step.needs[which] for step in steps if which in step.needs), (otherwise,))
    return now if now in axes else axes[0]


def last_axis(steps: Sequence[Step], which: Representation, otherwise: Axis) -> Axis:
    """The axis along which a representation is after `steps`; `otherwise` if these take either."""
    return next_axis(steps[::-1], which, otherwise)


def without_msa(steps: Sequence[Step]) -> list[Step]:
    """The steps on which the pair depends."""
    reading = [step.changes == "pair" and "msa" in step.needs for step in steps]
    read = len(steps) - reading[::-1].index(True) if any(reading) else 0
    return [*steps[:read], *(step for step in steps[read:] if step.changes == "pair")]


def interleaved(steps: Sequence[Step], enters: dict[Representation, Axis]) -> list[Step]:
    """The steps in an order that computes the same: when a representation has been sent to another axis, steps come next that
    do not need it. `enters`: axis of each representation before the first step.
    """
    waiting, ordered, now = list(steps), [], dict(enters)
    sent: Representation = "msa"
    while waiting:
        ready = [
            step
            for number, step in enumerate(waiting)
            if not any(step.needs.keys() & other.needs.keys() or step.name == other.name for other in waiting[:number])
        ]
        step = next((step for step in ready if sent not in step.needs), ready[0])
        waiting.remove(step)
        ordered.append(step)
        for which in step.needs:
            axis = axis_after(now[which], waiting, which, now[which])
            sent, now[which] = which if axis != now[which] else sent, axis
    return ordered


@dataclass(frozen=True)
class CommunicationPlan:
    """The choice of how a block communicates where there are several ways. Every plan computes the same result."""

    RESUME: ClassVar[str] = "same"

    triangle_outgoing: Literal["channel", "gather"] = "channel"
    """Triangle multiplication, outgoing edges. `channel`: an all-to-all brings both operands to a sharding by channels and
    another one brings the product back; together they move 3/N of the pair representation. `gather`: the pair representation
    is switched to rows (I) and one operand is gathered whole."""
    triangle_incoming: Literal["channel", "gather"] = "channel"
    """Triangle multiplication, incoming edges. `channel`: as above. `gather`: one operand is gathered whole, and the pair
    representation stays on columns (J)."""
    outer_product_mean: Literal["auto", "gather", "sum"] = "auto"
    """Outer product mean of the extra-MSA stack. `gather`: one operand is gathered, the other one switched to residues. `sum`:
    partial sums over sequences are reduced, a few rows at a time. `auto`: whichever moves fewer bytes."""
    extra_msa_axis: Literal["seq", "res"] = "seq"
    """Axis along which the extra MSA is sharded after row attention. `seq`: it stays there, and column attention reduces sums
    over sequences. `res`: it is switched to residues and back in every block."""
    stream_bias: bool = False
    """Broadcast the pair bias of attention one shard at a time, so that it is never whole on a rank: for very long chains.
    Predictions always do so where the whole bias exceeds their working memory."""
    keep_gathered: bool = True
    """Where activations are recomputed, keep the results of gathers and sums (biases, one operand) instead of communicating
    them again."""

    @property
    def outgoing_axis(self) -> Literal["i", "j"]:
        """Axis along which the pair is sharded during the outgoing triangle multiplication."""
        return "i" if self.triangle_outgoing == "gather" else "j"

    def triangle_way(
        self, edges: Literal["outgoing", "incoming"], ranks: int, in_pieces: bool
    ) -> Literal["local", "channel", "gather"]:
        """The way in which a triangle multiplication gets the operands of its product. `in_pieces`: whether a few channels
        are computed at a time.
        """
        if ranks == 1 and not in_pieces:
            return "local"
        return self.triangle_outgoing if edges == "outgoing" else self.triangle_incoming

    def sums_outer_products(self, sequences: int, residues: int, channels: int, c_z: int, ranks: int) -> bool:
        """Whether the extra-MSA stack's outer product mean reduces partial sums.

        These are R x R x c_z numbers; moving the operands takes S x R x channels x (1 + 1/N).
        """
        if ranks == 1 or self.outer_product_mean == "gather":
            return False
        return self.outer_product_mean == "sum" or sequences * channels * (ranks + 1) >= ranks * residues * c_z

    @staticmethod
    def pieces_of_partial_sums(sequences: int, residues: int, channels: int, c_z: int, ranks: int) -> int:
        """Number of pieces of rows in which the partial sums of an outer product mean are reduced. Arguments as in
        `sums_outer_products`.

        There are as few pieces as possible, for fewer collectives. But there are at least two, and a piece of R x R x c_z /
        pieces numbers is no larger than both operands of a rank, 2 S x R x channels / N.
        """
        fitting = math.ceil(ranks * residues * c_z / (2 * sequences * channels))
        return min(max(2, fitting), residues)


DAP = CommunicationPlan(
    triangle_outgoing="gather", triangle_incoming="gather", outer_product_mean="gather", extra_msa_axis="res"
)
"""The plan of FastFold's Dynamic Axial Parallelism, as a baseline for comparison."""
