"""`evodsp.predict`: prediction from Python."""

from __future__ import annotations

import gzip
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import evodsp
from evodsp.errors import UserError
from evodsp.inference.api import OWN
from evodsp.inference.config import PredictConfig
from evodsp.inference.results import read_result
from evodsp.parallel.config import SequenceConfig

from .conftest import Workplace


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


def test_embed_refuses_names_that_it_does_not_have() -> None:
    """Catches Python's TypeError, which names no other."""
    with pytest.raises(UserError, match=r"evodsp\.embed: no option 'recycle'\. Did you mean 'recycles'"):
        evodsp.embed("MKTA", **{"recycle": 3})


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
