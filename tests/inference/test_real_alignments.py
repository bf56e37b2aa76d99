"""Prediction from the real alignments of 6KWC_1 and query73_A: thousands of sequences, a small untrained model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig, ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model
from evodsp.weights.command import randomise


@pytest.mark.verify_but("query73*")
@pytest.mark.parametrize(
    ("fasta", "name", "residues", "rows"), [("6kwc", "6KWC_1", 191, 1929), ("query73", "query73_A", 73, 1140)]
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


@pytest.mark.verify
def test_two_ranks_predict_the_structures_that_one_process_does(real_data: Path, tmp_path: Path) -> None:
    """At AlphaFold2's widths, in float32, with query73_A's templates and recycling: within the last digit of the files."""
    config = ModelConfig.preset("model_1_ptm")
    two_blocks = {name: dataclasses.replace(getattr(config, name), blocks=2) for name in ("evoformer", "extra_msa")}
    model = AlphaFold(dataclasses.replace(config, **two_blocks))
    randomise(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)  # larger ones amplify the rounding of float32 without end
    features = FeatureConfig(crop_size=None, msa_clusters=64, extra_msa=128, recycles=1, max_templates=4)
    save_model(tmp_path / "wide.ckpt", model, features=features)
    data = {"alignments": "alignments", "templates": "mmcif_files"}
    words = [str(real_data / "fasta"), *(f"--{name}={real_data / folder}" for name, folder in data.items())]
    for ranks in ("1", "2"):
        options = [
            f"--checkpoint={tmp_path / 'wide.ckpt'}",
            f"--output={tmp_path / ranks}",
            f"--parallel.sequence={ranks}",
        ]
        command = [sys.executable, "-m", "evodsp", "predict", *words, *options]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    log = (tmp_path / "2" / "predict.log").read_text()
    assert "the best 4 are used: 3u8v_A, 2crb_A, 4zey_A, 1psm_A" in log
    for name in ("6KWC_1", "query73_A"):
        alone, both = (
            np.array([atom.atom.pos.tolist() for atom in gemmi.read_structure(str(file))[0].all()])
            for file in (tmp_path / ranks / name / "seed_0.cif" for ranks in ("1", "2"))
        )
        assert alone.shape == both.shape
        assert np.ptp(alone) > 10  # a structure, not a point
        assert np.abs(alone - both).max() < 1.5e-3  # files have three decimals
