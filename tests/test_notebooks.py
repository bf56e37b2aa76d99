"""Every notebook runs from start to end with small parameters, and is committed without outputs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Values that replace those of the cell tagged "parameters" (papermill's convention).
SMALL: dict[str, dict[str, Any]] = {
    "quickstart.ipynb": {
        "steps": 2,
        "smaller": [
            "--data.train.crop_size=16",
            *(f"--data.{part}.{rows}=4" for part in ("train", "validation") for rows in ("msa_clusters", "extra_msa")),
            "--data.validation.recycles=0",
            "--model.evoformer.blocks=1",
            "--model.structure_module.iterations=1",
        ],
    }
}


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return notebook["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches cells that use a renamed function or a later cell, and code that needs a terminal."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    for name in ("data", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):  # as in a notebook, stdout is not a file and cannot be reconfigured
        for cell in cells(path):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{path.name}[{cell['id']}]", "exec"), namespace)
            if "parameters" in cell["metadata"].get("tags", ()):
                changed = SMALL[path.name]
                assert set(changed) <= set(namespace), "the notebook's parameters were renamed"
                namespace.update(changed)
    plt.close("all")
    assert len(namespace["curve"]) == namespace["steps"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"data", "configs", "runs"}


def test_the_alignment_shows_what_the_notebook_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an alignment that does not show the notebook's claim: columns that co-vary are in contact."""
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells(ROOT / "notebooks" / "quickstart.ipynb"):
            if cell["id"] in ("parameters", "imports", "alignment", "covariation"):
                exec("".join(cell["source"]), namespace)
    assert namespace["correct"] > 0.45
    assert namespace["correct"] > 3 * namespace["contact"][namespace["row"], namespace["column"]].mean()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_clean(path: Path) -> None:
    """Catches committed outputs, execution counts, and paths of the author's machine."""
    found = cells(path)
    assert found[0]["cell_type"] == "markdown"
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        source = "".join(cell["source"])
        assert source == source.strip()
        assert not re.search(r"/(?:home|root|tmp|work|Users)/", source)


def test_there_is_a_notebook() -> None:
    """Catches a notebook that is not tested."""
    assert {path.name for path in NOTEBOOKS} == set(SMALL)
