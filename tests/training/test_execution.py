"""How steps are executed: compiled blocks, recorded stacks, copies of parameters in half precision, where the host waits."""

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
from lightning.pytorch import Trainer
from torch import Tensor, nn

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.launch.watch import Watch
from evodsp.model.alphafold import AlphaFold
from evodsp.model.recordings import Rerun
from evodsp.parallel.config import ParallelConfig
from evodsp.training.checkpoints import LastCheckpoint
from evodsp.training.checks import CheckedRun
from evodsp.training.command import _callbacks
from evodsp.training.config import DataConfig, RunConfig, TrainingConfig
from evodsp.training.execution import RecordedStacks, check_graphs, obstacle_to_graphs
from evodsp.training.gradients import BatchGradients, PlainGradients
from evodsp.training.module import TrainingModule
from evodsp.training.run_end import LastValidation
from tests.builders.labelled_batch import batch_of
from tests.builders.small_model import CYCLES, SMALL, config, features
from tests.builders.training import CommandPool
from tests.builders.unchecked import both, refusal, waits
from tests.ranks import in_a_fork


@pytest.mark.verify
@pytest.mark.parametrize(
    ("options", "quick"),
    [
        (("--model.evoformer.blocks=2", "--data.train.recycles=0"), True),
        (("--model.evoformer.blocks=3",), False),
        (("--model.evoformer.blocks=2", "--data.train.recycles=0", "--model.evoformer.checkpoint_projections=true"), True),
        (("--model.evoformer.blocks=2", "--data.train.recycles=0",
             "--model.freeze=[evoformer.blocks.1.pair_stack, extra_msa_stack]"), True),
        (("--model.evoformer.blocks=3", "--trainer.precision", "bf16-mixed", "--model.evoformer.checkpoint", "true",
             "--model.extra_msa.checkpoint", "true"), False),
    ],
)  # fmt: skip
def test_a_compiled_run_is_the_run(chains: Path, tmp_path: Path, options: tuple[str, ...], quick: bool) -> None:
    """Catches a graph for each block or step, changed numbers, and other names in checkpoints.

    Several blocks of the Evoformer, one of the extra-MSA stack, recycling, dropout, the moving average. Each half of a block is
    one graph in passes with gradients, and one in recycled passes without; three more are those of the check at the start.
    `make test` runs the graphs as they are traced, without recycling and without that check, which has tests of its own.
    """
    plain, compiled, graphs = in_a_fork(both, chains, tmp_path, (*options, "--trainer.max_steps=3"), quick)
    assert len(plain["loss"]) == 3
    tolerance = 1e-2 if "bf16-mixed" in options else 1e-4
    torch.testing.assert_close(compiled["loss"], plain["loss"], rtol=tolerance, atol=0)
    assert compiled["names"] == plain["names"]
    assert graphs <= (4 if quick else 8 + 3)


@pytest.mark.verify
@pytest.mark.parametrize("half", [False, True])
def test_a_right_backend_compiles(half: bool) -> None:
    """Catches a false alarm: rounding errors, and gradients that are nothing else."""
    assert in_a_fork(refusal, "right", half) == ""


@pytest.mark.verify_but("wrong_gradient*")
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("wrong_result", "a block's MSA stack: result 1 differs by 1.0e-01 of its size"),
        ("wrong_gradient", "a block's MSA stack: the gradient of input 1 differs by 5.0e-01 of its size"),
        ("broken", "OSError: no code"),
    ],
)
def test_a_wrong_backend_is_refused(backend: str, said: str) -> None:
    """Catches a run that trains on wrong numbers, as with torch 2.11: results were right, and gradients were not."""
    message = in_a_fork(refusal, backend, False)
    assert said in message
    assert f"torch {torch.__version__}" in message
    assert "set compile to none" in message
    assert "\n" not in message


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
        assert not any(isinstance(one, LastValidation) for one in _callbacks(run, last))
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
        assert stacks._graphs.agree is world.of_sample
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


def labelled_sample() -> dict[str, Tensor]:
    clusters, _, residues = SMALL
    generator = torch.Generator().manual_seed(2)
    batch = {
        **features(1),
        **batch_of(1, residues),
        "true_msa": torch.randint(22, (1, CYCLES, clusters, residues), generator=generator),
        "bert_mask": torch.ones(1, CYCLES, clusters, residues),
        "sample_index": torch.zeros(1, dtype=torch.long),
    }
    return {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}


def test_copies_last_until_the_backward_pass_has_ended() -> None:
    """Catches a recomputation in the backward pass that casts parameters one by one again, and copies that hide the parameters
    when the optimizer has changed them or when the moving average takes their place."""
    module = TrainingModule(TrainingConfig(**vars(config())))
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module._gradients = PlainGradients(module.model.parameters(), None)
    attention = module.model.evoformer.blocks[0].pair_stack.attention_starting.attention
    layer = attention.output  # whose parameters an operator takes: it is never called
    used: list[torch.dtype] = []
    attention.register_forward_hook(lambda *_: used.append(layer.weight.dtype))
    batch = labelled_sample()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = module.training_step(batch, 0)
    passes = len(used)
    loss.backward()
    module.on_after_backward()
    assert len(used) == passes + 1  # recomputed
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        module._evaluate(batch, "val")
    assert isinstance(layer.weight, nn.Parameter)
    assert set(used) == {torch.bfloat16}


def test_a_model_that_is_scored_is_the_one_that_is_cast() -> None:
    """Catches copies of the parameters of a new model, where validate and test put another one in its place."""
    model = AlphaFold(config())
    module = TrainingModule(TrainingConfig(**vars(config())), model=model)
    assert module.model is model
    layer = model.evoformer.blocks[0].pair_stack.attention_starting.attention.output
    with torch.autocast("cpu", torch.bfloat16), module._casts:
        assert layer.weight.dtype == torch.bfloat16


KEYS = "_to_copy model/dropout.py"
"""The copy of dropout's keys, from pinned memory on a GPU; a meta tensor's source is never pinned."""


@pytest.mark.verify_but("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_once(chains: Path, tmp_path: Path, ranks: int) -> None:
    """Catches losses, a norm or a sample number read one by one, numbers that are copied to the device to be logged, a check of
    a value on the device, and Lightning's question before each batch of several ranks whether one of them got SIGTERM.

    The one wait is the copy of all losses and of the norm in `TrainingModule.on_before_optimizer_step`. Batches are compared
    over the ranks before they are on the device, and are copied there asynchronously. So are the keys of dropout, once a pass.
    """
    (step,) = in_a_fork(waits, ranks, chains, tmp_path)
    places = [wait.split(":")[0] for wait in step]
    assert [place for place in places if place != KEYS] == ["_to_copy training/module.py"]
