"""What a stack communicates, read off the schedule's tables: every collective of one rank, in the order of the forward pass.

`tests/model/test_traffic.py` holds it against the ledger of a run, call by call. Counting is the ledger's: an all-gather counts
its output, a reduce-scatter and an all-to-all their local input, an all-reduce twice its input, a rank's own part included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from evodsp.config import EvoformerConfig
from evodsp.model.schedule import EXTRA_MSA_HALF, MSA_HALF, PAIR_HALF, CommunicationPlan, Representation, Step
from evodsp.parallel.exchange import KEPT
from evodsp.parallel.layout import Axis, shard_sizes
from evodsp.parallel.ledger import Kind


@dataclass(frozen=True)
class Call:
    """One collective of one rank."""

    layer: str
    """The sub-layer that asks for it; `switch m`, `switch m back` and `switch z` move a representation between sub-layers."""
    kind: Kind
    elements: int
    """Numbers in the forward pass."""
    backward: int
    """Numbers of its transpose in the backward pass; 0: it has none."""


@dataclass(frozen=True)
class Sizes:
    """Everything that volumes depend on, and which rank of how many."""

    ranks: int
    rank: int
    batch: int
    sequences: int
    residues: int
    c_m: int
    c_z: int
    config: EvoformerConfig
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)

    def whole(self, axis: Axis) -> int:
        """True size of an axis; that of the channels is the operands' of triangle multiplication."""
        if axis == "channel":
            return self.config.triangle_channels
        return self.sequences if axis == "seq" else self.residues

    def own(self, axis: Axis) -> int:
        """Entries of `axis` on this rank."""
        return shard_sizes(self.whole(axis), self.ranks)[self.rank]

    def padded(self, axis: Axis) -> int:
        """Entries of `axis` that a gather or a reduce-scatter moves: every shard travels as the largest."""
        return self.ranks * max(shard_sizes(self.whole(axis), self.ranks))


RETURN = "switch m back"
"""The switch of the MSA representation back to S between two blocks: it lies outside of what is recomputed at once."""


def recomputed(calls: Sequence[Call], plan: CommunicationPlan) -> list[Call]:
    """Those of a stack's `calls` that activation checkpointing launches again in the backward pass, once each.

    Results that the plan keeps are not communicated again, and the switch between blocks is not part of a recomputed segment.
    `stream_bias` recomputes its broadcasts a second time, within the recomputation; that is not counted here.
    """
    kept = KEPT if plan.keep_gathered else ()
    return [call for call in calls if call.layer != RETURN and call.kind not in kept]


def _switch(layer: str, n: Sizes, source: Axis, target: Axis, others: int) -> Call:
    """`others`: numbers to one entry of the two axes."""
    forward = n.own(source) * n.whole(target) * others
    return Call(layer, "all-to-all", forward, n.whole(source) * n.own(target) * others)


def _gather(layer: str, n: Sizes, axis: Axis, others: int) -> Call:
    return Call(layer, "all-gather", n.padded(axis) * others, n.padded(axis) * others)


def _sum(layer: str, elements: int) -> Call:
    return Call(layer, "all-reduce", 2 * elements, 2 * elements)


def _bias(layer: str, n: Sizes, axis: Axis, heads: int) -> Iterator[Call]:
    """The bias of attention, [batch, residues, residues, heads]."""
    row = n.batch * n.residues * heads
    if not n.plan.stream_bias:
        yield _gather(layer, n, axis, row)
        return
    if axis == "j":
        yield _switch(layer, n, "j", "i", n.batch * heads)
    for size in shard_sizes(n.residues, n.ranks):
        yield Call(layer, "broadcast", size * row, size * row)


def _row_attention(n: Sizes) -> Iterator[Call]:
    yield from _bias("row_attention", n, "j", n.config.msa_heads)


def _column_attention(n: Sizes) -> Iterator[Call]:
    """Column attention has everything on R; global column attention, on S, needs sums."""
    return iter(())


def _global_column_attention(n: Sizes) -> Iterator[Call]:
    layer, columns, heads = "column_attention", n.batch * n.residues, n.config.msa_heads
    yield _sum(layer, columns * n.c_m)
    yield Call(layer, "all-reduce", 2 * columns * heads, 0)  # the largest logit, outside the graph
    yield _sum(layer, columns * heads * (n.config.msa_head_width + 1))


def _outer_product_mean(n: Sizes) -> Iterator[Call]:
    yield _gather("outer_product_mean", n, "res", n.batch * n.sequences * n.config.outer_product_channels)


