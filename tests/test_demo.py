"""`make demo`, and the same from scratch: training learns, and predictions of unseen sequences work."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.inference.score.scores import write_report

ROOT = Path(__file__).resolve().parents[1]
NEW = {f"s{number:03}_A" for number in range(11, 16)}
"""The family that the example's model has not seen."""


@pytest.mark.verify
def test_the_demo_learns_a_new_family_and_its_relatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches anything that stops the model from learning, and weights that are forgotten at the start: lDDT-CA before and
    after the demo's training, in one process."""
    monkeypatch.chdir(ROOT)
    run = tmp_path / "model"
    assert main([*training(), "--parallel.sequence=1", "--output", str(run)]) == 0
    splits = {split: (ROOT / "data" / f"{split}.txt").read_text().split() for split in ("train", "validation")}
    scores = {}
    for name, model in (("before", Path("data/example_model")), ("after", run / "checkpoints" / "last.ckpt")):
        words = ["data/fasta", "--alignments", "data/alignments", "--checkpoint", str(model)]
        assert main(["predict", *words, "--output", str(tmp_path / name)]) == 0
        rows = write_report(tmp_path / name, ROOT / "data" / "mmcif_files", splits, tmp_path / f"report_{name}")
        scores[name] = {row.name: row.lddt_ca for row in rows}
    assert max(scores["before"][name] for name in NEW) < 0.5
    assert min(scores["after"][name] for name in splits["train"]) >= 0.85
    assert min(scores["after"][name] for name in splits["validation"]) >= 0.68
    assert len(list(csv.reader((run / "curve.csv").open()))) > 50


def training() -> list[str]:
    """The words of the Makefile's command that trains, without its folder."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    steps = re.search(r"^DEMO_STEPS \?= (\d+)$", makefile, re.MULTILINE)
    command = re.search(r"^\t\$\(BIN\)/evodsp (fit .*) --parallel.sequence 2 ", makefile, re.MULTILINE)
    assert steps
    assert command
    return shlex.split(command[1].replace("$(DEMO_STEPS)", steps[1]))


@pytest.mark.verify
def test_the_quick_start_learns_its_proteins_and_their_relatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches anything that stops the model from learning: lDDT-CA before and after training, on both splits."""
    monkeypatch.chdir(ROOT)
    curve = tmp_path / "model" / "curve.csv"
    assert main(["fit", "--config", "configs/quickstart.yaml", "--output", str(tmp_path / "model")]) == 0
    fasta = tmp_path / "all.fasta"
    fasta.write_text("".join(path.read_text() for path in sorted((ROOT / "data" / "fasta").glob("*.fasta"))))
    for name, checkpoint in (("after", "last"), ("before", "initial")):
        model = tmp_path / "model" / "checkpoints" / f"{checkpoint}.ckpt"
        if checkpoint == "initial":
            options = [
                "--output",
                str(tmp_path / "initial"),
                "--trainer.max_steps",
                "1",
                "--data.samples_per_epoch",
                "1",
            ]
            assert main(["fit", "--config", "configs/quickstart.yaml", *options]) == 0
            model = tmp_path / "initial" / "checkpoints" / "last.ckpt"
        words = ["--fasta", str(fasta), "--alignments", "data/alignments", "--checkpoint", str(model)]
        assert main(["predict", *words, "--output", str(tmp_path / name)]) == 0
    splits = {split: (ROOT / "data" / f"{split}.txt").read_text().split() for split in ("train", "validation")}
    scores = {}
    for name in ("before", "after"):
        rows = write_report(tmp_path / name, ROOT / "data" / "mmcif_files", splits, tmp_path / f"report_{name}")
        scores[name] = {split: [row.lddt_ca for row in rows if row.split == split] for split in splits}
    assert max(scores["before"]["train"]) < 0.35
    assert min(scores["after"]["train"]) >= 0.65
    assert min(scores["after"]["validation"]) >= 0.55
    assert len(list(csv.reader(curve.open()))) > 100
