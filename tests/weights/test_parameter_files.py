"""DeepMind's and OpenFold's parameter files, of chains and of complexes: every array is read and written, bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evodsp.config import ModelConfig, as_multimer
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights import deepmind, openfold
from evodsp.weights.checkpoint import load_model, load_published
from evodsp.weights.deepmind import export_deepmind, load_deepmind, read_npz, write_npz
from evodsp.weights.names import older, parameter_names
from evodsp.weights.openfold import export_openfold, load_openfold, read_openfold, write_openfold
from tests.builders.golden import CONFIG as GOLDEN
from tests.builders.weights import SMALL, averaged, prefixed, random_model, same
from tests.shared import SHARED, load

Arrays = dict[str, Any]
CHAINS = as_multimer(SMALL)
EVOFORMER = "alphafold/alphafold_iteration/evoformer/evoformer_iteration"
SCALE = f"{EVOFORMER}/pair_transition/input_layer_norm//scale"
ATTENTION = "alphafold/alphafold_iteration/structure_module/fold_iteration/invariant_point_attention"
NEWER = "evoformer.blocks.1.pair_stack.pair_transition.layer_norm.weight"
OLDER = "evoformer.blocks.1.core.pair_transition.layer_norm.weight"


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return random_model(SMALL, 0)


# ---- There and back ----


@pytest.mark.verify_but("*-False-monomer", "*-True-monomer", "deepmind-True-*", "openfold-True-*")
@pytest.mark.parametrize("config", [SMALL, CHAINS], ids=["monomer", "multimer"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", ["deepmind", "openfold", "openfold-legacy"])
def test_a_random_model_goes_out_and_comes_back(form: str, fused: bool, config: ModelConfig, tmp_path: Path) -> None:
    """Catches an array dropped, duplicated or split wrongly, AF2's sizes hard-coded in the table of names, a naming or layout
    that is written but not recognised, rows of complexes that are put into our order and not back, and views saved with the
    whole matrix that they are parts of."""
    model, other, path = random_model(config, 0), random_model(config, 1), tmp_path / "x"
    if form == "deepmind":
        arrays: Arrays = export_deepmind(model, fused)
        write_npz(path, arrays)
        load_deepmind(path, other)
    elif form == "openfold-legacy" and config is CHAINS:
        with pytest.raises(UserError, match="no multimer models"):
            export_openfold(model, legacy=True)
        return
    else:
        arrays = export_openfold(model, form == "openfold-legacy", fused)
        assert ("template_angle_embedder.linear_1.weight" in arrays) == (form == "openfold-legacy")
        write_openfold(path, arrays)
        load_openfold(path, other)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert sum(value.untyped_storage().nbytes() for value in read_openfold(path).values()) == 4 * numbers
    assert deepmind.is_fused(arrays) == fused
    assert same(model, other)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_mixture_of_both_namings_is_read(model: AlphaFold) -> None:
    """Catches refused files that mix the namings: `core.outer_product_mean` and `pair_stack.tri_mul_out`."""
    newer, legacy = export_openfold(model), export_openfold(model, legacy=True)
    mixed = {
        old if "outer_product" in old or old.startswith("template") else new: value
        for (new, value), old in zip(newer.items(), legacy, strict=True)
    }
    openfold.set_parameters(other := random_model(SMALL, 1), mixed)
    assert same(model, other)


@pytest.mark.parametrize(
    ("form", "has_average"),
    [
        (lambda a: a, False),
        (lambda a: prefixed("model.", a), False),  # as zero_to_fp32.py converts DeepSpeed's
        (lambda a: {"state_dict": prefixed("model.", a), "ema": {"params": averaged(a), "decay": 0.999}}, True),
        (lambda a: {"module": prefixed("module.model.", a), "ema": {"params": averaged(a)}, "dp_world_size": 8}, True),
        (lambda a: prefixed("_forward_module.model._orig_mod.", a), False),
        (lambda a: {key.replace("blocks.0.", "blocks.0._orig_mod._fsdp_wrapped_module."): a[key] for key in a}, False),
    ],
)
def test_every_form_on_disk_is_read(
    model: AlphaFold, tmp_path: Path, form: Callable[[Arrays], Any], has_average: bool
) -> None:
    """Catches a wrapper's part of a name that is not removed, and moving average and raw weights exchanged."""
    arrays = export_openfold(model)
    torch.save(form(arrays), path := tmp_path / "x.pt")
    for raw in (False, True):
        found = read_openfold(path, raw)
        expected = averaged(arrays) if has_average and not raw else arrays
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_other_floats_are_converted(model: AlphaFold) -> None:
    """Catches 16-bit or 64-bit arrays that are refused or copied without conversion."""
    halves = {key: value.bfloat16() for key, value in export_openfold(model).items()}
    openfold.set_parameters(other := random_model(SMALL, 1), halves)
    for parameter, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, theirs.bfloat16().float())


