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
RANKINGS: list[Any] = [
    [],
    1,
    {"name": 3},
    {"name": None},
    {"ranking": []},
    {"ranking": {}},
    {"ranking": [1]},
    {"settings": 1},
    {"settings": {"a": DEEP}},
    {"models": []},
    {"models": {"a": 1}},
    {"models": {}},
    {"models": {"a": {}}},
    {"ranking": [ENTRY, ENTRY]},
    *(
        {"ranking": [{**ENTRY, **change}]}
        for change in (
            {"seed": 1e400},
            {"seed": -1},
            {"seed": True},
            {"seed": "0"},
            {"seed": 1 << 70},
            {"mean_plddt": "high"},
            {"mean_plddt": float("nan")},
            {"mean_plddt": 101},
            {"mean_plddt": 10**400},
            {"ptm": None},
            {"ptm": [1]},
            {"structure": "seed_0.c" + "i" * 500 + "f"},
            {"structure": "../../x.cif"},
            {"structure": "/etc/passwd"},
            {"structure": 3},
            {"model": "b"},
            {"model": ["a"]},
        )
    ),
    {"name": "\ud800"},
]


@pytest.mark.parametrize("change", RANKINGS, ids=str)
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
    [
        "",
        "{",
        "[1]",
        '{"plddt": 1}',
        '{"plddt": []}',
        '{"plddt": [1, 2',
        '{"plddt": [null]}',
        '{"plddt": [{}]}',
        '{"plddt": ["a"]}',
        '{"plddt": [NaN, 1, 1, 1, 1, 1]}',
        '{"plddt": [101]}',
        '{"plddt": [-1]}',
        '{"plddt": [1e999]}',
        '{"plddt": [[1], [1, 2]]}',
        '{"plddt": [' + "9" * 5000 + "]}",
        '{"plddt": ' + "[" * 100_000,
        '{"plddt": [1, 2]}',
    ],
)
def test_edited_scores_are_one_line(folder: Path, text: str) -> None:
    """Catches NaN that has no colour, an empty list, and another number of residues than the structure has."""
    scores = folder / "seed_0_scores.json"
    scores.write_text(text)
    with pytest.raises(UserError, match=r"seed_0(_scores\.json|\.cif):.* (predict again|is empty)") as error:
        write_target_page(folder, [])
    assert len(str(error.value)) < 500
    with pytest.raises(UserError, match=r"seed_0_scores\.json:.* (predict again|is empty)"):
        compare(folder / "seed_0.cif", folder / "seed_0.cif", "A")
    assert ("0 targets" in batch_page(folder.parent, []).html()) == (text != '{"plddt": [1, 2]}')


def test_scores_of_another_length_are_one_line(folder: Path) -> None:
    """Catches a structure that is given the confidence of another one, without a word."""
    (folder / "seed_0_scores.json").write_text('{"plddt": [1, 2]}')
    with pytest.raises(UserError, match=r"seed_0\.cif: has 6 residues, but its scores are of 2; predict again"):
        read_structure(read_with_ranking(folder)[0], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"model_seconds": None},
        {"model_seconds": "1"},
        {"features_seconds": float("nan")},
        {"seeds": 1},
        {"seeds": [1]},
        {"model_seconds": True},
        {"model_seconds": 10**400},
        {"device": DEEP},
    ],
    ids=str,
)
def test_edited_timings_are_one_line(folder: Path, change: dict[str, Any]) -> None:
    """Catches the TypeError of times that are no numbers."""
    (folder / TIMINGS).write_text(json.dumps({**json.loads((folder / TIMINGS).read_text()), **change}))
    for read in (read_timings, lambda folder: write_target_page(folder, [])):
        with pytest.raises(UserError, match=r"timings\.json: not written by evodsp predict"):
            read(folder)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [1],
        [{}],
        [{"predicted_aligned_error": [[1]], "max_predicted_aligned_error": "a"}],
        [{"predicted_aligned_error": [[1, 2]], "max_predicted_aligned_error": 31.75}],
        [{"predicted_aligned_error": [[float("nan")]], "max_predicted_aligned_error": 31.75}],
        [{"predicted_aligned_error": 1, "max_predicted_aligned_error": 31.75}],
        [{"predicted_aligned_error": [[1]], "max_predicted_aligned_error": 0}],
    ],
    ids=str,
)
def test_edited_aligned_errors_are_one_line(folder: Path, content: Any) -> None:
    """Catches a matrix that is none, and a scale of no length."""
    (folder / "seed_0_pae.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"seed_0_pae\.json: not written by evodsp predict"):
        read_pae(folder, 0)


def test_aligned_errors_of_another_size_are_one_line(folder: Path) -> None:
    """Catches the IndexError of a page whose matrix is smaller than its chain."""
    error = {"predicted_aligned_error": [[1, 2], [3, 4]], "max_predicted_aligned_error": 31.75}
    (folder / "seed_0_pae.json").write_text(json.dumps([error]))
    with pytest.raises(UserError, match=r"seed_0\.cif: has another number of residues than its scores"):
        write_target_page(folder, [])


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.uint8), np.zeros((2, 2)), np.array([["a"]]), np.zeros((2, 3), np.uint8)]
)
def test_edited_contacts_are_one_line(folder: Path, array: np.ndarray) -> None:
    """Catches probabilities above 1, and a matrix that is none."""
    np.savez(folder / "seed_0_contacts.npz", probability=array)
    with pytest.raises(UserError, match=r"seed_0_contacts\.npz: not written by evodsp predict"):
        read_contacts(folder, 0)
    np.savez(folder / "seed_0_contacts.npz", other=array)
    with pytest.raises(UserError, match="no array probability"):
        read_contacts(folder, 0)


@pytest.mark.parametrize(
    "change",
    [{"rmsd": None}, {"seconds": "1"}, {"violations_before": 3}, {"violations_after": {}}, {"energy_after": "low"}],
    ids=str,
)
def test_an_edited_relaxation_is_one_line(folder: Path, change: dict[str, Any]) -> None:
    """Catches the KeyError of a page with the facts of a relaxation."""
    none, facts = {"any": 0}, {"rmsd": 0.1, "seconds": 1.0, "energy_before": None, "energy_after": -3.5}
    facts |= {"violations_before": none, "violations_after": none}
    (folder / "seed_0_relaxed.json").write_text(json.dumps(facts))
    assert read_relaxation(folder, 0) == facts
    (folder / "seed_0_relaxed.json").write_text(json.dumps({**facts, **change}))
    with pytest.raises(UserError, match=r"seed_0_relaxed\.json: not written by evodsp predict"):
        read_relaxation(folder, 0)


def test_what_predict_writes_is_read(folder: Path) -> None:
    """Catches a finished result that is refused, or read as other numbers."""
    np.testing.assert_array_equal(read_plddt(folder, 0), np.full(LENGTH, 90))
    assert read_pae(folder, 0)[1] == 31.75
    np.testing.assert_array_equal(read_contacts(folder, 0), np.eye(LENGTH))
    write_target_page(folder, [])
    assert "1 target" in batch_page(folder.parent, []).html()
