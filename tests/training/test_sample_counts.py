"""Samples, batches and steps on different meshes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import UserError
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule, Chains
from evodsp.training.config import DataConfig
from evodsp.training.gradients import Batching, batching
from evodsp.training.world import World


@pytest.mark.parametrize(
    ("data_ranks", "batch_size", "accumulate"), [(1, 1, 128), (8, 1, 16), (64, 2, 1), (128, 1, 1), (2, 32, 2)]
)
def test_batches_are_accumulated_to_the_global_batch(data_ranks: int, batch_size: int, accumulate: int) -> None:
    """Ranks that share a sample counted as data ranks; samples of a batch counted twice."""
    found = batching(128, data_ranks, batch_size, 1)
    assert found == Batching(data_ranks, batch_size, accumulate)
    assert found.samples == 128
    assert [found.steps(samples) for samples in (1, 128, 129, 1_500_000)] == [1, 1, 2, 11_719]


@pytest.mark.parametrize(("data_ranks", "batch_size"), [(256, 1), (3, 1), (64, 4), (1, 129)])
def test_a_global_batch_that_does_not_divide(data_ranks: int, batch_size: int) -> None:
    """A global batch rounded to what the mesh allows, without a word."""
    with pytest.raises(UserError, match=rf"global_batch is 128, but must be a multiple of {data_ranks * batch_size} "):
        batching(128, data_ranks, batch_size, 1)


def sample_numbers(config: DataConfig, data_ranks: int, accumulate: int, steps: int) -> list[list[tuple[int, int]]]:
    """By step, the number and the recycling iterations of each sample of all data ranks."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    for rank in range(data_ranks):
        chains = Chains(["a"], [], [], store=Mock(spec=ChainFiles))
        module = ChainDataModule(config, chains, 7, Mock(spec=World, data_ranks=data_ranks, data_rank=rank, reads=True))
        module.trainer = Mock(accumulate_grad_batches=accumulate)
        loader = module.train_dataloader()
        for number, indices in zip(range(steps * accumulate), loader.indices, strict=False):
            found[number // accumulate] += [(index, loader.samples.cycles_of(index)) for index in indices]
    return [sorted(step) for step in found]


def test_a_global_batch_has_the_same_samples_and_recycles_alike_on_every_mesh() -> None:
    """Recycling agreed within the batch of a rank only: on many data ranks all wait for the slowest; and another draw on
    another mesh."""
    config = DataConfig(train=FeatureConfig(recycles=3), samples_per_epoch=1000)
    serial = sample_numbers(config, 1, 16, steps=6)
    assert [[index for index, _ in step] for step in serial] == [list(range(n, n + 16)) for n in range(0, 96, 16)]
    assert all(len({cycles for _, cycles in step}) == 1 for step in serial)
    assert len({step[0][1] for step in serial}) > 1
    for data_ranks in (2, 8, 16):
        assert sample_numbers(config, data_ranks, 16 // data_ranks, steps=6) == serial


def test_a_run_ends_by_samples_and_resumes_with_its_global_batch_only(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A length in samples that counts steps or batches; a resume whose steps are other samples of the schedule than the steps
    before it: the learning rate, the epochs and the end of the run would move."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), "--trainer.max_steps=-1"]
    words += ["--model.optimizer.warmup_samples=20", "--data.validation_chains=null"]
    assert main([*words, "--global_batch=2", "--max_samples=5"]) == 0
    assert "2 samples a step: data ranks 1 x data.batch_size 1 x accumulated batches 2" in capsys.readouterr().err
    assert main([*words, "--max_samples=7", "--ckpt_path=last"]) == 2
    assert (
        "last.ckpt: its run has 2 samples a step, but this one has 1 sample a step: data ranks"
        in capsys.readouterr().err
    )
    words += ["--ckpt_path=last", "--data.batch_size=2"]
    assert main([*words, "--max_samples=7"]) == 0
    rates = {step: float(row["train/lr"]) for step, row in read_curve(tmp_path / "run" / "curve.csv").items()}
    assert rates == pytest.approx({step: 0.01 * (2 * step + 2) / 20 for step in range(4)})
