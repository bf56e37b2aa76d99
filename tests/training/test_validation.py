"""Validations: their scores, the last one of a run, runs that they end, and the bar that a run writes before its first step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.data.similarity.nearest import Compared
from evodsp.geometry.residues import CA
from evodsp.metrics import lddt_ca
from evodsp.model.alphafold import AlphaFold
from evodsp.report.runs import read_curve, read_runs
from evodsp.training import scores
from evodsp.training.chains import Chains, find_chains
from evodsp.training.config import DataConfig
from evodsp.training.scores import known_scores, score, warn_of_overlap, write_baseline
from evodsp.weights.checkpoint import read_checkpoint
from evodsp.weights.pretrained import model_card
from tests.builders.bundled import dimers
from tests.builders.labelled_batch import batch_of
from tests.builders.small_model import SMALL, config, features
from tests.builders.training import CommandPool
from tests.builders.training_chains import write_chain


def fit(chains: Path, output: Path, *options: str) -> int:
    """A run of epochs of four steps."""
    return main(["fit", f"--config={chains}/tiny.yaml", f"--output={output}", "--async_checkpoints=false", *options])


def validated(output: Path) -> list[int]:
    """The numbers of steps after which a validation is in the curve."""
    return [step + 1 for step, row in read_curve(output / "curve.csv").items() if row.get("val/lddt_ca")]


def table(text: str) -> list[str]:
    """The lines of the last table of scores, with the line before it."""
    lines = text.splitlines()
    first = max(number for number, line in enumerate(lines) if line.startswith("chain"))
    return lines[first - 1 : first + 2]


@pytest.mark.verify
def test_the_last_weights_are_validated(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run whose table is of a step long before its end, a last checkpoint written before the validation of its step
    or without it, raw weights scored at the end, a resumed run without a last validation, or with one that is
    logged under another step."""
    output = tmp_path / "run"
    assert fit(chains, output, "--trainer.max_steps=2", "--checkpoint_every=1") == 0
    title, header, row = table(capsys.readouterr().out)
    assert (title, header.split()[0], row.split()[0]) == ("scores after step 2:", "chain", "1abc_A")
    assert validated(output) == [2]
    saved = read_checkpoint(output / "checkpoints/last.ckpt")
    score = float(read_curve(output / "curve.csv")[1]["val/lddt_ca"])
    scores = saved["callbacks"]["BestCheckpoint"]
    assert saved["global_step"] == 2
    assert float(scores["current_score"]) == pytest.approx(score, abs=1e-6), "written before the validation of its step"
    same = ["--config", str(chains / "tiny.yaml"), "--output", str(output), "--ckpt_path", "last"]
    assert main(["validate", *same]) == 0
    assert table(capsys.readouterr().out)[1:] == [header, row]
    assert fit(chains, output, "--trainer.max_steps=3", "--ckpt_path=last") == 0
    assert table(capsys.readouterr().out)[0] == "scores after step 3:"
    assert validated(output) == [2, 3]


@pytest.mark.verify_but("epochs")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--trainer.max_steps=2", "--trainer.val_check_interval=2"], [2], id="an interval's step"),
        pytest.param(["--trainer.max_epochs=1", "--trainer.max_steps=-1", "--trainer.val_check_interval=2",
                      "--data.samples_per_epoch=3"], [2, 3], id="epochs"),
        pytest.param(["--trainer.max_steps=1", "--trainer.check_val_every_n_epoch=5"], [1], id="sparse epochs"),
        pytest.param(["--trainer.max_steps=1", "--trainer.val_check_interval=00:01:00:00"], [1], id="a time"),
        pytest.param(["--trainer.max_steps=1", "--trainer.accumulate_grad_batches=2", "--data.samples_per_epoch=4",
                      "--trainer.val_check_interval=4"], [1], id="accumulated"),
        pytest.param(["--trainer.max_steps=1", "--trainer.limit_val_batches=0"], [], id="none wanted"),
    ],
)  # fmt: skip
def test_one_validation_after_the_last_step(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[int]
) -> None:
    """Catches a second validation where one coincides with the end, and intervals whose last validation is forgotten."""
    assert fit(chains, tmp_path / "run", "--trainer.callbacks=tests.builders.observers.Validations", *options) == 0
    out = capsys.readouterr().out
    assert [int(line.split()[-1]) for line in out.splitlines() if line.startswith("validation after")] == expected
    assert validated(tmp_path / "run") == expected
    assert ("scores after step" in out) == bool(expected)


