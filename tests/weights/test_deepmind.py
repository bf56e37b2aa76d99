"""DeepMind's parameter files in both layouts: every array is read and written, bitwise."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.deepmind import (
    export_deepmind,
    is_fused,
    load_deepmind,
    read_npz,
    set_parameters,
    with_blocks_of,
    write_npz,
)
from evodsp.weights.names import parameter_names
from tests.builders.golden import CONFIG as GOLDEN
from tests.builders.weights import SMALL, random_model, same
from tests.shared import load

Arrays = dict[str, np.ndarray]
SCALE = "alphafold/alphafold_iteration/evoformer/evoformer_iteration/pair_transition/input_layer_norm//scale"


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    return random_model(SMALL, 0)


@pytest.fixture
def arrays(model: AlphaFold) -> Arrays:
    return export_deepmind(model)


def test_golden_parameters_come_back_bit_for_bit(golden: Path, tmp_path: Path) -> None:
    """Catches an array dropped, duplicated, transposed, split at the wrong head, or of another shape than DeepMind's."""
    model = AlphaFold(GOLDEN)
    load_deepmind(golden / "params.npz", model)
    write_npz(tmp_path / "out.npz", export_deepmind(model))
    expected, found = load(golden / "params.npz"), read_npz(tmp_path / "out.npz")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        assert found[key].tobytes() == value.tobytes(), key
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_random_model_goes_out_and_comes_back(model: AlphaFold, tmp_path: Path, fused: bool) -> None:
    """Catches AF2's sizes hard-coded in the table of names, and a newer layout that is written but not recognised."""
    arrays = export_deepmind(model, fused)
    assert is_fused(arrays) == fused
    write_npz(tmp_path / "x.npz", arrays)
    load_deepmind(tmp_path / "x.npz", other := random_model(SMALL, 1))
    assert same(model, other)


def test_the_fused_layout_is_deepminds(golden: Path) -> None:
    """Catches left and right exchanged, and names or shapes unlike the newer release's."""
    model = AlphaFold(GOLDEN)
    load_deepmind(golden / "params.npz", model)
    split, fused = load(golden / "params.npz"), export_deepmind(model, fused=True)
    scope = f"{SCALE.partition('pair_transition')[0]}triangle_multiplication_outgoing/"
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


def test_the_table_lists_every_parameter_once(model: AlphaFold) -> None:
    """Catches a parameter that no file could set."""
    for fused in (False, True):
        listed = [name.ours for name in parameter_names(SMALL, fused)]
        assert len(listed) == len(set(listed))
        assert set(listed) == {name for name, _ in model.named_parameters()}


@pytest.mark.verify_but("model_5_ptm")
@pytest.mark.parametrize("preset", ["model_1", "model_5_ptm"])
def test_the_table_of_published_models(preset: str) -> None:
    """Catches a head or templates in the table of a model that lacks them."""
    with torch.device("meta"):
        model = AlphaFold(ModelConfig.preset(preset))
    listed = {name.ours for name in parameter_names(model.config)}
    assert listed == {name for name, _ in model.named_parameters()}


def test_blocks_are_read_off_the_arrays(arrays: Arrays) -> None:
    """Catches a rejected file of a shallower model, and a number of blocks taken from the wrong axis."""
    deeper = dataclasses.replace(
        SMALL,
        evoformer=dataclasses.replace(SMALL.evoformer, blocks=48),
        extra_msa=dataclasses.replace(SMALL.extra_msa, blocks=4),
        templates=dataclasses.replace(SMALL.templates, blocks=2),
    )
    assert with_blocks_of(deeper, arrays) == SMALL
    assert with_blocks_of(deeper, {SCALE: np.array(1, np.float32)}) == deeper  # found by the check of shapes


def without(key: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {name: value for name, value in arrays.items() if name != key}


@pytest.mark.verify_but("*-said1", "*-said2", "*-said3")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(SCALE), [f"no array '{SCALE}' of shape (2, 10)"]),
        (lambda a: {**without(SCALE)(a), f"{SCALE}s": a[SCALE]}, [f"no array '{SCALE}'", f"Did you mean '{SCALE}s'?"]),
        (
            lambda a: {**a, "surplus//w": np.zeros((3, 4), np.float32)},
            ["no parameter for array 'surplus//w'", "(3, 4)"],
        ),
        (lambda a: {**a, SCALE: a[SCALE].T}, [f"array '{SCALE}' has the shape (10, 2)", "needs (2, 10)"]),
        (lambda a: {**a, SCALE: a[SCALE].reshape(-1)}, ["has the shape (20,)", "needs (2, 10)"]),
        (lambda a: {**a, SCALE: np.repeat(a[SCALE], 2, 0)}, ["has the shape (4, 10)", "needs (2, 10)"]),
        (lambda a: {}, ["no array", "more)"]),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    arrays: Arrays, change: Callable[[Arrays], Arrays], said: list[str]
) -> None:
    """Catches an array ignored or broadcast, a parameter left at its initial value, and a model changed in part."""
    target = random_model(SMALL, 1)
    with pytest.raises(UserError) as caught:
        set_parameters(target, change(arrays), "here.npz")
    assert str(caught.value).startswith("here.npz: ")
    assert "\n" not in str(caught.value)
    for words in said:
        assert words in str(caught.value)
    assert same(target, random_model(SMALL, 1))


def test_heads_merged_into_one_axis_do_not_pass(arrays: Arrays) -> None:
    """Catches an array of the same size but another shape that is reshaped instead of refused."""
    key = SCALE.replace("pair_transition/input_layer_norm//scale", "msa_column_attention/attention//query_w")
    with pytest.raises(UserError, match=r"has the shape \(2, 12, 12\), but the model needs \(2, 12, 3, 4\)"):
        set_parameters(random_model(SMALL, 1), {**arrays, key: arrays[key].reshape(2, 12, 12)})


def member(path: Path) -> None:
    """Write a zip file with a pickle in it, as torch.save does."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "no such parameter file"),
        (lambda path: path.mkdir(), "no such parameter file"),
        (lambda path: path.write_bytes(b""), "not an .npz file"),
        (lambda path: path.write_text(">query\nMKT\n"), "not an .npz file"),
        (lambda path: np.save(path.open("wb"), np.zeros(3)), "not an .npz file"),
        (lambda path: torch.save({"weight": torch.zeros(1)}, path), "'x/data.pkl' is not an array"),
        (member, "'archive/data.pkl' is not an array"),
        (lambda path: np.savez(path, a=np.array([{}], dtype=object)), "not a readable NumPy file"),
        (lambda path: np.savez(path, a=np.arange(3)), "'a' is not an array of floats"),
    ],
)
def test_a_file_that_is_no_parameter_file_is_one_line(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    """Catches a traceback, and code in a file that runs."""
    make(path := tmp_path / "x.npz")
    with pytest.raises(UserError) as caught:
        read_npz(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_one_line(arrays: Arrays, tmp_path: Path) -> None:
    """Catches a traceback for a damaged file."""
    write_npz(path := tmp_path / "x.npz", arrays)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable NumPy file"):
        read_npz(path)
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match="cut short"):
        read_npz(path)
