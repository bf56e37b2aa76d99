"""The parts of `make parity-data` that decide its result. The comparison itself needs a clone of OpenFold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evodsp.config import FeatureConfig
from evodsp.data.samples.raw_features import STREAMS
from evodsp.features.batch import draw
from evodsp.features.clusters import mask_letters
from evodsp.rng import Draws
from scripts.parity import data
from scripts.parity import openfold_data_side as side
from scripts.parity.data import Results

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = ROOT / "data"
CHAIN = "s001_A"


@pytest.fixture(scope="module")
def results() -> Results:
    """What evodsp reads and makes of one bundled chain, and of a template search."""
    request = data.request_of(BUNDLED)
    request["structures"] = [path for path in request["structures"] if path.endswith("s001.cif")]
    request["alignments"] = {CHAIN: request["alignments"][CHAIN]}
    samples, _ = data.sample_results(BUNDLED, [CHAIN], seed=0)
    return {name: np.asarray(value) for name, value in data.file_results(request)} | samples


def test_equal_sides_pass_and_every_kind_is_compared(results: Results) -> None:
    """Catches a difference reported between equal sides, and a kind of file that is not read."""
    rows = data.compare(results, dict(results))
    assert all(row.passed and row.measured == 0 for row in rows)
    quantities = {row.quantity for row in rows}
    assert {f"sample {name}" for name in data.FEATURES + data.LABELS} <= quantities
    assert {"structure positions", "alignment deletions"} <= quantities
    assert all("1 compared" in row.note for row in rows if row.quantity.startswith(("sample", "structure")))


def test_templates_of_a_search_are_compared(real_data: Path) -> None:
    """Catches templates that are not made, because the query or the structures are not those of the search."""
    found = {name: np.asarray(value) for name, value in data.template_results(data.request_of(real_data))}
    names = [value for name, value in found.items() if name.startswith("template name|query73_A")]
    assert names == ["3u8v_A", "2crb_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A"]
    rows = data.compare(found | {"template aatype|query73_A 3": found["template aatype|query73_A 3"] + 1}, found)
    assert [row.quantity for row in rows if not row.passed] == ["template aatype"]
    assert {row.quantity for row in rows} >= {
        "template all_atom_positions",
        "template pseudo_beta",
        "template sum_probs",
    }


@pytest.mark.parametrize(
    ("quantity", "by"),
    [
        ("structure positions", 1e-3),
        ("structure mask", 1),
        ("alignment rows", 1),
        ("alignment deletions", 1),
        ("sample msa_feat", 1e-5),
        ("sample extra_msa", 1),
        ("sample rigidgroups_gt_frames", 1e-3),
        ("sample msa_feat", np.nan),
    ],
)
def test_a_planted_difference_is_found(results: Results, quantity: str, by: float) -> None:
    """Catches a quantity that is not compared, a tolerance that hides a wrong letter, and NaN that counts as equal."""
    name = next(name for name in results if name.startswith(f"{quantity}|"))
    other = results[name].copy()
    other[(-1,) * other.ndim] += by
    beyond = [row for row in data.compare(results, {**results, name: other}) if not row.passed]
    assert [row.quantity for row in beyond] == [quantity]
    assert name.split("|")[1] in beyond[0].note


def test_what_one_side_lacks_or_reads_in_another_shape_is_a_difference(results: Results) -> None:
    """Catches a file that OpenFold cannot read, or that we cannot, passing because nothing is left to compare."""
    sequence = f"structure sequence|s001.cif {CHAIN[-1]}"
    rows = f"sample extra_msa|{CHAIN}"
    for changed in (
        {name: value for name, value in results.items() if name != sequence},
        {**results, sequence: np.array("A")},
        {**results, rows: results[rows][:-1]},
    ):
        assert sum(not row.passed for row in data.compare(results, changed)) == 1
        assert sum(not row.passed for row in data.compare(changed, results)) == 1


def test_openfold_draws_the_numbers_it_is_given() -> None:
    """Catches other rows, masked places or letters on OpenFold's side: their features would differ although both are right."""
    config = FeatureConfig(crop_size=None, msa_clusters=5)
    keys = torch.tensor([[Draws.root(1).at(stream).signed_key() for stream in STREAMS]])
    drawn = draw(keys, torch.ones(1, 9, dtype=torch.bool), 5, 30)
    order, replace, letter = (numbers[0].numpy() for numbers in (drawn.order, drawn.replace, drawn.letter))
    msa = np.random.default_rng(0).integers(0, 22, (5, 30)).astype(np.int8)
    profile = np.full((30, 22), 1 / 22, np.float32)
    transforms = SimpleNamespace(shaped_categorical=None)
    with side.fixed_draws(transforms, order, replace, letter):
        assert torch.equal(torch.randperm(8) + 1, torch.from_numpy(order[1:]))
        assert torch.equal(torch.randperm(4), torch.arange(4))
        assert not (torch.rand((9, 30)) < 0).any()
        replaced = (torch.rand((5, 30)) < config.masked_msa_fraction).numpy()
        probabilities = mixture(msa, profile, config)
        letters = transforms.shaped_categorical(torch.from_numpy(probabilities)).numpy()
    masked, mask = mask_letters(
        torch.from_numpy(msa), torch.from_numpy(profile), drawn.replace[0], drawn.letter[0], config
    )
    np.testing.assert_array_equal(replaced, mask)
    np.testing.assert_array_equal(np.where(replaced, letters, msa), masked)
    assert transforms.shaped_categorical is None
    assert torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist() != [0, 1, 2, 3]


def mixture(msa: np.ndarray, profile: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """The mixture of supplement 1.2.7 [S, L, 23], written out."""
    probabilities = np.zeros((*msa.shape, 23), np.float32)
    probabilities[..., :20] += config.masked_uniform / 20
    probabilities[..., :22] += config.masked_profile * profile + config.masked_same * np.eye(22, dtype=np.float32)[msa]
    probabilities[..., 22] = 0.7
    return probabilities


def test_the_resolution_is_the_model_s() -> None:
    """Catches the resolution of the data where the model has one, and none where the model has none."""

    def last(entry: dict[str, list[str]]) -> str | None:
        return entry.get(side.RESOLUTION_OF_DATA, entry.get("_refine.ls_d_res_high", [None]))[0]

    both = {"_refine.ls_d_res_high": ["1.86"], side.RESOLUTION_OF_DATA: ["1.80"]}
    header = side.header_of_model(last)
    assert header(both) == "1.86"
    assert header({side.RESOLUTION_OF_DATA: ["1.80"]}) == "1.80"
