"""A tiny untrained model and small alignments: predictions from them take milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evodsp.config import FeatureConfig, ModelConfig, TemplateConfig, as_multimer
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict
from evodsp.inference.results import PredictionResult, read_result
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model
from tests.builders.msa_server import StandIn, serving
from tests.builders.parameters import noisy

QUERY = "MKTAYIAKQRXGSHWLVEDNCF"
OTHER = "GSTLLKAEEQ"
TRAINED = FeatureConfig(crop_size=8, msa_clusters=7, extra_msa=3, max_templates=1, recycles=2, masked_msa_fraction=0.5)
"""The sizes in the checkpoint: none equals a default or the workplace's configuration."""
TINY = ModelConfig.preset("test")
MULTIMER = as_multimer(
    replace(
        TINY,
        evoformer=replace(TINY.evoformer, blocks=1),
        templates=TemplateConfig(
            enabled=True, channels=6, blocks=1, pair_heads=2, pair_head_width=3, triangle_channels=5, checkpoint=False
        ),
    )
)
PTM = replace(
    TINY,
    templates=TemplateConfig(
        enabled=True, channels=6, pair_heads=2, pair_head_width=3, triangle_channels=5, attention_heads=2, checkpoint=False
    ),
    heads=replace(TINY.heads, experimentally_resolved=True, predicted_aligned_error=True),
)  # fmt: skip
SIZES = replace(TRAINED, max_templates=2)
LETTERS = (QUERY, OTHER, QUERY)
"""Chains A, B and C: in the model's columns, C stands before B."""


def write_model(path: Path, config: ModelConfig, seed: int, features: FeatureConfig = TRAINED) -> Path:
    """A checkpoint with random weights."""
    torch.manual_seed(seed)
    save_model(path, noisy(AlphaFold(config)), features=features)
    return path


@dataclass(frozen=True)
class Workplace:
    """The inputs of one prediction run, in a separate folder."""

    root: Path
    config: PredictConfig

    def change(self, **values: Any) -> PredictConfig:
        """The configuration with other values."""
        return replace(self.config, **values)

    def only(self, name: str) -> None:
        """Leave out the other target: where one shows as much as two."""
        letters = {"alpha_A": QUERY, "beta_A": OTHER}[name]
        self.config.fasta.write_text(f">{name}\n{letters}\n")

    def snapshot(self) -> set[str]:
        """All paths below the folder. A failed run must not change them."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights. With the initial zeros, all seeds would give the same structure."""
    config = replace(TINY, evoformer=replace(TINY.evoformer, blocks=1))
    return write_model(tmp_path_factory.mktemp("checkpoint") / "tiny.ckpt", config, 0)


@pytest.fixture(scope="session")
def ptm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with templates and the PAE head, so that a prediction reads all features."""
    return write_model(tmp_path_factory.mktemp("ptm") / "tiny_ptm.ckpt", PTM, 1)


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


def make_workplace(root: Path, checkpoint: Path) -> Workplace:
    """Two targets, alpha_A and beta_A, to be predicted into <root>/deep/out, each with two seeds in one pass."""
    (root / "targets.fasta").write_text(f">alpha_A first\n{QUERY}\n>beta_A\n{OTHER}\n")
    write_alignment(root / "alignments" / "alpha_A", QUERY)
    write_alignment(root / "alignments" / "beta_A", OTHER)
    config = PredictConfig(
        fasta=root / "targets.fasta",
        alignments=root / "alignments",
        checkpoint=checkpoint,
        output=root / "deep" / "out",
        seeds=2,
        recycles=0,
        device="cpu",
        msa_clusters=5,
        extra_msa=4,
    )
    return Workplace(root, config)


@pytest.fixture
def workplace(tmp_path: Path, checkpoint: Path) -> Workplace:
    """A workplace where nothing is predicted yet."""
    return make_workplace(tmp_path, checkpoint)


@dataclass(frozen=True)
class Finished:
    """A run of prediction that has ended."""

    results: list[PredictionResult]
    lines: list[str] = field(default_factory=list)
    """What it reported."""

    @classmethod
    def run(cls, config: PredictConfig) -> Finished:
        """Predict."""
        lines: list[str] = []
        return cls(predict(config, lines.append), lines)

    def copied(self, output: Path) -> Finished:
        """The same run with its files in another folder, where a test may change them."""
        shutil.copytree(self.results[0].folder.parent, output)
        return Finished([read_result(output / result.name) for result in self.results], self.lines)


@pytest.fixture(scope="session")
def predicted(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Finished:
    """A run with the workplace's configuration, once for all tests of a process, which must not change its files."""
    return Finished.run(make_workplace(tmp_path_factory.mktemp("predicted"), checkpoint).config)


@pytest.fixture
def finished(workplace: Workplace, predicted: Finished) -> Finished:
    """As if the workplace's configuration had just been predicted there."""
    return predicted.copied(workplace.config.output)


@pytest.fixture(scope="session")
def multimer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny multimer model."""
    return write_model(tmp_path_factory.mktemp("multimer") / "tiny.ckpt", MULTIMER, 2, SIZES)


def settings(root: Path, model: Path, text: str, name: str = "given.fasta", **options: Any) -> PredictConfig:
    """To predict what a file with this text holds into <root>/out."""
    (root / name).write_text(text)
    given = {"seeds": 1, "recycles": 0, "device": "cpu", "msa_clusters": 6, "extra_msa": 4, **options}
    return PredictConfig(inputs=(root / name,), checkpoint=model, output=root / "out", **given)


@pytest.fixture
def stand_in() -> StandIn:
    """A server of alignments."""
    return StandIn()


@pytest.fixture
def address(stand_in: StandIn) -> Iterator[str]:
    """Its address, for a client that asks again at once: the stand-in has an answer by then."""
    with mock.patch("evodsp.search.server._POLL_S", 0.01), serving(stand_in) as found:
        yield found
