"""Scores of predictions against experiments, and the table and files made from them."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
import torch
import yaml

from evodsp import metrics
from evodsp.cli import main
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.geometry.residues import CA, RESTYPE_ATOM37_MASK, encode
from evodsp.inference.results import TIMINGS, write_json, write_results
from evodsp.inference.score.scores import compare, write_report
from evodsp.inference.score.table import StructureScores, columns_of, table, write_scores
from evodsp.inference.structure_files import PredictedStructure
from scripts.examples.synthetic.mmcif_writer import write_mmcif
from tests.builders.training_chains import write_chain

LENGTH = 40
KEYS = {"train": ["9aaa_B"], "held-out": ["9bbb_B"]}


def make_case(root, pdb_id: str, noise: float) -> tuple[Chain, PredictedStructure]:
    """An experiment with three missing residues, and predictions of two seeds; the second is better and ranked first."""
    rng = np.random.default_rng(len(pdb_id) + int(noise * 10))
    aatype = (np.arange(LENGTH) % 20).astype(np.int32)
    mask = RESTYPE_ATOM37_MASK[aatype].astype(np.float32)
    n = np.arange(LENGTH)
    trace = np.stack([2.3 * np.cos(1.745 * n), 2.3 * np.sin(1.745 * n), 1.5 * n], -1)
    positions = (trace[:, None] + rng.normal(size=(LENGTH, 37, 3))).astype(np.float32)
    true_mask = mask.copy()
    true_mask[10:13] = 0
    predicted = PredictedStructure(
        name=f"{pdb_id}_B",
        aatype=aatype,
        positions=(positions + rng.normal(size=positions.shape) * noise + 5).astype(np.float32),
        mask=mask,
        plddt=np.linspace(50, 90, LENGTH, dtype=np.float32),
    )
    worse = PredictedStructure(f"{pdb_id}_B", aatype, positions * 0, mask, predicted.plddt / 2)
    experiment = Chain(
        pdb_id=pdb_id,
        chain_id="B",
        sequence=predicted.sequence,
        residue_number=np.where(true_mask.any(-1), n + 101, 0).astype(np.int32),
        insertion_code=("",) * LENGTH,
        is_missing=~true_mask.any(-1),
        positions=positions,
        mask=true_mask,
    )
    (root / "structures").mkdir(exist_ok=True)
    write_mmcif(root / "structures" / f"{pdb_id}.cif", [experiment])
    with whole_folder(root / "predictions" / f"{pdb_id}_B") as work:
        write_results(work, {0: worse, 1: predicted}, "cif", {}, predicted.name)
        write_json(work / TIMINGS, {})
    return experiment, predicted


@pytest.fixture
def cases(tmp_path):
    """Two predicted chains, with little and with much noise."""
    return tmp_path, [make_case(tmp_path, "9aaa", 0.3), make_case(tmp_path, "9bbb", 3.0)]


def test_scores_equal_the_metrics(cases):
    """Catches scores from atoms other than CA, from missing residues, or from another seed."""
    root, ((experiment, predicted), _) = cases
    prediction = root / "predictions" / "9aaa_B" / "seed_1.cif"
    scores = compare(prediction, root / "structures" / "9aaa.cif", "B", "train")
    resolved = np.r_[0:10, 13:LENGTH]
    a, b = (torch.tensor(x.positions[resolved, CA]) for x in (predicted, experiment))
    ones = torch.ones(len(resolved))
    assert (scores.residues, scores.resolved, scores.split) == (LENGTH, LENGTH - 3, "train")
    assert scores.plddt == pytest.approx(70.0, abs=0.01)
    assert scores.lddt_ca == pytest.approx(float(metrics.lddt_ca(a, b, ones)), abs=2e-3)
    assert scores.rmsd == pytest.approx(float(metrics.rmsd(a, b, ones)), abs=2e-3)
    assert scores.gdt_ts == pytest.approx(float(metrics.gdt_ts(a, b, ones)), abs=2e-3)
    assert scores.tm_score == pytest.approx(float(metrics.tm_score(a, b, ones)), abs=2e-3)


def test_report_takes_the_best_seed_and_writes_all(cases, capsys):
    """Catches scores of a seed other than the best, and a missing CSV or plot."""
    root, made = cases
    found = write_report(root / "predictions", root / "structures", KEYS, root / "shown")
    assert [(s.name, s.split) for s in found] == [("9aaa_B", "train"), ("9bbb_B", "held-out")]
    assert found[0].lddt_ca > found[1].lddt_ca
    assert found[0].plddt == pytest.approx(70.0, abs=0.01)
    with (root / "shown" / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["rmsd"]) for row in rows] == [pytest.approx(s.rmsd, abs=1e-4) for s in found]
    for key in ("9aaa_B", "9bbb_B"):
        assert (root / "shown" / f"distances_{key}.svg").stat().st_size > 2_000
    assert (root / "shown" / "calibration.svg").stat().st_size > 2_000
    said = capsys.readouterr().out
    assert "9bbb_B" in said
    assert f"held-out: mean lDDT-CA {found[1].lddt_ca:.3f} of 1 chain\n" in said
    (line,) = (line for line in said.splitlines() if line.startswith("held-out: pLDDT "))
    assert f"over {LENGTH - 3} residues" in line
    experiment, predicted = made[1]
    resolved = np.r_[0:10, 13:LENGTH]
    atoms = [torch.tensor(one.positions[resolved, CA]).double() for one in (predicted, experiment)]
    true = 100 * metrics.lddt_ca(*atoms, torch.ones(len(resolved)).double(), per_residue=True).mean()
    found_high = re.search(r": ([\d.]+) too high", line)
    assert found_high is not None
    assert float(found_high[1]) == pytest.approx(float(predicted.plddt[resolved].mean() - true), abs=0.11)


def test_the_scores_are_written_before_they_are_printed(cases):
    """Catches `evodsp score | head` that leaves no scores.csv."""
    root, _ = cases

    def closed(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        write_report(root / "predictions", root / "structures", KEYS, root / "shown", closed)
    assert (root / "shown" / "scores.csv").is_file()


def test_table_explains_each_column():
    """Catches abbreviations without an explanation, and long names that break the columns."""
    scores = [
        StructureScores("short_A", "train", 48, 48, 81.25, 0.7, 1.2, 0.8, 0.75),
        StructureScores("a_much_longer_name_A", "held-out", 1048, 1000, 51.25, 0.6, 11.2, 0.5, 0.45),
    ]
    shown = table(columns_of("chains"), scores, "chain")
    body, legend = shown.split("\n\n")
    lines = body.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("chain ")
    for heading in ("split", "residues", "pLDDT", "lDDT-CA", "RMSD Å", "GDT-TS", "TM-score"):
        assert heading in lines[0]
        assert any(line.startswith(heading) for line in legend.splitlines())
    assert "0.600" in lines[3]
    assert max(map(len, shown.splitlines())) <= 120


def test_scores_as_json_and_unknown_suffix(tmp_path):
    """Catches JSON unlike the table, and a file written despite an unknown suffix."""
    scores = [StructureScores("x_A", "train", 4, 4, 1.0, 0.123456, 1.0, 1.0, 1.0)]
    write_scores(columns_of("chains"), scores, "chain", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())[0]["lddt_ca"] == 0.1235
    with pytest.raises(UserError, match=r"\.xlsx"):
        write_scores(columns_of("chains"), scores, "chain", tmp_path / "scores.xlsx")
    assert not (tmp_path / "scores.xlsx").exists()


OPTIONS = ("--baseline", "nearest")


def score_command(root, *words: str, held_out: str = "9bbb_B") -> int:
    folders = ["--predictions", str(root / "predictions"), "--structures", str(root / "structures")]
    return main(["score", *folders, "--held_out", held_out, "--output", str(root / "shown"), *words])


def test_a_prediction_beside_the_copy_of_its_nearest_training_chain(cases, capsys):
    """Catches a copy of the held-out chain itself or of a chain that was not trained on, a difference of the wrong sign,
    and training structures in a folder of their own that are not looked for there."""
    root, ((near, _), (experiment, predicted)) = cases
    resolved = np.r_[0:10, 13:LENGTH]
    ones = torch.ones(len(resolved)).double()
    ours, copied, true = (torch.tensor(one.positions[resolved, CA]).double() for one in (predicted, near, experiment))
    lddt, of_copy = (float(metrics.lddt_ca(one, true, ones)) for one in (ours, copied))
    (apart := root / "of training").mkdir()
    (root / "structures" / "9aaa.cif").rename(apart / "9aaa.cif")
    (listed := root / "train.txt").write_text("9aaa_B\n9bbb_B  # by mistake\n9zzz_B\n")
    assert score_command(root, *OPTIONS, "--train_chains", str(listed), "--structure_dir", str(apart)) == 0
    said = capsys.readouterr()
    (row,) = csv.DictReader((root / "shown" / "scores.csv").open())
    assert [row[name] for name in ("nearest", "nearest_identity", "nearest_coverage")] == ["9aaa_B", "1.0", "0.925"]
    assert float(row["nearest_lddt_ca"]) == pytest.approx(of_copy, abs=2e-3)
    assert float(row["better_by"]) == pytest.approx(lddt - of_copy, abs=2e-3)
    better = int(lddt > of_copy)
    means = re.search(r"held-out: mean lDDT-CA ([\d.]+) of copies .* 1 of 1, .* have lDDT-CA ([\d.]+); (.*)", said.out)
    assert means is not None
    assert [float(mean) for mean in means.groups()[:2]] == pytest.approx([of_copy, lddt], abs=2e-3)
    assert "with 100% identity on average, where predictions have " in means[0]
    assert means[3] == f"the prediction is better (lDDT-CA) on {better} of 1"
    assert "training has 1 of 1 chain, too, such as 9bbb_B; no chain is copied from itself" in said.out
    assert "better by  lDDT-CA (of complexes: iLDDT-CA) of the prediction less that of the copy" in said.out
    assert "2 of 3 training chains cannot be read and are not copied, such as 9bbb_B" in said.err


def test_the_training_chains_of_a_run(cases, capsys):
    """Catches a config whose chains, folders or filters are not those that are copied, and a chain without a copy that ends the
    table."""
    root, _ = cases
    for key in ("1abc_A", "2abc_A"):
        write_chain(root, key, "MKTAYIAKQRWLEACD" if key == "1abc_A" else "ACDEFGHIKLMNPQRSTVWY" * 2)
    data = {
        "alignment_dir": f"{root}/alignments",
        "structure_dir": f"{root}/mmcif_files",
        "train_chains": ["2abc_A", "1abc_A"],
    }
    (root / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    assert score_command(root, *OPTIONS, "--config", str(root / "config.yaml")) == 0
    (row,) = csv.DictReader((root / "shown" / "scores.csv").open())
    assert row["nearest"] == "2abc_A"
    (root / "mmcif_files" / "2abc.cif").write_text("data_2ABC\n")
    (listed := root / "train.txt").write_text("2abc_A\n")
    capsys.readouterr()
    assert score_command(root, *OPTIONS, "--config", str(root / "config.yaml"), "--train_chains", str(listed)) == 0
    said = capsys.readouterr().out
    assert "held-out: no copy for 1 of 1 chain, such as 9bbb_B: its nearest training chains cannot be read: " in said
    (row,) = csv.DictReader((root / "shown" / "scores.csv").open())
    names = ("nearest", "nearest_identity", "nearest_coverage", "nearest_lddt_ca", "better_by")
    assert [row[name] for name in names] == [""] * 5
    alone = StructureScores("x_A", "held-out", 4, 4, 1.0, 0.5, 1.0, 1.0, 1.0)
    write_scores(columns_of("chains", beside_copy=True), [alone], "chain", root / "scores.json")
    assert json.loads((root / "scores.json").read_text())[0]["better_by"] is None


def test_a_baseline_of_nothing_is_one_line(cases, capsys):
    """Catches a traceback, or a table without copies, where the training chains are not there."""
    root, _ = cases
    (listed := root / "train.txt").write_text("9zzz_B\n")
    for words, said in (
        (OPTIONS, "--baseline nearest needs the training chains; give --config with the config.yaml"),
        (("--train_chains", "a.txt"), "--train_chains is a.txt, but names what is copied; give --baseline nearest"),
        (("--train_chains", "a.txt"), "leave it out (--train scores predictions of training chains)"),
        (("--structure_dir", "a"), "give --baseline nearest, or leave it out\n"),
        ((*OPTIONS, "--train_chains", "nowhere.txt"), "nowhere.txt: no such file of chain names"),
        ((*OPTIONS, "--train_chains", str(listed)), "none of 1 training chains can be read, such as 9zzz_B: "),
        ((*OPTIONS, "--train", "9zzz_B", "--structure_dir", "nowhere"), "nowhere: no such structure directory"),
        ((*OPTIONS, "--config", str(listed)), "has no block 'data'; give a config of 'evodsp fit'"),
        (("--baseline", "best"), "baseline"),
    ):
        assert score_command(root, *words) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_another_protein_is_not_compared(cases):
    """Catches scores between two proteins of equal length, which would look like a bad prediction."""
    root, _ = cases
    other, _ = make_case(root, "9ccc", 0.1)
    path = root / "structures" / "9ccc.cif"
    sequence = "W" + other.sequence[1:]
    write_mmcif(path, [Chain(**{**vars(other), "sequence": sequence, "mask": other.mask * 0 + (np.arange(37) < 3)})])
    with pytest.raises(UserError, match="residue 1 is A against W"):
        compare(root / "predictions" / "9aaa_B" / "seed_1.cif", path, "B")


def test_what_is_lacking_counts_in_copies_alone(cases, capsys):
    """Catches residues X, which no prediction has, that count as wrong, pLDDT beside the lDDT of another residue, residues
    without a counterpart that do not cost the copy, and a copy that is lost where the structure's file has another name."""
    root, ((experiment, _), _) = cases
    letters = experiment.sequence[:20] + "X" + experiment.sequence[21:]
    odd = Chain(**{**vars(experiment), "pdb_id": "of_mine", "sequence": letters})
    write_mmcif(root / "structures" / "mine.cif", [odd])
    aatype = encode(letters).astype(np.int32)
    mask = RESTYPE_ATOM37_MASK[aatype].astype(np.float32)
    plddt = np.linspace(50, 90, LENGTH, dtype=np.float32)
    predicted = PredictedStructure("mine", aatype, experiment.positions, mask, plddt)
    with whole_folder(root / "predictions" / "mine") as work:
        write_results(work, {0: predicted}, "cif", {}, "mine")
        write_json(work / TIMINGS, {})
    kept = {
        name: getattr(odd, name)[:30]
        for name in ("sequence", "residue_number", "insertion_code", "is_missing", "positions", "mask")
    }
    write_mmcif(root / "structures" / "9ddd.cif", [Chain(**{**vars(odd), **kept, "pdb_id": "9ddd"})])
    (listed := root / "train.txt").write_text("9ddd_B\n")
    assert score_command(root, *OPTIONS, "--train_chains", str(listed), held_out="mine") == 0
    (row,) = csv.DictReader((root / "shown" / "scores.csv").open())
    assert [row[name] for name in ("chain", "residues", "resolved", "lddt_ca", "nearest")] == [
        "mine",
        "40",
        "36",
        "1.0",
        "9ddd_B",
    ]
    seen = [n for n in range(LENGTH) if experiment.mask[n, CA]]
    at = experiment.positions[:, CA].astype(float)
    pairs = [b < 30 and a < 30 for a in seen for b in seen if a != b and np.linalg.norm(at[a] - at[b]) < 15]
    assert float(row["nearest_lddt_ca"]) == pytest.approx(np.mean(pairs), abs=1e-4)
    compared = [value for n, value in enumerate(plddt) if n in seen and n != 20]
    assert f"held-out: pLDDT {np.mean(compared):.1f}, true lDDT-CA 100.0: " in capsys.readouterr().out