# ---- Names, shapes and the order of rows ----


@pytest.mark.parametrize("config", [SMALL, ModelConfig.preset("model_5_ptm")], ids=["small", "model_5_ptm"])
def test_the_table_lists_every_parameter_once(config: ModelConfig) -> None:
    """Catches a parameter that no file could set, and a head or templates in the table of a model that lacks them."""
    with torch.device("meta"):
        parameters = {name for name, _ in AlphaFold(config).named_parameters()}
    for fused in (False, True):
        listed = [name.ours for name in parameter_names(config, fused)]
        assert len(listed) == len(set(listed))
        assert set(listed) == parameters


def test_the_fused_layout_is_deepminds(golden: Path) -> None:
    """Catches left and right exchanged, and names or shapes unlike the newer release's."""
    model = AlphaFold(GOLDEN)
    load_deepmind(golden / "params.npz", model)
    split, fused = load(golden / "params.npz"), export_deepmind(model, fused=True)
    scope = f"{EVOFORMER}/triangle_multiplication_outgoing/"
    ours = {key.removeprefix(scope): value.shape for key, value in fused.items() if key.startswith(scope)}
    norms, linears = ("left_norm_input", "center_norm"), ("projection", "gate", "output_projection", "gating_linear")
    assert ours == {
        **{f"{norm}//{part}": (2, 128) for norm in norms for part in ("scale", "offset")},
        **{f"{linear}//bias": (2, 256 if n < 2 else 128) for n, linear in enumerate(linears)},
        **{f"{linear}//weights": (2, 128, 256 if n < 2 else 128) for n, linear in enumerate(linears)},
    }
    for key in ("projection//weights", "projection//bias", "gate//weights", "gate//bias"):
        sides = [split[f"{scope}{side}_{key}"] for side in ("left", "right")]
        np.testing.assert_array_equal(fused[f"{scope}{key}"], np.concatenate(sides, -1))