def _outer_product_mean_on_s(n: Sizes) -> Iterator[Call]:
    layer, channels = "outer_product_mean", n.config.outer_product_channels
    if n.plan.sums_outer_products(n.sequences, n.residues, channels, n.c_z, n.ranks):
        for size in shard_sizes(n.residues, n.ranks):
            elements = n.batch * n.residues * size * n.c_z
            yield Call(layer, "reduce", elements, elements)
    else:
        yield _gather(layer, n, "seq", n.batch * n.residues * channels)
        yield _switch(layer, n, "seq", "res", n.batch * channels)


def _triangle(layer: str, result: Axis) -> Callable[[Sizes], Iterator[Call]]:
    def calls(n: Sizes) -> Iterator[Call]:
        if getattr(n.plan, layer) == "gather":
            yield _gather(layer, n, result, n.batch * n.residues * n.config.triangle_channels)
            return
        yield _switch(layer, n, "j", "channel", 2 * n.batch * n.residues)
        yield _switch(layer, n, "channel", result, n.batch * n.residues)

    return calls


def _triangle_attention(layer: str) -> Callable[[Sizes], Iterator[Call]]:
    def calls(n: Sizes) -> Iterator[Call]:
        yield from _bias(layer, n, "i", n.config.pair_heads)  # its rows are z's rows, or columns, that the rank holds

    return calls


_INSIDE: dict[tuple[str, Axis], Callable[[Sizes], Iterator[Call]]] = {
    ("row_attention", "seq"): _row_attention,
    ("column_attention", "seq"): _global_column_attention,
    ("outer_product_mean", "res"): _outer_product_mean,
    ("outer_product_mean", "seq"): _outer_product_mean_on_s,
    ("triangle_outgoing", "i"): _triangle("triangle_outgoing", "i"),
    ("triangle_outgoing", "j"): _triangle("triangle_outgoing", "j"),
    ("triangle_incoming", "i"): _triangle("triangle_incoming", "i"),
    ("triangle_incoming", "j"): _triangle("triangle_incoming", "j"),
    ("attention_starting", "i"): _triangle_attention("attention_starting"),
    ("attention_ending", "j"): _triangle_attention("attention_ending"),
}
"""What a sub-layer asks of its exchange, by its name and where its representation lies; one that is not here asks nothing."""


def walk(steps: Sequence[Step], n: Sizes, at: dict[Representation, Axis]) -> Iterator[Call]:
    """The collectives of `steps`. `at`: where the representations lie before; on return, where they lie after."""
    letters, channels = {"msa": "m", "pair": "z"}, {"msa": n.c_m, "pair": n.c_z}
    for step in n.plan.pair_steps(tuple(steps)):
        moves = [*step.reads, *([(step.updates, step.lands)] if step.updates in dict(step.reads) else [])]
        for name, axis in moves:
            if at[name] != axis:
                yield _switch(f"switch {letters[name]}", n, at[name], axis, n.batch * channels[name])
                at[name] = axis
        key = step.layer, step.lands if step.updates == "pair" and step.pair is not None else step.reads[0][1]
        yield from _INSIDE.get(key, _column_attention)(n)


def evoformer_calls(n: Sizes) -> list[Call]:
    """The forward pass of an Evoformer stack of `n.config.blocks` blocks."""
    calls: list[Call] = []
    for block in range(n.config.blocks):
        at: dict[Representation, Axis] = {"msa": "seq", "pair": "j"}
        calls += walk(MSA_HALF, n, at)
        if block + 1 < n.config.blocks:
            calls.append(_switch(RETURN, n, at["msa"], "seq", n.batch * n.c_m))
        calls += walk(PAIR_HALF, n, at)
    return calls


def extra_msa_calls(n: Sizes) -> list[Call]:
    """The forward pass of an extra-MSA stack."""
    calls: list[Call] = []
    for _ in range(n.config.blocks):
        at: dict[Representation, Axis] = {"msa": "seq", "pair": "j"}
        calls += [*walk(EXTRA_MSA_HALF, n, at), *walk(PAIR_HALF, n, at)]
    return calls


def inner_block(n: Sizes) -> list[Call]:
    """One Evoformer block that is not the last: twelve collectives."""
    two, one = (evoformer_calls(replace(n, config=replace(n.config, blocks=blocks))) for blocks in (2, 1))
    return two[: len(two) - len(one)]
