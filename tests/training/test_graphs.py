"""`cuda_graphs`: what a run refuses, and a run whose stacks are recorded compared with the same one without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.model.recorders import Rerun
from evodsp.parallel.config import ParallelConfig
from evodsp.training.config import DataConfig, RunConfig
from evodsp.training.execution import RecordedStacks, check_graphs

RUN, DATA = RunConfig(cuda_graphs=True), DataConfig()


@pytest.mark.parametrize(
    ("run", "parallel", "data", "on_gpu", "said"),
    [
        (RUN, ParallelConfig(), DATA, False, "this run is on a CPU"),
        (dataclasses.replace(RUN, compile="blocks"), ParallelConfig(), DATA, True, "set compile to none"),
        (RUN, ParallelConfig(sequence=2), DATA, True, "set parallel.sequence to 1"),
        (RUN, ParallelConfig(parameters="fsdp2"), DATA, True, "to replicate or zero1"),
        (RUN, ParallelConfig(), DataConfig(train=FeatureConfig(crop_size=None)), True, "set data.train.crop_size"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(
    run: RunConfig, parallel: ParallelConfig, data: DataConfig, on_gpu: bool, said: str
) -> None:
    """Catches a setting that is silently ignored, and one that fails in CUDA after the first step."""
    with pytest.raises(UserError, match=said) as error:
        check_graphs(run, parallel, data, on_gpu)
    assert len(str(error.value).splitlines()) == 1
    check_graphs(dataclasses.replace(run, cuda_graphs=False), parallel, data, on_gpu)


def test_a_gpu_is_accepted() -> None:
    """Catches a check meant for CPUs that refuses a GPU."""
    check_graphs(RUN, ParallelConfig(parameters="zero1"), DATA, on_gpu=True)


@pytest.mark.parametrize(
    "frozen",
    [
        "[]",
        pytest.param("['*embedder', extra_msa_stack]", marks=pytest.mark.verify),
        pytest.param("[evoformer.blocks.0.pair_stack]", marks=pytest.mark.verify),
    ],
)
def test_a_recorded_run_is_the_run(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    """Catches old weights or keys in a replay, accumulated batches that overwrite each other, a validation with the averaged
    weights that is recorded, and other names in checkpoints."""
    made: list[RecordedStacks] = []

    def recorded() -> RecordedStacks:
        made.append(RecordedStacks(Rerun()))
        return made[-1]

    monkeypatch.setattr("evodsp.training.checks.check_graphs", lambda *_: None)
    monkeypatch.setattr("evodsp.training.command.RecordedStacks", recorded)
    found = []
    for graphs in ("false", "true"):
        words = [
            "fit",
            "--config",
            str(chains / "tiny.yaml"),
            "--output",
            str(tmp_path / graphs),
            "--cuda_graphs",
            graphs,
            "--model.freeze",
            frozen,
        ]
        words += [
            "--trainer.max_steps",
            "2",
            "--trainer.precision",
            "bf16-mixed",
            "--trainer.enable_progress_bar",
            "false",
        ]
        assert main([*words, "--trainer.accumulate_grad_batches", "2"]) == 0
        found.append(torch.load(tmp_path / graphs / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    usual, replayed = found
    assert usual.keys() == replayed.keys()
    assert all(torch.equal(x, replayed[name]) for name, x in usual.items())
    assert made[0].replays > 0
