"""Plots: image files, and a helpful error without matplotlib."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from evodsp.errors import UserError
from evodsp.inference.score.figures import distance_figure


def helix(length: int = 60) -> np.ndarray:
    """CA positions of two antiparallel helices, in Å."""
    n = np.arange(length)
    turn = np.stack([2.3 * np.cos(1.745 * n), 2.3 * np.sin(1.745 * n), 1.5 * n], -1)
    back = turn.copy()
    back[:, 2] = 1.5 * (length - 1 - n)
    back[:, 0] += 9.0
    return np.where((n < length // 2)[:, None], turn, back)


@pytest.mark.parametrize("with_truth", [True, False])
def test_picture_of_distances(tmp_path, with_truth):
    """Catches an empty image, with or without a known structure, and errors because of its missing residues."""
    positions, path = helix(), tmp_path / "distances.png"
    noisy = positions + np.random.default_rng(0).normal(size=positions.shape)
    plddt = np.linspace(40.0, 95.0, len(positions))
    mask = np.ones(len(positions), dtype=bool)
    mask[10:14] = False
    distance_figure(positions if with_truth else None, noisy, plddt, path, "made_A (held-out)", mask)
    from matplotlib.image import imread

    picture = imread(path)
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1000
    assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 200


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    """Catches an ImportError traceback instead of the name of the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'evodsp\[plots\]'"):
        distance_figure(None, helix(), np.ones(60), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_imported_only_to_draw():
    """Catches an import of matplotlib by modules that must work without the extra."""
    code = "import sys, evodsp.inference.score.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
