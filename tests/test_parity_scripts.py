"""`make parity` itself needs minutes and DeepMind's JAX code; here are the parts that decide what it shows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evodsp.config import ModelConfig
from scripts.parity import compare, table
from scripts.parity.subject import Sizes, Subject, shallow

ROOT = Path(__file__).resolve().parents[1]
SIZES = Sizes(residues=24, padded_residues=3, clusters=6, extra=7)
CONFIG = shallow(ModelConfig.preset("model_1_ptm"), evoformer=2, extra_msa=1, template=1, structure_iterations=1)
SMALL = dataclasses.replace(CONFIG, templates=dataclasses.replace(CONFIG.templates, enabled=False))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.draw(SMALL, SIZES, seed=3, fused=False)


def test_parameters_are_dense_and_scaled_by_their_inputs(subject: Subject) -> None:
    """Catches a zero-initialised layer, which would hide all that is before it, and one that drowns the others."""
    for key, array in subject.parameters.items():
        assert array.dtype == np.float32
        assert (array != 0).mean() > 0.99, key
    root = "alphafold/alphafold_iteration/evoformer/evoformer_iteration"
    output = subject.parameters[f"{root}/outer_product_mean//output_w"]  # blocks, 32, 32, 128
    assert output.std() == pytest.approx(1 / 32, rel=0.05)
    gate = subject.parameters[f"{root}/triangle_multiplication_outgoing/left_gate//bias"]
    assert gate.mean() == pytest.approx(1, abs=0.1)


def test_a_seed_means_the_same_subject_and_another_seed_another() -> None:
    """Catches draws that do not come from the seed: a difference that was found could not be looked at again."""
    first, same, other = (Subject.draw(SMALL, SIZES, seed, fused=True).flat() for seed in (3, 3, 4))
    assert all(np.array_equal(first[key], same[key]) for key in first)
    for part in ("parameters", "features", "structure"):
        assert any(key.startswith(part) and not np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    "name",
    ["seq_mask", "msa_mask", "extra_msa_mask", "template_mask", "template_pseudo_beta_mask", "atom37_atom_exists"],
)
def test_every_mask_holds_padding(subject: Subject, name: str) -> None:
    """Catches a mask of ones, with which a module that ignores it would agree."""
    mask = subject.features[name]
    assert set(np.unique(mask)) == {0, 1}
    if mask.ndim > 2 and "template" not in name and "atom" not in name:
        assert not mask[:, :, SIZES.residues :].any()
        assert not mask[:, -SIZES.padded_rows :].any()
        assert (mask[:, 1 : -SIZES.padded_rows, : SIZES.residues] == 0).any(), "no letter is missing by itself"


def test_the_label_is_a_chain_with_missing_atoms(subject: Subject) -> None:
    """Catches atoms on top of one another or bonds that no peptide has: their torsions would be rounding noise."""
    positions, mask = subject.structure["all_atom_positions"], subject.structure["all_atom_mask"]
    n, ca, c = (positions[: SIZES.residues, atom] for atom in range(3))
    there = mask[: SIZES.residues, :3].all(-1)
    assert 3 <= (~there).sum() < SIZES.residues / 2
    assert np.linalg.norm(ca - n, axis=-1)[there] == pytest.approx(1.459, abs=1e-3)
    bonded = there[:-1] & there[1:]
    assert np.linalg.norm(n[1:] - c[:-1], axis=-1)[bonded] == pytest.approx(1.329, abs=1e-3)


def sides(residues: int = 4) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two equal sides and their features: one padded residue, one padded row."""
    rng = np.random.default_rng(0)
    theirs = {
        "masked_msa/logits": rng.normal(size=(3, residues, 23)),
        "structure/positions": rng.normal(size=(residues, 37, 3)),
        "loss/total": np.array(2.0),
        "gradient/a/b//weights": rng.normal(size=(5, 6)),
        "gradient/a/c//bias": np.full(3, 1e-9),
    }
    seq_mask = np.ones((1, residues))
    seq_mask[:, -1] = 0
    msa_mask = np.ones((1, 3, residues)) * seq_mask[:, None]
    msa_mask[:, -1] = 0
    exists = np.ones((1, residues, 37)) * seq_mask[..., None]
    features = {"seq_mask": seq_mask, "msa_mask": msa_mask, "atom37_atom_exists": exists}
    return {name: values.copy() for name, values in theirs.items()}, theirs, features


def test_equal_sides_pass() -> None:
    rows = table.compare(*sides())
    assert all(row.passed and row.measured == 0 for row in rows)
    assert table.text(rows).endswith("5 quantities, all within what is allowed")


@pytest.mark.parametrize(
    ("name", "where", "by", "quantity"),
    [
        ("masked_msa/logits", (0, 1, 2), 1e-3, "masked_msa/logits"),
        ("structure/positions", (2, 3, 0), 2e-3, "atom positions"),
        ("loss/total", (), 1e-4, "loss total"),
        ("gradient/a/b//weights", (2, 2), 1e-1, "gradient difference, 2 parameters"),
        ("loss/total", (), np.nan, "loss total"),
        ("gradient/a/c//bias", (0,), np.nan, "gradient norm, 2 parameters"),
    ],
)
def test_a_difference_is_found(name: str, where: tuple[int, ...], by: float, quantity: str) -> None:
    """Catches a quantity that is not compared, or one that is not a number and passes."""
    ours, theirs, features = sides()
    ours[name][where] += by
    beyond = [row.quantity for row in table.compare(ours, theirs, features) if not row.passed]
    assert quantity in beyond
    assert f"{len(beyond)} beyond what is allowed" in table.text(table.compare(ours, theirs, features))


@pytest.mark.parametrize(("name", "where"), [("masked_msa/logits", (0, 3)), ("masked_msa/logits", (2, 0))])
def test_padding_is_not_compared(name: str, where: tuple[int, ...]) -> None:
    """Catches a comparison of the noise that AF2 leaves in padded residues and rows."""
    ours, theirs, features = sides()
    ours[name][where] += 1
    assert all(row.passed for row in table.compare(ours, theirs, features))


def test_a_quantity_that_we_lack_is_an_error() -> None:
    """Catches a head or a parameter that only the other side has, and that would go unseen."""
    ours, theirs, features = sides()
    del ours["gradient/a/c//bias"]
    with pytest.raises(KeyError):
        table.compare(ours, theirs, features)


def test_distance_to_the_nearest_edge() -> None:
    """Catches a warning that looks at padding, or at other bins than those of recycling."""
    positions = np.zeros((3, 37, 3), np.float32)
    positions[1, :, 0] = 5.76  # edges are at 3.25, 4.5, 5.75, …
    nearest = compare.nearest_to_an_edge(positions, np.zeros(3, np.int32), np.array([1.0, 1.0, 0.0]))
    assert nearest == pytest.approx(0.01, abs=1e-5)


def test_openfold_is_skipped_where_it_is_not_installed(tmp_path: Path) -> None:
    """Catches a missing OpenFold that ends the run with a traceback."""
    side = ROOT / "scripts" / "parity" / "openfold_side.py"
    hidden = tmp_path / "openfold.py"  # found before any that is installed
    hidden.write_text("raise ImportError\n")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(side)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "subject", "result"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (compare.SKIPPED, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alphafold", "nowhere/python"], "nowhere/python: cannot be run"),
        (["--alphafold", sys.executable, "--residues", "3"], "--residues 3: too few"),
        (["--alphafold", sys.executable], "has no package alphafold; run `make parity`"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or exit code 1, which means that the two sides disagree."""
    assert compare.main([*arguments, "--evoformer", "1", "--template", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