def test_older_names_of_openfold() -> None:
    """Catches names of OpenFold's earlier releases, and shapes, unlike those of its model_1_ptm, which were read off its
    modules. (The present names of all arrays: test_openfold_golden.py.)"""
    with torch.device("meta"):
        model = AlphaFold(ModelConfig.preset("model_1_ptm"))
    names = parameter_names(model.config)
    shapes = openfold.expected_shapes(model, names)
    assert len(shapes) == len({older(key) for key in shapes}) == sum(len(name.openfold) for name in names)
    assert [name for name in names if len(name.openfold) != len(name.deepmind)] == []
    templates = "template_embedder"
    block, pairs, ipa = "evoformer.blocks.47", "template_pair_stack.blocks.1", "structure_module.ipa"
    for key, legacy, shape in (
        ("evoformer.linear.weight", None, (384, 256)),
        ("extra_msa_stack.blocks.3.msa_att_col.global_attention.linear_k.weight", None, (8, 64)),
        ("structure_module.angle_resnet.layers.1.linear_2.weight", None, (128, 128)),
        ("aux_heads.tm.linear.weight", None, (64, 128)),
        (f"{block}.outer_product_mean.linear_out.weight", f"{block}.core.outer_product_mean.linear_out.weight", (128, 1024)),
        (f"{block}.msa_transition.linear_1.weight", f"{block}.core.msa_transition.linear_1.weight", (1024, 256)),
        (f"{block}.pair_stack.tri_mul_in.linear_a_p.weight", f"{block}.core.tri_mul_in.linear_a_p.weight", (128, 128)),
        (f"{block}.pair_stack.tri_att_end.linear.weight", f"{block}.core.tri_att_end.linear.weight", (4, 128)),
        (f"{templates}.{pairs}.tri_att_start.mha.linear_q.weight", f"{pairs}.tri_att_start.mha.linear_q.weight", (64, 64)),
        (f"{templates}.template_pointwise_att.mha.linear_o.weight", "template_pointwise_att.mha.linear_o.weight", (128, 64)),
        (f"{templates}.template_single_embedder.linear_1.weight", "template_angle_embedder.linear_1.weight", (256, 57)),
        (f"{templates}.template_pair_embedder.linear.weight", "template_pair_embedder.linear.weight", (64, 88)),
        (f"{ipa}.linear_q_points.linear.weight", f"{ipa}.linear_q_points.weight", (144, 384)),
        (f"{ipa}.linear_kv_points.linear.bias", f"{ipa}.linear_kv_points.bias", (432,)),
    ):  # fmt: skip
        assert shapes[key] == shape, key
        assert older(key) == (legacy or key)


@pytest.mark.verify_but("model_1_multimer_v3-True")
@pytest.mark.parametrize(("model", "fused"), [("model_1_multimer", False), ("model_1_multimer_v3", True)])
def test_names_and_shapes_are_those_of_the_published_multimer_files(model: str, fused: bool) -> None:
    """Catches an array that is missing, renamed or of another shape; the list was read off DeepMind's model."""
    listed = SHARED / "multimer" / "parameters.txt"
    if not listed.is_file():
        pytest.skip("no ../shared/multimer beside this checkout")
    lines = listed.read_text().split(f"[{model}]", 1)[1].split("[", 1)[0].splitlines()
    rows = [line.split() for line in lines if line.startswith("alphafold")]
    expected = {key: tuple(map(int, shape.split("x"))) for key, shape in rows}
    with torch.device("meta"):
        module = AlphaFold(ModelConfig.preset(model))
    assert deepmind.expected_shapes(module, parameter_names(module.config, fused)) == expected
    assert len(expected) == (330 if fused else 354)


def test_rows_of_point_attention_are_by_head() -> None:
    """Catches keys and values side by side for all heads together, and points whose x, y and z are not apart."""
    arrays = export_deepmind(random_model(CHAINS, 0))
    sizes = CHAINS.structure_module
    h, d, e, p, v = (
        sizes.heads, sizes.scalar_query_width, sizes.scalar_value_width, sizes.query_points, sizes.value_points,
    )  # fmt: skip
    numbers = {"k_scalar": (h, d), "v_scalar": (h, e), "k_point": (h, 3, p), "v_point": (h, 3, v)}
    for number, (kind, shape) in enumerate(numbers.items()):
        key = f"{ATTENTION}/{kind}_projection{'/point_projection' if 'point' in kind else ''}//weights"
        values = 1000 * number + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        arrays[key] = np.broadcast_to(values.reshape(1, *arrays[key].shape[1:]), arrays[key].shape).copy()
    deepmind.set_parameters(model := random_model(CHAINS, 1), arrays)
    attention = model.structure_module.attention
    scalars = attention.key_value.weight[:, 0].detach().view(h, d + e).numpy()
    points = attention.key_value_points.weight[:, 0].detach().view(3, h, p + v).numpy()
    np.testing.assert_array_equal(scalars[:, :d], np.arange(h * d).reshape(h, d))
    np.testing.assert_array_equal(scalars[:, d:], 1000 + np.arange(h * e).reshape(h, e))
    np.testing.assert_array_equal(points[..., :p], 2000 + np.arange(3 * h * p).reshape(h, 3, p).swapaxes(0, 1))
    np.testing.assert_array_equal(points[..., p:], 3000 + np.arange(3 * h * v).reshape(h, 3, v).swapaxes(0, 1))


