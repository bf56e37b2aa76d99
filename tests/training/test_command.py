"""`evodsp fit`, `validate` and `test` from end to end, in this process, on two chains of 13 residues."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.files import holder, lock
from evodsp.inference.score.table import columns_of
from evodsp.report.runs import read_curve
from evodsp.training.checks import CheckedRun, check_run
from evodsp.training.command import Built, TrainingCLI, _execute
from evodsp.weights.checkpoint import load_features, load_model, read_checkpoint


def fit(chains: Path, output: Path, *options: str) -> int:
    return main(["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options])


NO_VALIDATION = "--trainer.limit_val_batches=0"


def losses(output: Path) -> dict[int, str]:
    return {step: row["train/loss"] for step, row in read_curve(output / "curve.csv").items()}


@pytest.fixture(scope="module")
def finished(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of an uninterrupted run of 6 steps, 4 to an epoch."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert fit(chains, output) == 0
    return output


def test_fit_leaves_checkpoints_logs_and_its_config(finished: Path) -> None:
    names = {
        path.relative_to(finished).as_posix().split("/events")[0] for path in finished.rglob("*") if path.is_file()
    }
    assert {
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
        "curve.csv",
        "config.yaml",
        "tensorboard",
        "baseline.json",
    } <= names
    row = read_curve(finished / "curve.csv")[3]
    assert {
        "train/loss",
        "train/backbone_fape",
        "train/lr",
        "val/lddt_ca",
        "val/lddt_ca/1abc_A",
        "val/tm_score",
        "seconds",
    } <= set(row)


@pytest.mark.parametrize("stops", [(2, 5), pytest.param((4,), marks=pytest.mark.verify)], ids=str)
def test_a_resumed_run_is_the_uninterrupted_run(
    chains: Path, finished: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """Sample order, dropout, Adam's state, schedule or average lost in a resume: within an epoch, at its end, in the next."""
    output = tmp_path / "run"
    for stop in stops:
        assert fit(chains, output, "--trainer.max_steps", str(stop), "--ckpt_path", "auto") == 0
        assert list(losses(output)) == list(range(stop))
    assert fit(chains, output, "--ckpt_path", "last") == 0
    assert losses(output) == losses(finished)
    once, twice = (read_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (finished, output))
    for weights in ("state_dict", "ema_state_dict"):
        for name, value in once[weights].items():
            torch.testing.assert_close(twice[weights][name], value, rtol=0, atol=1e-6)


@pytest.mark.verify
def test_a_checkpoint_between_validations_resumes_alike(chains: Path, finished: Path, tmp_path: Path) -> None:
    """Lightning counts a batch as done only after the hook in which checkpoints are written."""
    output = tmp_path / "run"
    assert (
        fit(chains, output, "--checkpoint_every", "1", "--trainer.limit_val_batches", "0", "--trainer.max_steps", "3")
        == 0
    )
    other = tmp_path / "other"
    assert fit(chains, other, "--ckpt_path", str(output / "checkpoints" / "last.ckpt")) == 0
    assert losses(other) == {step: loss for step, loss in losses(finished).items() if step >= 3}


def test_the_checkpoint_holds_raw_and_averaged_weights(finished: Path) -> None:
    path = finished / "checkpoints" / "last.ckpt"
    averaged, raw = load_model(path), load_model(path, raw=True)
    assert not averaged.training
    differing = [not torch.equal(a, b) for a, b in zip(averaged.parameters(), raw.parameters(), strict=True)]
    assert sum(differing) > len(differing) / 2


def test_the_checkpoint_holds_the_features_of_validation(finished: Path) -> None:
    """The features of training, with crops and random recycling, or none: prediction would use other sizes."""
    expected = FeatureConfig(crop_size=None, msa_clusters=4, extra_msa=3, recycles=0, uniform_recycling=False)
    for name in ("last", "best"):
        assert load_features(finished / "checkpoints" / f"{name}.ckpt") == expected


def test_mixed_precision_trains(chains: Path, finished: Path, tmp_path: Path) -> None:
    """Lightning refuses to clip gradients in mixed precision where the optimizer is fused; a resume may switch to it."""
    output, last = tmp_path / "run", finished / "checkpoints" / "last.ckpt"
    options = ("--trainer.precision", "bf16-mixed", "--trainer.max_steps", "7", "--ckpt_path", str(last))
    assert fit(chains, output, *options, NO_VALIDATION) == 0
    assert fit(chains, output, "--trainer.max_steps", "8", "--ckpt_path", "last", NO_VALIDATION) == 0
    assert list(losses(output)) == [6, 7]


