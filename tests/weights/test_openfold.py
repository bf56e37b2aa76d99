"""OpenFold's checkpoints with both namings, both layouts and all forms on disk: every array is read and written, bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.names import older, parameter_names
from evodsp.weights.openfold import (
    expected_shapes,
    export_openfold,
    is_fused,
    load_openfold,
    read_openfold,
    set_parameters,
    with_blocks_of,
    write_openfold,
)
from tests.builders.weights import SMALL, Arrays, averaged, prefixed, random_model, same

BLOCK = "evoformer.blocks.1"
SCALE = f"{BLOCK}.pair_stack.pair_transition.layer_norm.weight"
OLDER_SCALE = f"{BLOCK}.core.pair_transition.layer_norm.weight"


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return random_model(SMALL, 0)


@pytest.fixture
def arrays(model: AlphaFold) -> Arrays:
    return export_openfold(model)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_random_model_goes_out_and_comes_back(model: AlphaFold, tmp_path: Path, legacy: bool, fused: bool) -> None:
    """Catches an array dropped, duplicated or split wrongly, and a naming or layout that is written but not recognised."""
    arrays = export_openfold(model, legacy, fused)
    assert is_fused(arrays) == fused
    assert ("template_angle_embedder.linear_1.weight" in arrays) == legacy
    write_openfold(tmp_path / "x.pt", arrays)
    load_openfold(tmp_path / "x.pt", other := random_model(SMALL, 1))
    assert same(model, other)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_a_file_is_as_large_as_its_arrays(model: AlphaFold, arrays: Arrays, tmp_path: Path) -> None:
    """Catches views saved with the whole matrix that they are parts of."""
    write_openfold(path := tmp_path / "x.pt", arrays)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert sum(value.untyped_storage().nbytes() for value in read_openfold(path).values()) == 4 * numbers


def test_a_mixture_of_both_namings_is_read(model: AlphaFold) -> None:
    """Catches refused files that mix the namings: `core.outer_product_mean` and `pair_stack.tri_mul_out`."""
    newer, legacy = export_openfold(model), export_openfold(model, legacy=True)
    mixed = {
        old if "outer_product" in old or old.startswith("template") else new: value
        for (new, value), old in zip(newer.items(), legacy, strict=True)
    }
    set_parameters(other := random_model(SMALL, 1), mixed)
    assert same(model, other)


def test_names_and_shapes_of_the_full_width() -> None:
    """Catches names and shapes unlike those of OpenFold's model_1_ptm, which were read off its modules."""
    with torch.device("meta"):
        model = AlphaFold(ModelConfig.preset("model_1_ptm"))
    names = parameter_names(model.config)
    shapes = expected_shapes(model, names)
    assert len(shapes) == len({older(key) for key in shapes}) == sum(len(name.openfold) for name in names)
    assert [name for name in names if len(name.openfold) != len(name.deepmind)] == []
    for key, legacy, shape in (
        ("input_embedder.linear_relpos.weight", None, (128, 65)),
        ("extra_msa_embedder.linear.weight", None, (64, 25)),
        ("recycling_embedder.layer_norm_m.bias", None, (256,)),
        ("evoformer.linear.weight", None, (384, 256)),
        ("evoformer.blocks.47.msa_att_row.linear_z.weight", None, (8, 128)),
        ("evoformer.blocks.47.msa_att_col._msa_att.mha.linear_g.bias", None, (256,)),
        ("extra_msa_stack.blocks.3.msa_att_col.global_attention.linear_k.weight", None, (8, 64)),
        ("extra_msa_stack.blocks.3.msa_att_col.layer_norm_m.weight", None, (64,)),
        (
            "extra_msa_stack.blocks.3.outer_product_mean.linear_out.weight",
            "extra_msa_stack.blocks.3.core.outer_product_mean.linear_out.weight",
            (128, 1024),
        ),
        (
            "evoformer.blocks.47.msa_transition.linear_1.weight",
            "evoformer.blocks.47.core.msa_transition.linear_1.weight",
            (1024, 256),
        ),
        (
            "evoformer.blocks.47.pair_stack.tri_mul_in.linear_a_p.weight",
            "evoformer.blocks.47.core.tri_mul_in.linear_a_p.weight",
            (128, 128),
        ),
        (
            "evoformer.blocks.47.pair_stack.tri_att_end.linear.weight",
            "evoformer.blocks.47.core.tri_att_end.linear.weight",
            (4, 128),
        ),
        (
            "template_embedder.template_pair_stack.blocks.1.tri_att_start.mha.linear_q.weight",
            "template_pair_stack.blocks.1.tri_att_start.mha.linear_q.weight",
            (64, 64),
        ),
        (
            "template_embedder.template_pointwise_att.mha.linear_o.weight",
            "template_pointwise_att.mha.linear_o.weight",
            (128, 64),
        ),
        (
            "template_embedder.template_single_embedder.linear_1.weight",
            "template_angle_embedder.linear_1.weight",
            (256, 57),
        ),
        ("template_embedder.template_pair_embedder.linear.weight", "template_pair_embedder.linear.weight", (64, 88)),
        (
            "structure_module.ipa.linear_q_points.linear.weight",
            "structure_module.ipa.linear_q_points.weight",
            (144, 384),
        ),
        (
            "structure_module.ipa.linear_kv_points.linear.bias",
            "structure_module.ipa.linear_kv_points.bias",
            (432,),
        ),
        ("structure_module.ipa.linear_out.weight", None, (384, 2112)),
        ("structure_module.transition.layers.0.linear_3.weight", None, (384, 384)),
        ("structure_module.angle_resnet.layers.1.linear_2.weight", None, (128, 128)),
        ("structure_module.bb_update.linear.weight", None, (6, 384)),
        ("aux_heads.experimentally_resolved.linear.weight", None, (37, 384)),
        ("aux_heads.plddt.linear_3.weight", None, (50, 128)),
        ("aux_heads.tm.linear.weight", None, (64, 128)),
    ):
        assert shapes[key] == shape, key
        assert older(key) == (legacy or key)


