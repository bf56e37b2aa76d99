"""The files of a finished prediction after someone has edited them: each is one line, and the page of the batch goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.errors import UserError
from evodsp.geometry.residues import CA
from evodsp.inference.pages.target_page import batch_page, write_target_page
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import (
    RANKING,
    TIMINGS,
    read_contacts,
    read_pae,
    read_plddt,
    read_relaxation,
    read_structure,
    read_timings,
    read_with_ranking,
    write_json,
    write_results,
)
from evodsp.inference.score.scores import compare
from evodsp.inference.structure_files import AlignedError, PredictedStructure

LENGTH = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished target of one seed, as predict writes it."""
    positions = np.zeros((LENGTH, 37, 3), np.float32)
    positions[:, CA, 0] = 3.8 * np.arange(LENGTH)
    mask = np.zeros((LENGTH, 37), np.float32)
    mask[:, CA] = 1
    plddt, pae = np.full(LENGTH, 90, np.float32), np.ones((LENGTH, LENGTH), np.float32)
    contacts = np.eye(LENGTH, dtype=np.float32)
    structure = PredictedStructure(
        "x", np.arange(LENGTH), positions, mask, plddt, aligned_error=AlignedError(pae, 31.75, 0.5), contacts=contacts
    )
    (made := tmp_path / "x").mkdir()
    write_results(made, {0: structure}, "cif", {"checkpoint": "a"}, "x")
    write_json(made / TIMINGS, {"features_seconds": 1.0, "model_seconds": 2.0, "seeds": []})
    return made


ENTRY = {"seed": 0, "mean_plddt": 90.0, "ptm": 0.5, "structure": "seed_0.cif"}
DEEP: Any = []
for _ in range(50):
    DEEP = [DEEP]


def entry(**change: Any) -> dict[str, Any]:
    return {"ranking": [{**ENTRY, **change}]}


@pytest.mark.parametrize(
    "change",
    [
        [], {"name": 3}, {"name": "\ud800"}, {"settings": 1}, {"settings": {"a": DEEP}}, {"models": {}}, {"models": {"a": 1}},
        {"models": {"a": {}}}, {"ranking": []}, {"ranking": [1]}, {"ranking": [ENTRY, ENTRY]}, entry(seed=1e400),
        entry(seed=-1), entry(seed=True), entry(seed=1 << 70), entry(mean_plddt="high"), entry(mean_plddt=float("nan")),
        entry(mean_plddt=101), entry(mean_plddt=10**400), entry(ptm=None), entry(structure="../../x.cif"),
        entry(structure=3), entry(model="b"), entry(saved=5), entry(saved={"file": "x.npz"}),
        entry(saved={"file": "x.npz", "arrays": [["pair"]]}), entry(saved={"file": "../x.npz", "arrays": []}),
    ],
    ids=str,
)  # fmt: skip
def test_an_edited_ranking_is_one_line(folder: Path, change: Any) -> None:
    """Catches an AttributeError, an OverflowError, a path out of the folder and half of a character, in every reader of it."""
    content = json.loads((folder / RANKING).read_text())
    edited = {**content, **change} if isinstance(change, dict) else change
    (folder / RANKING).write_text(json.dumps(edited))
    for read in (read_with_ranking, Prediction.read, lambda folder: write_target_page(folder, [])):
        with pytest.raises(UserError, match=r"ranking\.json: .*predict again with --overwrite") as error:
            read(folder)
        assert len(str(error.value)) < 700
        assert "\n" not in str(error.value)
    assert "0 targets" in batch_page(folder.parent, []).html()


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"plddt": 1}', '{"plddt": []}', '{"plddt": [null]}', '{"plddt": [NaN, 1, 1, 1, 1, 1]}', '{"plddt": [101]}',
     '{"plddt": [[1], [1, 2]]}', '{"plddt": [' + "9" * 5000 + "]}", '{"plddt": ' + "[" * 100_000, '{"plddt": [1, 2]}'],
)  # fmt: skip
def test_edited_scores_are_one_line(folder: Path, text: str) -> None:
    """Catches NaN that has no colour, an empty list, and another number of residues than the structure has."""
    scores = folder / "seed_0_scores.json"
    scores.write_text(text)
    with pytest.raises(UserError, match=r"seed_0(_scores\.json|\.cif):.* (predict again|is empty)") as error:
        write_target_page(folder, [])
    assert len(str(error.value)) < 500
    with pytest.raises(UserError, match=r"seed_0_scores\.json:.* (predict again|is empty)"):
        compare(folder / "seed_0.cif", folder / "seed_0.cif", "A")
    if text == '{"plddt": [1, 2]}':
        with pytest.raises(UserError, match=r"seed_0\.cif: has 6 residues, but its scores are of 2; predict again"):
            read_structure(read_with_ranking(folder)[0], 0)
    else:
        assert "0 targets" in batch_page(folder.parent, []).html()


