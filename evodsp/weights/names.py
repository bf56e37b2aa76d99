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

from evodsp.config import ArrangementName, EvoformerConfig, ModelConfig, StructureModuleConfig, TemplateConfig

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


def _name(ours: str, deepmind: Keys, openfold: Keys, layout: Layout, split: int | None = None) -> Name:
    return Name(ours, _tuple(deepmind), layout, split=split, openfold=_tuple(openfold))


def _tuple(keys: Keys) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else keys


def _linear(ours: str, scopes: Keys, openfold: Keys) -> Iterator[Name]:
    scopes, openfold = _tuple(scopes), _tuple(openfold)
    weights, biases = (tuple(f"{scope}//{part}" for scope in scopes) for part in ("weights", "bias"))
    yield _name(f"{ours}.weight", weights, tuple(f"{path}.weight" for path in openfold), "input_first")
    yield _name(f"{ours}.bias", biases, tuple(f"{path}.bias" for path in openfold), "vector")


def _norm(ours: str, scope: str, openfold: str) -> Iterator[Name]:
    yield _name(f"{ours}.weight", f"{scope}//scale", f"{openfold}.weight", "vector")
    yield _name(f"{ours}.bias", f"{scope}//offset", f"{openfold}.bias", "vector")


def _output(ours: str, scope: str, openfold: str, split: int, letter: str = "o") -> Iterator[Name]:
    theirs = f"{openfold}.linear_{letter}"
    yield _name(f"{ours}.output.weight", f"{scope}//output_w", f"{theirs}.weight", "output_last", split)
    yield _name(f"{ours}.output.bias", f"{scope}//output_b", f"{theirs}.bias", "vector")


def _key_value(ours: str, scope: str, openfold: str, heads: int | None = None) -> Iterator[Name]:
    scopes, theirs = (
        (f"{scope}//key_w", f"{scope}//value_w"),
        (f"{openfold}.linear_k.weight", f"{openfold}.linear_v.weight"),
    )
    yield _name(f"{ours}.key_value.weight", scopes, theirs, "input_first", heads)


def _blocks(number: int, names_of: Callable[[int], Iterator[Name]]) -> Iterator[Name]:
    """The names of a stack. `names_of`: those of the block of a number."""
    return (replace(name, block=n) for n in range(number) for name in names_of(n))


def _gate_and_output(ours: str, scope: str, openfold: str, heads: int) -> Iterator[Name]:
    yield _name(f"{ours}.gate.weight", f"{scope}//gating_w", f"{openfold}.linear_g.weight", "input_first", heads)
    yield _name(f"{ours}.gate.bias", f"{scope}//gating_b", f"{openfold}.linear_g.bias", "vector", heads)
    yield from _output(ours, scope, openfold, heads)


def gated_attention(ours: str, scope: str, heads: int, openfold: str = "") -> Iterator[Name]:
    qkv = tuple(f"{scope}//{part}_w" for part in ("query", "key", "value"))
    theirs = tuple(f"{openfold}.linear_{part}.weight" for part in "qkv")
    yield _name(f"{ours}.qkv.weight", qkv, theirs, "input_first", heads)
    yield from _gate_and_output(ours, scope, openfold, heads)


def row_attention(ours: str, scope: str, heads: int = EvoformerConfig.msa_heads, openfold: str = "") -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm", f"{openfold}.layer_norm_m")
    yield from _norm(f"{ours}.pair_norm", f"{scope}/feat_2d_norm", f"{openfold}.layer_norm_z")
    yield _name(f"{ours}.pair_bias.weight", f"{scope}//feat_2d_weights", f"{openfold}.linear_z.weight", "input_first")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads, f"{openfold}.mha")


def column_attention(
    ours: str, scope: str, heads: int = EvoformerConfig.msa_heads, openfold: str = ""
) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm", f"{openfold}._msa_att.layer_norm_m")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads, f"{openfold}._msa_att.mha")


def global_attention(
    ours: str, scope: str, heads: int = EvoformerConfig.msa_heads, openfold: str = ""
) -> Iterator[Name]:
    attention, theirs = f"{scope}/attention", f"{openfold}.global_attention"
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm", f"{openfold}.layer_norm_m")
    yield _name(f"{ours}.query.weight", f"{attention}//query_w", f"{theirs}.linear_q.weight", "input_first", heads)
    yield from _key_value(ours, attention, theirs)  # one head's serve all heads: no axis of heads here
    yield from _gate_and_output(ours, attention, theirs, heads)