def test_blocks_are_counted_in_the_names(model: AlphaFold) -> None:
    """Catches a rejected file of a shallower model, and a block number that is trusted without counting."""
    deeper = dataclasses.replace(
        SMALL,
        evoformer=dataclasses.replace(SMALL.evoformer, blocks=48),
        extra_msa=dataclasses.replace(SMALL.extra_msa, blocks=4),
        templates=dataclasses.replace(SMALL.templates, blocks=2),
    )
    for legacy in (False, True):
        assert with_blocks_of(deeper, export_openfold(model, legacy)) == SMALL
    assert with_blocks_of(deeper, ["evoformer.blocks.999999999.x"]).evoformer.blocks == 1


@pytest.mark.parametrize(
    ("form", "has_average"),
    [
        (lambda a: a, False),
        (lambda a: prefixed("model.", a), False),  # as zero_to_fp32.py converts DeepSpeed's
        (lambda a: {"state_dict": prefixed("model.", a), "epoch": 3, "optimizer_states": [{}]}, False),
        (lambda a: {"state_dict": prefixed("model.", a), "ema": {"params": averaged(a), "decay": 0.999}}, True),
        (lambda a: {"module": prefixed("module.model.", a), "ema": {"params": averaged(a)}, "dp_world_size": 8}, True),
        (lambda a: prefixed("_orig_mod.", a), False),  # torch.compile
        (lambda a: prefixed("_forward_module.model._orig_mod.", a), False),
        (lambda a: {key.replace("blocks.0.", "blocks.0._orig_mod._fsdp_wrapped_module."): a[key] for key in a}, False),
    ],
)
def test_every_form_on_disk_is_read(
    arrays: Arrays, tmp_path: Path, form: Callable[[Arrays], Any], has_average: bool
) -> None:
    """Catches a wrapper's part of a name that is not removed, and moving average and raw weights exchanged."""
    torch.save(form(arrays), path := tmp_path / "x.pt")
    for raw in (False, True):
        found = read_openfold(path, raw)
        expected = averaged(arrays) if has_average and not raw else arrays
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_other_floats_are_converted(model: AlphaFold, arrays: Arrays) -> None:
    """Catches 16-bit or 64-bit arrays that are refused or copied without conversion."""
    set_parameters(other := random_model(SMALL, 1), {key: value.bfloat16() for key, value in arrays.items()})
    for parameter, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, theirs.bfloat16().float())


