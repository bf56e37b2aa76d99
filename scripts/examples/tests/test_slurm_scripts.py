"""The batch script with stand-ins for SLURM's commands: what it would start on the nodes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.signal_to_itself import STEP as LAST
from tests.builders.small_run import words, write_config

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "examples" / "slurm" / "fit.sbatch"
BUILD = SCRIPT.with_name("build.sbatch")
SHELL = [SCRIPT, BUILD, *sorted((ROOT / "scripts").glob("**/*.sh"))]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)


JOB = {
    "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}  # fmt: skip
STAND_INS = {
    "srun": 'printf "%s\\n" "$@"; echo "ends at ${SLURM_JOB_END_TIME:-}"',
    "scontrol": 'if [[ $1 == show ]]; then printf "gpu003\\ngpu004\\n"; else echo "scontrol $*"; fi',
    "squeue": 'case "$SLURM_TIME_FORMAT $*" in %s*%e) echo "${ENDS:-NONE}" ;; *%T) echo "${STATE:-RUNNING}" ;; esac',
    "scancel": 'echo "scancel $*"',
}
STEP = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
"""An `srun` that starts the program, once."""


def begun(
    tmp_path: Path, words: list[str], variables: dict[str, str], folder: Path | None = None, **stand_ins: str
) -> subprocess.Popen[str]:
    """The script with stand-ins for SLURM's commands, in `folder`, or where the stand-ins are."""
    for name, does in {**STAND_INS, **stand_ins}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **JOB, **variables}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", str(SCRIPT), *words], env=environment, cwd=folder or tmp_path, **piped)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code and the lines after the first."""
    output = process.communicate(timeout=60)[0]
    return process.returncode, output.splitlines()[1:]


def started(tmp_path: Path, words: list[str], **variables: str) -> list[str]:
    """The words that `srun` would be given."""
    code, lines = ended(begun(tmp_path, words, variables))
    assert code == 0
    return lines[:-1]