def transition(ours: str, scope: str, openfold: str = "") -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/input_layer_norm", f"{openfold}.layer_norm")
    yield from _linear(f"{ours}.widen", f"{scope}/transition1", f"{openfold}.linear_1")
    yield from _linear(f"{ours}.narrow", f"{scope}/transition2", f"{openfold}.linear_2")


def outer_product_mean(
    ours: str, scope: str, channels: int = EvoformerConfig.outer_product_channels, openfold: str = ""
) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/layer_norm_input", f"{openfold}.layer_norm")
    yield from _linear(
        f"{ours}.left_right",
        (f"{scope}/left_projection", f"{scope}/right_projection"),
        (f"{openfold}.linear_1", f"{openfold}.linear_2"),
    )
    yield from _output(ours, scope, openfold, channels, "out")


def triangle_multiplication(
    ours: str, scope: str, fused: bool = False, openfold: str = "", incoming: bool = False
) -> Iterator[Name]:
    """`fused`: the layout of newer releases, which keep left and right in one array as we do."""
    yield from _norm(
        f"{ours}.norm", f"{scope}/{'left_norm_input' if fused else 'layer_norm_input'}", f"{openfold}.layer_norm_in"
    )
    parts = ("",) if fused else ("left_", "right_")
    # Left and right are a and b, but the other way round where edges come in.
    operands = ("ab",) if fused else ("b", "a") if incoming else ("a", "b")
    for name, theirs, letter in (("projection", "projection", "p"), ("projection_gate", "gate", "g")):
        scopes = tuple(f"{scope}/{part}{theirs}" for part in parts)
        for row in _linear(f"{ours}.{name}", scopes, tuple(f"{openfold}.linear_{o}_{letter}" for o in operands)):
            yield replace(row, halves_swapped=fused and incoming)
    yield from _norm(
        f"{ours}.product_norm",
        f"{scope}/{'center_norm' if fused else 'center_layer_norm'}",
        f"{openfold}.layer_norm_out",
    )
    yield from _linear(f"{ours}.output", f"{scope}/output_projection", f"{openfold}.linear_z")
    yield from _linear(f"{ours}.output_gate", f"{scope}/gating_linear", f"{openfold}.linear_g")


def triangle_attention(ours: str, scope: str, heads: int = PAIR_HEADS, openfold: str = "") -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm", f"{openfold}.layer_norm")
    yield _name(f"{ours}.pair_bias.weight", f"{scope}//feat_2d_weights", f"{openfold}.linear.weight", "input_first")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads, f"{openfold}.mha")


def pair_stack(ours: str, scope: str, heads: int, fused: bool, openfold: str = "") -> Iterator[Name]:
    for edges, short in (("outgoing", "out"), ("incoming", "in")):
        yield from triangle_multiplication(
            f"{ours}.triangle_{edges}",
            f"{scope}/triangle_multiplication_{edges}",
            fused,
            f"{openfold}.tri_mul_{short}",
            incoming=edges == "incoming",
        )
    for node, short in (("starting", "start"), ("ending", "end")):
        yield from triangle_attention(
            f"{ours}.attention_{node}", f"{scope}/triangle_attention_{node}_node", heads, f"{openfold}.tri_att_{short}"
        )
    yield from transition(f"{ours}.transition", f"{scope}/pair_transition", f"{openfold}.pair_transition")


def evoformer_block(
    ours: str,
    scope: str,
    extra: bool = False,
    config: EvoformerConfig | None = None,
    fused: bool = False,
    openfold: str = "",
) -> Iterator[Name]:
    config = config or EvoformerConfig()
    msa, heads = f"{ours}.msa_stack", config.msa_heads
    column, theirs = (global_attention, "column_global") if extra else (column_attention, "column")
    yield from row_attention(
        f"{msa}.row_attention", f"{scope}/msa_row_attention_with_pair_bias", heads, f"{openfold}.msa_att_row"
    )
    yield from column(f"{msa}.column_attention", f"{scope}/msa_{theirs}_attention", heads, f"{openfold}.msa_att_col")
    yield from transition(f"{msa}.transition", f"{scope}/msa_transition", f"{openfold}.msa_transition")
    yield from outer_product_mean(
        f"{msa}.outer_product_mean",
        f"{scope}/outer_product_mean",
        config.outer_product_channels,
        f"{openfold}.outer_product_mean",
    )
    yield from pair_stack(f"{ours}.pair_stack", scope, config.pair_heads, fused, f"{openfold}.pair_stack")


