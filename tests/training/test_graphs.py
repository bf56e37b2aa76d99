"""`cuda_graphs`: what a run refuses, and runs whose stacks are recorded compared with the same ones without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.launch.watch import Watch
from evodsp.model.recordings import Rerun
from evodsp.parallel.config import ParallelConfig
from evodsp.training.checkpoints import LastCheckpoint
from evodsp.training.checks import CheckedRun
from evodsp.training.command import _callbacks
from evodsp.training.config import DataConfig, RunConfig
from evodsp.training.execution import RecordedStacks, check_graphs, obstacle_to_graphs
from evodsp.training.gradients import BatchGradients
from evodsp.training.module import TrainingModule
from tests.builders.training import CommandPool

RUN, DATA = RunConfig(cuda_graphs=True), DataConfig()


@pytest.mark.parametrize(
    ("run", "parallel", "data", "on_gpu", "said"),
    [
        (RUN, ParallelConfig(), DATA, False, "this run is on a CPU"),
        (dataclasses.replace(RUN, compile="blocks"), ParallelConfig(), DATA, True, "set compile to none"),
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
    for other in ("auto", False):
        check_graphs(dataclasses.replace(run, cuda_graphs=other), parallel, data, on_gpu)


@pytest.mark.parametrize("parallel", [ParallelConfig(parameters="zero1"), ParallelConfig(sequence=8)])
def test_a_gpu_is_accepted(parallel: ParallelConfig) -> None:
    """Catches a check meant for CPUs that refuses GPUs, and one that refuses collectives, which NCCL's recordings hold."""
    check_graphs(RUN, parallel, DATA, on_gpu=True)
    assert obstacle_to_graphs(RUN, parallel, DATA, on_gpu=True) is None


@pytest.mark.verify_but("*=2")
@pytest.mark.parametrize(
    "trained",
    [
        "--model.adapters.rank=0",
        "--model.adapters.rank=2",
        "--model.freeze=['*embedder', extra_msa_stack]",
        "--model.freeze=[evoformer.blocks.0.pair_stack]",
    ],
)
def test_a_recorded_run_is_the_run(chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    """Catches old weights or keys in a replay, accumulated batches that overwrite each other, a validation with the averaged
    weights that is recorded, and other names in checkpoints."""
    made: list[RecordedStacks] = []

    def recorded(required: bool) -> RecordedStacks:
        made.append(RecordedStacks(recorder=Rerun()))
        return made[-1]

    monkeypatch.setattr("evodsp.training.checks.obstacle_to_graphs", lambda *_: None)
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
            trained,
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


@pytest.mark.parametrize(("setting", "required"), [(True, True), ("auto", False)])
def test_graphs_that_nobody_demanded_end_no_run(setting: bool | str, required: bool) -> None:
    """Catches a run with the default that ends because a stack cannot be recorded, and `true` that goes on without graphs."""
    settings, chains = Mock(), Mock(validation=[])
    settings.run.early_stop = None
    run = Mock(spec=CheckedRun, command="fit", records_stacks=True, settings=settings, chains=chains)
    settings.run.cuda_graphs, settings.run.compile, settings.model.ema_decay = setting, "none", None
    settings.trainer = {"enable_progress_bar": False, "enable_checkpointing": False}
    last = Mock(spec=LastCheckpoint)
    with mock.patch("evodsp.training.command.RecordedStacks", return_value=RecordedStacks(recorder=Rerun())) as made:
        _callbacks(run, last)
        made.assert_called_once_with(required=required)
        run.records_stacks = False
        _callbacks(run, last)
    made.assert_called_once()


def test_a_run_that_goes_on_without_graphs_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that is slow in silence, and a line in each step or from each rank of a sample."""
    for reads in (True, False):
        world, model = Mock(reads=reads, group=None), Mock()
        stacks, module = RecordedStacks(recorder=Rerun()), Mock(spec=TrainingModule, world=world, model=model)
        module.modules.return_value, module.parameters.return_value = [], []
        stacks.on_fit_start(Mock(), module)
        stacks.on_train_batch_end(Mock(), module)
        assert capsys.readouterr().err == ""
        assert stacks._graphs is not None
        stacks._graphs.given_up = "a replay of EvoformerStack is not what was launched: result 1 has other bits"
        for _ in range(2):
            stacks.on_train_batch_end(Mock(), module)
        line = f"evodsp: {stacks._graphs.given_up}; the run goes on without CUDA graphs\n"
        assert capsys.readouterr().err == (line if reads else "")


@contextmanager
def _recorded_by_running_again() -> Iterator[None]:
    """Stacks are recorded on CPUs, by a recorder that launches again. The watch must hear of replayed collectives, and no other
    collective may run beside them."""
    counts: list[Callable[[], int]] = []
    by_running_again = partial(RecordedStacks, recorder=Rerun())
    early: list[bool] = []

    def reducing(*given: Any, **named: Any) -> BatchGradients:
        early.append(named["early"])
        return BatchGradients(*given, **named)

    with (
        mock.patch("evodsp.training.world.BatchGradients", reducing),
        mock.patch("evodsp.training.checks.obstacle_to_graphs", return_value=None),
        mock.patch("evodsp.training.checks.check_graphs", return_value=None),
        mock.patch("evodsp.training.command.RecordedStacks", by_running_again),
        mock.patch.object(Watch, "count", lambda _, count: counts.append(count)),
    ):
        yield
    (count,) = counts
    assert count() > 0
    assert not any(early)


@pytest.mark.verify
@pytest.mark.parametrize(
    "options",
    [
        ("--model.optimizer.clip=batch", "--parallel.parameters=zero1"),
        ("--trainer.accumulate_grad_batches=2", "--trainer.precision=bf16-mixed"),
    ],
)
def test_a_recorded_run_on_two_ranks_is_the_run(
    commands: CommandPool, chains: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Catches ranks that replay another call than their neighbour, collectives that the watch does not count, gradients that
    are summed before they are whole, and optimizer state that a recording holds."""
    words = ("fit", f"--config={chains}/tiny.yaml", "--parallel.sequence=2", "--trainer.max_steps=3",
             "--trainer.enable_progress_bar=false", *options)  # fmt: skip
    found = []
    for graphs in (False, True):
        output = tmp_path / str(graphs)
        around = {"around": _recorded_by_running_again} if graphs else {}
        outcomes = commands.evodsp(2, *words, f"--cuda_graphs={str(graphs).lower()}", f"--output={output}", **around)
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
        found.append(torch.load(output / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    usual, replayed = found
    assert all(torch.equal(x, replayed[name]) for name, x in usual.items())
