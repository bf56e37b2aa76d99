"""Prediction from the real alignments of 6KWC_1 and query73_A: thousands of sequences, a small untrained model."""

from __future__ import annotations

import json
from pathlib import Path

import gemmi
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model


@pytest.mark.parametrize(
    ("fasta", "name", "residues", "rows"), [("6kwc", "6KWC_1", 191, 3126), ("query73", "query73_A", 73, 1140)]
)
def test_predicts_from_real_alignments(
    fasta: str, name: str, residues: int, rows: int, real_data: Path, tmp_path: Path
) -> None:
    """Catches real files that the readers refuse, alignments that are not merged, and an incomplete chain."""
    torch.manual_seed(0)
    features = FeatureConfig(crop_size=None, msa_clusters=64, extra_msa=128, recycles=1)
    save_model(tmp_path / "small.ckpt", AlphaFold(ModelConfig.preset("small")), features=features)
    words = [
        "--fasta",
        str(real_data / "fasta" / f"{fasta}.fasta"),
        "--alignments",
        str(real_data / "alignments" / name),
    ]
    assert (
        main(["predict", *words, "--checkpoint", str(tmp_path / "small.ckpt"), "--output", str(tmp_path / "out")]) == 0
    )
    timings = json.loads((tmp_path / "out" / name / "timings.json").read_text())
    assert (timings["residues"], timings["alignment_rows"]) == (residues, rows)
    assert len(timings["seeds"][0]["pass_seconds"]) == 2
    chain = gemmi.read_structure(str(tmp_path / "out" / name / "seed_0.cif"))[0][0]
    assert len(chain) == residues
    assert all(residue.find_atom("CA", "*") for residue in chain)
