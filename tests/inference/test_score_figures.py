"""Pictures as SVG files: every value in its place, in files that stand alone."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from evodsp.inference.pages.figures import Calibration, Figure, calibration_figure, confidence_figure, distance_figure
from evodsp.inference.structure_files import ChainSpan

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
