"""The pictures that a prediction draws beside its report, and the contact probabilities that they show."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from evodsp.config import HeadsConfig
from evodsp.errors import UserError
from evodsp.inference.predict import predict
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import read_contacts
from evodsp.model.heads import compute_contacts
from tests.builders.prediction import silent

from .conftest import Finished, Workplace

PICTURES = {"alignment_coverage.svg", "seed_0_confidence.svg", "seed_1_confidence.svg"}


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.svg")}


def test_pictures_of_a_prediction(workplace: Workplace, finished: Finished) -> None:
    """Catches pictures without the option, none for kept results, those of an earlier prediction, and empty ones."""
    workplace.only("alpha_A")
    folder = workplace.config.output / "alpha_A"
    assert pictures(folder) == {}
    (kept,) = predict(workplace.change(plots=True), silent)
    assert kept.kept
    drawn = pictures(folder)
    assert set(drawn) == PICTURES
    for name in PICTURES:
        root = ElementTree.fromstring(drawn[name])
        assert len(drawn[name]) > 2_000
        places = [float(one.attrib[key]) for one in root.iter() for key in one.attrib if key in ("x", "y", "x1", "y2")]
        assert places
        assert all(0 <= place < float(root.attrib["width"]) for place in places)
    predict(workplace.change(plots=True, overwrite=True, recycles=1), silent)
    again = pictures(folder)
    assert set(again) == PICTURES
    assert again["seed_0_confidence.svg"] != drawn["seed_0_confidence.svg"]


def test_a_sequence_alone_has_no_coverage(workplace: Workplace) -> None:
    workplace.only("alpha_A")
    predict(workplace.change(plots=True, alignments=None, seeds=1), silent)
    assert set(pictures(workplace.config.output / "alpha_A")) == {"seed_0_confidence.svg"}


def test_a_picture_that_cannot_be_drawn_costs_no_result(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends, and a picture that is not named."""

    def fail(*_: object) -> None:
        raise ValueError("no colours left")

    lines: list[str] = []
    monkeypatch.setattr("evodsp.inference.pages.figures.plddt_chart", fail)
    results = predict(workplace.change(plots=True, seeds=1), lines.append)
    assert [result.name for result in results] == ["alpha_A", "beta_A"]
    assert [line for line in lines if "alpha_A: pictures could not be written (ValueError" in line]


@pytest.mark.parametrize("bins", [64, 6])
def test_contacts_are_the_bins_below_eight(bins: int) -> None:
    """Catches another threshold, a bin too many, and rows that are lost between pieces."""
    heads = HeadsConfig()
    logits = torch.randn(1, 70, 71, bins)
    found = compute_contacts(logits, heads.distogram_min_distance, heads.distogram_max_distance)
    tops = np.linspace(heads.distogram_min_distance, heads.distogram_max_distance, bins - 1)
    weights = np.exp(logits.double().numpy())
    expected = weights[..., : int((tops <= 8).sum())].sum(-1) / weights.sum(-1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    if bins == 64:
        assert (tops <= 8).sum() == 19


def test_contacts_in_the_files(finished: Finished) -> None:
    """Catches numbers that are lost or mixed up between seeds, and folders without them that cannot be read."""
    (result, _) = finished.results
    read = Prediction.of(result)
    one, other = read.ranked[0], read.ranked[1]
    length = len(one.sequence)
    for each in (one, other):
        assert each.contacts is not None
        assert each.contacts.shape == (length, length)
        np.testing.assert_array_equal(each.contacts, each.contacts.T)
    assert 0 < one.contacts.max() <= 1
    assert not np.array_equal(one.contacts, other.contacts)
    (file, _) = sorted(result.folder.glob("*_contacts.npz"))
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"probability", b"improbable."), b""):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"seed_0_contacts\.npz: not .* --overwrite"):
            read_contacts(result.folder, 0)
    for path in result.folder.glob("*_contacts.npz"):
        path.unlink()
    assert read_contacts(result.folder, 0) is None
    assert Prediction.of(result).contacts is None
    assert "Contacts" not in Prediction.of(result).plot()
