"""Errors when ranks, settings and samples do not fit together: one line on every rank, without a hang."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.parallel.config import ParallelConfig
from evodsp.report.runs import read_curve
from evodsp.training.chains import open_samples
from evodsp.training.config import DataConfig
from evodsp.training.run_folder import recount_batches
from evodsp.training.scores import mean_by_chain
from evodsp.training.world import MeshWorld
from tests.builders.forked_command import run_forked
from tests.builders.training import CommandPool
from tests.ranks import RankPool


def words(chains: Path, output: Path, *options: str) -> tuple[str, ...]:
    return ("fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options)


@pytest.fixture(scope="module")
def one_step(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run of one step."""
    output = tmp_path_factory.mktemp("one") / "run"
    assert main(list(words(chains, output, "--trainer.max_steps=1", "--trainer.limit_val_batches=0"))) == 0
    return output


def callback(name: str, arguments: str = "") -> tuple[str, str]:
    """The option for a callback of Lightning."""
    return "--trainer.callbacks", f"{{class_path: lightning.pytorch.callbacks.{name}, init_args: {{{arguments}}}}}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--parallel.sequence", "0"), "parallel.sequence is 0"),
        (("--parallel.sequence", "2", "--trainer.devices", "3"), "not a multiple of it"),
        (("--parallel.sequence", "5"), "data.train.msa_clusters is 4"),
        (("--parallel.sequence", "4", "--data.train.crop_size", "3"), "data.train.crop_size is 3"),
        (("--parallel.parameters", "zero2"), "zero2"),
        (("--parallel.parameters", "fsdp2"), "set model.optimizer.clip to batch"),
        (("--trainer.num_nodes", "2"), "use torchrun, srun or mpirun"),
        (("--trainer.devices", "[0, 1]"), "CUDA_VISIBLE_DEVICES=0,1"),
        (("--trainer.devices", "2", "--trainer.strategy", "ddp"), "trainer.strategy is ddp"),
        (
            ("--trainer.devices", "2", "--trainer.precision", "16-mixed", "--model.optimizer.clip", "batch"),
            "bf16-mixed",
        ),
        (("--trainer.precision", "16-mixed", "--model.optimizer.clip", "batch"), "scaled gradients"),
        (("--trainer.precision", "16-true"), "keeps the weights in half precision"),
        (("--trainer.precision", "bf16-true", "--parallel.sequence", "2"), "use bf16-mixed or 32-true"),
        (("--seed_everything", "3"), "use --seed"),
        (("--trainer.gradient_clip_algorithm", "value"), "gradient_clip_algorithm is value"),
        (("--model.optimizer.clip", "none"), "clip"),
        (("--parallel.timeout", "0"), "parallel.timeout is 0"),
        (("--parallel.timeout", ".inf"), "parallel.timeout is inf"),
        (("--model.optimizer.lr", ".inf"), "model.optimizer.lr is inf, but must be finite"),
        (("--trainer.val_check_interval", "0"), "val_check_interval is 0, but must be above 0"),
        (("--trainer.val_check_interval", "0.0"), "val_check_interval is 0.0, but must be above 0"),
        (("--trainer.val_check_interval", "5"), "at most 4, the batches of an epoch"),
        (("--trainer.val_check_interval", "3", "--trainer.devices", "2"), "at most 2, the batches of an epoch"),
        (
            ("--trainer.val_check_interval", "9", "--global_batch", "4", "--data.batch_size", "2"),
            "at most 4, the batch",
        ),
        (("--trainer.val_check_interval", "00:00:10:00", "--trainer.devices", "2"), "a number on several ranks"),
        (("--trainer.check_val_every_n_epoch", "0"), "check_val_every_n_epoch is 0, but must be at least 1"),
        (("--trainer.check_val_every_n_epoch", "-1"), "check_val_every_n_epoch is -1, but must be at least 1"),
        (("--trainer.log_every_n_steps", "-1"), "log_every_n_steps is -1, but must be at least 0"),
        (("--trainer.num_sanity_val_steps", "-7"), "num_sanity_val_steps is -7, but must be at least -1"),
        (("--trainer.max_steps", "0"), "max_steps is 0, but must be at least 1, or -1 for no limit"),
        (("--trainer.max_steps", "-2"), "max_steps is -2, but must be at least 1, or -1 for no limit"),
        (("--trainer.max_epochs", "0"), "max_epochs is 0, but must be at least 1, or -1 for no limit"),
        (("--trainer.min_steps", "7"), "min_steps is 7, but must be at most 6, after which the run ends"),
        (("--trainer.min_steps", "5", "--max_samples", "4"), "min_steps is 5, but must be at most 4"),
        (("--trainer.min_steps", "-1"), "min_steps is -1, but must be at least 0"),
        (("--trainer.min_epochs", "3", "--trainer.max_epochs", "2"), "min_epochs is 3, but must be at most 2"),
        (("--trainer.devices", "0"), "devices is 0, but must be a number of at least 1"),
        (("--trainer.devices", "-2"), "devices is -2, but must be a number of at least 1"),
        (("--trainer.devices", "1.5"), "devices is 1.5, but must be a number of at least 1"),
        (("--trainer.devices", "[]"), "devices is [], but must be a number of at least 1"),
        (("--trainer.devices", "[0]"), "trainer: `devices`"),
        (("--trainer.accelerator", "tpu"), "trainer: "),
        (
            ("--trainer.limit_train_batches", "0"),
            "limit_train_batches is 0, but must be null: an epoch has data.samples",
        ),
        (("--trainer.limit_val_batches", "0.5"), "limit_val_batches is 0.5, but must be a number, or a share of 1"),
        (("--trainer.overfit_batches", "1"), "overfit_batches is 1, but must be 0: each epoch draws other samples"),
        (("--trainer.reload_dataloaders_every_n_epochs", "1"), "reload_dataloaders_every_n_epochs is 1, but must be 0"),
        (
            ("--trainer.barebones", "true"),
            "barebones is true, but must be false: it forbids checkpoints, logs and prog",
        ),
        (("--trainer.strategy", "ddp_spawn"), "strategy is ddp_spawn, but must be auto"),
        (callback("Timer", "duration: 00:00:01:00"), "Timer does not work with evodsp; set trainer.max_time"),
        (callback("GradientAccumulationScheduler", "scheduling: {0: 2}"), "set global_batch instead"),
        (callback("BatchSizeFinder"), "set data.batch_size instead"),
        (
            ("--trainer.callbacks", "nowhere.Mine"),
            "callbacks: Problem with given class_path 'nowhere.Mine': No module named 'nowhere'; see",
        ),
        (
            ("--trainer.callbacks", "[{class_path: nowhere.Mine}]"),
            "'nowhere.Mine': No module named 'nowhere'; see",
        ),
        (
            callback("EarlyStopping", "monitr: a"),
            "--trainer.callbacks: Option 'monitr' is not accepted. Did you mean 'monitor'?",
        ),
        (callback("EarlyStopping"), "--trainer.callbacks: the following arguments are required: monitor"),
        (callback("LearningRateFinder"), "set model.optimizer.lr instead"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(list(words(chains, tmp_path / "run", *options))) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_gpus_that_are_not_there(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A division by the number of GPUs; ranks that start and find no GPU of theirs."""
    for gpus, devices, said in (
        (0, "auto", "must be cpu or auto: this machine has no GPU"),
        (2, "3", "must be at most 2"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        options = ("--trainer.accelerator", "gpu", "--trainer.devices", devices)
        assert main(list(words(chains, tmp_path / "run", *options))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.verify_but("validate*")
@pytest.mark.parametrize(("command", "limit"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")])
def test_a_limit_that_leaves_nothing_to_score(
    chains: Path, one_step: Path, capsys: pytest.CaptureFixture[str], command: str, limit: str
) -> None:
    """A command that scores nothing and succeeds; a traceback of Lightning's."""
    score = [command, *words(chains, one_step)[1:], "--ckpt_path", "last", f"--trainer.{limit}"]
    for value, said in (("0", "0, but must be above 0: nothing would be scored"), ("0.5", "share of 1 batch")):
        assert main([*score, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{limit} is {value}" in line
        assert said in line


@pytest.mark.verify_but("counted over epochs")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("check_val_every_n_epoch=null", "val_check_interval=5"), id="counted over epochs"),
        pytest.param(("limit_val_batches=0", "val_check_interval=5"), id="without validation"),
        pytest.param(("val_check_interval=00:00:10:00",), id="by time"),
    ],
)
def test_validations_that_are_far_apart(chains: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Refused, although they can be; a checkpoint that is not written because a validation might follow."""
    output = tmp_path / "run"
    given = [f"--trainer.{option}" for option in options]
    every = ("--checkpoint_every=2", "--keep_last=3", "--data.samples_per_epoch=2", "--trainer.max_steps=3")
    assert main(list(words(chains, output, *given, *every))) == 0
    assert (output / "checkpoints/last-1.ckpt").is_file()


@pytest.mark.parametrize(
    ("ranks", "options", "own", "said"),
    [
        (3, ("--parallel.sequence", "2"), {}, "the number of ranks, 3, is not a multiple of it"),
        (2, ("--trainer.devices", "4"), {}, "but 2 were started"),
        (2, ("--parallel.sequence", "2"), {1: ("--seed", "9")}, "different settings"),
        (2, (), {1: ("--parallel.sequence", "2")}, "different settings"),
    ],
)
def test_every_rank_reports_what_does_not_fit(
    commands: CommandPool, chains: Path, tmp_path: Path, ranks: int, options: Any, own: Any, said: str
) -> None:
    for outcome in commands.evodsp(ranks, *words(chains, tmp_path / "run", *options), own=own):
        assert outcome.code == 2
        assert said in outcome.error
        assert "Traceback" not in outcome.error
        assert outcome.error.splitlines()[-1].startswith("evodsp: error: ")


def test_fit_starts_its_ranks_itself(chains: Path, tmp_path: Path) -> None:
    """Catches ranks that do not find each other, and a line that each of them says."""
    output = tmp_path / "run"
    options = ("--parallel.sequence", "2", "--trainer.max_steps", "1", "--trainer.precision", "bf16-mixed")
    done = run_forked(list(words(chains, output, *options, "--trainer.limit_val_batches=0")))
    assert done.returncode == 0, done.stderr
    assert list(read_curve(output / "curve.csv")) == [0]
    assert done.stdout.count("checkpoint:") == 1


@pytest.mark.verify_but("EarlyStopping*")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ModelCheckpoint", "`ModelCheckpoint(monitor='val/lddt')` could not find"),
        ("EarlyStopping", "Early stopping conditioned on metric `val/lddt`"),
    ],
)
def test_a_callback_that_monitors_what_is_not_logged(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    """A traceback for a misspelt score, with exit code 1, which a batch system may take for a failure of the machine."""
    own = f", dirpath: {tmp_path}/own" if name == "ModelCheckpoint" else ""
    options = (*callback(name, f"monitor: val/lddt{own}"), "--data.samples_per_epoch=1")
    assert main(list(words(chains, tmp_path / "run", *options))) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"evodsp: error: trainer: {said}")
    assert "val/lddt_ca" in error


def test_an_error_of_pytorch_is_no_mistake_of_the_user(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a GPU without memory, or a collective that failed, reported as a wrong setting: torchrun would not restart."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("evodsp.training.command._execute", fails)
    with pytest.raises(torch.OutOfMemoryError):
        main(list(words(chains, tmp_path / "run")))


def test_a_callback_in_the_current_folder_is_found(
    chains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`evodsp fit` that knows a user's file on several ranks only, which our launcher starts with `python -m evodsp`."""
    (tmp_path / "of_a_user.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Mine(Callback):\n"
        "    def on_train_start(self, trainer, module):\n        print('MINE', trainer.global_rank)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    options = ("--trainer.max_steps", "1", "--trainer.callbacks", "of_a_user.Mine")
    assert main(list(words(chains, tmp_path / "run", *options))) == 0
    assert "MINE 0" in capfd.readouterr().out


@pytest.mark.verify
def test_half_precision_trains_over_ranks(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """The exchange returns gradients of another type than their tensors; copies of parameters in half precision that are not
    those of the step, or that FSDP2's sharded parameters cannot have."""
    runs = {}
    for ranks, parameters in ((1, "replicate"), (2, "zero1"), (2, "fsdp2")):
        output = tmp_path / parameters
        options = ["--trainer.precision", "bf16-mixed", "--trainer.max_steps", "2", "--model.optimizer.clip", "batch"]
        options += ["--trainer.limit_val_batches=0"]
        options += ["--parallel.sequence", str(ranks), "--parallel.parameters", parameters]
        outcomes = commands.evodsp(ranks, *words(chains, output, *options))
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        runs[parameters] = [float(row["train/loss"]) for row in read_curve(output / "curve.csv").values()]
    for parameters, losses in runs.items():
        assert losses == pytest.approx(runs["replicate"], rel=1e-2), parameters


@pytest.mark.verify
def test_validation_scores_each_chain_once(commands: CommandPool, chains: Path, one_step: Path) -> None:
    """Fewer chains than data ranks (a rank without batches would hang the others); a sequence group counted N times."""
    score = ("--config", str(chains / "tiny.yaml"), "--output", str(one_step), "--ckpt_path", "last")
    tables = []
    for ranks, options in ((1, ()), (2, ()), (4, ("--parallel.sequence", "2"))):
        all_chains = ("--data.test_chains", "[1abc_A]" if ranks == 2 else "[1abc_A, 2abc_B]")
        outcomes = commands.evodsp(ranks, "test", *score, *all_chains, *options)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        assert all(not outcome.out for outcome in outcomes[1:]), "rank 0 alone shows results"
        tables.append(outcomes[0].out.splitlines())
        lines = (one_step / "test.csv").read_text().splitlines()[1:]
        keys = ["1abc_A"] if ranks == 2 else ["1abc_A", "2abc_B"]
        assert [line.split(",")[:4] for line in lines] == [[key, "test", "13", "13"] for key in keys]
    assert tables[0][:4] == tables[2][:4]
    assert tables[1][1] == tables[0][1]


def check(group: Any, sequence: int, batches: list[Any]) -> str:
    batch, world = batches[torch.distributed.get_rank(group)], MeshWorld(ParallelConfig(sequence=sequence))
    try:
        world.check_batches(UserError(batch) if isinstance(batch, str) else [batch])
    except UserError as error:
        return str(error)
    return ""


def sample(number: int, residues: int = 5) -> dict[str, torch.Tensor]:
    return {"aatype": torch.full((1, 2, residues), number), "sample_index": torch.tensor([number])}


def test_one_ranks_mistake_is_raised_on_all(pool: RankPool) -> None:
    """A broken file that one data rank reads, or a chain with fewer residues than ranks."""
    assert (
        pool.run(4, check, 2, [sample(1), sample(1), "x.a3m:3: broken", "x.a3m:3: broken"]) == ["x.a3m:3: broken"] * 4
    )
    for found in pool.run(4, check, 4, [sample(1, residues=3)] * 4):
        assert "has only 3 residues" in found


def test_scores_are_means_over_the_ranks_that_found_them() -> None:
    parts = [{"a": {"loss": 1.0}}, {"a": {"loss": 3.0}}, {"b": {"loss": 5.0}}]
    assert mean_by_chain(parts) == {"a": {"loss": 2.0}, "b": {"loss": 5.0}}


@pytest.mark.parametrize(
    ("former", "now", "counts", "expected"),
    [
        (4, 2, (8, 8, 8, 7), (4, 4, 4, 3)),  # written before the last batch counted as completed
        (2, 4, (6, 6, 6, 6), (12, 12, 12, 12)),
        (4, 4, (6, 6, 6, 5), (4, 4, 4, 4)),  # within a step: its gradients are not saved
        (4, 2, (7, 7, 7, 6), (2, 2, 2, 2)),  # within a step, on other ranks
    ],
)
def test_batches_are_recounted(former: int, now: int, counts: tuple[int, ...], expected: tuple[int, ...]) -> None:
    names = ("ready", "started", "processed", "completed")
    progress = {part: dict(zip(names, counts, strict=True)) for part in ("total", "current")}
    checkpoint = {"batches_per_step": former, "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
    recount_batches(checkpoint, now)
    for part in ("total", "current"):
        assert tuple(progress[part][name] for name in names) == expected


def _opened(config: DataConfig, *of_model: Any) -> Any:
    hidden = {"alignment_dir": "/not_mounted"} if os.environ["RANK"] == "1" else {}
    return open_samples(dataclasses.replace(config, **hidden), *of_model)


@contextmanager
def _rank_1_sees_no_folder() -> Iterator[None]:
    with mock.patch("evodsp.training.chains.open_samples", _opened):
        yield


def test_the_rank_and_its_host_are_named(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Catches ranks that wait for the one which has stopped, and a message from which nobody learns on which machine."""
    words = ("fit", f"--config={chains}/tiny.yaml", "--parallel.sequence=2", f"--output={tmp_path}/run")
    outcomes = commands.evodsp(2, *words, around=_rank_1_sees_no_folder)
    for outcome in outcomes:
        assert outcome.code == 2
        line = f"evodsp: error: rank 1 on {socket.gethostname()} of 2 ranks: data.alignment_dir is /not_mounted, which is no"
        assert outcome.error.startswith(line)
        assert len(outcome.error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_variables_count_less_than_the_config(
    chains: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches variables that nobody reads, and another order than Lightning's: defaults, variables, config, options."""
    for name, value in {"SEED": 5, "DATA__BATCH_SIZE": 7, "CHECKPOINT_EVERY": 17, "TRAINER__MAX_EPOCHS": 9}.items():
        monkeypatch.setenv(f"EVODSP_{name}", str(value))
    assert main(["fit", f"--config={chains}/tiny.yaml", "--checkpoint_every=3", "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["seed"] == 5
    assert config["trainer"]["max_epochs"] == 9
    assert config["data"]["batch_size"] == 1, "the config's"
    assert config["checkpoint_every"] == 3, "the option's"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EVODSP_CHECKPOINT_EVERY", "-3", "EVODSP_CHECKPOINT_EVERY: checkpoint_every is -3, but must be at least 1"),
        ("EVODSP_TRAINER__GRADIENT_CLIP_VAL", "lots", "EVODSP_TRAINER__GRADIENT_CLIP_VAL: trainer.gradient_clip_val: expec"),
        ("EVODSP_MODEL__OPTIMIZER__LR", "fast", "EVODSP_MODEL__OPTIMIZER__LR: model.optimizer.lr: expected float, found"),
        ("EVODSP_DATA", "/x", "EVODSP_DATA: data: expected a group of options"),
        ("EVODSP_TRAINER__MAX_STEP", "3", "MAX_STEP: no such setting. Did you mean 'EVODSP_TRAINER__MAX_STEPS'?"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, said: str,
) -> None:  # fmt: skip
    """Catches a wrong value that is blamed on the config file, which is right; a misspelled variable that does nothing."""
    monkeypatch.setenv(name, value)
    assert main(["fit", f"--config={chains}/tiny.yaml", f"--output={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "tiny.yaml" not in error
    assert len(error.splitlines()) == 1


PROGRAM = """
import sys
from evodsp.cli import main
config, output = sys.argv[1:]
assert main(["fit", f"--config={config}", f"--output={output}", "--trainer.max_steps=1"]) == 0
assert main(["validate", f"--config={config}", f"--output={output}", "--ckpt_path=last"]) == 0
"""


@pytest.mark.verify
def test_files_are_written_in_the_output_folder_only(chains: Path, tmp_path: Path) -> None:
    """Catches `lightning_logs/` and `checkpoints/` in the working directory, caches in the home folder, temporary files that
    stay. (matplotlib, which torchmetrics imports where there is one, keeps a list of fonts in a folder of its own.)"""
    empty = {name: tmp_path / name.lower() for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    working = tmp_path / "working"
    for folder in (*empty.values(), working):
        folder.mkdir()
    variables = {**os.environ, **{name: str(folder) for name, folder in empty.items()}, "OMP_NUM_THREADS": "1"}
    variables["MPLCONFIGDIR"] = str(tmp_path / "fonts")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{chains}/tiny.yaml", f"{tmp_path}/run"],
        cwd=working, env={**variables, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "baseline.json",
        "checkpoints",
        "config.yaml",
        "curve.csv",
        "tensorboard",
        "validate.csv",
    }
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt"}
    written = [path for folder in (working, *empty.values()) for path in folder.rglob("*")]
    assert not written, written
