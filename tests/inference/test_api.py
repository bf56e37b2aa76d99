"""A prediction from Python: `evodsp.predict`, what it takes without files, its arrays, and what a notebook shows."""

from __future__ import annotations

import gc
import gzip
import inspect
import subprocess
import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import evodsp
from evodsp.data.formats.mmcif import read_structure
from evodsp.errors import UserError
from evodsp.inference.api import OWN, is_sequence
from evodsp.inference.config import PredictConfig
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import read_result
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.config import SequenceConfig
from tests.builders.parameters import noisy

from .conftest import QUERY, Workplace


def test_predict_from_python(workplace: Workplace) -> None:
    """Catches lost options, strings that are not accepted as paths, and results unlike the files."""
    config, lines = workplace.config, list[str]()
    paths = [str(getattr(config, name)) for name in ("fasta", "alignments", "checkpoint", "output")]
    sizes: dict[str, Any] = {"recycles": 1, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}
    results = evodsp.predict(*paths, report=lines.append, seeds=2, first_seed=3, format="pdb", **sizes)
    assert [result.name for result in results] == ["alpha_A", "beta_A"]
    for result in results:
        assert sorted(result.mean_plddt) == [3, 4]
        assert result.structure().suffix == ".pdb"
        assert read_result(result.folder).mean_plddt == result.mean_plddt
    assert any("alpha_A" in line for line in lines)
    named: dict[str, Any] = dict(zip(("fasta", "alignments", "checkpoint", "output"), paths, strict=True))
    again = evodsp.predict(**named, report=lines.append, seeds=2, first_seed=3, format="pdb", **sizes)
    assert [(one.kept, one.mean_plddt) for one in again] == [(True, one.mean_plddt) for one in results]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recycle": 3}, "evodsp.predict: no option 'recycle'. Did you mean 'recycles'? See help(evodsp.predict)"),
        ({"template_structure_dir": "x"}, "no option 'template_structure_dir'. evodsp calls it templates. See"),
        ({"num_recycles": 3}, "no option 'num_recycles'. evodsp calls it recycles. See"),
        ({"recycles": -1}, "--recycles is -1"),
        ({"fasta": "y.fasta"}, "fasta is given beside inputs"),
        ({"checkpoint": None}, "no model is given"),
        ({"parallel": SequenceConfig(2)}, "runs in one process"),
    ],
)
def test_a_wrong_option_is_a_user_error(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    """Catches a dataclass's TypeError, and a number of ranks that is accepted but ignored."""
    with pytest.raises(UserError) as caught:
        evodsp.predict("x.fasta", "alignments", **{"checkpoint": "x.ckpt", "output": tmp_path / "out", **options})
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_editors_know_the_options_of_the_command() -> None:
    """Catches an option of the command that `evodsp.predict` lacks, and one with another default or type there. (An editor
    completes the names of a signature only: not those of a dictionary.)"""
    hints = get_type_hints(evodsp.predict)
    ours = {
        name: one for name, one in inspect.signature(evodsp.predict).parameters.items() if one.kind is one.KEYWORD_ONLY
    }
    for option in fields(PredictConfig):
        if option.name not in OWN:
            default = option.default if option.default is not MISSING else option.default_factory()
            found, taken = ours.pop(option.name).default, str(hints[option.name]).replace("str | pathlib.", "pathlib.")
            assert (list(found) if found == () else found) == default, option.name
            if option.name != "layers":
                assert taken == str(get_type_hints(PredictConfig)[option.name]), option.name
    assert not ours


def test_results_and_alignments_have_the_names_that_were_given(workplace: Workplace) -> None:
    """Catches a dictionary whose keys are the clean names of folders, which the caller does not know."""
    name, sizes = "sp|P1|X_Y", {"recycles": 0, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}
    given: dict[str, Any] = {"checkpoint": workplace.config.checkpoint, "report": lambda line: None}
    found = evodsp.predict({name: "MKTAYI"}, {name: ">q\nMKTAYI\n>h\nMKTAYV\n"}, **given, **sizes)
    assert list(found) == [name]
    assert found[name].name == "P1"


def test_an_alignment_may_have_dots_in_its_name(workplace: Workplace, tmp_path: Path) -> None:
    """Catches a file that is left out without a word, so that the sequence is predicted alone."""
    file, packed, other = (tmp_path / name for name in ("my.v2.a3m", "my.v2.a3m.gz", "my.v2.txt"))
    rows = ">q\nMKTAYI\n>h\nMKTAYV\n"
    for path in (file, other):
        path.write_text(rows)
    packed.write_bytes(gzip.compress(rows.encode()))
    sizes: dict[str, Any] = {"recycles": 0, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}
    for path in (file, packed):
        lines: list[str] = []
        evodsp.predict({"x": "MKTAYI"}, {"x": path}, workplace.config.checkpoint, report=lines.append, **sizes)
        assert any("read 2 sequences in 1 alignment" in line for line in lines)
    with pytest.raises(UserError, match=r"'my\.v2\.txt' is no \.a3m, \.sto or \.npz, gzipped or not; rename it"):
        evodsp.predict({"x": "MKTAYI"}, {"x": other}, workplace.config.checkpoint, report=lines.append, **sizes)


def test_nothing_is_printed_but_what_fails(workplace: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches progress in the middle of a program's own output, and a record that is left out without a word."""
    sizes: dict[str, Any] = {"recycles": 0, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}
    fasta = ">good\nMKTAYI\n>bad\nMK1\n"
    (found,) = evodsp.predict(fasta, checkpoint=workplace.config.checkpoint, **sizes)
    assert found.name == "good"
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("evodsp: bad: ")
    assert said.err.count("\n") == 1


TEST = evodsp.ModelConfig.preset("test").to_dict()
FEW: dict[str, Any] = {"recycles": 0, "msa_clusters": 5, "extra_msa": 4, "device": "cpu"}


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="session")
def with_pae() -> AlphaFold:
    """A tiny model with random weights and a head for aligned errors."""
    torch.manual_seed(1)
    config = evodsp.ModelConfig.from_dict({**TEST, "heads": {**TEST["heads"], "predicted_aligned_error": True}})
    return noisy(AlphaFold(config)).eval()


def test_a_sequence_without_files(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches A3M text that is not read, a model in memory that is predicted with other sizes or weights than its file's or
    that is changed, and temporary files that stay behind, or go while a structure of them is still in use."""
    temporary = workplace.root / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    config = workplace.config
    model = evodsp.load_model(config.checkpoint)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    a3m = (workplace.root / "alignments" / "alpha_A" / "uniref90_hits.a3m").read_text()
    lines: list[str] = []
    one = evodsp.predict(QUERY, a3m, model, report=lines.append, device="cpu")
    assert isinstance(one, Prediction)
    assert not any(str(temporary) in line for line in lines)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    [same] = evodsp.predict(
        [QUERY], workplace.root / "alignments" / "alpha_A", config.checkpoint, config.output, silent, device="cpu"
    )
    best = one.ranked[0]
    del one
    gc.collect()
    assert best.sequence == QUERY
    np.testing.assert_array_equal(best.positions, same.positions)
    np.testing.assert_array_equal(best.plddt, same.plddt)
    assert best.pae is None
    assert best.ptm is None
    assert "ATOM      1  N   MET A   1" in best.to_pdb()
    del best
    gc.collect()
    assert not any(temporary.iterdir())


def test_arrays_and_texts_are_those_of_the_files(with_pae: AlphaFold, tmp_path: Path) -> None:
    """Catches an order other than the ranking's, arrays of another seed, and texts unlike the files."""
    found = evodsp.predict({"x": QUERY}, {"x": f">x\n{QUERY}\n"}, with_pae, tmp_path / "out", silent, seeds=2, **FEW)
    one = found["x"]
    assert [ranked.key for ranked in one.ranked] == list(one.mean_plddt)
    assert one.ptm == one.ranked[0].ptm
    assert one.ranked[0].mean_plddt >= one.ranked[1].mean_plddt
    for ranked in one.ranked:
        [chain] = read_structure(one.structure(ranked.key)).chains.values()
        np.testing.assert_array_equal(ranked.positions, chain.positions)
        assert ranked.mask.shape == (len(QUERY), 37)
        assert ranked.plddt.mean() == pytest.approx(ranked.mean_plddt, abs=0.01)
        assert ranked.pae is not None
        assert ranked.pae.shape == (len(QUERY), len(QUERY))
        assert ranked.to_cif() == one.structure(ranked.key).read_text()
    assert one.save(tmp_path / "best.cif").read_text() == one.structure().read_text()
    assert one.save(tmp_path / "best.pdb").read_text() == one.to_pdb()
    saved = one.save(tmp_path / "all")
    assert {path.name for path in saved.iterdir()} == {path.name for path in one.folder.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        one.save(saved)


def test_what_a_notebook_shows(with_pae: AlphaFold, tmp_path: Path) -> None:
    """Catches a name that is read as HTML, a summary that carries the viewer, and a frame whose page ends early."""
    one = evodsp.predict({"x.1": QUERY}, None, with_pae, report=silent, **FEW)["x.1"]
    summary = one._repr_html_()
    assert len(summary) < 10_000
    assert "pTM" in summary
    assert "<img" in summary
    assert "<iframe" not in summary
    shown = one.show(height=500)._repr_mimebundle_()
    frame = shown["text/html"]
    assert frame.count("<") == 2
    assert frame.endswith("</iframe>")
    assert frame.count('"') % 2 == 0
    assert "3Dmol" in frame
    assert 'height="500"' in frame
    assert 'src="http' not in frame
    assert shown["image/svg+xml"].count("<line") == 2 * (len(QUERY) - 3)  # the X has no CA: both of its links are gaps
    figure = one.plot()
    assert figure.startswith("<svg")
    assert figure.index("Contacts: CB within 8 Å, by the distogram") < figure.index("Predicted aligned error")


@pytest.mark.parametrize(
    ("inputs", "alignments", "expected"),
    [
        ("mktay", None, "'mktay' is no file or folder, and no sequence"),
        ("", None, "nothing to predict"),
        ([], None, "nothing to predict"),
        ({}, None, "nothing to predict"),
        ({"a b": "MK"}, None, "the name 'a b' is empty or has blanks"),
        ({"a": "x.fasta"}, None, "'a' is 'x.fasta', but a sequence is in upper-case letters"),
        ({"a": "MK", "b": "MK"}, ">a\nMK\n", "one alignment for 2 sequences"),
        ({"alpha": "MK"}, {"alpa": ">a\nMK\n"}, "no record. Did you mean 'alpha'?"),
        ({"a": "MK"}, {"a": "nope.a3m"}, "'nope.a3m' is no file or folder, and no A3M text"),
        ("MK", ">a\nMKT\n", "has 3 residues"),
    ],
)
def test_a_wrong_input_is_a_user_error(workplace: Workplace, inputs: Any, alignments: Any, expected: str) -> None:
    """Catches a traceback, and a message that names a temporary folder."""
    with pytest.raises(UserError) as caught:
        evodsp.predict(inputs, alignments, workplace.config.checkpoint, report=silent, device="cpu")
    assert expected in str(caught.value)
    assert tempfile.gettempdir() + "/evodsp_" not in str(caught.value)


_WRONG_TYPES = """
import evodsp
from evodsp.errors import UserError
for words in ({"inputs": 3}, {"inputs": None}, {"alignments": 3}, {"checkpoint": 3}, {"seeds": "x"}, {"seeds": 1.5}):
    try:
        evodsp.predict(**{"inputs": "MK", "checkpoint": "x.ckpt", **words})
    except UserError as error:
        print(error)
try:
    evodsp.AlphaFold("small")
except TypeError as error:
    print(error)
"""


@pytest.mark.verify
def test_a_value_of_another_type_is_a_user_error() -> None:
    """Catches Python's own words for it, which name no argument. In a process of its own: here, types are checked before."""
    done = subprocess.run([sys.executable, "-c", _WRONG_TYPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "evodsp.predict: 3 is no sequence and no path; give a string or a Path",
        "evodsp.predict: None is no sequence and no path; give a string or a Path",
        "evodsp.predict: alignments: 3 is no path and no A3M text; give a string or a Path",
        "evodsp.predict: 3 is no model and no path; use evodsp.load_model(path)",
        "--seeds is 'x', but must be a whole number at least 1",
        "--seeds is 1.5, but must be a whole number at least 1",
        "AlphaFold takes a ModelConfig, but got 'small'; ModelConfig.preset('model_1_ptm') makes one",
    ]


def test_what_is_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file whose name is in capitals, and a long sequence that cannot be a file's name."""
    monkeypatch.chdir(tmp_path)
    assert is_sequence("MKTAY\nIAK*")
    assert is_sequence("M" * 5000)
    assert not any(map(is_sequence, ("data", "x.fasta", "", "-", "MK1", Path("MK"))))
    (tmp_path / "MK").touch()
    assert not is_sequence("MK")
