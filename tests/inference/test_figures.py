"""Pictures as SVG files, their numbers, and those that a prediction draws beside its report."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evodsp.config import HeadsConfig
from evodsp.errors import UserError
from evodsp.inference.pages.figures import Calibration, Figure, calibration_figure, confidence_figure, distance_figure
from evodsp.inference.predict import predict
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import read_contacts
from evodsp.inference.structure_files import ChainSpan
from evodsp.model.heads import compute_contacts
from tests.builders.prediction import silent

from .conftest import Finished, Workplace

SVG = "{http://www.w3.org/2000/svg}"
BAR = 14
"""Width of a bar of colours, in pixels."""


def matrices(figure: Figure) -> list[np.ndarray]:
    """The pictures of matrices in a figure, as numbers of colours; 255 is clear."""
    found = [one for one in ElementTree.fromstring(figure).iter(f"{SVG}image") if one.get("width") != str(BAR)]
    uris = [(one.get("href") or "").removeprefix("data:image/png;base64,") for one in found]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(uri)))) for uri in uris]


def texts(figure: Figure) -> str:
    return "\n".join(one.text or "" for one in ElementTree.fromstring(figure).iter(f"{SVG}text"))


@pytest.mark.parametrize("with_truth", [True, False])
def test_picture_of_distances(with_truth: bool) -> None:
    """Catches the two halves exchanged, residues without a CA that have distances, and distances of other units."""
    predicted = np.array([[0.0, 0, 0], [11, 0, 0], [44, 0, 0], [0, 0, 0]])
    true = np.array([[0.0, 0, 0], [5.5, 0, 0], [0, 0, 0], [900, 0, 0]])
    mask = np.array([True, True, True, False])
    given = (true, mask) if with_truth else (None, None)
    figure = distance_figure(given[0], predicted, np.linspace(40, 95, 4), "made_A <b>", given[1])
    (shown,) = matrices(figure)
    below = [[127, 254, 0], [254, 254]]
    assert [shown[1, 0], shown[2, 0], shown[3, 0], shown[2, 1], shown[3, 2]] == [*below[0], *below[1]]
    above = [shown[0, 1], shown[0, 2], shown[0, 3]]
    assert above == ([64, 0, 255] if with_truth else [127, 254, 0])
    assert "made_A <b>" in texts(figure)
    assert "<b>" not in figure
    assert ("above true" in texts(figure)) == with_truth


def test_a_picture_of_confidence_stands_alone() -> None:
    """Catches a file that needs the page's colours, a matrix of other errors, and no borders of chains."""
    pae = np.linspace(0, 30, 16).reshape(4, 4)
    chains = (ChainSpan("A", 0, 3), ChainSpan("B", 3, 4))
    figure = confidence_figure(np.array([91.0, 80, 60, 20]), pae, 30.0, pae / 30, "x", chains)
    contacts, errors = matrices(figure)
    expected = np.round(pae / 30 * 254).astype(np.uint8)
    np.testing.assert_array_equal(contacts, expected)
    np.testing.assert_array_equal(errors, expected)
    assert figure.count('class="border"') == 5
    assert "var(" not in figure
    assert "pLDDT, mean 62.8" in texts(figure)
    assert figure._repr_svg_().startswith("<svg")


def test_a_picture_of_calibration() -> None:
    """Catches pLDDT and lDDT-CA exchanged, and dots outside of their panel."""
    found = Calibration.of([(np.array([20.0, 80.0]), np.array([50.0, 100.0]))])
    figure = calibration_figure({"train": found, "held-out": found})
    (dots, _) = (one.get("d") for one in ElementTree.fromstring(figure).iter(f"{SVG}path"))
    assert dots == "M124.0 190.0h0 M340.0 10.0h0"
    assert "held-out: 2 residues, off by 25 on average" in texts(figure)


def test_numbers_of_a_known_case():
    """Catches means over chains instead of residues, a sign the wrong way round, a last bin that loses pLDDT 100, and ties."""
    found = Calibration.of(
        [
            (np.array([92.0, 98.0, 100.0]), np.array([72.0, 68.0, 70.0])),
            (np.array([40.0]), np.array([50.0])),
            (np.array([45.0, 45.0]), np.array([50.0, 60.0])),
        ]
    )
    bins = list(found.bins())
    assert [(one.lower, one.residues) for one in bins] == [(40, 3), (90, 3)]
    assert bins[1].plddt == pytest.approx(290 / 3)
    assert bins[1].lddt == pytest.approx(70.0)
    assert found.too_high == pytest.approx((420 - 370) / 6)
    assert found.error == pytest.approx(((160 - 130) + (290 - 210)) / 6)
    # Ranks, of which equal values share the mean: 4, 5, 6, 1, 2.5, 2.5 and 6, 4, 5, 1.5, 1.5, 3, with variances of 17 / 6.
    by_residue = 13.25 / 17
    assert found.line("held-out") == (
        f"held-out: pLDDT 70.0, true lDDT-CA 61.7: 8.3 too high; Spearman's correlation {by_residue:.2f} over 6 residues, "
        "1.00 over 3 structures"
    )


def test_a_constant_has_no_correlation():
    """Catches a nan in the line, a warning of numpy's, and a picture that needs two sets."""
    found = Calibration.of([(np.full(4, 80.0), np.array([90.0, 80.0, 95.0, 91.0]))])
    assert (
        found.line("train")
        == "train: pLDDT 80.0, true lDDT-CA 89.0: 9.0 too low; Spearman's correlation – over 4 residues"
    )
    assert "train: 4 residues, off by 9 on average" in calibration_figure({"train": found})


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
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"seed_0_contacts\.npz: not .* --overwrite"):
        read_contacts(result.folder, 0)
    for path in result.folder.glob("*_contacts.npz"):
        path.unlink()
    assert read_contacts(result.folder, 0) is None
    assert Prediction.of(result).contacts is None
    assert "Contacts" not in Prediction.of(result).plot()
