"""The bar that a run writes before its first step, for its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.data.similarity.nearest import Compared
from evodsp.model.alphafold import AlphaFold
from evodsp.report.runs import read_runs
from evodsp.training import scores
from evodsp.training.chains import Chains, find_chains
from evodsp.training.config import DataConfig
from evodsp.training.scores import warn_of_overlap, write_baseline
from evodsp.weights.pretrained import model_card
from tests.builders.bundled import dimers
from tests.builders.training_chains import write_chain

LETTERS = "MKTAYIAKQRWLEGSHMDER"
TRAIN, VALIDATION = ["1abc_A", "2abc_A"], ["3abc_A", "4abc_A"]


@pytest.fixture
def run_chains(tmp_path: Path) -> Chains:
    """Two training chains, and two validation chains that are copies of the second but for a residue or two."""
    letters = ["ACDEFGHIKLMNPQRSTVWY", LETTERS, f"W{LETTERS[1:]}", f"WW{LETTERS[2:]}"]
    for key, sequence in zip([*TRAIN, *VALIDATION], letters, strict=True):
        write_chain(tmp_path, key, sequence)
    folders = {"alignment_dir": f"{tmp_path}/alignments", "structure_dir": f"{tmp_path}/mmcif_files"}
    return find_chains(DataConfig(**folders, train_chains=TRAIN, validation_chains=VALIDATION))


def test_the_bar_of_the_validation_chains(
    run_chains: Chains, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a bar of other chains, one bad chain that costs it, and a start that computes again what is there."""
    write_baseline(path := tmp_path / "baseline.json", run_chains, None)
    found = json.loads(path.read_text())
    assert (found["validation_chains"], found["training_chains"], found["without"]) == (2, 2, {})
    assert [(copy["chain"], copy["nearest"]) for copy in found["copies"]] == [
        ("3abc_A", "2abc_A"),
        ("4abc_A", "2abc_A"),
    ]
    assert found["identity"] == pytest.approx((19 / 20 + 18 / 20) / 2)
    assert found["lddt_ca"] > 0.5
    (tmp_path / "mmcif_files" / "3abc.cif").write_text("data_3ABC\n")
    write_baseline(path, run_chains, None)
    assert json.loads(path.read_text()) == found
    path.write_text("{")
    write_baseline(path, run_chains, None)
    assert [copy["chain"] for copy in json.loads(path.read_text())["copies"]] == ["4abc_A"]
    assert list(json.loads(path.read_text())["without"]) == ["3abc_A"]
    write_chain(tmp_path, "5abc_A", "YWVTSRQPNMLKIHGFEDCA")
    write_baseline(path, replace(run_chains, train=["1abc_A", "5abc_A"]), None)
    assert json.loads(path.read_text())["copies"][0]["nearest"] != "2abc_A", "as many training chains, but others"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("most", [10_000, 0])
def test_there_is_no_bar_for_chains_that_are_trained_on(
    run_chains: Chains, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Catches '0.937, copying 0.052' of a chain that the run trains on, in its log, its report and its model card."""
    monkeypatch.setattr(scores, "MOST_CHAINS", most)
    (tmp_path / "curve.csv").write_text("step,val/lddt_ca\n0,0.937\n")
    write_chain(tmp_path, "6abc_A", f"W{LETTERS[1:]}")
    trained = [*TRAIN, "6abc_A", *(["4abc_A"] if not most else [])]
    same = {"3abc_A": "6abc_A"} if most else {"4abc_A": "4abc_A"}  # too many chains are compared by name only
    such = "3abc_A, whose sequence 6abc_A has" if most else "4abc_A"
    for _ in range(2):  # a run that resumes warns again
        write_baseline(tmp_path / "baseline.json", overlapping := replace(run_chains, train=trained), None)
        said = f"1 of 2 scored chains are trained on, such as {such}: their scores do not say"
        assert f"evodsp: warning: {said}" in capsys.readouterr().err
    found = json.loads((tmp_path / "baseline.json").read_text())
    assert (found["trained_on"], found["copies"], "lddt_ca" in found) == (same, [], False)
    warn_of_overlap(overlapping, VALIDATION, None)
    assert said in capsys.readouterr().err
    (tmp_path / "alignments" / "4abc_A").rename(tmp_path / "alignments" / "4abc")
    for one, other in (("4abc", "4abc_A"), ("4abc_A", "4abc")):  # two names of one chain
        warn_of_overlap(replace(run_chains, train=[other]), [one], None)
        assert "1 of 1 scored chains are trained on, such as 4abc" in capsys.readouterr().err
    (run,) = read_runs([tmp_path])
    assert run.baseline is None
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "page.html").read_text()
    card = model_card("a", AlphaFold(ModelConfig.preset("test")), tmp_path / "checkpoints" / "last.ckpt", {})
    assert f"**Warning:** {said}" in card.replace("\\", "")
    assert "copying the nearest" not in card


def test_no_failure_ends_a_run(
    run_chains: Chains, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a bar that ends a run, that makes it wait for minutes or fails without a word, and that of other chains,
    from an earlier start, which stays."""
    path = tmp_path / "baseline.json"

    def said() -> str:
        path.write_text('{"copies": [], "without": {"9abc_A": ""}}')
        write_baseline(path, run_chains, None)
        (line,) = capsys.readouterr().err.splitlines()
        assert not path.exists()
        return line

    with monkeypatch.context() as patch:
        patch.setattr(scores, "SECONDS", -1)
        assert (
            "copying the nearest training chain scores (it takes more than -1 s; evodsp data doctor says it)" in said()
        )
    with monkeypatch.context() as patch:
        patch.setattr(scores, "MOST_CHAINS", 1)
        assert "(more than 1 training chains; evodsp data doctor says it)" in said()
    with monkeypatch.context() as patch:
        patch.setattr(Compared, "copies", lambda *_, **__: 1 // 0)
        assert "(integer division or modulo by zero)" in said()
    for key in VALIDATION:
        (tmp_path / "mmcif_files" / f"{key[:4]}.cif").unlink()
    assert "(3abc_A: " in said()


def test_the_bar_of_complexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run on complexes without a bar, and one whose report does not draw that of interfaces."""
    data = DataConfig(
        alignment_dir=str(dimers() / "alignments"),
        structure_dir=str(dimers() / "mmcif_files"),
        train_chains=["c001", "c036"],
        validation_chains=["c002"],
    )
    write_baseline(tmp_path / "baseline.json", find_chains(data, arrangement="multimer"), None)
    write_baseline(
        tmp_path / "both.json", find_chains(replace(data, train_chains=["c002"]), arrangement="multimer"), None
    )
    assert "1 of 1 scored chains are trained on, such as c002" in capsys.readouterr().err
    found = json.loads((tmp_path / "baseline.json").read_text())
    assert [(copy["chain"], copy["nearest"]) for copy in found["copies"]] == [("c002", "c001")]
    assert found["interface_lddt_ca"] > 0.5
    (tmp_path / "curve.csv").write_text("step,val/lddt_ca,val/interface_lddt_ca\n0,0.5,0.4\n")
    (run,) = read_runs([tmp_path])
    bar = run.baseline
    assert bar is not None
    assert (bar.name, bar.interface_lddt_ca) == ("copying the nearest training complex", found["interface_lddt_ca"])
