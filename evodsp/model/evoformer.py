"""Evoformer stack and extra-MSA stack (algorithms 6 and 18).

Shape legend: B batch, S sequences, R residues, I J residues of the pair, c_m c_z channels. A small letter (s r i j) is this
rank's shard of that axis; on one device it is the whole axis. Masks are whole on every rank.

m is the MSA representation [B, S, R, c_m], z the pair representation [B, I, J, c_z]. A block receives m sharded along S and
z along J. In the Evoformer it leaves m on R, and the stack sends it back to S while the pair stack computes. Forward volume
of one rank among N, with Mm = S R c_m and Mz = R R c_z:

    sub-layer                              m, z on     communication
    MSA row attention with pair bias       S, J        all-gather of the bias, 8 R R
    switch m to R                                      all-to-all, Mm/N
    MSA column attention, MSA transition   R           none
    outer product mean                     R, J        all-gather of one 32-channel operand, 32 S R
    switch m to S                                      all-to-all, Mm/N, hidden by the pair stack
    triangle multiplication, outgoing      J           all-to-all of both operands to channels and of the product back, 3 Mz/N
    switch z to I                                      all-to-all, Mz/N, hidden by the next sub-layer
    triangle multiplication, incoming      J           the same, 3 Mz/N; the product returns on I
    triangle attention, starting node      I           all-gather of the bias, 4 R R
    switch z to J                                      all-to-all, Mz/N
    triangle attention, ending node        J           all-gather of the bias, 4 R R
    pair transition                        J           none

Some parts of a stack are recomputed in the backward pass, and its calls may be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from evodsp.config import ALPHAFOLD2, PAIR_STACK, EvoformerConfig, LayerName, TemplateConfig, child_name, layer_names
from evodsp.errors import UserError
from evodsp.model.dropout import (
    NO_DROPOUT,
    NO_MASKS,
    BlockWithDropout,
    Dropout,
    DropoutKeys,
    Masks,
    Streams,
    block_streams,
    draw_blocks,
)
from evodsp.model.graphs import Recorded
from evodsp.model.layers import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttention,
    OuterProductMean,
    TriangleAttention,
    TriangleMultiplication,
)
from evodsp.model.primitives import Budgeted, SubLayer, Transition
from evodsp.model.recomputation import Recomputation, Recomputed, Setting
from evodsp.model.schedule import (
    Representation,
    Step,
    axis_after,
    interleaved,
    last_axis,
    next_axis,
    representation,
    without_msa,
)
from evodsp.model.sharded import Sharded
from evodsp.parallel.collectives import DIMENSION, Axis
from evodsp.parallel.exchange import Pending, Ready
from evodsp.rng import Draws


@runtime_checkable
class Block(BlockWithDropout, Protocol):
    """A block of a stack."""

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        """The modules that the stack calls, in order. Each is compiled as one graph; part k of block n is in segment n + k."""


class Stack(Recorded):
    """A sequence of blocks. Its `forward` runs segments: segment k is block k; or it is the last part of block k - 1 and the
    first part of block k, and then there is one segment more than there are blocks.
    """

    def __init__(self, blocks: Sequence[Block], recomputed: Setting, projections: bool | int = False) -> None:
        """`recomputed`, `projections`: `checkpoint` and `checkpoint_projections` of the stack's config."""
        super().__init__()
        self.recomputation = Recomputation(recomputed, projections, len(blocks))
        self.blocks: Sequence[Any] = nn.ModuleList(blocks)  # type: ignore[arg-type, assignment]
        self._tell_parts()

    def recompute(self, chosen: Recomputed) -> None:
        """Fix what is recomputed, where `checkpoint` is auto."""
        self.recomputation.settle(chosen)
        self._tell_parts()

    def _tell_parts(self) -> None:
        for number, block in enumerate(self.blocks):
            for segment, part in enumerate(block.parts, start=number):
                part.projects_again = self.recomputation.covers_projections(segment)

    def settings(self) -> Hashable | None:
        chosen = self.recomputation.settled
        memory = [block.parts[0].memory for block in self.blocks[:1]]
        return None if chosen is None else (super().settings(), chosen, *memory)

    def dropout_streams(self, draws: Sequence[Draws]) -> Streams:
        """The dropout streams of the stack. `draws`: this stack's stream for each entry of the batch."""
        return block_streams(self.blocks, draws)

    def run(
        self,
        number: int,
        recompute: bool,
        segment: Callable[..., Any],
        *arguments: Any,
        contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    ) -> Any:
        """The result of `segment(*arguments)`, which is segment `number`. `recompute`: whether it is computed again in the
        backward pass. `contexts`: makes the contexts of the first and of the second computation.
        """
        if not recompute:
            with self.recomputation.counting(number, self):
                return segment(*arguments)
        # Nothing here draws from torch's generators, and a CUDA graph could not save their states.
        return checkpoint(segment, *arguments, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


class BlocksInTurn(Stack):
    """A stack whose segments are its blocks. `block(x, z, mask, pair_mask, masks)` returns x and z; `masks` are those of its
    dropout.
    """

    sharded_inputs = (0, 1)

    def forward(
        self,
        x: Float[Tensor, "B _ _ c_x"],
        z: Float[Tensor, "B I j c_z"],
        mask: Float[Tensor, "B S R"],
        pair_mask: Float[Tensor, "B R R"],
        keys: DropoutKeys = NO_DROPOUT,
    ) -> tuple[Float[Tensor, "B _ _ c_x"], Float[Tensor, "B I j c_z"]]:
        """Takes and returns both representations, sharded as the blocks have them. `keys`: keys of `dropout_streams`."""
        masks = draw_blocks(self.blocks, keys, residues=mask.shape[2], kernels=self.kernels)
        contexts = self.exchange.keeping if self.plan.keep_gathered else noop_context_fn
        for number, (block, own) in enumerate(zip(self.blocks, masks, strict=True)):
            recompute = self.recomputation.covers(number) and torch.is_grad_enabled()
            x, z = self.run(number, recompute, block, x, z, mask, pair_mask, own, contexts=contexts)
        return x, z


MSAMask = Float[Tensor, "B S R"]
PairMask = Float[Tensor, "B R R"]


def msa_layers(c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> dict[str, SubLayer]:
    """The sub-layers of a block that take the MSA (algorithm 6, lines 2 to 5), by name.

    With `extra`, they are those of a block of the extra-MSA stack: column attention is global (algorithm 19), and m stays on S,
    because global attention needs only sums over sequences from the other ranks.
    """
    heads, width = config.msa_heads, config.msa_head_width
    return {
        "row_attention": MSARowAttention(c_m, c_z, heads, width),
        "column_attention": (MSAColumnGlobalAttention if extra else MSAColumnAttention)(c_m, heads, width),
        "msa_transition": Transition(c_m, config.transition_factor, takes=("seq", "res")),
        "outer_product_mean": OuterProductMean(c_m, c_z, config.outer_product_channels),
    }


def pair_layers(
    c_z: int,
    config: EvoformerConfig | TemplateConfig,
    transition: Callable[[int, int], SubLayer] = Transition,
    order: Sequence[str] = PAIR_STACK,
) -> dict[str, SubLayer]:
    """The sub-layers of a pair stack (algorithm 6, lines 6 to 10) by name, in the given order. `transition`: makes the last
    one from its channels and its widening factor.
    """
    channels, heads, width = config.triangle_channels, config.pair_heads, config.pair_head_width
    make: dict[str, Callable[[], SubLayer]] = {
        "triangle_outgoing": lambda: TriangleMultiplication(c_z, channels, "outgoing"),
        "triangle_incoming": lambda: TriangleMultiplication(c_z, channels, "incoming"),
        "attention_starting": lambda: TriangleAttention(c_z, heads, width, "starting"),
        "attention_ending": lambda: TriangleAttention(c_z, heads, width, "ending"),
        "pair_transition": lambda: transition(c_z, config.transition_factor),
    }
    return {name: make[name]() for name in order}


_AXES = ("seq",), ("res",), ("seq", "res"), ("i",), ("j",), ("i", "j")
"""Axes that a `SubLayer` may take or leave."""


def made_layers(c_m: int, c_z: int, config: EvoformerConfig, extra: bool) -> dict[str, SubLayer]:
    """The sub-layers that `config.layers` names, by their own names, AlphaFold2's in the order of `ALPHAFOLD2` first.

    Initial weights of each depend on its name alone: AlphaFold2's are all drawn, and further ones draw from streams of their
    own.
    """
    wanted = {own.name: own for own in layer_names(config.layers or ALPHAFOLD2)}

    def every() -> dict[str, SubLayer]:
        return {**msa_layers(c_m, c_z, config, extra), **pair_layers(c_z, config)}

    standard = every()
    layers = {name: layer for name, layer in standard.items() if name in wanted and not wanted[name].path}
    for name, own in wanted.items():
        if name not in layers:
            with _own_draws(name):
                layers[name] = _made(own, c_m, c_z, config) if own.path else every()[own.kind]
    return layers


def _made(own: LayerName, c_m: int, c_z: int, config: EvoformerConfig) -> SubLayer:
    """A sub-layer of the user's class. Raises UserError if that is none."""
    what = f"the sub-layer '{own.kind}={own.path}'"
    if own.made is None:
        raise UserError(
            f"{what} is not imported; evodsp.config.import_layers(config) imports the classes of your own config"
        )
    if not (isinstance(own.made, type) and issubclass(own.made, SubLayer)):
        raise UserError(f"{what} is no class below evodsp.model.primitives.SubLayer, whose contract it needs")
    layer = own.made(c_m, c_z, config)
    lacking = [name for name in ("takes", "forward") if getattr(own.made, name) is getattr(SubLayer, name)]
    lacking += ["bias"] if layer.reads and not hasattr(layer, "bias") else []
    if lacking:
        raise UserError(f"{what} lacks `{lacking[0]}`, which evodsp.model.primitives.SubLayer asks for")
    for name in ("takes", "leaves", "reads"):
        axes = getattr(layer, name)
        if (axes or name == "takes") and axes not in _AXES:
            raise UserError(f"{what}: `{name}` is {axes!r}, but must be one of {', '.join(map(str, _AXES))}")
    return layer


@contextmanager
def _own_draws(name: str) -> Iterator[None]:
    """Initial weights are drawn from a stream that seed and name decide. Draws after it are as if there were none here."""
    with torch.random.fork_rng(devices=[]):
        now = int(torch.randint(2**62, (), device="cpu"))
        torch.default_generator.manual_seed(Draws.root(now).at(name).signed_key())
        yield


class Course(Budgeted):
    """A module that runs sub-layers, its own or those of its children."""

    steps: Sequence[Step] = ()
    """Steps to run, in order."""

    def both(
        self, m: Tensor, axis: Axis, z: Tensor, msa_mask: MSAMask, pair_mask: PairMask
    ) -> dict[Representation, Sharded]:
        """m, sharded along an axis, and z, along J, as `run` takes them."""
        return {"msa": self.sharded(m, axis, msa_mask), "pair": self.sharded(z, "j", pair_mask)}

    def run(self, held: dict[Representation, Sharded], leave: Mapping[Representation, Axis], masks: Masks) -> None:
        """Runs the sub-layers on the representations in `held`, and leaves them there along the axes `leave`.

        As soon as nothing needs a representation where it is, it is sent to where it is needed next.
        """
        biases: dict[str, Any] = {}
        for which in tuple(held):
            _send(held, which, self.steps, leave)
        for number, step in enumerate(self.steps, start=1):
            rest = self.steps[number:]
            if step.of_bias:
                (which,) = step.needs
                biases[step.name] = step.layer.bias(held[which])
            else:
                _run(step, held, biases, {which: next_axis(rest, which, leave[which]) for which in step.needs}, masks)
            for which in step.needs:
                _send(held, which, rest, leave)


def _send(
    held: dict[Representation, Sharded],
    which: Representation,
    steps: Sequence[Step],
    leave: Mapping[Representation, Axis],
) -> None:
    """Launches the switch of a representation to the axis on which the first of `steps` takes it, if it is not there."""
    x = held.pop(which)
    held[which] = x.switch(axis_after(x.axis, steps, which, leave[which]))


def _run(
    step: Step,
    held: dict[Representation, Sharded],
    biases: dict[str, Any],
    towards: Mapping[Representation, Axis],
    masks: Masks,
) -> None:
    """One sub-layer. It is a function so that what only this one needed is freed before the next one. `towards`: the axes on
    which representations must be next.
    """
    layer, taken, changed = step.layer, representation(step.layer.takes), step.changes
    x = held.pop(taken)
    given: tuple[Any, ...] = (biases.pop(step.name),) if layer.reads else ()
    result = x
    if taken != changed:
        held[taken], result = x, held.pop(changed)
    elif layer.leaves:  # it travels while the update is computed
        result = x.switch(towards[taken] if towards[taken] in layer.leaves else layer.leaves[0])
        given = (*given, result)
    update = layer(x, *given)
    del x, given
    result += update if step.dropout is None else step.dropout(update, masks)
    held[changed] = result


class SubLayers(Course):
    """Some sub-layers of a block, under the names of their parameters, and their dropout."""

    gathers_parameters = True

    def __init__(self, layers: Mapping[str, SubLayer], sizes: Mapping[Representation, tuple[int, float]]) -> None:
        """`sizes`: channels and dropout rate of each representation."""
        super().__init__()
        self.dropout = nn.ModuleDict()
        steps: list[Step] = []
        for name, layer in layers.items():
            attribute = child_name(name)
            if hasattr(self, attribute):
                raise UserError(
                    f"a sub-layer cannot be called '{name}', which names something else; choose another name"
                )
            setattr(self, attribute, layer)
            step = Step(name, layer)
            if layer.shared_axis is not None:
                self.dropout[name] = Dropout(*sizes[step.changes], name, layer.shared_axis)
                step = step._replace(dropout=self.dropout[name])
            steps += [step._replace(of_bias=True), step] if layer.reads else [step]
        self.steps = steps

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return tuple(cast(Dropout, dropout) for dropout in self.dropout.values())


class MSAStack(SubLayers):
    """The sub-layers of a block that take the MSA (algorithm 6, lines 2 to 5)."""

    @property
    def leaves(self) -> Axis:
        """Axis along which m is sharded after them."""
        return last_axis(self.steps, "msa", "seq")

    @property
    def enters(self) -> Axis:
        """Axis along which m is sharded before them."""
        return next_axis(self.steps, "msa", self.leaves)

    def forward(
        self,
        m: Float[Tensor, "B _ _ c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Masks = NO_MASKS,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on `enters` and z on J; returns m on `leaves` and z on J. `masks`: dropout masks of this block."""
        held = self.both(m, self.enters, z, msa_mask, pair_mask)
        self.run(held, {"msa": self.leaves, "pair": "j"}, masks)
        return held["msa"].x, held["pair"].x


class PairStack(SubLayers):
    """The pair stack of a block (algorithm 6, lines 6 to 10), or a block of pairs alone."""

    def __init__(
        self,
        c_z: int,
        config: EvoformerConfig | TemplateConfig,
        layers: Mapping[str, SubLayer] | None = None,
        ends: tuple[Axis, Axis] = ("j", "j"),
    ) -> None:
        """`layers`: in their order; None: `pair_layers`. `ends`: axes along which z is sharded before and after them."""
        layers = pair_layers(c_z, config) if layers is None else layers
        super().__init__(layers, {"pair": (c_z, config.pair_dropout)})
        self.ends = ends

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        return (self,)

    def forward(
        self, z: Float[Tensor, "B _ _ c_z"], pair_mask: PairMask, masks: Masks = NO_MASKS
    ) -> Float[Tensor, "B _ _ c_z"]:
        """Takes and returns z along `ends`. `masks`: dropout masks of this block."""
        first, last = self.ends
        held: dict[Representation, Sharded] = {"pair": self.sharded(z, first, pair_mask)}
        self.run(held, {"pair": last}, masks)
        return held["pair"].x


class EvoformerBlock(Course):
    """One block of the Evoformer (algorithm 6) or, with `extra`, of the extra-MSA stack (algorithm 18)."""

    def __init__(
        self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False, updates_msa: bool = True
    ) -> None:
        """`updates_msa`: False if nobody reads the m that the block leaves. Sub-layers on which only this m depends are then
        not run, but exist, because the published files hold them.
        """
        super().__init__()
        layers = made_layers(c_m, c_z, config, extra)
        sizes: dict[Representation, tuple[int, float]]
        sizes = {"msa": (c_m, config.msa_dropout), "pair": (c_z, config.pair_dropout)}
        of_msa = {name: layer for name, layer in layers.items() if representation(layer.takes) == "msa"}
        self.msa_stack = MSAStack(of_msa, sizes)
        self.pair_stack = PairStack(c_z, config, {name: layers[name] for name in layers if name not in of_msa})
        steps = [*self.msa_stack.steps, *self.pair_stack.steps]
        order = layer_names(config.layers or ALPHAFOLD2)
        steps = [step for own in order for step in steps if step.name == own.name]
        self.msa_stack.steps = [step for step in steps if step.name in of_msa]
        self.pair_stack.steps = [step for step in steps if step.name not in of_msa]
        # A pair stack that comes last and needs no m is a part of its own, during which m is on its way to the next block.
        of_msa_first = steps == [*self.msa_stack.steps, *self.pair_stack.steps]
        self.in_parts = of_msa_first and any(step.changes == "pair" for step in self.msa_stack.steps[-1:])
        self.gathers_parameters = not self.in_parts
        self.msa_stack.gathers_parameters = self.pair_stack.gathers_parameters = self.in_parts
        if not updates_msa:
            steps = without_msa(steps)
        self.steps = interleaved(steps, {"msa": self.leaves, "pair": "j"})

    @property
    def leaves(self) -> Axis:
        """Axis along which m is sharded after the block."""
        return self.msa_stack.leaves

    @property
    def enters(self) -> Axis:
        """Axis along which m is sharded before the block."""
        return self.msa_stack.enters if self.in_parts else self.leaves

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return *self.msa_stack.dropouts, *self.pair_stack.dropouts

    @property
    def parts(self) -> tuple[Budgeted, ...]:
        return (self.msa_stack, self.pair_stack) if self.in_parts else (self,)

    def forward(
        self,
        m: Float[Tensor, "B _ _ c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Masks = NO_MASKS,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on `enters` and z on J; returns m on `leaves` and z on J. `masks`: dropout masks of this block."""
        if self.in_parts:
            m, z = self.msa_stack(m, z, msa_mask, pair_mask, masks)
            return m, self.pair_stack(z, pair_mask, masks)
        held = self.both(m, self.enters, z, msa_mask, pair_mask)
        self.run(held, {"msa": self.leaves, "pair": "j"}, masks)
        return held["msa"].x, held["pair"].x


class EvoformerStack(Stack):
    """The Evoformer (algorithm 6) or, with `extra`, the extra-MSA stack (algorithm 18).

    `config.checkpoint` and `config.checkpoint_projections` say what the backward pass recomputes.

    A recomputed segment is the pair stack of one block and the MSA stack of the next; or a block, if its pair stack is no part
    of its own. Between two segments, outside of any, m is sent to the axis on which the next block takes it. This all-to-all is
    awaited after the pair stack, which therefore hides it.
    """

    sharded_inputs = (0, 1)

    def __init__(self, c_m: int, c_z: int, config: EvoformerConfig, extra: bool = False) -> None:
        # Nobody reads the m of the extra-MSA stack.
        updating = [not extra or number < config.blocks - 1 for number in range(config.blocks)]
        blocks = [EvoformerBlock(c_m, c_z, config, extra, updates_msa) for updates_msa in updating]
        super().__init__(blocks, config.checkpoint, config.checkpoint_projections)
        self.extra = extra

    @property
    def result_axis(self) -> Axis:
        """Axis along which m is sharded in the result."""
        if not self.extra:
            return "res"
        return self.blocks[-1].leaves if self.blocks else "seq"

    def forward(
        self,
        m: Float[Tensor, "B s R c_m"],
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        keys: DropoutKeys = NO_DROPOUT,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """Takes m on S and z on J; returns m on `result_axis` and z on J. `keys`: keys of `dropout_streams`."""
        masks = draw_blocks(self.blocks, keys, residues=msa_mask.shape[2], kernels=self.kernels)
        contexts = self.exchange.keeping if self.plan.keep_gathered else noop_context_fn
        axis: Axis = "seq"
        for number, block in enumerate([*self.blocks, None]):
            to = self.result_axis if block is None else block.enters
            arriving: Pending = Ready(m)
            if axis != to:
                arriving = self.exchange.start_switch(m, axis, to, whole=msa_mask.shape[DIMENSION[axis]])
            if block is None and not (self.blocks and self.blocks[-1].in_parts):
                return arriving.wait(), z
            recompute = self.recomputation.covers(number) and torch.is_grad_enabled()
            arguments = (number, arriving, z, msa_mask, pair_mask, masks, recompute)
            m, z = self.run(number, recompute, self._segment, *arguments, contexts=contexts)
            axis = to if block is None else block.leaves
        return m, z

    def _segment(
        self,
        number: int,
        arriving: Pending,
        z: Float[Tensor, "B I j c_z"],
        msa_mask: MSAMask,
        pair_mask: PairMask,
        masks: Sequence[Masks],
        recompute: bool,
    ) -> tuple[Float[Tensor, "B _ _ c_m"], Float[Tensor, "B I j c_z"]]:
        """The pair stack of the block before `number`, then the MSA stack of block `number`, or all of it."""
        if number > 0 and (before := self.blocks[number - 1]).in_parts:
            z = before.pair_stack(z, pair_mask, masks[number - 1])
        m = arriving.wait(keep=recompute)
        if number < len(self.blocks):
            m, z = self.blocks[number].parts[0](m, z, msa_mask, pair_mask, masks[number])
        return m, z
