"""One table of names: every parameter of the model beside its name and layout in DeepMind's parameter files.

DeepMind's key is `<root>/<scope>//<parameter>`; parameters of a stack of blocks carry a leading block axis. Several of their
arrays may stand side by side in one of our matrices (queries, keys, values; left and right operands): they are concatenated
along the output axis in the order given. Where our matrices have one axis for all heads, theirs have two (`Name.split`). The
sizes that `split` needs come from the configuration; the defaults of the functions below are those of the published models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from evodsp.config import EvoformerConfig, ModelConfig, TemplateConfig

Layout = Literal["input_first", "output_last", "vector"]

ROOT = "alphafold/alphafold_iteration"
EXTRA_STACK, STACK = "evoformer/extra_msa_stack", "evoformer/evoformer_iteration"
TEMPLATES = "evoformer/template_embedding"
PAIR_HEADS = TemplateConfig().pair_heads


@dataclass(frozen=True)
class Name:
    """One parameter. `layout` says how DeepMind's arrays lie: `input_first` [in, out…], `output_last` [in…, out].

    `block`: its place along the arrays' leading axis, None where they have no such axis. `split`: the length of the first of
    the two axes that DeepMind's arrays have where our parameter has one (heads, mostly), None where they too have one.
    """

    ours: str
    deepmind: tuple[str, ...]
    layout: Layout
    block: int | None = None
    split: int | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Full keys in DeepMind's files."""
        return tuple(f"{ROOT}/{key}" for key in self.deepmind)

    def array_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one block of each of DeepMind's arrays, where our parameter has the shape `ours`."""
        outputs = ours[0] // len(self.deepmind)
        if self.layout == "vector":
            return self._axes(outputs)
        if self.layout == "input_first":
            return (ours[1], *self._axes(outputs))
        return (*self._axes(ours[1]), outputs)

    def _axes(self, size: int) -> tuple[int, ...]:
        return (size,) if self.split is None else (self.split, size // self.split)


def _linear(ours: str, *scopes: str) -> Iterator[Name]:
    yield Name(f"{ours}.weight", tuple(f"{s}//weights" for s in scopes), "input_first")
    yield Name(f"{ours}.bias", tuple(f"{s}//bias" for s in scopes), "vector")


def _norm(ours: str, scope: str) -> Iterator[Name]:
    yield Name(f"{ours}.weight", (f"{scope}//scale",), "vector")
    yield Name(f"{ours}.bias", (f"{scope}//offset",), "vector")


def _gate_and_output(ours: str, scope: str, heads: int) -> Iterator[Name]:
    yield Name(f"{ours}.gate.weight", (f"{scope}//gating_w",), "input_first", split=heads)
    yield Name(f"{ours}.gate.bias", (f"{scope}//gating_b",), "vector", split=heads)
    yield Name(f"{ours}.output.weight", (f"{scope}//output_w",), "output_last", split=heads)
    yield Name(f"{ours}.output.bias", (f"{scope}//output_b",), "vector")


def gated_attention(ours: str, scope: str, heads: int) -> Iterator[Name]:
    qkv = tuple(f"{scope}//{part}_w" for part in ("query", "key", "value"))
    yield Name(f"{ours}.qkv.weight", qkv, "input_first", split=heads)
    yield from _gate_and_output(ours, scope, heads)


def row_attention(ours: str, scope: str, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm")
    yield from _norm(f"{ours}.pair_norm", f"{scope}/feat_2d_norm")
    yield Name(f"{ours}.pair_bias.weight", (f"{scope}//feat_2d_weights",), "input_first")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads)


def column_attention(ours: str, scope: str, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads)


def global_attention(ours: str, scope: str, heads: int = EvoformerConfig.msa_heads) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm")
    yield Name(f"{ours}.query.weight", (f"{scope}/attention//query_w",), "input_first", split=heads)
    # One head's keys and values serve all heads: no axis of heads here.
    yield Name(f"{ours}.key_value.weight", tuple(f"{scope}/attention//{p}_w" for p in ("key", "value")), "input_first")
    yield from _gate_and_output(ours, f"{scope}/attention", heads)


def transition(ours: str, scope: str) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/input_layer_norm")
    yield from _linear(f"{ours}.widen", f"{scope}/transition1")
    yield from _linear(f"{ours}.narrow", f"{scope}/transition2")


def outer_product_mean(ours: str, scope: str, channels: int = EvoformerConfig.outer_product_channels) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/layer_norm_input")
    yield from _linear(f"{ours}.left_right", f"{scope}/left_projection", f"{scope}/right_projection")
    yield Name(f"{ours}.output.weight", (f"{scope}//output_w",), "output_last", split=channels)
    yield Name(f"{ours}.output.bias", (f"{scope}//output_b",), "vector")


def triangle_multiplication(ours: str, scope: str, fused: bool = False) -> Iterator[Name]:
    """`fused`: the layout of newer releases, which keep left and right side by side as we do."""
    yield from _norm(f"{ours}.norm", f"{scope}/{'left_norm_input' if fused else 'layer_norm_input'}")
    parts = ("",) if fused else ("left_", "right_")
    yield from _linear(f"{ours}.projection", *(f"{scope}/{part}projection" for part in parts))
    yield from _linear(f"{ours}.projection_gate", *(f"{scope}/{part}gate" for part in parts))
    yield from _norm(f"{ours}.product_norm", f"{scope}/{'center_norm' if fused else 'center_layer_norm'}")
    yield from _linear(f"{ours}.output", f"{scope}/output_projection")
    yield from _linear(f"{ours}.output_gate", f"{scope}/gating_linear")


def triangle_attention(ours: str, scope: str, heads: int = PAIR_HEADS) -> Iterator[Name]:
    yield from _norm(f"{ours}.norm", f"{scope}/query_norm")
    yield Name(f"{ours}.pair_bias.weight", (f"{scope}//feat_2d_weights",), "input_first")
    yield from gated_attention(f"{ours}.attention", f"{scope}/attention", heads)


def pair_stack(ours: str, scope: str, heads: int, fused: bool) -> Iterator[Name]:
    for edges in ("outgoing", "incoming"):
        yield from triangle_multiplication(
            f"{ours}.triangle_{edges}", f"{scope}/triangle_multiplication_{edges}", fused
        )
    for node in ("starting", "ending"):
        yield from triangle_attention(f"{ours}.attention_{node}", f"{scope}/triangle_attention_{node}_node", heads)
    yield from transition(f"{ours}.transition", f"{scope}/pair_transition")


def evoformer_block(
    ours: str, scope: str, extra: bool = False, config: EvoformerConfig | None = None, fused: bool = False
) -> Iterator[Name]:
    config = config or EvoformerConfig()
    heads = config.msa_heads
    yield from row_attention(f"{ours}.row_attention", f"{scope}/msa_row_attention_with_pair_bias", heads)
    if extra:
        yield from global_attention(f"{ours}.column_attention", f"{scope}/msa_column_global_attention", heads)
    else:
        yield from column_attention(f"{ours}.column_attention", f"{scope}/msa_column_attention", heads)
    yield from transition(f"{ours}.msa_transition", f"{scope}/msa_transition")
    yield from outer_product_mean(
        f"{ours}.outer_product_mean", f"{scope}/outer_product_mean", config.outer_product_channels
    )
    yield from pair_stack(f"{ours}.pair_stack", scope, config.pair_heads, fused)


def stack(ours: str, scope: str, config: EvoformerConfig, extra: bool = False, fused: bool = False) -> Iterator[Name]:
    for n in range(config.blocks):
        for name in evoformer_block(f"{ours}.blocks.{n}", scope, extra, config, fused):
            yield replace(name, block=n)


def invariant_point_attention(ours: str, scope: str) -> Iterator[Name]:
    for part, theirs in (
        ("query", "q_scalar"),
        ("key_value", "kv_scalar"),
        ("query_points", "q_point_local"),
        ("key_value_points", "kv_point_local"),
        ("pair_bias", "attention_2d"),
        ("output", "output_projection"),
    ):
        yield from _linear(f"{ours}.{part}", f"{scope}/{theirs}")
    yield Name(f"{ours}.point_weight", (f"{scope}//trainable_point_weights",), "vector")


def structure_module(ours: str, scope: str, config: ModelConfig) -> Iterator[Name]:
    layer = f"{scope}/fold_iteration"
    yield from _norm(f"{ours}.single_norm", f"{scope}/single_layer_norm")
    yield from _norm(f"{ours}.pair_norm", f"{scope}/pair_layer_norm")
    yield from _linear(f"{ours}.initial", f"{scope}/initial_projection")
    yield from invariant_point_attention(f"{ours}.attention", f"{layer}/invariant_point_attention")
    yield from _norm(f"{ours}.attention_norm", f"{layer}/attention_layer_norm")
    for n in range(config.structure_module.transition_layers):
        yield from _linear(f"{ours}.transition.{n}", f"{layer}/transition{_numbered(n)}")
    yield from _norm(f"{ours}.transition_norm", f"{layer}/transition_layer_norm")
    yield from _linear(f"{ours}.backbone_update", f"{layer}/affine_update")
    angles, theirs = f"{ours}.angle_network", f"{layer}/rigid_sidechain"
    yield from _linear(f"{angles}.current", f"{theirs}/input_projection")
    yield from _linear(f"{angles}.initial", f"{theirs}/input_projection_1")
    for n in range(config.structure_module.angle_blocks):
        yield from _linear(f"{angles}.blocks.{n}.first", f"{theirs}/resblock1{_numbered(n)}")
        yield from _linear(f"{angles}.blocks.{n}.second", f"{theirs}/resblock2{_numbered(n)}")
    yield from _linear(f"{angles}.angles", f"{theirs}/unnormalized_angles")


def _numbered(n: int) -> str:
    """Haiku's suffix for the n-th module of one name."""
    return f"_{n}" if n else ""


def embedders(scope: str) -> Iterator[Name]:
    for ours, theirs in (
        ("input_embedder.left", "left_single"),
        ("input_embedder.right", "right_single"),
        ("input_embedder.target_to_msa", "preprocess_1d"),
        ("input_embedder.msa", "preprocess_msa"),
        ("input_embedder.relative_position", "pair_activiations"),
        ("recycling_embedder.distance", "prev_pos_linear"),
        ("extra_msa_embedder.linear", "extra_msa_activations"),
        ("single", "single_activations"),
    ):
        yield from _linear(ours, f"{scope}/{theirs}")
    yield from _norm("recycling_embedder.pair_norm", f"{scope}/prev_pair_norm")
    yield from _norm("recycling_embedder.msa_norm", f"{scope}/prev_msa_first_row_norm")


def heads(config: ModelConfig) -> Iterator[Name]:
    yield from _linear("distogram_head.half_logits", "distogram_head/half_logits")
    yield from _linear("masked_msa_head.logits", "masked_msa_head/logits")
    yield from _norm("plddt_head.norm", "predicted_lddt_head/input_layer_norm")
    for ours, theirs in (("first", "act_0"), ("second", "act_1"), ("logits", "logits")):
        yield from _linear(f"plddt_head.{ours}", f"predicted_lddt_head/{theirs}")
    if config.heads.experimentally_resolved:
        yield from _linear("resolved_head.logits", "experimentally_resolved_head/logits")
    if config.heads.predicted_aligned_error:
        yield from _linear("pae_head.logits", "predicted_aligned_error_head/logits")


def template_pair_stack(
    ours: str, scope: str, blocks: int, heads: int = PAIR_HEADS, fused: bool = False
) -> Iterator[Name]:
    for n in range(blocks):
        for name in pair_stack(f"{ours}.blocks.{n}", f"{scope}/__layer_stack_no_state", heads, fused):
            yield replace(name, block=n)


def template_pointwise_attention(ours: str, scope: str, heads: int = TemplateConfig.attention_heads) -> Iterator[Name]:
    yield Name(f"{ours}.query.weight", (f"{scope}//query_w",), "input_first", split=heads)
    key_value = tuple(f"{scope}//{part}_w" for part in ("key", "value"))
    yield Name(f"{ours}.key_value.weight", key_value, "input_first", split=heads)
    yield Name(f"{ours}.output.weight", (f"{scope}//output_w",), "output_last", split=heads)
    yield Name(f"{ours}.output.bias", (f"{scope}//output_b",), "vector")


def template_embedder(
    ours: str, scope: str, blocks: int, config: TemplateConfig | None = None, fused: bool = False
) -> Iterator[Name]:
    """`scope`: that of the template embedding; `blocks`: of the template pair stack."""
    config = config or TemplateConfig()
    single = f"{scope}/single_template_embedding"
    yield from _linear(f"{ours}.embedding", f"{single}/embedding2d")
    yield from template_pair_stack(f"{ours}.stack", f"{single}/template_pair_stack", blocks, config.pair_heads, fused)
    yield from _norm(f"{ours}.norm", f"{single}/output_layer_norm")
    yield from template_pointwise_attention(f"{ours}.attention", f"{scope}/attention", config.attention_heads)


def template_torsion_embedder(ours: str, scope: str) -> Iterator[Name]:
    """`scope`: that of the Evoformer, which these two layers lie directly under."""
    yield from _linear(f"{ours}.embedding", f"{scope}/template_single_embedding")
    yield from _linear(f"{ours}.projection", f"{scope}/template_projection")


def templates(config: TemplateConfig, fused: bool) -> Iterator[Name]:
    if config.enabled:
        yield from template_embedder("template_embedder", TEMPLATES, config.blocks, config, fused)
        if config.torsions:
            yield from template_torsion_embedder("template_torsion_embedder", "evoformer")


def parameter_names(config: ModelConfig, fused: bool = False) -> list[Name]:
    """Every parameter of a model of this configuration, once. `fused`: triangle multiplication's layout in newer files."""
    return [
        *embedders("evoformer"),
        *stack("extra_msa_stack", EXTRA_STACK, config.extra_msa, extra=True, fused=fused),
        *stack("evoformer", STACK, config.evoformer, fused=fused),
        *structure_module("structure_module", "structure_module", config),
        *templates(config.templates, fused),
        *heads(config),
    ]


def block_probes() -> dict[str, str]:
    """For every stack of the configuration, DeepMind's key of an array whose leading axis is the stack's blocks."""
    transition_scale = "pair_transition/input_layer_norm//scale"
    template_stack = f"{TEMPLATES}/single_template_embedding/template_pair_stack/__layer_stack_no_state"
    stacks = {"extra_msa": EXTRA_STACK, "evoformer": STACK, "templates": template_stack}
    return {stack: f"{ROOT}/{scope}/{transition_scale}" for stack, scope in stacks.items()}