@pytest.mark.verify
def test_a_signal_in_the_last_validation(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that was stopped in its last validation and never repeats it, because no step is left, and one that
    promises a further step."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    options = ("--trainer.max_steps=2", "--data.validation_chains=[1abc_A,2abc_B]")
    sends = "--trainer.callbacks=tests.builders.signal_to_itself.TerminateInValidation"
    assert fit(chains, stopped, *options, sends) == 75
    assert validated(stopped) == []
    capsys.readouterr()
    assert fit(chains, stopped, *options, "--ckpt_path=auto") == 0
    written = capsys.readouterr()
    found = table(written.out)
    assert found[0] == "scores after step 2:"
    assert " parameters, step 2 was the last; its validation is left\nstep 2/2 " in written.err
    assert fit(chains, whole, *options) == 0
    assert table(capsys.readouterr().out) == found
    assert validated(stopped) == validated(whole) == [2]
    assert read_checkpoint(stopped / "checkpoints/last.ckpt")["global_step"] == 2
    assert (stopped / "checkpoints/best.ckpt").is_file()
    assert fit(chains, stopped, *options, "--ckpt_path=auto") == 0
    assert "scores after" not in capsys.readouterr().out, "validated again, although nothing was left to do"


def words(chains: Path, output: Path, *options: str, steps: int = 40) -> list[str]:
    """A run with a validation after each step that learns nothing."""
    given = [
        "fit",
        f"--config={chains}/tiny.yaml",
        f"--output={output}",
        "--model.optimizer.lr=1e-30",
        "--early_stop=2",
    ]
    return [*given, "--data.samples_per_epoch=1", f"--trainer.max_steps={steps}", *options]


def test_a_run_ends_when_validations_do_not_get_better(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that goes on, one that ends at once, and a resume that forgets how many there were."""
    output = tmp_path / "run"
    assert main(words(chains, output, steps=2)) == 0
    assert "ended early" not in capsys.readouterr().out
    assert main(words(chains, output, "--ckpt_path=last")) == 0
    steps = read_checkpoint(output / "checkpoints" / "last.ckpt")["global_step"]
    assert steps == 3, "one validation that is the best, and two after it"
    assert "ended early: val/lddt_ca has not risen above " in capsys.readouterr().out


@pytest.mark.verify
def test_several_validations_of_an_epoch_and_two_ranks(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: CommandPool
) -> None:
    """Catches a run that ends in its first epoch without a line, and ranks of which one goes on."""
    often = words(chains, tmp_path / "often", "--trainer.val_check_interval=0.25", "--trainer.limit_val_batches=1")
    often[often.index("--data.samples_per_epoch=1")] = "--data.samples_per_epoch=8"
    assert main(often) == 0
    assert "ended early: " in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "often" / "checkpoints" / "last.ckpt")["global_step"] == 6
    two = words(chains, tmp_path / "two", "--parallel.sequence=2")
    assert [outcome.code for outcome in commands.evodsp(2, *two)] == [0, 0]
    assert read_checkpoint(tmp_path / "two" / "checkpoints" / "last.ckpt")["global_step"] == 3


def test_confidence_is_compared_where_the_truth_is_known() -> None:
    """Catches a mean over padding and residues without a CA, fractions compared with points, and the sign."""
    torch.manual_seed(0)
    model = AlphaFold(config()).double().eval()
    with torch.no_grad():
        for parameter in model.heads.plddt.parameters():
            parameter.normal_()
        batch = {**features(2), **batch_of(2, SMALL[2])}
        output = model(batch)
    found = score(output, batch)
    for b in range(2):
        known = batch["all_atom_mask"][b, :, CA] > 0
        assert 0 < known.sum() < SMALL[2] or b > 0
        probabilities = output.logits["plddt"][b, known].softmax(-1)
        centres = torch.arange(0.5, probabilities.shape[-1]) * 100 / probabilities.shape[-1]
        plddt = (probabilities * centres).sum(-1).mean()
        atoms = (output.structure.positions[b, known][:, CA], batch["all_atom_positions"][b, known][:, CA])
        true = 100 * lddt_ca(*atoms, torch.ones(int(known.sum())), per_residue=True).mean()
        assert float(found["plddt"][b]) == pytest.approx(float(plddt), abs=1e-5)
        assert float(found["plddt_too_high"][b]) == pytest.approx(float(plddt - true), abs=1e-4)


def test_a_validation_repeats() -> None:
    """Catches scores of two steps that differ because a part of each chain, or a number of cycles, is drawn."""
    assert DataConfig().validation == FeatureConfig(crop_size=None, uniform_recycling=False)


def test_a_chain_has_no_score_of_an_interface_that_it_lacks() -> None:
    """Catches a column of nan, and a score of the chain itself that is dropped or kept by mistake."""
    nan = float("nan")
    assert known_scores({"lddt_ca": 0.5, "interface_lddt_ca": nan}) == {"lddt_ca": 0.5}
    assert known_scores({"lddt_ca": 0.5, "interface_lddt_ca": 0.25}) == {"lddt_ca": 0.5, "interface_lddt_ca": 0.25}


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
