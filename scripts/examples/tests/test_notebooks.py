"""Every notebook runs from start to end with small parameters, and is committed with the outputs of a whole run."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

_SMALLER = {
    "data.train.crop_size": 16,
    **{f"data.{part}.{rows}": 4 for part in ("train", "validation") for rows in ("msa_clusters", "extra_msa")},
    "data.validation.recycles": 0,
    "model.evoformer.blocks": 1,
    "model.structure_module.iterations": 1,
}
# Four rows of clusters are those of the templates.
_WITH_TEMPLATES = {name: 6 if name.endswith("msa_clusters") else value for name, value in _SMALLER.items()}
# Values that replace those of the cell tagged "parameters" (papermill's convention).
SMALL: dict[str, dict[str, Any]] = {
    "predict.ipynb": {"steps": 2, "smaller": _SMALLER},
    "train_on_your_family.ipynb": {"steps": 2, "smaller": _WITH_TEMPLATES},
    "inside_dsp.ipynb": {"sequences": 16, "residues": 24},
}
_MOST_BYTES = 300_000
"""Of a notebook with its outputs: pictures of plots, no viewers of structures."""


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return notebook["cells"]


@pytest.mark.parametrize(
    "path",
    [
        # One trains and one starts ranks, which takes a quarter of a minute each.
        pytest.param(path, id=path.name, marks=() if path.name == "predict.ipynb" else pytest.mark.verify)
        for path in NOTEBOOKS
    ],
)
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
    CHECKS[path.name](namespace)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"data", "configs", "runs"}


def test_colab_installs_evodsp_and_takes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a notebook that finds no configs outside of a clone, and one that trains for hours there."""
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(subprocess, "run", lambda words, check: installed.append(words))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    installed: list[list[str]] = []
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in cells(ROOT / "notebooks" / "train_on_your_family.ipynb")[1:3]:
            exec("".join(cell["source"]), namespace)
    assert [words[1:4] for words in installed] == [["-m", "pip", "install"]]
    assert installed[0][-1] == namespace["evodsp_source"]
    assert namespace["steps"] == 200
    assert (tmp_path / namespace["start"] / "model.safetensors").is_file()
    assert printed.getvalue() == "12 chains to train on, 3 held out\n"


def _trained(namespace: dict[str, Any]) -> None:
    assert max(namespace["curve"]) == namespace["steps"] - 1
    assert set(namespace["predictions"]) == set(namespace["held_out"])
    assert 0 < namespace["bar"] < 1
    assert len(namespace["said"]) > 60


def _predicted(namespace: dict[str, Any]) -> None:
    assert len(namespace["one"].mean_plddt) == 3
    assert namespace["path"].is_file()


def _compared(namespace: dict[str, Any]) -> None:
    """The two ranks agree with one process, and the ledger with the list."""
    pattern = r"difference (\S+), of gradients (\S+); sent (\S+) bytes in the forward pass, listed (\S+)"
    said = re.findall(pattern, namespace["done"].stdout)
    assert len(said) == 2
    for difference, gradients, sent, listed in said:
        assert float(difference) < 1e-12
        assert float(gradients) < 1e-12
        assert sent == listed


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "predict.ipynb": _predicted,
    "train_on_your_family.ipynb": _trained,
    "inside_dsp.ipynb": _compared,
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    """Catches cells without the outputs that a reader sees, errors among them, paths of the author's machine, and megabytes."""
    found = cells(path)
    assert found[0]["cell_type"] == "markdown"
    assert len({cell["id"] for cell in found}) == len(found)
    assert path.stat().st_size < _MOST_BYTES
    run = [cell["execution_count"] for cell in found if cell["cell_type"] == "code"]
    assert run == list(range(1, len(run) + 1)), "run all cells of a new kernel"
    assert sum(bool(cell.get("outputs")) for cell in found) >= 4
    for cell in found:
        source = "".join(cell["source"])
        assert source == source.strip()
        for text in (source, json.dumps(cell.get("outputs", []))):
            assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)
        assert all(output["output_type"] != "error" for output in cell.get("outputs", []))


def test_there_is_a_notebook() -> None:
    """Catches a notebook that is not tested."""
    assert {path.name for path in NOTEBOOKS} == set(SMALL)
