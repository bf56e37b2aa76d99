"""THE table: which sub-layer runs when, and along which axis each representation is cut meanwhile.

It drives execution (`Block.run`), says what a block communicates (`evodsp.model.traffic`), and is what tests count against.

m is the MSA representation [B, S, R, c], z the pair [B, I, J, c]; `seq` `res` `i` `j` name their axes. Where a sub-layer reads
a representation on another axis than it lies on, an all-to-all switches it. Volumes a rank and a forward pass: an all-gather
moves all of it, an all-to-all 1/N; R residues, S sequences, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evodsp.parallel.layout import Axis

Representation = Literal["msa", "pair"]


@dataclass(frozen=True)
class Step:
    """One residual update: `updates` += dropout(layer(what it reads))."""

    layer: str
    """The sub-layer, by its name in the block."""
    updates: Representation
    msa: Axis | None = None
    """Where the sub-layer reads the MSA representation; None: it does not."""
    pair: Axis | None = None
    """Where the sub-layer reads the pair representation; None: it does not."""
    result: Axis | None = None
    """Where the update comes out, if not where `updates` is read. The representation itself is switched there meanwhile."""
    masked: bool = True
    """Whether the sub-layer takes the mask of the first representation that it reads."""
    shared: Axis | None = None
    """The axis along which the update's dropout mask is shared; None: no dropout."""

    @property
    def reads(self) -> tuple[tuple[Representation, Axis], ...]:
        """What the sub-layer reads, and where."""
        axes: tuple[tuple[Representation, Axis | None], ...] = (("msa", self.msa), ("pair", self.pair))
        return tuple((name, axis) for name, axis in axes if axis is not None)

    @property
    def lands(self) -> Axis:
        """Where the updated representation lies afterwards."""
        if self.result is not None:
            return self.result
        return dict(self.reads).get(self.updates, "j")  # an update of what is not read: the outer product mean's, on J


@dataclass(frozen=True)
class CommunicationPlan:
    """Which way a block communicates where there is more than one. Every plan computes the same."""

    triangle_outgoing: Literal["channel", "gather"] = "channel"
    """`channel`: both operands go to channels and the product comes back, 3/N of the pair representation. `gather`: the pair
    goes to I and one operand is gathered whole."""
    triangle_incoming: Literal["channel", "gather"] = "channel"
    """Likewise; `gather` leaves the pair on J."""
    outer_product_mean: Literal["auto", "gather", "sum"] = "auto"
    """Of the extra-MSA stack. `gather`: one operand is gathered, the other switched. `sum`: partial sums are reduced, one
    output shard at a time. `auto`: whichever moves less."""
    stream_bias: bool = False
    """Attention takes the pair bias one shard at a time, so that it is never whole: for very long chains."""
    keep_gathered: bool = True
    """Where a block is recomputed, keep what was gathered or summed (biases, an operand) instead of gathering it again."""

    def sums_outer_products(self, sequences: int, residues: int, channels: int, c_z: int, ranks: int) -> bool:
        """Whether the extra-MSA stack's outer product mean adds up partial sums, R x R x c_z, instead of moving its operands,
        S x R x channels (1 + 1/N).
        """
        if self.outer_product_mean != "auto":
            return self.outer_product_mean == "sum"
        return sequences * channels * (ranks + 1) >= ranks * residues * c_z

    def pair_steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """`steps` with the triangle multiplications done in this plan's way."""

        def in_our_way(step: Step) -> Step:
            if step.layer == "triangle_outgoing" and self.triangle_outgoing == "gather":
                return replace(step, pair="i")
            if step.layer == "triangle_incoming" and self.triangle_incoming == "gather":
                return replace(step, result=None)
            return step

        return tuple(in_our_way(step) for step in steps)


DAP = CommunicationPlan(triangle_outgoing="gather", triangle_incoming="gather", outer_product_mean="gather")
"""FastFold's Dynamic Axial Parallelism: what DSP is compared with."""


# A block of the Evoformer (algorithm 6). m on S and z on J at entry. Between the two halves the switch of m back to S is
# launched; the next block awaits it, so that the whole pair half hides it. The last block leaves m on R, where its first row
# (single representation, recycling) is.
MSA_HALF = (
    Step("row_attention", "msa", msa="seq", pair="j", shared="seq"),
    Step("column_attention", "msa", msa="res"),
    Step("msa_transition", "msa", msa="res", masked=False),
    Step("outer_product_mean", "pair", msa="res"),
)
# The result of the incoming update returns on I, where attention needs it, and z's own switch hides under the update.
PAIR_HALF = (
    Step("triangle_outgoing", "pair", pair="j", shared="i"),
    Step("triangle_incoming", "pair", pair="j", result="i", shared="i"),
    Step("attention_starting", "pair", pair="i", shared="i"),
    Step("attention_ending", "pair", pair="j", shared="j"),
    Step("transition", "pair", pair="j", masked=False),
)

# A block of the extra-MSA stack (algorithm 18): global column attention needs sums over S only, so m stays on S throughout.
EXTRA_MSA_HALF = (
    Step("row_attention", "msa", msa="seq", pair="j", shared="seq"),
    Step("column_attention", "msa", msa="seq"),
    Step("msa_transition", "msa", msa="seq", masked=False),
    Step("outer_product_mean", "pair", msa="seq"),
)

# A block of the template pair stack (algorithm 16), where attention comes first: z on I at entry, and left on I for the next
# block; the last one leaves it on J, for the pointwise attention.
_TEMPLATE = (
    Step("attention_starting", "pair", pair="i", shared="i"),
    Step("attention_ending", "pair", pair="j", shared="j"),
    Step("triangle_outgoing", "pair", pair="j", shared="i"),
)
TEMPLATE_PAIR = (
    *_TEMPLATE,
    Step("triangle_incoming", "pair", pair="j", result="i", shared="i"),
    Step("transition", "pair", pair="i", masked=False),
)
LAST_TEMPLATE_PAIR = (
    *_TEMPLATE,
    Step("triangle_incoming", "pair", pair="j", shared="i"),
    Step("transition", "pair", pair="j", masked=False),
)