ERRORS = {"predicted_aligned_error": [[1]], "max_predicted_aligned_error": 31.75}
RELAXED = {"rmsd": 0.1, "seconds": 1.0, "energy_before": None, "energy_after": -3.5}
RELAXED |= {f"violations_{when}": {"any": 0} for when in ("before", "after")}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((TIMINGS, {"features_seconds": 1.0, "model_seconds": 2.0, "seeds": [], **change}) for change in (
            {"model_seconds": None}, {"features_seconds": float("nan")}, {"seeds": [1]}, {"model_seconds": True},
            {"model_seconds": 10**400}, {"device": DEEP},
        )),
        *(("seed_0_pae.json", content) for content in (
            {}, [1], [{}], [{**ERRORS, "max_predicted_aligned_error": 0}], [{**ERRORS, "predicted_aligned_error": [[1, 2]]}],
            [{**ERRORS, "predicted_aligned_error": [[float("nan")]]}], [{**ERRORS, "predicted_aligned_error": 1}],
        )),
        *(("seed_0_relaxed.json", {**RELAXED, **change}) for change in (
            {"rmsd": None}, {"violations_before": 3}, {"violations_after": {}}, {"energy_after": "low"},
        )),
        *(("seed_0_contacts.npz", content) for content in (
            {"probability": np.zeros(3, np.uint8)}, {"probability": np.zeros((2, 2))},
            {"probability": np.zeros((2, 3), np.uint8)}, {"other": np.zeros((2, 2), np.uint8)},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_another_edited_file_is_one_line(folder: Path, name: str, content: Any) -> None:
    """Catches the TypeError or KeyError of what is no number, a matrix that is none, and a scale of no length."""
    if name.endswith(".npz"):
        np.savez(folder / name, **content)
    else:
        (folder / name).write_text(json.dumps(content))
    read = {
        TIMINGS: lambda: read_timings(folder),
        "seed_0_pae.json": lambda: read_pae(folder, 0),
        "seed_0_relaxed.json": lambda: read_relaxation(folder, 0),
        "seed_0_contacts.npz": lambda: read_contacts(folder, 0),
    }[name]
    with pytest.raises(UserError, match=rf"{name}: not written by evodsp predict"):
        read()


def test_aligned_errors_of_another_size_are_one_line(folder: Path) -> None:
    """Catches the IndexError of a page whose matrix is smaller than its chain."""
    error = {**ERRORS, "predicted_aligned_error": [[1, 2], [3, 4]]}
    (folder / "seed_0_pae.json").write_text(json.dumps([error]))
    with pytest.raises(UserError, match=r"seed_0\.cif: has another number of residues than its scores"):
        write_target_page(folder, [])


def test_what_predict_writes_is_read(folder: Path) -> None:
    """Catches a finished result that is refused, or read as other numbers."""
    np.testing.assert_array_equal(read_plddt(folder, 0), np.full(LENGTH, 90))
    assert read_pae(folder, 0)[1] == 31.75
    np.testing.assert_array_equal(read_contacts(folder, 0), np.eye(LENGTH))
    (folder / "seed_0_relaxed.json").write_text(json.dumps(RELAXED))
    assert read_relaxation(folder, 0) == RELAXED
    (folder / "seed_0_relaxed.json").unlink()
    write_target_page(folder, [])
    assert "1 target" in batch_page(folder.parent, []).html()