def rows(text: str) -> list[str]:
    """The lines of a table of scores that are of a chain."""
    return [line for line in text.splitlines() if line.startswith("1abc_A")]


def test_validation_in_training_scores_the_average(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw weights scored in training, the average by `validate`: their tables must agree."""
    output = tmp_path / "run"
    assert fit(chains, output, "--trainer.max_steps", "4") == 0
    in_training = rows(capsys.readouterr().out)
    assert len(in_training) == 1
    common = ["--config", str(chains / "tiny.yaml"), "--output", str(output), "--ckpt_path", "last"]
    for command in ("validate", "test"):
        assert main([command, *common]) == 0
        said, warned = capsys.readouterr()
        assert rows(said) == in_training
        assert "warning: 1 of 1 scored chains are trained on, such as 1abc_A: their scores" in warned
        assert said.splitlines()[-1] == f"scores: {output / command}.csv"
        check_file(output / f"{command}.csv", in_training, {"validate": "validation"}.get(command, command))


def check_file(path: Path, table: list[str], split: str) -> None:
    """The file has the columns of `evodsp score`, and the numbers of the table."""
    with path.open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["chain", *columns_of("chains")[1:]]
    assert [row[name] for name in ("chain", "split", "residues", "resolved")] == ["1abc_A", split, "13", "13"]
    names = ("lddt_ca", "gdt_ts", "tm_score", "rmsd", "plddt")
    assert [float(row[name]) for name in names] == pytest.approx([float(x) for x in table[0].split()[1:6]], abs=6e-4)


def test_without_logger_and_checkpoints_only_the_config_is_written(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml written to the current folder, over another one; files named that do not exist; filters that the user wrote
    and that are not applied, without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("mine")
    options = ("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.max_steps=1")
    assert fit(chains, Path("run"), *options, NO_VALIDATION, "--data.filters.max_resolution=9") == 0
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"config.yaml", "run/config.yaml"}
    assert (tmp_path / "config.yaml").read_text() == "mine"
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "config: run/config.yaml"
    assert said.err.count("evodsp: warning: data.filters are not applied: values that are all the default") == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--trainer.enable_checkpointing=false", "curve: OUT/curve.csv"),
        ("--trainer.logger=false", "checkpoint: OUT/checkpoints/last.ckpt"),
    ],
)
def test_only_files_that_exist_are_named(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert fit(chains, tmp_path / "run", option, "--trainer.max_steps=1", NO_VALIDATION) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said.replace("OUT", str(tmp_path / "run"))


def test_nothing_is_deleted_before_everything_is_checked(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite with a mistake in another option: the earlier run is gone and there is no new one."""
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for mistake in ("--trainer.accelerator=abacus", "--data.train_chains=[1abc_B]", "--model.ema_decay=2"):
        assert fit(chains, tmp_path / "run", "--overwrite", mistake) == 2
        assert checkpoint.is_file()


def test_an_earlier_run_is_not_overwritten(chains: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(chains, finished) == 2
    assert "--ckpt_path last" in capsys.readouterr().err


def test_a_folder_in_which_another_run_trains(tmp_path: Path) -> None:
    """Catches two runs that write the same checkpoints: the lock is not taken, or only after the folder was prepared."""
    run, built = MagicMock(spec=CheckedRun), MagicMock(spec=Built)
    run.command, run.start, run.changed, run.folder, run.chains = "fit", None, (), MagicMock(path=tmp_path), MagicMock()
    run.settings = MagicMock(run=MagicMock(init_from=None, dry_run=False))
    built.module, built.data, built.trainer, built.world = MagicMock(), MagicMock(), MagicMock(), MagicMock(group=None)
    with (
        lock(tmp_path / "run.lock", tmp_path, "trains there"),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* trains there; end it first"),
    ):
        _execute(run, built, "")
    assert not run.folder.prepare.called

    def prepare(*_: object) -> None:
        assert holder(tmp_path / "run.lock") is not None
        raise KeyboardInterrupt

    run.folder.prepare.side_effect = prepare
    with pytest.raises(KeyboardInterrupt):
        _execute(run, built, "")


def test_overwrite_starts_anew_and_its_config_does_not_repeat_that(chains: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert fit(chains, output, "--trainer.max_steps", "2", NO_VALIDATION) == 0
    assert fit(chains, output, "--trainer.max_steps", "1", "--overwrite", NO_VALIDATION) == 0
    assert list(losses(output)) == [0]
    assert main(["fit", "--config", str(output / "config.yaml")]) == 2


@pytest.mark.verify
def test_accumulated_batches_and_workers_run(chains: Path, tmp_path: Path) -> None:
    """One optimizer step of two batches of two, made by a worker process."""
    options = ("--trainer.accumulate_grad_batches", "2", "--data.batch_size", "2", "--data.num_workers", "1")
    assert fit(chains, tmp_path / "run", *options, "--trainer.max_steps", "1") == 0


@pytest.mark.verify_but(
    *(f"options{number}-*" for number in (0, 2, 4, 8, 15, 16, 19, 20, 26, 28)),
)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model.evoformr.blocks", "3"), "Did you mean '--model.evoformer.blocks'?"),
        (("--trainer.max_step", "3"), "Did you mean '--trainer.max_steps'?"),
        (("--model.evoformer.blocks", "many"), "--model.evoformer.blocks: expected int, found 'many'; see"),
        (("--model.evoformer", "3"), "model.evoformer: expected a group of options (blocks, "),
        (
            ("--model.loss.pae", "0.1"),
            "model.loss.pae is 0.1, but the model has no head for it; set model.heads.predicted_aligned",
        ),
        (("--model.evoformer.msa_heads", "0"), "model.evoformer.msa_heads is 0, but must be at least 1"),
        (
            ("--model.extra_msa.pair_dropout", "1.5"),
            "model.extra_msa.pair_dropout is 1.5, but must be at least 0 and below 1",
        ),
        (("--model.optimizer.beta2", "1"), "model.optimizer.beta2 is 1.0, but must be at least 0 and below 1"),
        (("--data.train.crop_size", "-5"), "--data.train.crop_size is -5, but must be at least 1"),
        (("--data.train.msa_clusters", "0"), "--data.train.msa_clusters is 0, but must be at least 1"),
        (("--data.train.recycles", "-1"), "--data.train.recycles is -1, but must be at least 0"),
        (("--data.validation.extra_msa", "0"), "--data.validation.extra_msa is 0, but must be at least 1"),
        (("--data.train.masked_uniform", "2"), "masked_uniform is 2.0, but must be at least 0 and at most 1"),
        (("--seed", "-1"), "--seed is -1, but must be at least 0 and below 4294967296"),
        (("--checkpoint_every", "0"), "--checkpoint_every is 0, but must be at least 1"),
        (
            ("--trainer.accumulate_grad_batches", "0"),
            "--trainer.accumulate_grad_batches is 0, but must be at least 1",
        ),
        (
            ("--global_batch", "9", "--data.batch_size", "2"),
            "global_batch is 9, but must be a multiple of 2 (data ranks 1 x data.batch_size 2); use another",
        ),
        (
            ("--global_batch", "4", "--trainer.accumulate_grad_batches", "4"),
            "global_batch is 4, which sets how many batches are accumulated, but trainer.accumulate_grad_batches is 4; give",
        ),
        (("--max_samples", "0"), "--max_samples is 0, but must be at least 1"),
        (
            ("--model.optimizer.drop_step", "3"),
            "model.optimizer.drop_step was replaced by model.optimizer.drop_samples, which counts samples: steps x",
        ),
        (
            ("--model.optimizer.schedule", "cosine", "--trainer.max_steps", "-1", "--max_samples", "null"),
            "model.optimizer.total_samples is null, but must be a number: max_samples and trainer.max_steps are off",
        ),
        (("--trainer.gradient_clip_val", "-1"), "--trainer.gradient_clip_val is -1, but must be at least 0"),
        (("--model.optimizer.lr", "-1"), "--model.optimizer.lr is -1.0, but must be above 0"),
        (("--data", "3"), "--data: expected a group of options (alignment_dir, "),
        (("--output", "elsewhere"), "--output is given more than once; give it once"),
        (("--trainer.accelerator", "abacus"), "abacus"),
        (("--data.train_chains", "[1abc_B]"), "no alignments of chain '1abc_B'"),
        (("--data.train_chains", "nowhere.txt"), "nowhere.txt: no such file"),
        (("--data.train_chains", "[1abc_A, 1abc_A]"), "more than once"),
        (
            ("--data.structure_dir", "nowhere"),
            "data.structure_dir is nowhere, which is no folder; give the folder of structures",
        ),
        (
            ("--data.alignment_dir", __file__),
            "which is a file; give the folder of alignments, one sub-folder per chain",
        ),
        (("--data.batch_size", "0"), "data.batch_size is 0"),
        (("--ckpt_path", "nowhere.ckpt"), "nowhere.ckpt: no such checkpoint"),
        (("--ckpt_path", "last"), "checkpoints/last.ckpt"),
        (("--config", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert fit(chains, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("evodsp: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_folder_of_checkpoints_that_cannot_be_written(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found at the first save, after hours. A file stands for a folder without permission, which root has everywhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    assert fit(chains, tmp_path / "run") == 2
    assert "run/checkpoints: is a file" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.verify_but("batch_size*", "trainer*", "  evoformer*", "msa: 3*")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch_size", "batchsize", ":LINE: unknown config key 'data.batchsize'. Did you mean 'data.batch_size'?"),
        (
            "  train: {crop",
            "  trn: {crop",
            ":LINE: unknown config key 'data.trn.crop_size'. Did you mean 'data.train.crop_size'?",
        ),
        ("channels: {msa: 6", "channels: {msa: 0", ":LINE: model.channels.msa is 0, but must be at least 1"),
        ("  evoformer: *stack", "  evoformer: 3", ":LINE: model.evoformer: expected a group of options (blocks, "),
        ("channels: {msa: 6", "channels: {msa: six", ":LINE: model.channels.msa: expected int, found 'six'; see"),
        (
            "msa: 3, recycles: 1}",
            "msa: 3, recycles: -1}",
            ":LINE: data.train.recycles is -1, but must be at least 0",
        ),
        ("trainer: {", "trainer: [", ":LINE: not YAML that evodsp reads"),
    ],
)
def test_a_mistake_in_the_config_names_its_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    text = (chains / "tiny.yaml").read_text().replace(old, new)
    (tmp_path / "wrong.yaml").write_text(text)
    assert main(["fit", "--config", str(tmp_path / "wrong.yaml"), "--output", str(tmp_path / "run")]) == 2
    line = 1 + next(number for number, line in enumerate(text.splitlines()) if new in line)
    assert "wrong.yaml" + said.replace("LINE", str(line)) in capsys.readouterr().err


@pytest.mark.verify
def test_a_checkpoint_of_other_sizes_is_refused(
    chains: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wall of missing keys, weights silently left at random, or sizes that `validate` ignores."""
    options = ("--ckpt_path", str(finished / "checkpoints" / "last.ckpt"), "--model.evoformer.blocks", "2")
    for command in ("fit", "validate", "test"):
        common = ["--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run")]
        assert main([command, *common, *options]) == 2
        assert "trained with model.evoformer.blocks 1, but the config says 2" in capsys.readouterr().err


@pytest.mark.verify
def test_a_run_without_work_is_refused(chains: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 without a step or a score; but a repeated `--ckpt_path auto` of a finished run is no mistake."""
    common = ["--config", str(chains / "tiny.yaml"), "--output", str(finished)]
    for command, options, said in (
        (
            "fit",
            ["--ckpt_path=last", "--trainer.max_steps=1"],
            "last.ckpt: is at step 6 already, and trainer.max_steps is 1",
        ),
        (
            "fit",
            ["--ckpt_path=last", "--trainer.max_steps=9", "--max_samples=6"],
            "last.ckpt: is at step 6 already, and max_samples is 6, so nothing is left to train; give a larger max_samples",
        ),
        ("validate", ["--ckpt_path=last", "--data.validation_chains=null"], "data.validation_chains is null"),
        (
            "test",
            ["--ckpt_path=last", "--data.validation_chains=null"],
            "data.test_chains and data.validation_chains are",
        ),
    ):
        assert main([command, *common, *options]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    settings = TrainingCLI("fit", [*common, "--ckpt_path=auto", "--trainer.max_steps=6"]).settings
    assert check_run("fit", settings).start == finished / "checkpoints" / "last.ckpt"


def test_a_broken_alignment_is_one_line_even_from_a_worker(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more chains than are read in advance, a broken file is found in a worker process of the loader."""
    monkeypatch.setattr("evodsp.training.chains.MOST_CHAINS_READ", 0)
    broken = tmp_path / "alignments"
    for key in ("1abc_A", "2abc_B"):
        (broken / key).mkdir(parents=True)
        (broken / key / "hits.a3m").write_text(">q\nMKT\n>r\nMK\n")
    options = ("--data.alignment_dir", str(broken), "--data.num_workers", "1")
    assert fit(chains, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert "hits.a3m" in error
    assert error.splitlines()[-1].startswith("evodsp: error: ")
    assert "Traceback" not in error


@pytest.mark.verify
def test_ctrl_c_says_where_the_last_checkpoint_is(chains: Path, tmp_path: Path) -> None:
    """Lightning ends an interrupted run with exit code 1 and no hint."""
    output = tmp_path / "run"
    command = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), "--trainer.max_steps", "100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "evodsp", *command, "--checkpoint_every", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 60
        while not (output / "checkpoints" / "last.ckpt").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "checkpoints/last.ckpt; resume with --ckpt_path last" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_the_command_line_is_lightnings() -> None:
    """Users of Lightning know its command line, and may build on it."""
    assert issubclass(TrainingCLI, LightningCLI)
