"""`evodsp fit`, `validate` and `test` from end to end, in this process, on two chains of 13 residues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from evodsp.cli import main
from evodsp.training.command import TrainingCLI


def fit(chains: Path, output: Path, *options: str) -> int:
    return main(["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options])


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
