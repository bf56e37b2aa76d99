"""A tiny untrained model and small alignments: predictions from them take milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.inference.config import PredictConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model

QUERY = "MKTAYIAKQRXGSHWLVEDNCF"
OTHER = "GSTLLKAEEQ"
TRAINED = FeatureConfig(crop_size=8, msa_clusters=7, extra_msa=3, max_templates=1, recycles=2, masked_msa_fraction=0.5)
"""The sizes in the checkpoint: none equals a default or the workplace's configuration."""


@dataclass(frozen=True)
class Workplace:
    """The inputs of one prediction run, in a separate folder."""

    root: Path
    config: PredictConfig

    def change(self, **values: Any) -> PredictConfig:
        """The configuration with other values."""
        return replace(self.config, **values)

    def snapshot(self) -> set[str]:
        """All paths below the folder. A failed run must not change them."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights. With the initial zeros, all seeds would give the same structure."""
    torch.manual_seed(0)
    model = AlphaFold(ModelConfig.preset("test"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.ckpt"
    save_model(path, model, features=TRAINED)
    return path


def write_alignment(folder: Path, query: str, rows: int = 12) -> None:
    """An A3M file whose rows are the query with a few letters changed, one deletion and one insertion."""
    folder.mkdir(parents=True)
    lines = [">query", query]
    for row in range(1, rows):
        letters = [
            ("ACDEFGHIKLMNPQRSTVWY"[(row * 7 + i) % 20] if (row + i) % 3 == 0 else c) for i, c in enumerate(query)
        ]
        letters[row % len(query)] = "-"
        letters.insert(3, "ag")
        lines += [f">hit{row}", "".join(letters)]
    (folder / "uniref90_hits.a3m").write_text("\n".join(lines) + "\n")


@pytest.fixture
def workplace(tmp_path: Path, checkpoint: Path) -> Workplace:
    """Two targets, alpha_A and beta_A, to be predicted into <root>/deep/out."""
    (tmp_path / "targets.fasta").write_text(f">alpha_A first\n{QUERY}\n>beta_A\n{OTHER}\n")
    write_alignment(tmp_path / "alignments" / "alpha_A", QUERY)
    write_alignment(tmp_path / "alignments" / "beta_A", OTHER)
    config = PredictConfig(
        fasta=tmp_path / "targets.fasta",
        alignments=tmp_path / "alignments",
        checkpoint=checkpoint,
        output=tmp_path / "deep" / "out",
        seeds=2,
        recycles=1,
        device="cpu",
        msa_clusters=5,
        extra_msa=4,
    )
    return Workplace(tmp_path, config)
