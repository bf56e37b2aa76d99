"""One table of names: every parameter of the model beside its name and layout in DeepMind's and in OpenFold's files.

DeepMind's key is `<root>/<scope>//<parameter>`; the arrays of a stack have a leading axis of blocks. Our matrices have one
axis for all heads, DeepMind's have two (`Name.split`). The sizes that `split` needs come from the configuration; the functions'
defaults are the published models' sizes.

OpenFold's key is a path of modules, with one array per block in our layout: [out, in], heads side by side. `OLDER` converts it
to the name that OpenFold's releases before version 2, and its published checkpoints, use for the same array.

One of our matrices may hold several of their arrays side by side (queries, keys, values; left and right operands). They are
concatenated along the output axis, in the order given. Invariant point attention of multimer files has its outputs in another
order than ours (`Name.order`).

OpenFold's own importer of DeepMind's files (openfold/utils/import_weights.py) defines how the two correspond. It only
transposes and merges axes: the points of invariant point attention keep DeepMind's order, all x, then all y, then all z. In the
incoming triangle multiplication OpenFold calls DeepMind's right operand a and the left one b.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from evodsp.config import (
    ALPHAFOLD2,
    PAIR_STACK,
    ArrangementName,
    EvoformerConfig,
    ModelConfig,
    StructureModuleConfig,
    TemplateConfig,
)
from evodsp.errors import UserError

Layout = Literal["input_first", "output_last", "vector", "no_input"]
Keys = str | tuple[str, ...]

ROOT = "alphafold/alphafold_iteration"
EXTRA_STACK, STACK = "evoformer/extra_msa_stack", "evoformer/evoformer_iteration"
TEMPLATES = "evoformer/template_embedding"
TEMPLATE_STACK: dict[ArrangementName, str] = {
    "monomer": "template_pair_stack/__layer_stack_no_state",
    "multimer": "template_embedding_iteration",
}
PAIR_HEADS = TemplateConfig().pair_heads

_BLOCK = r"^((?:evoformer|extra_msa_stack)\.blocks\.\d+\.)"
OLDER: tuple[tuple[str, str], ...] = (
    (r"^template_embedder\.template_single_embedder\.", "template_angle_embedder."),
    (r"^template_embedder\.", ""),
    (_BLOCK + r"pair_stack\.", r"\1core."),
    (_BLOCK + r"(msa_transition|outer_product_mean)\.", r"\1core.\2."),
    (r"^(structure_module\.ipa\.linear_(?:q|kv)_points)\.linear\.", r"\1."),
)
"""OpenFold's present names and their older forms: pattern and replacement. The first pattern that matches is used."""


FUSED_MARKS = ("/triangle_multiplication_outgoing/projection//weights", ".linear_ab_p.weight")
"""DeepMind's and OpenFold's arrays that only newer files have: both sides of triangle multiplication in one."""


def is_fused(arrays: Iterable[str]) -> bool:
    """Whether these keys, of either program, have the layout with both sides of triangle multiplication in one array."""
    return any(key.endswith(FUSED_MARKS) for key in arrays)


def with_blocks(config: ModelConfig, blocks: Mapping[str, int]) -> ModelConfig:
    """`config` with these numbers of blocks in its stacks."""
    sizes = {stack: replace(getattr(config, stack), blocks=number) for stack, number in blocks.items()}
    return replace(config, **sizes)


def older(key: str) -> str:
    """The name before OpenFold's version 2 of the array that its present releases call `key`."""
    for pattern, replacement in OLDER:
        if (renamed := re.sub(pattern, replacement, key)) != key:
            return renamed
    return key