def without(key: str, arrays: Arrays) -> Arrays:
    return {name: value for name, value in arrays.items() if name != key}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: without(SCALE, a), [f"no array '{SCALE}' of shape (10,)"]),
        (lambda a: {**without(SCALE, a), f"{SCALE}s": a[SCALE]}, [f"no array '{SCALE}'", f"Did you mean '{SCALE}s'?"]),
        (lambda a: {**a, "surplus.weight": torch.zeros(3, 4)}, ["no parameter for array 'surplus.weight'", "(3, 4)"]),
        (lambda a: {**a, SCALE: a[SCALE].repeat(2)}, [f"array '{SCALE}' has the shape (20,)", "needs (10,)"]),
        (lambda a: {**a, OLDER_SCALE: a[SCALE]}, [f"'{SCALE}' and '{OLDER_SCALE}'", "two names of one array"]),
        (lambda a: {}, ["no array", "more)"]),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    arrays: Arrays, change: Callable[[Arrays], Arrays], said: list[str]
) -> None:
    """Catches an array ignored or broadcast, a parameter left at its initial value, and a model changed in part."""
    target = random_model(SMALL, 1)
    with pytest.raises(UserError) as caught:
        set_parameters(target, change(arrays), "here.pt")
    assert str(caught.value).startswith("here.pt: ")
    assert "\n" not in str(caught.value)
    for words in said:
        assert words in str(caught.value)
    assert same(target, random_model(SMALL, 1))


def test_an_array_is_called_as_in_the_file(model: AlphaFold) -> None:
    """Catches an error that gives the newer name of an array in an older file."""
    legacy = export_openfold(model, legacy=True)
    with pytest.raises(UserError, match=rf"no array '{OLDER_SCALE}'"):
        set_parameters(model, without(OLDER_SCALE, legacy))
    with pytest.raises(UserError, match=rf"array '{OLDER_SCALE}' has the shape \(1,\)"):
        set_parameters(model, {**legacy, OLDER_SCALE: torch.zeros(1)})


def test_a_transition_that_openfold_lacks_is_refused() -> None:
    """Catches an exported checkpoint that OpenFold cannot load."""
    longer = dataclasses.replace(SMALL.structure_module, transition_layers=4)
    with pytest.raises(UserError, match="transition_layers 4, but OpenFold's models always have 3"):
        export_openfold(AlphaFold(dataclasses.replace(SMALL, structure_module=longer)))


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the checkpoint's author ran",)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "no such parameter file"),
        (lambda path: path.mkdir(), "not a DeepSpeed checkpoint"),
        (lambda path: path.write_bytes(b""), "not a PyTorch .pt file"),
        (lambda path: torch.save([1, 2], path), "not an OpenFold checkpoint"),
        (lambda path: torch.save({"state_dict": {}}, path), "not an OpenFold checkpoint"),
        (lambda path: torch.save({"ema": {"params": 3}}, path), "not an OpenFold checkpoint"),
        (lambda path: torch.save({"evoformer.linear.weight": 3}, path), "is not an array of floats"),
        (lambda path: torch.save({"evoformer.linear.weight": torch.arange(3)}, path), "is not an array of floats"),
        (lambda path: torch.save({"evoformer.linear.weight": Malicious()}, path), "is not an array of floats"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], said: str
) -> None:
    """Catches a traceback, and code in a file that runs."""
    make(path := tmp_path / "x.pt")
    with pytest.raises(UserError) as caught:
        read_openfold(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "ran" not in capsys.readouterr().out
