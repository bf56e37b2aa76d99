"""`evodsp.predict`: prediction from Python."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

import evodsp
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_TYPES
from evodsp.inference.results import read_result
from evodsp.parallel.config import SequenceConfig

from .conftest import OTHER, QUERY, Workplace

SIZES: dict[str, Any] = {"recycles": 1, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}


def silent(line: str) -> None:
    """Drop a line of progress."""


def test_predict_from_python(workplace: Workplace) -> None:
    """Catches lost options, strings that are not accepted as paths, and results unlike the files."""
    config, lines = workplace.config, list[str]()
    paths = [str(getattr(config, name)) for name in ("fasta", "alignments", "checkpoint", "output")]
    results = evodsp.predict(*paths, report=lines.append, seeds=2, first_seed=3, format="pdb", **SIZES)
    assert [result.name for result in results] == ["alpha_A", "beta_A"]
    for result in results:
        assert sorted(result.mean_plddt) == [3, 4]
        assert result.structure().suffix == ".pdb"
        assert read_result(result.folder).mean_plddt == result.mean_plddt
    assert any("alpha_A" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recycle": 3}, "no option 'recycle'. Did you mean 'recycles'?"),
        ({"recycles": -1}, "--recycles is -1"),
        ({"parallel": SequenceConfig(2)}, "runs in one process"),
    ],
)
def test_a_wrong_option_is_a_user_error(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    """Catches a dataclass's TypeError, and a number of ranks that is accepted but ignored."""
    with pytest.raises(UserError) as caught:
        evodsp.predict("x.fasta", "alignments", "x.ckpt", tmp_path / "out", **options)
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sequences_and_alignments_from_memory(workplace: Workplace) -> None:
    """Catches an alignment that is given to another record or not at all, and numbers unlike those from files."""
    a3m = (workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m").read_text()  # type: ignore[operator]
    made = workplace.config.checkpoint
    sequences = {"alpha_A": QUERY, "beta_A": OTHER}
    alpha, beta = evodsp.predict(sequences, {"alpha_A": a3m}, made, report=silent, **SIZES)  # type: ignore[arg-type]
    (file,) = evodsp.predict(
        {"alpha_A": QUERY},
        workplace.config.alignments,
        made,
        workplace.root / "out",
        silent,
        **SIZES,  # type: ignore[arg-type]
    )
    np.testing.assert_array_equal(alpha.positions, file.positions)
    np.testing.assert_array_equal(alpha.plddt, file.plddt)
    assert (alpha.sequence, beta.sequence) == (QUERY, OTHER)
    lone = evodsp.predict({"alpha_A": QUERY}, None, made, report=silent, **SIZES)[0]  # type: ignore[arg-type]
    assert np.abs(lone.positions - alpha.positions).max() > 1e-3


def test_a_result_has_what_its_files_have(workplace: Workplace) -> None:
    """Catches arrays of another seed, an order of atoms that is not atom37's, and texts that lose how they were made."""
    config = workplace.config
    (one, _) = evodsp.predict(
        config.fasta, config.alignments, config.checkpoint, config.output, silent, seeds=2, **SIZES
    )  # type: ignore[arg-type]
    for key in one.mean_plddt:
        shown = one.of(key)
        model = gemmi.read_structure(str(one.structure(key)))[0]
        atoms = {(residue.seqid.num - 1, atom.name): atom for residue in model["A"] for atom in residue}
        assert int(shown.mask.sum()) == len(atoms)
        for (residue, name), atom in atoms.items():
            np.testing.assert_allclose(shown.positions[residue, ATOM_TYPES.index(name)], atom.pos.tolist(), atol=1e-3)
            assert atom.b_iso == pytest.approx(float(shown.plddt[residue]), abs=0.006)
        assert shown.plddt.mean() == pytest.approx(one.mean_plddt[key], abs=0.01)
        assert shown.to_cif() == one.structure(key).read_text()
        assert shown.to_pdb().startswith("HEADER") or "ATOM" in shown.to_pdb()
    assert one.shown == one.best
    assert (one.pae, one.ptm) == (None, None)
    assert evodsp.Prediction.read(one.folder).mean_plddt == one.mean_plddt
    with pytest.raises(UserError, match="no prediction '9'; there are"):
        one.of(9)
    assert "mean pLDDT" in repr(one)
    assert "<script" not in one._repr_html_()
    assert "polyline" in one._repr_html_()


def test_what_is_saved(workplace: Workplace) -> None:
    """Catches files that vanish with the temporary folder, and a folder of the user that is overwritten."""
    made = workplace.config.checkpoint
    (one,) = evodsp.predict({"x": OTHER}, None, made, report=silent, **SIZES)  # type: ignore[arg-type]
    folder = one.folder
    for name in ("a/x.cif", "x.pdb"):
        assert gemmi.read_structure(str(one.save(workplace.root / name)))[0]["A"]
    kept = one.save(workplace.root / "all")
    assert (kept / "report.html").is_file()
    with pytest.raises(UserError, match="exists already"):
        one.save(workplace.root / "all")
    with pytest.raises(UserError, match=r"written as \.cif or \.pdb"):
        one.save(workplace.root / "x.mol2")
    assert folder.is_dir()
    del one
    gc.collect()
    assert not folder.exists()
    assert evodsp.Prediction.read(kept).sequence == OTHER


def test_a_notebook_shows_the_page(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a page whose own quotes end the frame's attribute, and a traceback where there is no notebook."""
    (one,) = evodsp.predict({"x": OTHER}, None, workplace.config.checkpoint, report=silent, **SIZES)  # type: ignore[arg-type]
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"no notebook is running; open .*report.html"):
        one.show()
    shown: list[str] = []
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = lambda: "running"  # type: ignore[attr-defined]
    display.HTML, display.display = str, shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    one.show()
    (frame,) = shown
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count('"') == 8, "the attributes' own quotes only"


@pytest.mark.parametrize(
    ("inputs", "alignments", "words"),
    [
        ({"two words": "MKT"}, None, "needs a name of one word"),
        ({"x": "MKT\n>y\nMKT"}, None, "letters without '>'"),
        ({"x": "MKT"}, {"x": "uniref.a3m"}, "is no A3M text"),
        ({"x": "MKT"}, {"../x": ">x\nMKT\n"}, "take '/' out of it"),
        ({}, None, "no records|empty|no sequence"),
        ("MKTAYIAK", None, "MKTAYIAK: no such file or folder"),
    ],
)
def test_what_python_gives_wrong(workplace: Workplace, inputs: Any, alignments: Any, words: str) -> None:
    """Catches a sequence that is silently taken for something else, and texts that lead out of the temporary folder."""
    with pytest.raises(UserError, match=words):
        evodsp.predict(inputs, alignments, workplace.config.checkpoint, report=silent, **SIZES)
