"""Parameter files of AlphaFold-Multimer's models: names, shapes, order of rows, both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import ModelConfig, as_multimer
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import load_published
from evodsp.weights.deepmind import expected_shapes, export_deepmind, load_deepmind, set_parameters, write_npz
from evodsp.weights.names import parameter_names
from evodsp.weights.openfold import export_openfold, load_openfold, write_openfold
from tests.builders.weights import SMALL, random_model, same
from tests.shared import SHARED

CHAINS = as_multimer(SMALL)
ATTENTION = "alphafold/alphafold_iteration/structure_module/fold_iteration/invariant_point_attention"


@pytest.mark.verify_but("model_1_multimer_v3-True")
@pytest.mark.parametrize(("model", "fused"), [("model_1_multimer", False), ("model_1_multimer_v3", True)])
def test_names_and_shapes_are_those_of_the_published_files(model: str, fused: bool) -> None:
    """Catches an array that is missing, renamed or of another shape; the list was read off DeepMind's model."""
    listed = SHARED / "multimer" / "parameters.txt"
    if not listed.is_file():
        pytest.skip("no ../shared/multimer beside this checkout")
    lines = listed.read_text().split(f"[{model}]", 1)[1].split("[", 1)[0].splitlines()
    rows = [line.split() for line in lines if line.startswith("alphafold")]
    expected = {key: tuple(map(int, shape.split("x"))) for key, shape in rows}
    with torch.device("meta"):
        module = AlphaFold(ModelConfig.preset(model))
    assert expected_shapes(module, parameter_names(module.config, fused)) == expected
    assert len(expected) == (330 if fused else 354)


@pytest.mark.verify_but("True")
@pytest.mark.parametrize("fused", [False, True])
def test_a_random_model_goes_out_and_comes_back(tmp_path: Path, fused: bool) -> None:
    """Catches rows that are put into our order and not back, and widths of keys and values taken for equal."""
    model = random_model(CHAINS, 0)
    write_npz(tmp_path / "x.npz", export_deepmind(model, fused))
    write_openfold(tmp_path / "x.pt", export_openfold(model, fused=fused))
    load_deepmind(tmp_path / "x.npz", from_deepmind := random_model(CHAINS, 1))
    load_openfold(tmp_path / "x.pt", from_openfold := random_model(CHAINS, 2))
    assert same(model, from_deepmind)
    assert same(model, from_openfold)


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
    set_parameters(model := random_model(CHAINS, 1), arrays)
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
    openfold, deepmind = export_openfold(model), export_deepmind(model)
    single = "alphafold/alphafold_iteration/evoformer/template_embedding/single_template_embedding"
    for number, axis in enumerate("xyz", 4):
        bias = model.get_parameter(f"template_embedder.direction_{axis}.bias").detach()
        assert torch.equal(openfold[f"template_embedder.template_pair_embedder.{axis}_linear.bias"], bias)
        np.testing.assert_array_equal(deepmind[f"{single}/template_pair_embedding_{number}//bias"], bias.numpy())


def test_a_published_file_is_known_by_its_name(tmp_path: Path) -> None:
    """Catches a multimer file read with a monomer's sizes, blocks of templates that are not counted, and a legacy export."""
    config = ModelConfig.preset("model_2_multimer_v3")
    few = dict.fromkeys(("extra_msa", "evoformer", "templates"), 1)
    shallow = dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), blocks=blocks) for name, blocks in few.items()}
    )
    model = AlphaFold(shallow)
    write_npz(tmp_path / "params_model_2_multimer_v3.npz", export_deepmind(model, fused=True))
    found, _ = load_published(tmp_path / "params_model_2_multimer_v3.npz")
    assert found.config == shallow
    assert same(found, model)
    with pytest.raises(UserError, match="no multimer models"):
        export_openfold(model, legacy=True)
