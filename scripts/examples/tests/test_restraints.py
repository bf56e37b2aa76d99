"""The input of one's own of scripts/examples/restraints.py: crops, ranks, and the weights in files. The page's test trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.data.samples.dataset import SampleDataset, collate
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import UserError
from evodsp.features.batch import with_features
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import ShardedModule, use_exchange
from evodsp.parallel import Group
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.testing import check
from evodsp.report.runs import read_curve
from evodsp.weights.checkpoint import load_model, save_model
from evodsp.weights.pretrained import save_pretrained
from scripts.examples.restraints import BOUNDS, Restraints, add
from tests.builders.pages import ROOT
from tests.builders.small_run import TINY
from tests.ranks import RankPool


@pytest.fixture
def lines(tmp_path: Path) -> str:
    path = tmp_path / "restraints.tsv"
    path.write_text("s001_A\t3\t9\t12\ns001_A\t8\t20\t25.5\ns001_A\t1\t3\t99\ns002_A\t4\t5\t3\n")
    return str(path)


def test_a_crop_keeps_its_restraints(lines: str) -> None:
    """Catches residues that are counted from the crop's first, padding that is taken for residue 1, one direction of a pair,
    and restraints of another chain."""
    index = torch.tensor([[2, 3, 7, 8, 19, 0, 0]])
    found = Restraints(lines)(
        "s001_A",
        {"residue_index": index, "seq_mask": (index > 0).float(), "msa_keys": torch.zeros(3, 3), "aatype": index},
    )
    feature = found["restraints"]
    assert feature.shape == (3, 7, 7, len(BOUNDS))
    assert feature[2].nonzero().tolist() == [[0, 3, 1], [2, 4, 3], [3, 0, 1], [4, 2, 3]]


def test_samples_have_it(lines: str) -> None:
    """Catches an entry that a batch drops, that has other iterations than the features, or other residues."""
    config = FeatureConfig(crop_size=16, msa_clusters=4, extra_msa=4, recycles=2)
    files = ChainFiles(ROOT / "data/alignments", ROOT / "data/mmcif_files")
    samples = SampleDataset(files, ["s001_A"], config, 0, training=True, batch_group=2, added=Restraints(lines))
    batch = with_features(collate([samples[0], samples[1]]), config)
    assert batch["restraints"].shape == (2, batch["aatype"].shape[1], 16, 16, len(BOUNDS))
    for sample in range(2):
        index = batch["residue_index"][sample, 0].tolist()
        for first, second, _ in batch["restraints"][sample, 0].nonzero().tolist():
            assert sorted((index[first], index[second])) in ([2, 8], [7, 19], [0, 2])


def small() -> AlphaFold:
    torch.manual_seed(0)
    return AlphaFold(ModelConfig.preset("test"))


class FirstPair(ShardedModule):
    """The first pair representation of a model with restraints, a rank's columns of it."""

    def __init__(self) -> None:
        super().__init__()
        model = small()
        add(model)
        self.embedder = model.input_embedder

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return self.embedder.pair_representation(features)


def sharded(model: nn.Module, group: Group) -> None:
    use_exchange(model, ShardedExchange(group))


def test_ranks_add_what_one_device_adds(pool: RankPool) -> None:
    """Catches a rank that embeds other columns than it holds."""
    features = {
        "target_feat": torch.randn(2, 7, 22),
        "residue_index": torch.arange(7).expand(2, 7),
        "restraints": torch.randn(2, 7, 7, len(BOUNDS)),
    }
    assert "sharded were axes of 7 positions" in check(FirstPair(), (features,), sharded, run=pool.run)


def test_it_begins_with_zero_and_keeps_weights() -> None:
    """Catches an embedding that changes a trained model before it has learnt, or is added twice."""
    model, plain = small(), small()
    add(model)
    embedding = model.input_embedder.relative_position
    add(model)
    assert model.input_embedder.relative_position is embedding
    assert model.features == (*plain.features, "restraints")
    features = {
        "target_feat": torch.randn(1, 5, 22),
        "residue_index": torch.arange(5)[None],
        "restraints": torch.randn(1, 5, 5, len(BOUNDS)),
    }
    before = plain.input_embedder.pair_representation(features)
    assert torch.equal(model.input_embedder.pair_representation(features), before)
    nn.init.ones_(embedding.restraints.weight)
    assert not torch.equal(model.input_embedder.pair_representation(features), before)


def test_files_hold_the_weights_and_no_code(tmp_path: Path) -> None:
    """Catches weights that are lost or filled anew, a folder that is not read, and files that load without the user's word."""
    model = small()
    add(model)
    nn.init.normal_(model.input_embedder.relative_position.restraints.weight)
    save_model(tmp_path / "model.ckpt", model, features=FeatureConfig())
    save_pretrained(model, tmp_path / "folder")
    for path in (tmp_path / "model.ckpt", tmp_path / "folder"):
        found = load_model(path, add=add).state_dict()
        assert all(torch.equal(x, found[name]) for name, x in model.state_dict().items())
        with pytest.raises(
            UserError, match=r"no parameter for array 'input_embedder\.relative_position\.restraints\.weight'"
        ):
            load_model(path)
    save_model(tmp_path / "plain.ckpt", small(), features=FeatureConfig())
    with pytest.raises(UserError, match=r"input_embedder\.relative_position\.restraints\.weight"):
        load_model(tmp_path / "plain.ckpt", add=add)


@pytest.mark.verify
def test_a_run_on_two_ranks_is_that_on_one(tmp_path: Path, lines: str) -> None:
    """Catches a feature that only the rank that reads has, and an embedding that is not trained."""
    config = tmp_path / "config.yaml"
    config.write_text(TINY.replace("block_delete: true", "block_delete: false"))
    added = ["--trainer.callbacks+=scripts.examples.restraints.WithRestraints", f"--trainer.callbacks.path={lines}"]
    folders = [f"--data.alignment_dir={ROOT}/data/alignments", f"--data.structure_dir={ROOT}/data/mmcif_files"]
    losses, weights = [], []
    for ranks in (1, 2):
        output = tmp_path / f"run_{ranks}"
        words = [f"--config={config}", *folders, *added, f"--output={output}", "--trainer.max_steps=6"]
        command = [sys.executable, "-m", "evodsp", "fit", *words, f"--parallel.sequence={ranks}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        losses.append([float(row["train/loss"]) for row in read_curve(output / "curve.csv").values()])
        model = load_model(output / "checkpoints" / "last.ckpt", add=add)
        weights.append(model.input_embedder.relative_position.restraints.weight)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert weights[0].abs().max() > 0
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-2, atol=1e-6)