def stack(ours: str, scope: str, config: EvoformerConfig, extra: bool = False, fused: bool = False) -> Iterator[Name]:
    """OpenFold's two stacks are called as ours."""

    def block(n: int) -> Iterator[Name]:
        return evoformer_block(f"{ours}.blocks.{n}", scope, extra, config, fused, openfold=f"{ours}.blocks.{n}")

    return _blocks(config.blocks, block)


def invariant_point_attention(ours: str, scope: str, openfold: str = "") -> Iterator[Name]:
    for part, deepmind, theirs in (
        ("query", "q_scalar", "linear_q"),
        ("key_value", "kv_scalar", "linear_kv"),
        ("query_points", "q_point_local", "linear_q_points.linear"),
        ("key_value_points", "kv_point_local", "linear_kv_points.linear"),
        ("pair_bias", "attention_2d", "linear_b"),
        ("output", "output_projection", "linear_out"),
    ):
        yield from _linear(f"{ours}.{part}", f"{scope}/{deepmind}", f"{openfold}.{theirs}")
    yield _name(f"{ours}.point_weight", f"{scope}//trainable_point_weights", f"{openfold}.head_weights", "vector")


def point_attention_of_chains(
    ours: str, scope: str, config: StructureModuleConfig, openfold: str = ""
) -> Iterator[Name]:
    """Invariant point attention of multimer files: no scalar biases; keys and values apart; points by heads."""
    heads = config.heads
    scalars = "scalar_projection", "", 1, config.scalar_query_width, config.scalar_value_width, (("weight", "weights"),)
    parts = ("weight", "weights"), ("bias", "bias")
    points = "point_projection/point_projection", "_points", 3, config.query_points, config.value_points, parts
    for projection, suffix, planes, width_of_keys, width_of_values, kinds in (scalars, points):
        module = suffix and f"{suffix}.linear"
        for part, letters in (("query", "q"), ("key_value", "kv")):
            widths = [width_of_values if letter == "v" else width_of_keys for letter in letters]
            for kind, theirs in kinds:
                yield Name(
                    f"{ours}.{part}{suffix}.{kind}",
                    tuple(f"{scope}/{letter}_{projection}//{theirs}" for letter in letters),
                    "input_first" if kind == "weight" else "vector",
                    split=heads,
                    openfold=tuple(f"{openfold}.linear_{letter}{module}.{kind}" for letter in letters),
                    outputs=tuple(planes * heads * width for width in widths),
                    order=_order(heads, planes, widths),
                )
    yield from _linear(f"{ours}.pair_bias", f"{scope}/attention_2d", f"{openfold}.linear_b")
    yield from _linear(f"{ours}.output", f"{scope}/output_projection", f"{openfold}.linear_out")
    yield _name(f"{ours}.point_weight", f"{scope}//trainable_point_weights", f"{openfold}.head_weights", "vector")


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


def structure_module(ours: str, scope: str, config: ModelConfig, openfold: str = "structure_module") -> Iterator[Name]:
    layer, chains = f"{scope}/fold_iteration", config.arrangement == "multimer"
    attention = f"{ours}.attention", f"{layer}/invariant_point_attention"
    yield from _norm(f"{ours}.single_norm", f"{scope}/single_layer_norm", f"{openfold}.layer_norm_s")
    yield from _norm(f"{ours}.pair_norm", f"{scope}/pair_layer_norm", f"{openfold}.layer_norm_z")
    yield from _linear(f"{ours}.initial", f"{scope}/initial_projection", f"{openfold}.linear_in")
    if chains:
        yield from point_attention_of_chains(*attention, config.structure_module, f"{openfold}.ipa")
    else:
        yield from invariant_point_attention(*attention, f"{openfold}.ipa")
    yield from _norm(f"{ours}.attention_norm", f"{layer}/attention_layer_norm", f"{openfold}.layer_norm_ipa")
    for n in range(config.structure_module.transition_layers):
        yield from _linear(
            f"{ours}.transition.{n}",
            f"{layer}/transition{_numbered(n)}",
            f"{openfold}.transition.layers.0.linear_{n + 1}",
        )
    yield from _norm(f"{ours}.transition_norm", f"{layer}/transition_layer_norm", f"{openfold}.transition.layer_norm")
    update = "quat_rigid/rigid" if chains else "affine_update"
    yield from _linear(f"{ours}.backbone_update", f"{layer}/{update}", f"{openfold}.bb_update.linear")
    yield from angle_network(
        f"{ours}.angle_network",
        f"{layer}/rigid_sidechain",
        config.structure_module.angle_blocks,
        f"{openfold}.angle_resnet",
    )


