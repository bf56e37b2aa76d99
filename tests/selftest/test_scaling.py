"""`evodsp selftest --scaling`: on CPU ranks, where parts fail, hang or end the ranks, and what reads its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.model.recordings import Rerun
from evodsp.parallel.group import Group
from evodsp.planner.device import load_device, load_link
from evodsp.selftest import ranks, scaling, scaling_parts
from evodsp.selftest.scaling import ScalingReport
from tests.builders.processes import ROOT, TORCHRUN, begin, free_port
from tests.ranks import RankError, RankPool


def scaled(report: Path, *words: str, launcher: Sequence[str] = (sys.executable,)) -> tuple[int, dict[str, Any], str]:
    """The exit code of a command, its report, and all that it printed."""
    process = begin([*launcher, "-m", "evodsp", "selftest", "--scaling", "--output", str(report), *words])
    said = "".join(process.communicate(timeout=580))
    return process.returncode, json.loads(report.read_text()), said


@pytest.mark.verify
def test_two_ranks_write_one_report(tmp_path: Path) -> None:
    """Catches workers that do not meet, rows that are lost, and a page that is missing."""
    code, report, said = scaled(tmp_path / "r.json", "--cpu", "2", "--parts", "environment,collectives")
    assert code == 0, said
    assert {name: part["state"] for name, part in report["parts"].items()} == {"environment": "ok", "collectives": "ok"}
    assert [row["rank"] for row in report["parts"]["environment"]["rows"][:2]] == [0, 1]
    assert [row["ranks"] for row in report["parts"]["collectives"]["rows"]] == [1, 2]
    assert "2 parts: 2 ok" in (tmp_path / "r.html").read_text()


@pytest.mark.verify
def test_every_part_on_two_ranks(tmp_path: Path) -> None:
    """Catches a part that fails on gloo, and a report of which no plan can be made."""
    path = tmp_path / "r.json"
    code, report, said = scaled(path, "--cpu", "2")
    assert code == 0, said
    rows = {name: part["rows"] for name, part in report["parts"].items()}
    assert {(row["parameters"], row["how"]) for row in rows["training"]} == {
        *((parameters, how) for parameters in ("replicate", "zero1") for how in ("launched", "replayed")),
        ("fsdp2", "launched"),
    }
    assert {(row["residues"], row["ranks"], row["how"]) for row in rows["scaling"]} == {
        (residues, number, how) for residues in (16, 24) for number in (1, 2) for how in ("launched", "replayed")
    }
    assert all(row["planned for"] == report["device"]["name"] for row in rows["scaling"])
    for fault in ("killed", "stopped"):
        assert [row["code"] for row in rows[fault][1:]] == [3, -9]
        assert rows[fault][1]["seconds"] < 30
    sizes = ["--preset=test", "--residues=24", "--msa=8", "--extra_msa=9", "--global_batch=2", "--precision=fp32"]
    assert main(["plan", "--gpus=2", f"--device={path}", *sizes, f"--output={tmp_path}/p.html"]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["links"]["inside"] == "gloo, 2 ranks, a node"


@pytest.mark.verify
def test_three_ranks_of_torchrun(tmp_path: Path) -> None:
    """Catches workers that want another place than torchrun gave, shards that must be even, and a rank that is killed under
    torchrun, which must not see it."""
    words = ("--cpu", "3", "--parts", "environment,collectives,blocks,training,killed")
    launcher = (*TORCHRUN, "--local-addr=127.0.0.1", "--standalone", "--nproc-per-node=3")
    code, report, said = scaled(tmp_path / "r.json", *words, launcher=launcher)
    assert code == 0, said
    assert {part["state"] for part in report["parts"].values()} == {"ok"}
    assert [row["code"] for row in report["parts"]["killed"]["rows"][1:]] == [3, 3, -9]


BROKEN = """
import sys, time
if "evodsp.selftest.scaling" in sys.orig_argv:
    import torch.distributed as dist
    from evodsp.selftest import config, scaling_parts
    def one_fails(run):
        yield {"n": 1}
        if run.group.rank == 1:
            raise ValueError("only here")
        dist.barrier()
    def all_fail(run):
        yield {"found": "wrong", "ok": False}
        raise ValueError("everywhere")
    def hangs(run):
        yield {"n": 2}
        time.sleep(1000) if run.group.rank == 0 else dist.barrier()
    def works(run):
        yield {"n": 3}
    scaling_parts.PARTS.update(environment=one_fails, collectives=all_fail, speed=hangs, blocks=works)
    config.SCALING_PARTS["speed"] = 1.0