def test_predictions_of_other_programs(cases, capsys):
    """Catches a structure file that is not taken for a prediction, confidence that it does not have, and the first chain of
    several that stands for all."""
    root, _ = cases
    folder = root / "predictions"
    (folder / "9bbb_B" / "seed_1.cif").rename(folder / "9bbb.cif")
    (folder / "9bbb_B").rename(folder / "other")
    assert score_command(root) == 0
    (row,) = csv.DictReader((root / "shown" / "scores.csv").open())
    assert (row["chain"], row["plddt"], row["rmsd"] > "0") == ("9bbb_B", "", True)
    said = capsys.readouterr().out
    assert "pLDDT" not in said.partition("\n")[0]
    assert said.endswith(f"wrote {root / 'shown' / 'scores.csv'}\n")
    chain = read_chain(folder / "9bbb.cif", "")
    write_mmcif(folder / "9bbb.cif", [chain, Chain(**{**vars(chain), "chain_id": "C"})])
    assert score_command(root) == 2
    assert "9bbb_B: its prediction has 2 chains; compare complexes with --complexes true" in capsys.readouterr().err


def test_the_command_reports_mistakes_in_one_line(cases, capsys, tmp_path):
    """Catches a traceback, a wrong exit code (2 for mistakes, 0 for success), chains of a file that are not read, and
    columns of a baseline that nobody asked for."""
    root, _ = cases
    (held := tmp_path / "held.txt").write_text("9bbb_B\n")
    assert score_command(root, "--train", "9aaa_B", held_out=str(held)) == 0
    table = (root / "shown" / "scores.csv").read_text()
    assert table.startswith("chain,split,residues,resolved,plddt,lddt_ca,rmsd,gdt_ts,tm_score\n")
    assert table.count("held-out") == 1
    assert "nearest" not in capsys.readouterr().out
    assert score_command(root, held_out="9zzz_A") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_names_all_predictions_are_scored_that_have_a_structure(cases, capsys):
    """Catches a list that a user has to type although the folder says it, files of the folder taken for predictions, and
    another prediction that costs all scores."""
    root, _ = cases
    (root / "predictions" / "_alignments").mkdir()
    (root / "predictions" / "predictions.csv").write_text("name\n")
    (root / "predictions" / "9ccc_A.cif").write_text("data_x\n")  # has no structure
    (root / "predictions" / "9aaa_B" / "ranking.json").unlink()  # is not finished
    words = ["score", *(f"--{name}={root / name}" for name in ("predictions", "structures")), f"--output={root}"]
    assert main(words) == 0
    assert "predicted: mean lDDT-CA" in capsys.readouterr().out
    (row,) = csv.DictReader((root / "scores.csv").read_text().splitlines())
    assert (row["chain"], row["split"]) == ("9bbb_B", "predicted")
    (root / "predictions" / "9bbb_B" / "ranking.json").unlink()
    assert main(words) == 2
    assert "no finished prediction has the name of a structure in" in capsys.readouterr().err


