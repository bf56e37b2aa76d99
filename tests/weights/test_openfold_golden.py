"""OpenFold's arrays against DeepMind's: by the table of OpenFold's importer, and in the supplement's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from evodsp.model.alphafold import AlphaFold
from evodsp.model.structure_module import PairRows
from evodsp.weights.deepmind import load_deepmind
from evodsp.weights.openfold import export_openfold
from tests.builders.golden import CONFIG
from tests.shared import load

ROOT = "alphafold/alphafold_iteration"
EVOFORMER = f"{ROOT}/evoformer"
TEMPLATE = f"{EVOFORMER}/template_embedding"
Pair = tuple[str, str, str]
"""DeepMind's key below its scope, OpenFold's path below its module, and how axes are merged before transposing."""


@pytest.fixture(scope="module")
def model(golden: Path) -> AlphaFold:
    load_deepmind(golden / "params.npz", model := AlphaFold(CONFIG))
    return model


def linear(deepmind: str, openfold: str) -> list[Pair]:
    return [(f"{deepmind}//weights", f"{openfold}.weight", "in"), (f"{deepmind}//bias", f"{openfold}.bias", "flat")]


def norm(deepmind: str, openfold: str) -> list[Pair]:
    return [(f"{deepmind}//scale", f"{openfold}.weight", "flat"), (f"{deepmind}//offset", f"{openfold}.bias", "flat")]


def attention(deepmind: str, openfold: str, gated: bool = True) -> list[Pair]:
    pairs = [
        (f"{deepmind}//{part}_w", f"{openfold}.linear_{part[0]}.weight", "in") for part in ("query", "key", "value")
    ]
    if gated:
        pairs.append((f"{deepmind}//gating_w", f"{openfold}.linear_g.weight", "in"))
        pairs.append((f"{deepmind}//gating_b", f"{openfold}.linear_g.bias", "flat"))
    pairs.append((f"{deepmind}//output_w", f"{openfold}.linear_o.weight", "out"))
    return [*pairs, (f"{deepmind}//output_b", f"{openfold}.linear_o.bias", "flat")]


def transition(deepmind: str, openfold: str) -> list[Pair]:
    return [
        *norm(f"{deepmind}/input_layer_norm", f"{openfold}.layer_norm"),
        *linear(f"{deepmind}/transition1", f"{openfold}.linear_1"),
        *linear(f"{deepmind}/transition2", f"{openfold}.linear_2"),
    ]


def pair_stack(openfold: str) -> list[Pair]:
    pairs = []
    for edges, short, left, right in (("outgoing", "out", "a", "b"), ("incoming", "in", "b", "a")):
        scope, path = f"triangle_multiplication_{edges}", f"{openfold}tri_mul_{short}"
        pairs += [
            *norm(f"{scope}/layer_norm_input", f"{path}.layer_norm_in"),
            *linear(f"{scope}/left_projection", f"{path}.linear_{left}_p"),
            *linear(f"{scope}/right_projection", f"{path}.linear_{right}_p"),
            *linear(f"{scope}/left_gate", f"{path}.linear_{left}_g"),
            *linear(f"{scope}/right_gate", f"{path}.linear_{right}_g"),
            *norm(f"{scope}/center_layer_norm", f"{path}.layer_norm_out"),
            *linear(f"{scope}/output_projection", f"{path}.linear_z"),
            *linear(f"{scope}/gating_linear", f"{path}.linear_g"),
        ]
    for node, short in (("starting", "start"), ("ending", "end")):
        scope, path = f"triangle_attention_{node}_node", f"{openfold}tri_att_{short}"
        pairs += norm(f"{scope}/query_norm", f"{path}.layer_norm")
        pairs.append((f"{scope}//feat_2d_weights", f"{path}.linear.weight", "in"))
        pairs += attention(f"{scope}/attention", f"{path}.mha")
    return [*pairs, *transition("pair_transition", f"{openfold}pair_transition")]


def block(extra: bool) -> list[Pair]:
    column = "msa_column_global_attention" if extra else "msa_column_attention"
    path = "msa_att_col" if extra else "msa_att_col._msa_att"
    return [
        *norm("msa_row_attention_with_pair_bias/query_norm", "msa_att_row.layer_norm_m"),
        *norm("msa_row_attention_with_pair_bias/feat_2d_norm", "msa_att_row.layer_norm_z"),
        ("msa_row_attention_with_pair_bias//feat_2d_weights", "msa_att_row.linear_z.weight", "in"),
        *attention("msa_row_attention_with_pair_bias/attention", "msa_att_row.mha"),
        *norm(f"{column}/query_norm", f"{path}.layer_norm_m"),
        *attention(f"{column}/attention", f"{path}.{'global_attention' if extra else 'mha'}"),
        *transition("msa_transition", "msa_transition"),
        *norm("outer_product_mean/layer_norm_input", "outer_product_mean.layer_norm"),
        *linear("outer_product_mean/left_projection", "outer_product_mean.linear_1"),
        *linear("outer_product_mean/right_projection", "outer_product_mean.linear_2"),
        ("outer_product_mean//output_w", "outer_product_mean.linear_out.weight", "out"),
        ("outer_product_mean//output_b", "outer_product_mean.linear_out.bias", "flat"),
        *pair_stack("pair_stack."),
    ]


def structure_module() -> list[Pair]:
    ipa, angles = "fold_iteration/invariant_point_attention", "fold_iteration/rigid_sidechain"
    return [
        *norm("single_layer_norm", "layer_norm_s"),
        *norm("pair_layer_norm", "layer_norm_z"),
        *linear("initial_projection", "linear_in"),
        *linear(f"{ipa}/q_scalar", "ipa.linear_q"),
        *linear(f"{ipa}/kv_scalar", "ipa.linear_kv"),
        *linear(f"{ipa}/q_point_local", "ipa.linear_q_points.linear"),
        *linear(f"{ipa}/kv_point_local", "ipa.linear_kv_points.linear"),
        (f"{ipa}//trainable_point_weights", "ipa.head_weights", "flat"),
        *linear(f"{ipa}/attention_2d", "ipa.linear_b"),
        *linear(f"{ipa}/output_projection", "ipa.linear_out"),
        *norm("fold_iteration/attention_layer_norm", "layer_norm_ipa"),
        *linear("fold_iteration/transition", "transition.layers.0.linear_1"),
        *linear("fold_iteration/transition_1", "transition.layers.0.linear_2"),
        *linear("fold_iteration/transition_2", "transition.layers.0.linear_3"),
        *norm("fold_iteration/transition_layer_norm", "transition.layer_norm"),
        *linear("fold_iteration/affine_update", "bb_update.linear"),
        *linear(f"{angles}/input_projection", "angle_resnet.linear_in"),
        *linear(f"{angles}/input_projection_1", "angle_resnet.linear_initial"),
        *linear(f"{angles}/resblock1", "angle_resnet.layers.0.linear_1"),
        *linear(f"{angles}/resblock2", "angle_resnet.layers.0.linear_2"),
        *linear(f"{angles}/resblock1_1", "angle_resnet.layers.1.linear_1"),
        *linear(f"{angles}/resblock2_1", "angle_resnet.layers.1.linear_2"),
        *linear(f"{angles}/unnormalized_angles", "angle_resnet.linear_out"),
    ]


def embedders() -> list[Pair]:
    single, path = "template_embedding/single_template_embedding", "template_embedder"
    return [
        *linear("preprocess_1d", "input_embedder.linear_tf_m"),
        *linear("preprocess_msa", "input_embedder.linear_msa_m"),
        *linear("left_single", "input_embedder.linear_tf_z_i"),
        *linear("right_single", "input_embedder.linear_tf_z_j"),
        *linear("pair_activiations", "input_embedder.linear_relpos"),
        *linear("prev_pos_linear", "recycling_embedder.linear"),
        *norm("prev_msa_first_row_norm", "recycling_embedder.layer_norm_m"),
        *norm("prev_pair_norm", "recycling_embedder.layer_norm_z"),
        *linear("extra_msa_activations", "extra_msa_embedder.linear"),
        *linear("single_activations", "evoformer.linear"),
        *linear("template_single_embedding", f"{path}.template_single_embedder.linear_1"),
        *linear("template_projection", f"{path}.template_single_embedder.linear_2"),
        *linear(f"{single}/embedding2d", f"{path}.template_pair_embedder.linear"),
        *norm(f"{single}/output_layer_norm", f"{path}.template_pair_stack.layer_norm"),
        *attention("template_embedding/attention", f"{path}.template_pointwise_att.mha", gated=False),
    ]


def heads() -> list[Pair]:
    return [
        *norm("predicted_lddt_head/input_layer_norm", "plddt.layer_norm"),
        *linear("predicted_lddt_head/act_0", "plddt.linear_1"),
        *linear("predicted_lddt_head/act_1", "plddt.linear_2"),
        *linear("predicted_lddt_head/logits", "plddt.linear_3"),
        *linear("distogram_head/half_logits", "distogram.linear"),
        *linear("experimentally_resolved_head/logits", "experimentally_resolved.linear"),
        *linear("masked_msa_head/logits", "masked_msa.linear"),
        *linear("predicted_aligned_error_head/logits", "tm.linear"),
    ]


def importers_table() -> Iterator[tuple[str, int | None, str, str]]:
    """For each array of the golden model: DeepMind's key, the block, OpenFold's key, and how axes are merged."""
    template_stack = f"{TEMPLATE}/single_template_embedding/template_pair_stack/__layer_stack_no_state"
    for scope, path, pairs, blocks in (
        (EVOFORMER, "", embedders(), (None,)),
        (f"{EVOFORMER}/evoformer_iteration", "evoformer.blocks.{}.", block(extra=False), (0, 1)),
        (f"{EVOFORMER}/extra_msa_stack", "extra_msa_stack.blocks.{}.", block(extra=True), (0,)),
        (template_stack, "template_embedder.template_pair_stack.blocks.{}.", pair_stack(""), (0,)),
        (f"{ROOT}/structure_module", "structure_module.", structure_module(), (None,)),
        (ROOT, "aux_heads.", heads(), (None,)),
    ):
        for n in blocks:
            for deepmind, openfold, how in pairs:
                yield f"{scope}/{deepmind}", n, f"{path.format(n)}{openfold}", how


def test_every_array_is_what_openfolds_importer_makes_of_deepminds(golden: Path, model: AlphaFold) -> None:
    """Catches exchanged arrays of one shape (gates, operands, queries and keys), and arrays transposed or split wrongly."""
    params, found = load(golden / "params.npz"), export_openfold(model)
    table = list(importers_table())
    assert {key for key, *_ in table} == set(params)
    assert {openfold for *_, openfold, _ in table} == set(found)
    for key, n, openfold, how in table:
        array = params[key] if n is None else params[key][n]
        if how == "in":  # the first axis is the input; the others are merged
            array = array.reshape(len(array), -1).T
        elif how == "out":  # the last axis is the output; the others are merged
            array = array.reshape(-1, array.shape[-1]).T
        np.testing.assert_array_equal(found[openfold].numpy(), array.reshape(found[openfold].shape), err_msg=openfold)


@pytest.mark.parametrize("edges", ["outgoing", "incoming"])
@pytest.mark.parametrize("fused", [False, True])
def test_triangle_multiplication_by_the_supplement(golden: Path, model: AlphaFold, edges: str, fused: bool) -> None:
    """Catches OpenFold's a and b exchanged: for incoming edges they are DeepMind's right and left.

    Algorithms 11 and 12 are written out with OpenFold's arrays.
    """
    case = load(golden / "modules" / f"triangle_multiplication_{edges}.npz")
    path = f"evoformer.blocks.0.pair_stack.tri_mul_{'out' if edges == 'outgoing' else 'in'}"
    arrays = {
        key.removeprefix(f"{path}."): value
        for key, value in export_openfold(model, fused=fused).items()
        if key.startswith(f"{path}.")
    }

    def layer(x: Tensor, name: str) -> Tensor:
        return F.linear(x, arrays[f"linear_{name}.weight"], arrays[f"linear_{name}.bias"])

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    mask = torch.from_numpy(case["in/pair_mask"])
    z = normed(torch.from_numpy(case["in/z"]), "layer_norm_in")
    if fused:
        a, b = (layer(z, "ab_p") * layer(z, "ab_g").sigmoid() * mask[..., None]).chunk(2, -1)
    else:
        a, b = (layer(z, f"{x}_p") * layer(z, f"{x}_g").sigmoid() * mask[..., None] for x in "ab")
    product = torch.einsum("ikc,jkc->ijc" if edges == "outgoing" else "kic,kjc->ijc", a, b)
    found = layer(normed(product, "layer_norm_out"), "z") * layer(z, "g").sigmoid()
    expected = torch.from_numpy(case["out/out"])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_points_are_all_x_then_all_y_then_all_z(golden: Path, model: AlphaFold) -> None:
    """Catches the x, y, z of one point stored side by side. Every round trip would hide this mistake.

    OpenFold splits the projection into three parts, all x, all y and all z, and stacks them last.
    """
    arrays = export_openfold(model)
    s = torch.randn(1, 5, 384, generator=torch.Generator().manual_seed(0))
    ipa, config = model.structure_module.attention, model.config.structure_module
    shared = ipa.shared(PairRows.whole(torch.zeros(1, 5, 5, 128)), torch.ones(1, 5))
    scalars = config.heads * (2 * config.scalar_query_width + config.scalar_value_width)
    planes = F.linear(s, shared.weight, shared.bias)[..., scalars:].unflatten(-1, (3, config.heads, -1))
    parts = planes.movedim(2, -1).split((config.query_points, config.query_points + config.value_points), -2)
    for ours, theirs in zip(parts, ("linear_q_points", "linear_kv_points"), strict=True):
        path = f"structure_module.ipa.{theirs}.linear"
        flat = F.linear(s, arrays[f"{path}.weight"], arrays[f"{path}.bias"])
        points = torch.stack(flat.split(flat.shape[-1] // 3, -1), -1).view(1, 5, config.heads, -1, 3)
        torch.testing.assert_close(ours, points)