"""


@pytest.mark.verify
def test_parts_that_fail_cost_no_other(tmp_path: Path) -> None:
    """Catches an error of one rank that leaves the others waiting, a hang that ends the report, a part without its rows, and
    workers that meet in a store which is gone with an earlier worker: under srun nobody else keeps one."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    report, port = tmp_path / "r.json", free_port()
    words = ["--cpu", "2", "--parts", "environment,collectives,speed,blocks", "--output", str(report)]
    started = [
        begin(
            [sys.executable, "-m", "evodsp", "selftest", "--scaling", *words],
            SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_NUM_NODES=1, MASTER_PORT=port,
            PYTHONPATH=f"{tmp_path}:{ROOT}",
        )
        for rank in range(2)
    ]  # fmt: skip
    said = "".join(text for process in started for text in process.communicate(timeout=300))
    assert [process.returncode for process in started] == [1, 0], said
    parts = json.loads(report.read_text())["parts"]
    assert [part["state"] for part in parts.values()] == ["FAILED", "FAILED", "FAILED", "ok"]
    assert "rank 1 on" in parts["environment"]["problems"][0]
    assert "only here" in parts["environment"]["problems"][0]
    assert parts["collectives"]["problems"] == [f"rank {n}: found: wrong; ValueError: everywhere" for n in (0, 1)]
    assert "it did not end within 3 s" in parts["speed"]["problems"][0]
    assert "in hangs" in said
    assert [part["rows"][0].get("n") for part in parts.values()] == [1, None, 2, 3]


def begun(path: Path, *names: str) -> ScalingReport:
    report = ScalingReport.begin(path, 2, names)
    assert report.next() == names[0]
    return report


def worker(code: int, time: float = 0.0) -> dict[str, Any]:
    return {"part": "x", "code": code, "time": time, "late": False, "limit": 9.0, "host": "node1", "said": "words"}


@pytest.mark.parametrize(
    ("part", "codes", "problems"),
    [
        ("blocks", (3, -11), ["rank 1 on node1: exit code -11; its last words: words"]),
        ("blocks", (3, 3), ["the ranks lost each other"]),
        ("killed", (3, -9), []),
        ("killed", (1, -9), ["rank 0 did not notice: exit code 1; its last words: words"]),
    ],
)
def test_what_ended_workers_mean(tmp_path: Path, part: str, codes: tuple[int, int], problems: list[str]) -> None:
    """Catches a crash that counts as success, and ranks that wait for a dead one and pass."""
    report = begun(tmp_path / "r.json", part, "scaling")
    report.add(part, {"victim": 1, "begun": 100.0})
    report.ended([worker(code, 107.5) for code in codes])
    assert report.content["parts"][part]["problems"] == problems
    assert report.content["parts"][part]["state"] == ("FAILED" if problems else "ok")
    if part == "killed":
        assert [row["seconds"] for row in report.content["parts"][part]["rows"][1:]] == [7.5, 7.5]
    assert ScalingReport(tmp_path / "r.json").next() == "scaling"