def test_a_prediction_of_the_entrys_name(cases, capsys):
    """Catches a prediction called 9aaa that is not found for 9aaa_B, the only chain of its structure, that is taken for another
    chain, and a message that does not say which files were looked for."""
    root, _ = cases
    folder = root / "predictions"
    (folder / "9aaa_B").rename(folder / "9aaa")
    (one,) = write_report(folder, root / "structures", {"train": ["9aaa_B", "9aaa_C"]}, root / "shown")
    assert one.name == "9aaa_B"
    said = capsys.readouterr().out
    assert "such as 9aaa_C (looked for 9aaa_C/ranking.json and 9aaa_C.cif, " in said
    assert "; if the structure of 9aaa has this chain only, also 9aaa/ranking.json and 9aaa.cif); predict them" in said
    (folder / "9aaa").rename(folder / "other")
    with pytest.raises(UserError, match=r"predictions: no finished prediction of '9aaa_B' .* 9aaa_B/ranking\.json and"):
        write_report(folder, root / "structures", {"train": ["9aaa_B"]}, root / "shown")
    (folder / "other").rename(folder / "9ccc_B")
    with pytest.raises(UserError, match=r"no 9ccc\.cif, .*pdb9ccc\.ent, .* \(or 9ccc_B\.cif"):
        write_report(folder, root / "structures", {"train": ["9ccc_B"]}, root / "shown")