def angle_network(ours: str, scope: str, blocks: int, openfold: str = "") -> Iterator[Name]:
    yield from _linear(f"{ours}.current", f"{scope}/input_projection", f"{openfold}.linear_in")
    yield from _linear(f"{ours}.initial", f"{scope}/input_projection_1", f"{openfold}.linear_initial")
    for n in range(blocks):
        block, theirs = f"{ours}.blocks.{n}", f"{openfold}.layers.{n}"
        yield from _linear(f"{block}.first", f"{scope}/resblock1{_numbered(n)}", f"{theirs}.linear_1")
        yield from _linear(f"{block}.second", f"{scope}/resblock2{_numbered(n)}", f"{theirs}.linear_2")
    yield from _linear(f"{ours}.angles", f"{scope}/unnormalized_angles", f"{openfold}.linear_out")


def _numbered(n: int) -> str:
    """Haiku's suffix for the n-th module with the same name."""
    return f"_{n}" if n else ""


RELATIVE_POSITION: dict[ArrangementName, str] = {
    "monomer": "pair_activiations",
    "multimer": "~_relative_encoding/position_activations",
}


def embedders(scope: str, arrangement: ArrangementName = "monomer") -> Iterator[Name]:
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
        yield from _linear(ours, f"{scope}/{deepmind}", openfold)
    for ours, deepmind, openfold in (
        ("recycling_embedder.pair_norm", "prev_pair_norm", "recycling_embedder.layer_norm_z"),
        ("recycling_embedder.msa_norm", "prev_msa_first_row_norm", "recycling_embedder.layer_norm_m"),
    ):
        yield from _norm(ours, f"{scope}/{deepmind}", openfold)


def heads(config: ModelConfig) -> Iterator[Name]:
    aux = "aux_heads"
    yield from _linear("heads.distogram.half_logits", "distogram_head/half_logits", f"{aux}.distogram.linear")
    yield from _linear("heads.masked_msa.logits", "masked_msa_head/logits", f"{aux}.masked_msa.linear")
    yield from _norm("heads.plddt.norm", "predicted_lddt_head/input_layer_norm", f"{aux}.plddt.layer_norm")
    for n, (ours, deepmind) in enumerate((("first", "act_0"), ("second", "act_1"), ("logits", "logits")), start=1):
        yield from _linear(f"heads.plddt.{ours}", f"predicted_lddt_head/{deepmind}", f"{aux}.plddt.linear_{n}")
    if config.heads.experimentally_resolved:
        yield from _linear(
            "heads.experimentally_resolved.logits",
            "experimentally_resolved_head/logits",
            f"{aux}.experimentally_resolved.linear",
        )
    if config.heads.predicted_aligned_error:
        yield from _linear(
            "heads.predicted_aligned_error.logits", "predicted_aligned_error_head/logits", f"{aux}.tm.linear"
        )


def template_pair_stack(
    ours: str, scope: str, blocks: int, heads: int = PAIR_HEADS, fused: bool = False, openfold: str = ""
) -> Iterator[Name]:
    """`scope`: that of a block. DeepMind's arrays have all blocks."""

    def block(n: int) -> Iterator[Name]:
        return pair_stack(f"{ours}.blocks.{n}", scope, heads, fused, f"{openfold}.blocks.{n}")

    return _blocks(blocks, block)


def template_pointwise_attention(
    ours: str, scope: str, heads: int = TemplateConfig.attention_heads, openfold: str = ""
) -> Iterator[Name]:
    yield _name(f"{ours}.query.weight", f"{scope}//query_w", f"{openfold}.linear_q.weight", "input_first", heads)
    yield from _key_value(ours, scope, openfold, heads)
    yield from _output(ours, scope, openfold, heads)