def test_the_command_of_a_training_job(tmp_path: Path) -> None:
    """A job that could not resume, or whose nodes would not meet."""
    words = started(tmp_path, ["--config", "a config.yaml", "--parallel.sequence", "8"])
    assert words[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=64"]
    assert words[words.index("torch.distributed.run") - 2] == "python"
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
    assert words[2] == "/env/bin/python"  # SIGTERM ends torchrun


def test_ranks_without_gpus(tmp_path: Path) -> None:
    """A cluster of CPUs, whose SLURM counts no GPUs: a division by zero, or one rank that uses all cores of a node."""
    words = started(tmp_path, ["--config", "a.yaml"], SLURM_GPUS_ON_NODE="", EVODSP_RANKS="4")
    assert dict(itertools.pairwise(words))["--nproc-per-node"] == "4"
    assert dict(itertools.pairwise(started(tmp_path, [], SLURM_GPUS_ON_NODE="")))["--nproc-per-node"] == "1"


def test_the_end_of_the_job(tmp_path: Path) -> None:
    """SLURM 22.05 does not tell a job when it ends: the run would be killed at its limit, without a checkpoint."""
    lines = ended(begun(tmp_path, [], {"ENDS": "1795591277", "EVODSP_STOP_BEFORE_END": "60"}))[1]
    assert lines[-3:] == ["--stop_before_end", "60", "ends at 1795591277"]
    lines = ended(begun(tmp_path, [], {"ENDS": "1", "SLURM_JOB_END_TIME": "1795591277"}))[1]
    assert lines[-1] == "ends at 1795591277"
    lines = ended(begun(tmp_path, [], {}))[1]  # a job without a limit
    assert "--stop_before_end" not in lines
    assert lines[-1] == "ends at "


def test_flags_for_srun_and_a_container(tmp_path: Path) -> None:
    """Catches a cluster of containers on which the script's own words are all that srun gets."""
    pyxis = "--container-image=/images/evodsp.sqsh --container-mounts=/data:/data"
    words = started(tmp_path, ["--output", "o"], EVODSP_SRUN=pyxis, EVODSP_CONTAINER="apptainer exec --nv evodsp.sif")
    assert words[2:4] == pyxis.split()
    at = words.index("apptainer")
    assert words[at : at + 5] == ["apptainer", "exec", "--nv", "evodsp.sif", "python"]
    assert words.index("bash") < at, "srun starts what ignores signals, and this the container"


@pytest.mark.parametrize(
    "given", [["--output", "a run"], ["--output=a run"], []], ids=["word", "equals", "in the config"]
)
def test_where_a_stopped_run_says_so(tmp_path: Path, given: list[str]) -> None:
    """Catches a file in a temporary folder of the node, which a container does not share: the run is not queued again."""
    (tmp_path / "a run").mkdir()
    place = "a run" if given else "."
    (tmp_path / place / "stopped-1234567").touch()  # of an attempt that was killed before it could remove it
    code, lines = ended(begun(tmp_path, given, {}, srun='echo "$EVODSP_STOPPED_FILE"; [[ ! -e $EVODSP_STOPPED_FILE ]]'))
    assert (code, lines) == (0, [f"{place}/stopped-1234567"])
    code, lines = ended(begun(tmp_path, given, {}, srun='touch "$EVODSP_STOPPED_FILE"'))
    assert lines[-1] == "scontrol requeue 1234567"
    assert not (tmp_path / place / "stopped-1234567").exists()


@pytest.mark.parametrize(
    ("state", "step", "requeued"),
    [
        ("RUNNING", "touch $EVODSP_STOPPED_FILE; exit 1", True),
        ("COMPLETING", "touch $EVODSP_STOPPED_FILE; exit 1", False),
        ("RUNNING", "exit 1", False),
    ],
    ids=["stopped", "cancelled", "a mistake"],
)
def test_what_is_queued_again(tmp_path: Path, state: str, step: str, requeued: bool) -> None:
    """A run that stopped and is not continued; `scancel` that starts the job anew; a mistake that is repeated for ever."""
    code, lines = ended(begun(tmp_path, [], {"STATE": state}, srun=step))
    assert code == 1
    assert ("scontrol requeue 1234567" in lines) == requeued


def test_a_signal_to_the_script_alone(tmp_path: Path) -> None:
    """`scancel --signal USR1 --batch`: bash ends, and SLURM ends the job at once; or it does not wait for the save."""
    step = (
        f"touch {tmp_path}/begun; until [[ -e {tmp_path}/asked ]]; do sleep 0.05; done; sleep 0.3; echo saved; exit 7"
    )
    process = begun(tmp_path, [], {}, srun=step, scancel=f'echo "scancel $*"; touch {tmp_path}/asked')
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert ended(process) == (7, ["scancel --signal TERM 1234567", "saved"])


@pytest.mark.verify
@pytest.mark.parametrize("name", ["TerminateStep", "UserStep"])
def test_a_signal_to_all_processes_of_a_step(tmp_path: Path, name: str) -> None:
    """What SLURM does. The run is lost if torchrun ends, if it sends the ranks the signal once more and that ends them, or if a
    worker that makes samples ends."""
    output = tmp_path / "run"
    given = words(write_config(tmp_path / "run.yaml"), output, "--data.num_workers=1",
                  f"--trainer.callbacks=tests.builders.signal_to_itself.{name}")[1:]  # fmt: skip
    job = {"EVODSP_PYTHON": sys.executable, "EVODSP_RANKS": "2", "SLURM_JOB_NUM_NODES": "1", "OMP_NUM_THREADS": "1"}
    here = 'printf "localhost\\n"; [[ $1 == show ]] || echo "scontrol $*"'
    code, lines = ended(begun(tmp_path, given, job, ROOT, srun=STEP, scontrol=here))
    assert code == 0, lines
    assert "scontrol requeue 1234567" in lines, lines
    assert read_checkpoint(output / "checkpoints/last.ckpt")["global_step"] == LAST + 1, lines


def test_the_command_of_a_build_task(tmp_path: Path) -> None:
    """Catches tasks that all build the same shards, or options that are lost."""
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "64", "SLURM_CPUS_PER_TASK": "8"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EVODSP_PYTHON": str(python), **task}
    words = ["bash", str(BUILD), "--alignment_dir", "an a", "--output", "o"]

    def printed(**more: str) -> list[str]:
        done = subprocess.run(words, env={**environment, **more}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

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
    assert printed() == expected
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "srun:" "$@"\n')
    srun.chmod(0o755)
    pyxis = "--container-image=evodsp.sqsh"
    assert printed(EVODSP_SRUN=pyxis) == ["srun:", "--cpus-per-task=8", pyxis, str(python), *expected]