def test_directions_of_templates_keep_their_axes() -> None:
    """Catches x and y of a template's directions that are swapped in OpenFold's or DeepMind's file: their shapes are equal, and
    a file that goes out and comes back is the same."""
    model = random_model(CHAINS, 0)
    theirs, arrays = export_openfold(model), export_deepmind(model)
    single = "alphafold/alphafold_iteration/evoformer/template_embedding/single_template_embedding"
    for number, axis in enumerate("xyz", 4):
        bias = model.get_parameter(f"template_embedder.direction_{axis}.bias").detach()
        assert torch.equal(theirs[f"template_embedder.template_pair_embedder.{axis}_linear.bias"], bias)
        np.testing.assert_array_equal(arrays[f"{single}/template_pair_embedding_{number}//bias"], bias.numpy())


def test_blocks_are_counted_in_the_arrays(model: AlphaFold) -> None:
    """Catches a rejected file of a shallower model, a number of blocks taken from the wrong axis, and a block number that is
    trusted without counting."""
    deeper = dataclasses.replace(
        SMALL,
        evoformer=dataclasses.replace(SMALL.evoformer, blocks=48),
        extra_msa=dataclasses.replace(SMALL.extra_msa, blocks=4),
        templates=dataclasses.replace(SMALL.templates, blocks=2),
    )
    assert deepmind.with_blocks_of(deeper, export_deepmind(model)) == SMALL
    assert deepmind.with_blocks_of(deeper, {SCALE: np.array(1, np.float32)}) == deeper  # found by the check of shapes
    for legacy in (False, True):
        assert openfold.with_blocks_of(deeper, export_openfold(model, legacy)) == SMALL
    assert openfold.with_blocks_of(deeper, ["evoformer.blocks.999999999.x"]).evoformer.blocks == 1


def test_a_published_multimer_file_is_known_by_its_name(tmp_path: Path) -> None:
    """Catches a multimer file read with a monomer's sizes, and blocks of templates that are not counted."""
    config = ModelConfig.preset("model_2_multimer_v3")
    few = {
        name: dataclasses.replace(getattr(config, name), blocks=1) for name in ("extra_msa", "evoformer", "templates")
    }
    shallow = dataclasses.replace(config, **few)
    model = AlphaFold(shallow)
    write_npz(tmp_path / "params_model_2_multimer_v3.npz", export_deepmind(model, fused=True))
    found, _ = load_published(tmp_path / "params_model_2_multimer_v3.npz")
    assert found.config == shallow
    assert same(found, model)


# ---- Refusals ----