def template_embedder(
    ours: str, scope: str, config: TemplateConfig, fused: bool = False, openfold: str = "template_embedder"
) -> Iterator[Name]:
    """`scope`: the template embedding's scope."""
    single, theirs = f"{scope}/single_template_embedding", f"{openfold}.template_pair_stack"
    yield from _linear(f"{ours}.embedding", f"{single}/embedding2d", f"{openfold}.template_pair_embedder.linear")
    stack_of = f"{single}/{TEMPLATE_STACK['monomer']}"
    yield from template_pair_stack(f"{ours}.stack", stack_of, config.blocks, config.pair_heads, fused, theirs)
    yield from _norm(f"{ours}.norm", f"{single}/output_layer_norm", f"{theirs}.layer_norm")
    yield from template_pointwise_attention(
        f"{ours}.attention", f"{scope}/attention", config.attention_heads, f"{openfold}.template_pointwise_att.mha"
    )


def template_torsion_embedder(
    ours: str, scope: str, layers: Sequence[str] = ("linear_1", "linear_2"), openfold: str = "template_embedder"
) -> Iterator[Name]:
    """`scope`: the Evoformer's scope, which holds these two layers directly. `layers`: OpenFold's names of them."""
    for part, theirs, layer in zip(
        ("embedding", "projection"), ("single_embedding", "projection"), layers, strict=True
    ):
        yield from _linear(
            f"{ours}.{part}", f"{scope}/template_{theirs}", f"{openfold}.template_single_embedder.{layer}"
        )


def chain_template_embedder(
    ours: str, scope: str, config: TemplateConfig, fused: bool, openfold: str = "template_embedder"
) -> Iterator[Name]:
    """Templates of multimer files."""
    single, pair, theirs = (
        f"{scope}/single_template_embedding",
        f"{openfold}.template_pair_embedder",
        f"{openfold}.template_pair_stack",
    )
    for n, (layer, their_layer) in enumerate(
        (
            ("distances", "dgram_linear"), ("beta_mask", "pseudo_beta_mask_linear"), ("column_type", "aatype_linear_1"),
            ("row_type", "aatype_linear_2"), ("direction_x", "x_linear"), ("direction_y", "y_linear"),
            ("direction_z", "z_linear"), ("backbone_mask", "backbone_mask_linear"), ("query", "query_embedding_linear"),
        )
    ):  # fmt: skip
        without_input = layer in ("beta_mask", "backbone_mask") or layer.startswith("direction")
        for name in _linear(f"{ours}.{layer}", f"{single}/template_pair_embedding_{n}", f"{pair}.{their_layer}"):
            is_weight = name.layout == "input_first"
            yield replace(name, layout="no_input") if without_input and is_weight else name
    yield from _norm(f"{ours}.query_norm", f"{single}/query_embedding_norm", f"{pair}.query_embedding_layer_norm")
    stack_of = f"{single}/{TEMPLATE_STACK['multimer']}"
    yield from template_pair_stack(f"{ours}.stack", stack_of, config.blocks, config.pair_heads, fused, theirs)
    yield from _norm(f"{ours}.norm", f"{single}/output_layer_norm", f"{theirs}.layer_norm")
    yield from _linear(f"{ours}.output", f"{scope}/output_linear", f"{openfold}.linear_t")


def templates(config: ModelConfig, fused: bool) -> Iterator[Name]:
    own, chains = config.templates, config.arrangement == "multimer"
    if own.enabled:
        yield from (chain_template_embedder if chains else template_embedder)(
            "template_embedder", TEMPLATES, own, fused
        )
        if own.torsions:
            layers = ("template_single_embedder", "template_projector") if chains else ("linear_1", "linear_2")
            yield from template_torsion_embedder("template_torsion_embedder", "evoformer", layers)


def parameter_names(config: ModelConfig, fused: bool = False) -> list[Name]:
    """Every parameter of a model with this configuration, once. `fused`: triangle multiplication's layout in newer files."""
    return [
        *embedders("evoformer", config.arrangement),
        *stack("extra_msa_stack", EXTRA_STACK, config.extra_msa, extra=True, fused=fused),
        *stack("evoformer", STACK, config.evoformer, fused=fused),
        *structure_module("structure_module", "structure_module", config),
        *templates(config, fused),
        *heads(config),
    ]


def block_probes(arrangement: ArrangementName) -> dict[str, str]:
    """For every stack of the configuration, DeepMind's key of an array whose leading axis counts the stack's blocks."""
    template_stack = f"{TEMPLATES}/single_template_embedding/{TEMPLATE_STACK[arrangement]}"
    stacks = {"extra_msa": EXTRA_STACK, "evoformer": STACK, "templates": template_stack}
    return {stack: f"{ROOT}/{scope}/pair_transition/input_layer_norm//scale" for stack, scope in stacks.items()}
