"""`make demo` from training to prediction: training learns, and predictions of unseen sequences work."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evodsp.cli import main

ROOT = Path(__file__).resolve().parents[1]


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
    from evodsp.inference.score.scores import write_report

    splits = {split: (ROOT / "data" / f"{split}.txt").read_text().split() for split in ("train", "validation")}
    scores = {}
    for name in ("before", "after"):
        rows = write_report(tmp_path / name, ROOT / "data" / "mmcif_files", splits, tmp_path / f"report_{name}")
        scores[name] = {split: [row.lddt_ca for row in rows if row.split == split] for split in splits}
    assert max(scores["before"]["train"]) < 0.35
    assert min(scores["after"]["train"]) >= 0.65
    assert min(scores["after"]["validation"]) >= 0.55
    assert len(list(csv.reader(curve.open()))) > 100