@dataclass(frozen=True)
class Name:
    """One parameter of the model and its arrays in other programs' files.

    `layout`: axes of DeepMind's arrays, `input_first` [in, out…] or `output_last` [in…, out]; [out…] with `vector`, and with
    `no_input`, where our matrix has one input. `block`: index along the leading
    axis of DeepMind's arrays; None without such an axis. `split`: length of the first of two axes (heads, mostly) that
    DeepMind's arrays have instead of one of ours; None if they also have one. `openfold`: OpenFold's full keys.
    `halves_swapped`: OpenFold's array, which then is the only one, holds the second half of ours first. `outputs`: length of
    each of their arrays along the output axis; None if they are equally long. `order`: row k of our parameter is row order[k]
    of their arrays, concatenated; None: row k.
    """

    ours: str
    deepmind: tuple[str, ...]
    layout: Layout
    block: int | None = None
    split: int | None = None
    openfold: tuple[str, ...] = ()
    halves_swapped: bool = False
    outputs: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Full keys in DeepMind's files."""
        return tuple(f"{ROOT}/{key}" for key in self.deepmind)

    def sizes(self, outputs: int) -> tuple[int, ...]:
        """The length of each of their arrays along the output axis. `outputs`: that of our parameter."""
        return self.outputs or (outputs // len(self.deepmind),) * len(self.deepmind)

    def array_shapes(self, ours: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of one block of each of DeepMind's arrays, if our parameter has the shape `ours`."""
        shapes: list[tuple[int, ...]] = []
        for outputs in self.sizes(ours[0]):
            if self.layout in ("vector", "no_input"):
                shapes.append(self._axes(outputs))
            elif self.layout == "input_first":
                shapes.append((ours[1], *self._axes(outputs)))
            else:
                shapes.append((*self._axes(ours[1]), outputs))
        return shapes

    def in_our_order(self, rows: Any) -> Any:
        """Rows of their arrays, concatenated, as rows of our parameter. Takes arrays and tensors."""
        return rows if self.order is None else rows[list(self.order)]

    def in_their_order(self, rows: Any) -> Any:
        """The inverse of `in_our_order`."""
        if self.order is None:
            return rows
        return rows[sorted(range(len(self.order)), key=self.order.__getitem__)]

    def _axes(self, size: int) -> tuple[int, ...]:
        return (size,) if self.split is None else (self.split, size // self.split)


@dataclass(frozen=True)
class Prefix:
    """A module, by the prefixes of its parameters' names: its name in our model, its scope in DeepMind's files, and its path in
    OpenFold's."""

    ours: str
    scope: str
    openfold: str = ""

    def below(self, ours: str = "", scope: str = "", openfold: str = "") -> Prefix:
        """A module within this one. Where a name is '', the two have the same."""
        return Prefix(
            _joined(".", self.ours, ours), _joined("/", self.scope, scope), _joined(".", self.openfold, openfold)
        )

    def name(self, ours: str, arrays: Keys, openfold: Keys, layout: Layout, split: int | None = None) -> Name:
        """A parameter. `arrays`: DeepMind's keys, such as query_norm//scale, or //output_w of this scope itself."""
        deepmind = (
            f"{self.scope}{'' if key.startswith('//') or not self.scope else '/'}{key}" for key in _tuple(arrays)
        )
        theirs = (_joined(".", self.openfold, key) for key in _tuple(openfold))
        return Name(_joined(".", self.ours, ours), tuple(deepmind), layout, split=split, openfold=tuple(theirs))

    def linear(self, ours: str, scopes: Keys, openfold: Keys) -> Iterator[Name]:
        """A linear layer; those of several scopes side by side are one of ours."""
        weights, biases = (tuple(f"{scope}//{part}" for scope in _tuple(scopes)) for part in ("weights", "bias"))
        paths = _tuple(openfold)
        yield self.name(f"{ours}.weight", weights, tuple(f"{path}.weight" for path in paths), "input_first")
        yield self.name(f"{ours}.bias", biases, tuple(f"{path}.bias" for path in paths), "vector")

    def norm(self, ours: str, scope: str, openfold: str) -> Iterator[Name]:
        yield self.name(f"{ours}.weight", f"{scope}//scale", f"{openfold}.weight", "vector")
        yield self.name(f"{ours}.bias", f"{scope}//offset", f"{openfold}.bias", "vector")

    def blocks(self, number: int, names_of: Callable[[Prefix], Iterator[Name]]) -> Iterator[Name]:
        """The parameters of a stack of blocks, which have one scope. `names_of`: those of a block."""
        for n in range(number):
            for name in names_of(self.below(f"blocks.{n}", "", f"blocks.{n}")):
                yield replace(name, block=n)


def _joined(between: str, *parts: str) -> str:
    return between.join(filter(None, parts))


def _tuple(keys: Keys) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else keys


def _output(at: Prefix, split: int, letter: str = "o") -> Iterator[Name]:
    yield at.name("output.weight", "//output_w", f"linear_{letter}.weight", "output_last", split)
    yield at.name("output.bias", "//output_b", f"linear_{letter}.bias", "vector")


def _key_value(at: Prefix, heads: int | None = None) -> Iterator[Name]:
    theirs = ("linear_k.weight", "linear_v.weight")
    yield at.name("key_value.weight", ("//key_w", "//value_w"), theirs, "input_first", heads)


def _gate_and_output(at: Prefix, heads: int) -> Iterator[Name]:
    yield at.name("gate.weight", "//gating_w", "linear_g.weight", "input_first", heads)
    yield at.name("gate.bias", "//gating_b", "linear_g.bias", "vector", heads)
    yield from _output(at, heads)


def gated_attention(at: Prefix, heads: int) -> Iterator[Name]:
    theirs = ("linear_q.weight", "linear_k.weight", "linear_v.weight")
    yield at.name("qkv.weight", ("//query_w", "//key_w", "//value_w"), theirs, "input_first", heads)
    yield from _gate_and_output(at, heads)


def row_attention(at: Prefix, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from at.norm("norm", "query_norm", "layer_norm_m")
    yield from at.norm("pair_norm", "feat_2d_norm", "layer_norm_z")
    yield at.name("pair_bias.weight", "//feat_2d_weights", "linear_z.weight", "input_first")
    yield from gated_attention(at.below("attention", "attention", "mha"), heads)


def column_attention(at: Prefix, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from at.norm("norm", "query_norm", "_msa_att.layer_norm_m")
    yield from gated_attention(at.below("attention", "attention", "_msa_att.mha"), heads)


def global_attention(at: Prefix, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from at.norm("norm", "query_norm", "layer_norm_m")
    inner = at.below("", "attention", "global_attention")
    yield inner.name("query.weight", "//query_w", "linear_q.weight", "input_first", heads)
    yield from _key_value(inner)  # one head's serve all heads: no axis of heads here
    yield from _gate_and_output(inner, heads)


def transition(at: Prefix) -> Iterator[Name]:
    yield from at.norm("norm", "input_layer_norm", "layer_norm")
    yield from at.linear("widen", "transition1", "linear_1")
    yield from at.linear("narrow", "transition2", "linear_2")


def outer_product_mean(at: Prefix, channels: int = EvoformerConfig.outer_product_channels) -> Iterator[Name]:
    yield from at.norm("norm", "layer_norm_input", "layer_norm")
    yield from at.linear("left_right", ("left_projection", "right_projection"), ("linear_1", "linear_2"))
    yield from _output(at, channels, "out")


def triangle_multiplication(at: Prefix, fused: bool = False, incoming: bool = False) -> Iterator[Name]:
    """`fused`: the layout of newer releases, which keep left and right in one array as we do."""
    yield from at.norm("norm", "left_norm_input" if fused else "layer_norm_input", "layer_norm_in")
    parts = ("",) if fused else ("left_", "right_")
    # Left and right are a and b, but the other way round where edges come in.
    operands = ("ab",) if fused else ("b", "a") if incoming else ("a", "b")
    for name, theirs, letter in (("projection", "projection", "p"), ("projection_gate", "gate", "g")):
        scopes = tuple(f"{part}{theirs}" for part in parts)
        for row in at.linear(name, scopes, tuple(f"linear_{operand}_{letter}" for operand in operands)):
            yield replace(row, halves_swapped=fused and incoming)
    yield from at.norm("product_norm", "center_norm" if fused else "center_layer_norm", "layer_norm_out")
    yield from at.linear("output", "output_projection", "linear_z")
    yield from at.linear("output_gate", "gating_linear", "linear_g")


def triangle_attention(at: Prefix, heads: int = PAIR_HEADS) -> Iterator[Name]:
    yield from at.norm("norm", "query_norm", "layer_norm")
    yield at.name("pair_bias.weight", "//feat_2d_weights", "linear.weight", "input_first")
    yield from gated_attention(at.below("attention", "attention", "mha"), heads)


def pair_stack(at: Prefix, heads: int, fused: bool, layers: Sequence[str] = PAIR_STACK) -> Iterator[Name]:
    for edges, short in (("outgoing", "out"), ("incoming", "in")):
        own = at.below(f"triangle_{edges}", f"triangle_multiplication_{edges}", f"tri_mul_{short}")
        if f"triangle_{edges}" in layers:
            yield from triangle_multiplication(own, fused, incoming=edges == "incoming")
    for node, short in (("starting", "start"), ("ending", "end")):
        own = at.below(f"attention_{node}", f"triangle_attention_{node}_node", f"tri_att_{short}")
        if f"attention_{node}" in layers:
            yield from triangle_attention(own, heads)
    if "pair_transition" in layers:
        yield from transition(at.below("transition", "pair_transition", "pair_transition"))


def evoformer_block(
    at: Prefix, extra: bool = False, config: EvoformerConfig | None = None, fused: bool = False
) -> Iterator[Name]:
    """Sub-layers that the block lacks have no names, nor have those that another program's block does not have."""
    config, msa = config or EvoformerConfig(), at.below("msa_stack")
    layers = config.layers or ALPHAFOLD2
    column, theirs = (global_attention, "column_global") if extra else (column_attention, "column")
    row = msa.below("row_attention", "msa_row_attention_with_pair_bias", "msa_att_row")
    names = {
        "row_attention": row_attention(row, config.msa_heads),
        "column_attention": column(
            msa.below("column_attention", f"msa_{theirs}_attention", "msa_att_col"), config.msa_heads
        ),
        "msa_transition": transition(msa.below("transition", "msa_transition", "msa_transition")),
        "outer_product_mean": outer_product_mean(
            msa.below("outer_product_mean", "outer_product_mean", "outer_product_mean"), config.outer_product_channels
        ),
    }
    for layer, own in names.items():
        if layer in layers:
            yield from own
    yield from pair_stack(at.below("pair_stack", "", "pair_stack"), config.pair_heads, fused, layers)


def stack(ours: str, scope: str, config: EvoformerConfig, extra: bool = False, fused: bool = False) -> Iterator[Name]:
    """OpenFold's two stacks are called as ours."""
    return Prefix(ours, scope, ours).blocks(config.blocks, lambda at: evoformer_block(at, extra, config, fused))


def invariant_point_attention(at: Prefix) -> Iterator[Name]:
    for ours, scope, openfold in (
        ("query", "q_scalar", "linear_q"),
        ("key_value", "kv_scalar", "linear_kv"),
        ("query_points", "q_point_local", "linear_q_points.linear"),
        ("key_value_points", "kv_point_local", "linear_kv_points.linear"),
        ("pair_bias", "attention_2d", "linear_b"),
        ("output", "output_projection", "linear_out"),
    ):
        yield from at.linear(ours, scope, openfold)
    yield at.name("point_weight", "//trainable_point_weights", "head_weights", "vector")


def point_attention_of_chains(at: Prefix, config: StructureModuleConfig) -> Iterator[Name]:
    """Invariant point attention of multimer files: no scalar biases; keys and values apart; points by heads."""
    heads = config.heads
    parts: tuple[tuple[str, str, Layout], ...] = ("weight", "weights", "input_first"), ("bias", "bias", "vector")
    scalars = "scalar_projection", "", 1, config.scalar_query_width, config.scalar_value_width, parts[:1]
    points = "point_projection/point_projection", "_points", 3, config.query_points, config.value_points, parts
    for projection, suffix, planes, width_of_keys, width_of_values, kinds in (scalars, points):
        module = suffix and f"{suffix}.linear"
        for part, letters in (("query", "q"), ("key_value", "kv")):
            widths = [width_of_values if letter == "v" else width_of_keys for letter in letters]
            for kind, theirs, layout in kinds:
                arrays = tuple(f"{letter}_{projection}//{theirs}" for letter in letters)
                openfold = tuple(f"linear_{letter}{module}.{kind}" for letter in letters)
                yield replace(
                    at.name(f"{part}{suffix}.{kind}", arrays, openfold, layout, heads),
                    outputs=tuple(planes * heads * width for width in widths),
                    order=_order(heads, planes, widths),
                )
    yield from at.linear("pair_bias", "attention_2d", "linear_b")
    yield from at.linear("output", "output_projection", "linear_out")
    yield at.name("point_weight", "//trainable_point_weights", "head_weights", "vector")


def _order(heads: int, planes: int, widths: Sequence[int]) -> tuple[int, ...]:
    """`Name.order` of arrays [head, plane, width]. Ours is [plane, head, all widths]."""
    firsts = [heads * planes * sum(widths[:array]) for array in range(len(widths))]
    return tuple(
        first + (head * planes + plane) * width + place
        for plane in range(planes)
        for head in range(heads)
        for first, width in zip(firsts, widths, strict=True)
        for place in range(width)
    )


def structure_module(at: Prefix, config: ModelConfig) -> Iterator[Name]:
    layer, sizes, chains = at.below("", "fold_iteration"), config.structure_module, config.arrangement == "multimer"
    attention = layer.below("attention", "invariant_point_attention", "ipa")
    yield from at.norm("single_norm", "single_layer_norm", "layer_norm_s")
    yield from at.norm("pair_norm", "pair_layer_norm", "layer_norm_z")
    yield from at.linear("initial", "initial_projection", "linear_in")
    yield from point_attention_of_chains(attention, sizes) if chains else invariant_point_attention(attention)
    yield from layer.norm("attention_norm", "attention_layer_norm", "layer_norm_ipa")
    for n in range(sizes.transition_layers):
        yield from layer.linear(f"transition.{n}", f"transition{_numbered(n)}", f"transition.layers.0.linear_{n + 1}")
    yield from layer.norm("transition_norm", "transition_layer_norm", "transition.layer_norm")
    yield from layer.linear("backbone_update", "quat_rigid/rigid" if chains else "affine_update", "bb_update.linear")
    yield from angle_network(layer.below("angle_network", "rigid_sidechain", "angle_resnet"), sizes.angle_blocks)


def angle_network(at: Prefix, blocks: int) -> Iterator[Name]:
    yield from at.linear("current", "input_projection", "linear_in")
    yield from at.linear("initial", "input_projection_1", "linear_initial")
    for n in range(blocks):
        for layer, number in (("first", 1), ("second", 2)):
            scope = f"resblock{number}{_numbered(n)}"
            yield from at.linear(f"blocks.{n}.{layer}", scope, f"layers.{n}.linear_{number}")
    yield from at.linear("angles", "unnormalized_angles", "linear_out")


def _numbered(n: int) -> str:
    """Haiku's suffix for the n-th module with the same name."""
    return f"_{n}" if n else ""


RELATIVE_POSITION: dict[ArrangementName, str] = {
    "monomer": "pair_activiations",
    "multimer": "~_relative_encoding/position_activations",
}


def embedders(scope: str, arrangement: ArrangementName = "monomer") -> Iterator[Name]:
    at = Prefix("", scope)
    for ours, deepmind, openfold in (
        ("input_embedder.left", "left_single", "input_embedder.linear_tf_z_i"),
        ("input_embedder.right", "right_single", "input_embedder.linear_tf_z_j"),
        ("input_embedder.target_to_msa", "preprocess_1d", "input_embedder.linear_tf_m"),
        ("input_embedder.msa", "preprocess_msa", "input_embedder.linear_msa_m"),
        ("input_embedder.relative_position", RELATIVE_POSITION[arrangement], "input_embedder.linear_relpos"),
        ("recycling_embedder.distance", "prev_pos_linear", "recycling_embedder.linear"),
        ("extra_msa_embedder.linear", "extra_msa_activations", "extra_msa_embedder.linear"),
        ("single", "single_activations", "evoformer.linear"),
    ):
        yield from at.linear(ours, deepmind, openfold)
    yield from at.norm("recycling_embedder.pair_norm", "prev_pair_norm", "recycling_embedder.layer_norm_z")
    yield from at.norm("recycling_embedder.msa_norm", "prev_msa_first_row_norm", "recycling_embedder.layer_norm_m")


def heads(config: ModelConfig) -> Iterator[Name]:
    at = Prefix("heads", "", "aux_heads")
    yield from at.linear("distogram.half_logits", "distogram_head/half_logits", "distogram.linear")
    yield from at.linear("masked_msa.logits", "masked_msa_head/logits", "masked_msa.linear")
    yield from at.norm("plddt.norm", "predicted_lddt_head/input_layer_norm", "plddt.layer_norm")
    for n, (ours, deepmind) in enumerate((("first", "act_0"), ("second", "act_1"), ("logits", "logits")), start=1):
        yield from at.linear(f"plddt.{ours}", f"predicted_lddt_head/{deepmind}", f"plddt.linear_{n}")
    if config.heads.experimentally_resolved:
        name = "experimentally_resolved"
        yield from at.linear(f"{name}.logits", f"{name}_head/logits", f"{name}.linear")
    if config.heads.predicted_aligned_error:
        yield from at.linear("predicted_aligned_error.logits", "predicted_aligned_error_head/logits", "tm.linear")


def template_pair_stack(at: Prefix, blocks: int, heads: int = PAIR_HEADS, fused: bool = False) -> Iterator[Name]:
    return at.blocks(blocks, lambda own: pair_stack(own, heads, fused))


def template_pointwise_attention(at: Prefix, heads: int = TemplateConfig.attention_heads) -> Iterator[Name]:
    yield at.name("query.weight", "//query_w", "linear_q.weight", "input_first", heads)
    yield from _key_value(at, heads)
    yield from _output(at, heads)


def template_embedder(at: Prefix, config: TemplateConfig, fused: bool = False) -> Iterator[Name]:
    single = at.below("", "single_template_embedding")
    yield from single.linear("embedding", "embedding2d", "template_pair_embedder.linear")
    own = single.below("stack", TEMPLATE_STACK["monomer"], "template_pair_stack")
    yield from template_pair_stack(own, config.blocks, config.pair_heads, fused)
    yield from single.norm("norm", "output_layer_norm", "template_pair_stack.layer_norm")
    attention = at.below("attention", "attention", "template_pointwise_att.mha")
    yield from template_pointwise_attention(attention, config.attention_heads)


def template_torsion_embedder(at: Prefix, layers: Sequence[str] = ("linear_1", "linear_2")) -> Iterator[Name]:
    """The Evoformer's scope holds these two layers directly. `layers`: OpenFold's names of them."""
    yield from at.linear("embedding", "template_single_embedding", layers[0])
    yield from at.linear("projection", "template_projection", layers[1])


def chain_template_embedder(at: Prefix, config: TemplateConfig, fused: bool) -> Iterator[Name]:
    """Templates of multimer files."""
    single = at.below("", "single_template_embedding")
    pair = single.below("", "", "template_pair_embedder")
    for n, (layer, their_layer) in enumerate(
        (
            ("distances", "dgram_linear"), ("beta_mask", "pseudo_beta_mask_linear"), ("column_type", "aatype_linear_1"),
            ("row_type", "aatype_linear_2"), ("direction_x", "x_linear"), ("direction_y", "y_linear"),
            ("direction_z", "z_linear"), ("backbone_mask", "backbone_mask_linear"), ("query", "query_embedding_linear"),
        )
    ):  # fmt: skip
        without_input = layer in ("beta_mask", "backbone_mask") or layer.startswith("direction")
        for name in pair.linear(layer, f"template_pair_embedding_{n}", their_layer):
            is_weight = name.layout == "input_first"
            yield replace(name, layout="no_input") if without_input and is_weight else name
    yield from pair.norm("query_norm", "query_embedding_norm", "query_embedding_layer_norm")
    own = single.below("stack", TEMPLATE_STACK["multimer"], "template_pair_stack")
    yield from template_pair_stack(own, config.blocks, config.pair_heads, fused)
    yield from single.norm("norm", "output_layer_norm", "template_pair_stack.layer_norm")
    yield from at.linear("output", "output_linear", "linear_t")


def templates(config: ModelConfig, fused: bool) -> Iterator[Name]:
    own, chains, at = config.templates, config.arrangement == "multimer", Prefix("", "evoformer", "template_embedder")
    if own.enabled:
        embedder = chain_template_embedder if chains else template_embedder
        yield from embedder(at.below("template_embedder", "template_embedding"), own, fused)
        if own.torsions:
            layers = ("template_single_embedder", "template_projector") if chains else ("linear_1", "linear_2")
            place = at.below("template_torsion_embedder", "", "template_single_embedder")
            yield from template_torsion_embedder(place, layers)


def parameter_names(config: ModelConfig, fused: bool = False) -> list[Name]:
    """Every parameter of a model with this configuration, once. `fused`: triangle multiplication's layout in newer files."""
    return [
        *embedders("evoformer", config.arrangement),
        *stack("extra_msa_stack", EXTRA_STACK, config.extra_msa, extra=True, fused=fused),
        *stack("evoformer", STACK, config.evoformer, fused=fused),
        *structure_module(Prefix(*["structure_module"] * 3), config),
        *templates(config, fused),
        *heads(config),
    ]


def check_readable(config: ModelConfig) -> None:
    """Raise UserError for a model whose sub-layers other programs' models do not have, or not in this order."""
    for stack in ("evoformer", "extra_msa"):
        if getattr(config, stack).layers is not None:
            raise UserError(
                f"the model has its own {stack}.layers, which no other program can run; export with --format safetensors"
            )


def block_probes(arrangement: ArrangementName) -> dict[str, str]:
    """For every stack of the configuration, DeepMind's key of an array whose leading axis counts the stack's blocks."""
    template_stack = f"{TEMPLATES}/single_template_embedding/{TEMPLATE_STACK[arrangement]}"
    stacks = {"extra_msa": EXTRA_STACK, "evoformer": STACK, "templates": template_stack}
    return {stack: f"{ROOT}/{scope}/pair_transition/input_layer_norm//scale" for stack, scope in stacks.items()}
