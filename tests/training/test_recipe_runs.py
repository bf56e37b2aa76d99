"""AlphaFold2's recipe at full widths on real chains: the configs start, step, validate and resume on one CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from evodsp.cli import main
from evodsp.report.runs import read_curve
from evodsp.weights.checkpoint import read_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
LENGTHS = {"102m_A": 154, "1k1a_A": 241, "2q2k_A": 70}
TWO_BLOCKS = [f"--model.{stack}.blocks=2" for stack in ("evoformer", "extra_msa")]
FEW = [
    f"--data.{part}.{name}={value}"
    for part in ("train", "validation")
    for name, value in (("crop_size", 48), ("msa_clusters", 16), ("extra_msa", 32), ("recycles", 1))
]
"""Samples so small that a step takes seconds; the widths of the model stay."""


@pytest.mark.verify
@pytest.mark.parametrize("name", ["af2_initial", "af2_finetune", "af2_finetune_ptm"])
def test_the_recipe_trains_and_resumes(name: str, real_data: Path, tmp_path: Path) -> None:
    """Settings that do not go together at full size: heads that a loss needs, templates without features, rows of templates
    that leave no cluster, a first checkpoint that does not resume."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    content.pop("init_from", None)
    (tmp_path / "cache.json").write_text(
        json.dumps(
            {
                chain: {
                    "release_date": "2010-01-01",
                    "seq": "ACDEFGHIKL" * (length // 10),
                    "resolution": 2.0,
                    "cluster_size": 1,
                }
                for chain, length in LENGTHS.items()
            }
        )
    )
    content["data"] |= {
        "alignment_dir": str(real_data / "alignments"),
        "structure_dir": str(real_data / "mmcif_files"),
        "template_structure_dir": str(real_data / "mmcif_files"),
        "chain_data_cache": str(tmp_path / "cache.json"),
        "distillation": {},
        "train_chains": list(LENGTHS),
        "validation_chains": ["2q2k_A"],
        "samples_per_epoch": 1,
        "num_workers": 0,
        "time_limit": None,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    words = ["fit", "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--global_batch=1"]
    words += [*TWO_BLOCKS, *FEW, "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    assert main([*words, "--trainer.max_steps=1"]) == 0
    assert main([*words, "--trainer.max_steps=2", "--ckpt_path=last"]) == 0
    rows = read_curve(tmp_path / "run" / "curve.csv")
    losses = {"af2_initial": (), "af2_finetune": ("violation",), "af2_finetune_ptm": ("violation", "pae")}[name]
    assert list(rows) == [0, 1]
    for row in rows.values():
        assert float(row["val/loss"]) > 0
        assert all(float(row[f"train/{term}"]) > 0 for term in ("masked_msa", "backbone_fape", *losses))
    rates = [float(row["train/lr"]) for row in rows.values()]
    assert rates == pytest.approx([1e-3 / 128_000, 2e-3 / 128_000] if name == "af2_initial" else [5e-4, 5e-4])
    checkpoint = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 2
    assert checkpoint["model_config"]["channels"] == {"msa": 256, "pair": 128, "extra_msa": 64, "single": 384}