def test_a_plan_takes_the_report(tmp_path: Path) -> None:
    """Catches links that are looked for beside the report, and a report without a device that is taken for one."""
    path = tmp_path / "r.json"
    report = begun(path, "speed")
    scaling_run = Mock(spec=scaling_parts.ScalingRun, report=path)
    assert scaling_parts._planned_device(scaling_run)[0].name == "H100 SXM"
    with pytest.raises(UserError, match=r"r\.json: has no measured device"):
        load_device(str(path))
    link = {**vars(load_link("pcie"))}
    device = {**vars(load_device("a100")), "inside": "inside", "across": "across"}
    links = {name: {**link, "name": f"measured {name}"} for name in ("inside", "across")}
    row = {"between": "a node", "ranks": 2, "collective": "all-gather", "bytes": 4096, "us": 3.0, "GB/s": 1.5}
    report.add("speed", row)
    report.add("speed", {**row, "bytes": 8192})
    report.add("speed", {"device": device, "links": links})
    report.end("speed", [])
    found = load_device(str(path))
    assert [load_link(name).name for name in (found.inside, found.across)] == ["measured inside", "measured across"]
    assert scaling_parts._planned_device(scaling_run)[1].across.name == "measured across"
    assert "GB/s by log2 of bytes" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "speed"], "--parts and --output are options of --scaling"),
        (["--scaling", "--parts", "speed,block"], "--parts names 'block', but the parts are environment, collectives"),
        (["--scaling", "--output", "r.yaml"], "--output is r.yaml, but the report needs a name that ends in .json"),
        ([], "--cpu 2"),
    ],
)
def test_options_that_cannot_be(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ten minutes without the part that was meant, or without a report; and, on a machine without GPUs, a table of no
    checks that says that all succeeded."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["selftest", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [2.001, float("nan")])
def test_other_losses_are_found(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Catches training that is called equal whatever it computes."""
    mesh = Mock(data_ranks=2, data_rank=0)
    run = Mock(
        spec=scaling_parts.ScalingRun, sizes=Mock(), group=Mock(size=2), groups=[1, 2], on_gpu=False,
        sample=lambda *_: {}, world=lambda *_: mesh, recorder=Rerun,
    )  # fmt: skip

    def train(*given: Any, recorder: Any = None) -> scaling_parts.TimedSteps:
        last = wrong if recorder else 2.0
        return scaling_parts.TimedSteps([3.0, last], 1.0, 0.0, 0)

    monkeypatch.setattr(scaling_parts, "train", train)
    alone, *rows = scaling_parts.training(run)
    assert "ok" not in alone
    assert {(row["how"], row["ok"]) for row in rows} == {("launched", True), ("replayed", False)}


class WrongRoot(Group):
    """Broadcasts another rank's tensor than was asked for."""

    def broadcast(self, x: torch.Tensor, root: int) -> Any:
        return super().broadcast(x, 0)


def _collectives(handle: Any, kind: type[Group]) -> str:
    return ranks.collectives(kind(handle), torch.device("cpu"))


def test_numbers_that_do_not_arrive_are_found(pool: RankPool) -> None:
    """Catches a check of collectives that compares them with themselves, and one that empty shards stop."""
    assert all("inner products agree" in said for said in pool.run(3, _collectives, Group))
    with pytest.raises(RankError, match=r"broadcast of \[11, 13\] in torch\.float64: other numbers arrived"):
        pool.run(3, _collectives, WrongRoot)


def test_an_interrupted_run_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a worker that outlives its supervisor because it was stopped on purpose and notices nothing."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin_one(*_: object, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        begun[0].send_signal(signal.SIGSTOP)
        return begun[0]

    monkeypatch.setattr(scaling, "subprocess", Mock(spec=subprocess, Popen=begin_one))
    monkeypatch.setattr(scaling, "time", Mock(spec=time, sleep=Mock(side_effect=KeyboardInterrupt), time=time.time))
    with pytest.raises(KeyboardInterrupt):
        scaling._worker({})
    assert begun[0].returncode == -signal.SIGKILL
