"""The batch script with stand-ins for SLURM's commands: what it would start on the nodes."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "slurm" / "fit.sbatch"
BUILD = SCRIPT.with_name("build.sbatch")
SHELL = [SCRIPT, BUILD, ROOT / "scripts" / "verify_gpus.sh"]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)


def started(tmp_path: Path, words: list[str], **variables: object) -> list[str]:
    """The words that `srun` would be given."""
    for name, does in {"scontrol": "printf 'gpu003\\ngpu004\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "gpu[003-004]",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64",
        **{name: str(value) for name, value in variables.items()},
    }  # fmt: skip
    done = subprocess.run(["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[1:]


def test_the_command_of_a_training_job(tmp_path: Path) -> None:
    """A job that could not resume, or whose nodes would not meet."""
    words = started(tmp_path, ["--config", "a config.yaml", "--parallel.sequence", "8"])
    assert words[:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=64", "python"]
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--nproc-per-node"]) == ("2", "8")
    assert given["--rdzv-endpoint"] == f"gpu003:{15000 + 1234567 % 15000}"
    at = words.index("evodsp")
    assert words[at:] == [
        "evodsp", "fit", "--config", "a config.yaml", "--parallel.sequence", "8", "--ckpt_path", "auto",
    ]  # fmt: skip


def test_another_checkpoint_path_replaces_auto(tmp_path: Path) -> None:
    """Given twice, the option would be refused on every rank."""
    for given in (["--ckpt_path", "x.ckpt"], ["--ckpt_path=x.ckpt"]):
        words = started(tmp_path, ["--config", "a.yaml", *given])
        assert words[words.index("evodsp") :] == ["evodsp", "fit", "--config", "a.yaml", *given]


def test_predict_takes_no_checkpoint_path(tmp_path: Path) -> None:
    words = started(tmp_path, ["--fasta", "x"], EVODSP_COMMAND="predict", EVODSP_PYTHON="/env/bin/python")
    assert words[-3:] == ["predict", "--fasta", "x"]
    assert words[2] == "/env/bin/python"


def test_the_command_of_a_build_task(tmp_path: Path) -> None:
    """Catches tasks that all build the same shards, or options that are lost."""
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "64", "SLURM_CPUS_PER_TASK": "8"}
    environment = {"PATH": os.environ["PATH"], "EVODSP_PYTHON": str(python), **task}
    words = ["bash", str(BUILD), "--alignment_dir", "an a", "--output", "o"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    expected = [
        "-m",
        "evodsp",
        "data",
        "build",
        "--alignment_dir",
        "an a",
        "--output",
        "o",
        "--workers",
        "8",
        "--share",
        "3/64",
    ]
    assert done.stdout.splitlines() == expected
