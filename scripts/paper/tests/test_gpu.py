"""The experiments for GPUs: their settings, `gpu.sh`, and the steps that it times, here on CPU ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.paper import gpu, gpu_report, gpu_step
from scripts.paper.experiments import TABLES, Case, cases
from scripts.paper.workload import Workload
from tests.ranks import RankPool

pytestmark = pytest.mark.verify

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "paper" / "gpu.sh"
TINY = Workload("tiny", time=4, rows=4, columns=4, checkpoint=True)


def test_fewer_gpus_run_what_fits() -> None:
    """Catches a case that needs more GPUs than there are, and data ranks that are not reduced."""
    found = list(gpu.available(8, ["table4"]))
    assert {(case.sequence, case.data) for case in found} == {(2, 4), (4, 2), (8, 1)}
    assert len(list(gpu.available(128))) == sum(len(list(cases(table))) for table in TABLES)
    with pytest.raises(gpu.UserError, match="Did you mean"):
        gpu.case_named("table4-720m-t128-b1-2x4-dps", 8, cpu=False)


def shell(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`gpu.sh` with a stand-in for Python that lists two cases."""
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/usr/bin/env bash\nprintf 'small 2\\nlarge 16\\n'\n")
    (tmp_path / "scontrol").write_text("#!/usr/bin/env bash\nprintf 'gpu003\\ngpu004\\n'\n")
    for path in (stand_in, tmp_path / "scontrol"):
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EVODSP_PYTHON": str(stand_in), **variables}
    return subprocess.run(["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False)


def test_the_commands_of_a_dry_run(tmp_path: Path) -> None:
    """Catches ranks that are started on the wrong number of machines, and an option that is not handed on."""
    done = shell(tmp_path, "--dry-run", "--cpu", "16", "--only", "table6", "--output", "out")
    assert done.returncode == 0, done.stderr
    small, large = done.stdout.splitlines()
    assert "--nproc-per-node 2 --standalone" in small
    assert large.endswith("-m scripts.paper.gpu run large --cpu --gpus 16 --output out")
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[003-004]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    small, large = shell(tmp_path, "--dry-run", **job).stdout.splitlines()
    assert "srun --nodes 1 " in small
    assert "srun --nodes 2 " in large
    assert "--nproc-per-node 8 --nnodes 2 " in large
    assert "--rdzv-endpoint gpu003:" in large
    assert "--gpus 16" in large


def stepped(group: Any) -> list[Any]:
    """Outcomes of four cases on one rank."""
    uneven = dataclasses.replace(TINY, time=6)
    chosen = (
        Case("table4", "", "dsp", 2, 2, TINY, True),
        Case("table4", "", "megatron_sp", 2, 2, TINY, True),
        Case("figure8", "", "ring", 4, 1, TINY, False),
        Case("table6", "", "ulysses", 4, 1, uneven, True),
    )
    return [gpu.measured(case, torch.device("cpu"), warm_up=1, steps=2) for case in chosen]


def test_a_step_of_every_kind_on_cpu_ranks(pool: RankPool) -> None:
    """Catches a method that does not run under FSDP2 or without, and one that cannot spread the model and ends the run."""
    for dsp, megatron, ring, ulysses in pool.run(4, stepped):
        assert (dsp["status"], megatron["status"], ring["status"]) == ("ok", "ok", "ok")
        assert len(dsp["seconds"]) == 2
        assert ulysses["status"] == "x"
        assert "time steps is 6" in ulysses["reason"]


def weights(group: Any) -> list[torch.Tensor]:
    """A rank's weights after a step on its own samples."""
    case = Case("table4", "", "megatron_sp", 2, 2, TINY, True)
    step, parallel = gpu_step.built(case, torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in parallel.parameters()]
    step()
    after = [parameter.detach().clone() for parameter in parallel.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    dist.barrier()
    return after


def test_data_ranks_of_a_tensor_parallel_method_stay_equal(pool: RankPool) -> None:
    """Catches gradients that are not averaged over data ranks, whose samples differ."""
    found = pool.run(4, weights)
    for one, other in ((0, 2), (1, 3)):  # the same slice of two data ranks
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))


def test_the_report_shows_what_has_no_number(tmp_path: Path) -> None:
    """Catches a case without a number that is left out, and a figure that cannot be drawn with one."""
    ok = {"status": "ok", "seconds": [0.2, 0.1, 0.3], "tokens_per_second": 10.0, "tflops_per_gpu": 1.5}
    ok |= {"allocated_bytes": 2 * 2**30, "reserved_bytes": 3 * 2**30}
    for table in ("table7", "figure8"):
        gpu.write(tmp_path, Case(table, "intra-node", "dsp", 2, 1, TINY, True), ok)
        gpu.write(
            tmp_path, Case(table, "intra-node", "ulysses", 2, 1, TINY, True), {"status": "x", "reason": "out of memory"}
        )
    text = gpu_report.report(tmp_path)
    assert "x  out of memory" in text
    assert "200.0" in text
    for name in ("results.csv", "results.txt", "table7.png", "table7_memory.png", "figure8.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_the_script_runs_on_cpu_ranks(tmp_path: Path) -> None:
    """Catches a program that the launcher cannot start, and results that are measured again."""
    command = ["bash", str(SCRIPT), "--cpu", "2", "--only", "table4", "--output", str(tmp_path)]
    environment = {**os.environ, "EVODSP_PYTHON": sys.executable}
    for word in ("done", "kept"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(word) == 4
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [result["status"] for result in results] == ["ok"] * 4