def without(key: str, arrays: Arrays) -> Arrays:
    return {name: value for name, value in arrays.items() if name != key}


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("npz", lambda a: {**without(SCALE, a), f"{SCALE}s": a[SCALE]}, [f"no array '{SCALE}'", f"Did you mean '{SCALE}s'?"]),
        ("npz", lambda a: {**a, "surplus//w": np.zeros((3, 4), "f4")}, ["no parameter for array 'surplus//w'", "(3, 4)"]),
        ("npz", lambda a: {**a, SCALE: a[SCALE].T}, [f"array '{SCALE}' has the shape (10, 2)", "needs (2, 10)"]),
        ("npz", lambda a: {**a, SCALE: np.repeat(a[SCALE], 2, 0)}, ["has the shape (4, 10)", "needs (2, 10)"]),
        ("npz", lambda a: {}, ["no array", "more)"]),
        ("pt", lambda a: {**a, NEWER: a[NEWER].repeat(2)}, [f"array '{NEWER}' has the shape (20,)", "needs (10,)"]),
        ("pt", lambda a: {**a, OLDER: a[NEWER]}, [f"'{NEWER}' and '{OLDER}'", "two names of one array"]),
        ("legacy", lambda a: without(OLDER, a), [f"no array '{OLDER}'"]),
        ("legacy", lambda a: {**a, OLDER: torch.zeros(1)}, [f"array '{OLDER}' has the shape (1,)"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    model: AlphaFold, form: str, change: Callable[[Arrays], Arrays], said: list[str]
) -> None:
    """Catches an array ignored, reshaped or broadcast, a parameter left at its initial value, a model changed in part, and an
    error that gives the newer name of an array in an older file."""
    target = random_model(SMALL, 1)
    program = deepmind if form == "npz" else openfold
    arrays: Arrays = export_deepmind(model) if form == "npz" else export_openfold(model, form == "legacy")
    with pytest.raises(UserError) as caught:
        program.set_parameters(target, change(arrays), "here")
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)
    for words in said:
        assert words in str(caught.value)
    assert same(target, random_model(SMALL, 1))


def test_a_transition_that_openfold_lacks_is_refused() -> None:
    """Catches an exported checkpoint that OpenFold cannot load."""
    longer = dataclasses.replace(SMALL.structure_module, transition_layers=4)
    with pytest.raises(UserError, match="transition_layers 4, but OpenFold's models always have 3"):
        export_openfold(AlphaFold(dataclasses.replace(SMALL, structure_module=longer)))


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the file's author ran",)


@pytest.mark.parametrize(
    ("read", "make", "said"),
    [
        (read_npz, lambda path: path.mkdir(), "no such parameter file"),
        (read_npz, lambda path: path.write_text(">query\nMKT\n"), "not an .npz file"),
        (read_npz, lambda path: torch.save({"weight": torch.zeros(1)}, path), "'x/data.pkl' is not an array"),
        (read_npz, lambda path: np.savez(path.open("wb"), a=np.array([{}], dtype=object)), "not a readable NumPy file"),
        (read_npz, lambda path: np.savez(path.open("wb"), a=np.arange(3)), "'a' is not an array of floats"),
        (read_openfold, lambda path: None, "no such parameter file"),
        (read_openfold, lambda path: path.write_bytes(b""), "not a PyTorch .pt file"),
        (read_openfold, lambda path: torch.save([1, 2], path), "not an OpenFold checkpoint"),
        (read_openfold, lambda path: torch.save({"ema": {"params": 3}}, path), "not an OpenFold checkpoint"),
        (read_openfold, lambda path: torch.save({"evoformer.linear.weight": torch.arange(3)}, path), "not an array of floats"),
        (read_openfold, lambda path: torch.save({"evoformer.linear.weight": Malicious()}, path), "is not an array of floats"),
        (load_model, lambda path: None, "no such checkpoint"),
        (load_model, lambda path: path.mkdir(), "not a DeepSpeed checkpoint"),
        (load_model, lambda path: path.write_text(">query\nMKT\n"), "neither a checkpoint nor"),
        (load_model, lambda path: torch.save([1, 2], path), "lacks format_version, model_config"),
        (load_model, lambda path: torch.save({"x": Malicious()}, path), "not a readable checkpoint"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], read: Any, make: Callable[[Path], None], said: str
) -> None:
    """Catches a traceback, a message without the path, and code in a file that runs."""
    make(path := tmp_path / "x")
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "ran" not in capsys.readouterr().out


def test_a_damaged_file_is_one_line(model: AlphaFold, tmp_path: Path) -> None:
    """Catches a traceback for a damaged file."""
    write_npz(path := tmp_path / "x.npz", export_deepmind(model))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable NumPy file"):
        read_npz(path)
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match="cut short"):
        read_npz(path)
