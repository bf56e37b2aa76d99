"""--ensembles and --stop_tolerance: what reaches the model, and what the user is told."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from evodsp.data.chain_folder import read_alignment_dir
from evodsp.data.dataset import collate, prediction_sample
from evodsp.data.mmcif import read_chain
from evodsp.data.records import ProteinSequence
from evodsp.errors import UserError
from evodsp.inference.predict import predict
from evodsp.model.outputs import ModelOutput
from evodsp.model.recycling import settled
from evodsp.weights.checkpoint import load_model

from .conftest import QUERY, TRAINED, Workplace


def silent(line: str) -> None:
    """No progress lines."""


def read_json(path):
    return json.loads(path.read_text())


def by_hand(workplace: Workplace, recycles: int, ensembles: int, samples: int = 1, **options: float) -> ModelOutput:
    """The model on features with the sizes of the fixture's config, seed 0 of alpha_A, a batch of equal samples."""
    query = ProteinSequence("alpha_A", QUERY)
    config = replace(TRAINED, crop_size=None, msa_clusters=5, extra_msa=4, recycles=recycles)
    sample = prediction_sample(
        query, read_alignment_dir(workplace.config.alignments / "alpha_A", query), config, 0, ensembles=ensembles
    )
    assert len(sample["aatype"]) == (recycles + 1) * ensembles
    with torch.no_grad():
        return load_model(workplace.config.checkpoint)(collate([sample] * samples), ensembles=ensembles, **options)


def check_written(result, output: ModelOutput) -> None:
    chain = read_chain(result.structure(0), "A")
    there = chain.mask > 0
    np.testing.assert_allclose(chain.positions[there], output.structure.positions[0].numpy()[there], atol=1e-3)


def test_ensembling_draws_and_averages(workplace):
    """Two passes of three sets: six draws, two passes in the timings, the model's average in the file."""
    lines: list[str] = []
    result = predict(workplace.change(ensembles=3, seeds=1), lines.append)[0]
    check_written(result, by_hand(workplace, 1, 3))
    assert len(read_json(result.folder / "timings.json")["seeds"][0]["pass_seconds"]) == 2
    assert read_json(result.folder / "ranking.json")["settings"]["ensembles"] == 3
    assert any(line.startswith("sizes: ") and line.endswith(", ensembles 3") for line in lines)
    single = predict(workplace.change(seeds=1, output=workplace.root / "single"), silent)[0]
    assert single.structure().read_bytes() != result.structure().read_bytes()
    with pytest.raises(UserError, match="ensembles: 3 there, 1 now"):
        predict(workplace.change(seeds=1), silent)


def test_recycling_stops_and_says_so(workplace):
    """A tolerance nothing can miss: two of five passes, the second one's output, and the change in the log and the timings."""
    lines: list[str] = []
    result = predict(workplace.change(recycles=4, stop_tolerance=1e3, seeds=1), lines.append)[0]
    expected = by_hand(workplace, 4, 1, stop_tolerance=1e3)
    check_written(result, expected)
    (seed,) = read_json(result.folder / "timings.json")["seeds"]
    assert len(seed["pass_seconds"]) == 2
    assert expected.ca_change is not None
    assert seed["ca_change"] == pytest.approx(float(expected.ca_change[0]), abs=1e-3)
    assert any("(2 of 5 passes," in line and f"changed by {seed['ca_change']:.2f} Å" in line for line in lines)
    assert read_json(result.folder / "ranking.json")["settings"]["stop_tolerance"] == 1e3


def test_a_tolerance_of_zero_is_none(workplace):
    """0 must not stop at two equal passes, nor make an earlier result another question."""
    first = predict(workplace.change(seeds=1), silent)[0]
    again = predict(workplace.change(seeds=1, stop_tolerance=0.0), silent)[0]
    assert again.kept
    assert "ca_change" not in read_json(first.folder / "timings.json")["seeds"][0]


@pytest.mark.parametrize(
    ("value", "said"), [({"ensembles": 0}, "--ensembles is 0"), ({"stop_tolerance": -0.5}, "--stop_tolerance is -0.5"),
                        ({"stop_tolerance": float("nan")}, "--stop_tolerance is nan")]
)  # fmt: skip
def test_numbers_out_of_range(workplace, value, said):
    with pytest.raises(UserError, match=said):
        workplace.change(**value)


def test_recycling_goes_on_until_every_sample_has_settled(workplace):
    """A batch that stops as soon as one of its samples has settled, or that never stops."""
    output = by_hand(workplace, 1, 1, stop_tolerance=0.1, samples=2)
    assert output.ca_change is not None
    assert len(output.ca_change) == 2
    for changes, expected in (([0.1, 5.0], False), ([5.0, 0.1], False), ([0.1, 1.0], True)):
        assert settled(replace(output, ca_change=torch.tensor(changes)), 1.0) == expected
    assert not settled(replace(output, ca_change=None), 1.0), "after the first pass there is no change to judge"
