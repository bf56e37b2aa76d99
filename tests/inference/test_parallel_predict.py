"""`evodsp predict` over several ranks: the same files as one process up to rounding, errors reported once, no rank hangs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.data.formats.mmcif import read_chain
from evodsp.errors import UserError
from evodsp.inference import seeds
from evodsp.inference.command import run as start_ranks
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict, predict_records
from evodsp.inference.structure_files import PredictedStructure
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import SequenceConfig
from evodsp.parallel.group import Group, Ledger
from tests.builders.forked_command import ForkedCommand, number_of, run_forked
from tests.builders.prediction import silent
from tests.builders.processes import free_port
from tests.ranks import RankPool

from .conftest import OTHER, QUERY, Finished, Workplace


def predict_on_rank(handle: Any, config: PredictConfig) -> list[str] | str:
    """Predict on one rank: the names of the results, or the UserError's message."""
    try:
        return [result.name for result in predict(config, silent, Group(handle))]
    except UserError as error:
        return str(error)


def same_prediction(one: Path, other: Path) -> None:
    """Check that two folders have the same files with the same contents, up to rounding."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        if name.endswith(".cif"):
            a, b = (read_chain(folder / name, "A") for folder in (one, other))
            np.testing.assert_allclose(a.positions, b.positions, atol=2e-3)  # coordinates have three decimals
        elif name.endswith(("_scores.json", "_pae.json")):
            a, b = (json.loads((folder / name).read_text()) for folder in (one, other))
            if isinstance(a, list):
                a, b = a[0], b[0]
            assert a.keys() == b.keys()
            for key in a:
                np.testing.assert_allclose(a[key], b[key], atol=0.011)  # scores have two decimals
        elif name.endswith("_contacts.npz"):
            a, b = (np.load(folder / name)["probability"].astype(int) for folder in (one, other))
            np.testing.assert_allclose(a, b, atol=1)  # steps of 1/255
            assert len(np.unique(a)) > 2
        elif name.endswith("_representations.npz"):
            a, b = (np.load(folder / name) for folder in (one, other))
            assert a.files == b.files
            for array in a.files:
                np.testing.assert_allclose(a[array], b[array], atol=1e-4 * np.abs(a[array]).max())


SAVED = {"save": "single,pair,msa,distogram,structure_module", "save_passes": "all"}
STOPS = {"ensembles": 2, "recycles": 3, "stop_tolerance": 1.5, "seeds": 1, **SAVED}


@pytest.mark.verify_but("dropout-2")
@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        pytest.param({"recycles": 1}, 3, id="plain-3"),
        pytest.param({"recycles": 1}, 2, id="plain-2"),
        pytest.param({"recycles": 1, "seeds": 1, "dropout": True}, 2, id="dropout-2"),
        pytest.param({"recycles": 1, "dropout": True}, 3, id="dropout-3"),
        pytest.param(STOPS, 2, id="stops-2"),
        pytest.param(STOPS, 3, id="stops-3"),
    ],
)
def test_several_ranks_predict_what_one_does(
    workplace: Workplace, ptm_checkpoint: Path, pool: RankPool, ranks: int, change: dict[str, Any]
) -> None:
    """Catches misplaced shards, a PAE matrix of one rank's rows only, and ranks that stop recycling at different passes."""
    config = workplace.change(checkpoint=ptm_checkpoint, **change)
    single = predict(config, silent)
    config = dataclasses.replace(config, output=workplace.root / "sharded", parallel=SequenceConfig(ranks))
    assert pool.run(ranks, predict_on_rank, config) == [["alpha_A", "beta_A"]] * ranks
    for result in single:
        folder = config.output / result.name
        same_prediction(result.folder, folder)
        timings, serial = (json.loads((f / "timings.json").read_text()) for f in (folder, result.folder))
        assert [entry["rank"] for entry in timings["ranks"]] == list(range(ranks))
        assert all(entry["peak_memory_mib"] > 50 for entry in timings["ranks"])
        passes = [[len(seed["pass_seconds"]) for seed in t["seeds"]] for t in (timings, serial)]
        assert passes[0] == passes[1]
    kept = dataclasses.replace(config, parallel=SequenceConfig())
    assert all(result.kept for result in predict(kept, silent)), "a result does not depend on the number of ranks"


def held_on_rank(handle: Any, config: PredictConfig) -> tuple[list[int], int]:
    """What one rank holds of a record's confidences, and what it communicates for them: numbers of each matrix that it keeps,
    and bytes."""
    ledger, real, held, sent = Ledger(), seeds.structure_of, list[int](), 0

    def counted(*given: Any) -> PredictedStructure:
        nonlocal sent
        before = sum(entry.bytes for entry in ledger.entries)
        structure = real(*given)
        sent += sum(entry.bytes for entry in ledger.entries) - before
        errors = structure.aligned_error
        held.extend(0 if one is None else one.size for one in (structure.contacts, errors and errors.pae))
        return structure

    seeds.structure_of = counted
    try:
        predict(config, silent, Group(handle, ledger))
    finally:
        seeds.structure_of = real
    return held, sent


def test_residues_squared_confidences_are_where_they_are_written(
    workplace: Workplace, ptm_checkpoint: Path, pool: RankPool
) -> None:
    """Catches contacts and aligned errors that every rank receives and keeps: 23 GB of each rank at 54,000 residues."""
    workplace.config.fasta.write_text(f">alpha_A\n{QUERY}\n")
    config = workplace.change(checkpoint=ptm_checkpoint, seeds=1, parallel=SequenceConfig(3))
    numbers = len(QUERY) ** 2
    for rank, (held, sent) in enumerate(pool.run(3, held_on_rank, config)):
        rows = 8 if rank == 0 else 7
        assert held == ([numbers, numbers] if rank == 0 else [0, 0])
        assert sent == 2 * 4 * rows * len(QUERY) + 8, "its own rows, in float32; an all-gather counts all; and pTM"


def collectives_on_rank(handle: Any, config: PredictConfig) -> list[str]:
    """The kinds of a prediction's collectives, in order."""
    ledger = Ledger()
    predict(config, silent, Group(handle, ledger))
    return [entry.kind for entry in ledger.entries]


def test_ranks_communicate_by_the_plan_that_is_given(workplace: Workplace, pool: RankPool) -> None:
    """Catches an ignored --plan. Every plan gives the same results, so only the communication shows it."""
    workplace.only("beta_A")
    folders = (workplace.root / name for name in ("usual", "gather"))
    usual, gather = (
        pool.run(
            2, collectives_on_rank, workplace.change(output=folder, plan=plan, parallel=SequenceConfig(2), seeds=1)
        )[0]
        for folder, plan in zip(
            folders, (CommunicationPlan(), CommunicationPlan(triangle_incoming="gather")), strict=True
        )
    )
    assert gather.count("all-gather") > usual.count("all-gather")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"msa_clusters": 3}, "alpha_A: --parallel.sequence is 3, but with 22 residues and 2 rows"),
        ({"fasta": Path("nowhere.fasta")}, "nowhere.fasta: no such file or folder"),
    ],
    ids=["degree", "fasta"],
)
def test_a_mistake_is_known_to_every_rank(
    workplace: Workplace, pool: RankPool, change: dict[str, Any], expected: str
) -> None:
    """Catches ranks that wait for one that has raised an error, and files left by a prediction that cannot run."""
    before = workplace.snapshot()
    found = pool.run(3, predict_on_rank, workplace.change(parallel=SequenceConfig(3), **change))
    assert all(expected in message for message in found)
    assert len(set(found)) == 1
    assert workplace.snapshot() == before


def outcome_on_rank(handle: Any, config: PredictConfig) -> tuple[list[str], list[str]]:
    """The names of the results and the reasons of the failures, as one rank knows them."""
    outcome = predict_records(config, silent, Group(handle))
    return [result.name for result in outcome.results], [failure.reason for failure in outcome.failures]


def test_a_record_that_fails_fails_on_every_rank(workplace: Workplace, pool: RankPool) -> None:
    """Catches ranks that go on with a record which rank 0, which alone reads, has given up."""
    path = workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m"
    path.write_text(path.read_text()[:-5])
    found = pool.run(2, outcome_on_rank, workplace.change(parallel=SequenceConfig(2), seeds=1))
    assert found[0] == found[1]
    assert found[0][0] == ["beta_A"]
    assert "uniref90_hits.a3m" in found[0][1][0]


def predict_differently(handle: Any, configs: list[PredictConfig]) -> list[str] | str:
    """Predict with another configuration on each rank."""
    return predict_on_rank(handle, configs[handle.rank()])


def test_ranks_given_different_settings_all_say_so(workplace: Workplace, pool: RankPool) -> None:
    """Catches ranks that hang because their settings differ: one would run a pass that the others do not."""
    configs = [workplace.change(recycles=2 if rank == 1 else 1) for rank in range(3)]
    found = pool.run(3, predict_differently, configs)
    assert len(set(found)) == 1
    assert "different settings: rank 1 has " in found[0]
    assert "recycles=2" in found[0]
    assert "recycles=1" in found[0]


def command(config: PredictConfig, ranks: int, *more: str) -> list[str]:
    """`evodsp predict` with this configuration, as a command line."""
    names = ("fasta", "alignments", "checkpoint", "output", "seeds", "recycles", "device", "msa_clusters", "extra_msa")
    words = [f"--{name}={getattr(config, name)}" for name in names]
    return ["predict", *words, f"--parallel.sequence={ranks}", *more]


def run(program: list[str], timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a module of Python with one thread and return its output."""
    words = [sys.executable, "-m", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.verify
def test_the_command_starts_its_ranks(workplace: Workplace) -> None:
    """Catches ranks that are not started, and progress printed by every rank. These ranks are no forks."""
    done = run(["evodsp", *command(workplace.change(seeds=1), 2)], 120, {})
    said = [
        line for line in done.stderr.splitlines() if "waits for rank" not in line
    ]  # a busy machine starts a rank late
    assert (done.returncode, said) == (0, [])
    assert done.stdout.count("alpha_A: 22 residues") == 1
    timings = json.loads((workplace.config.output / "beta_A" / "timings.json").read_text())
    assert len(timings["ranks"]) == 2


def test_a_failed_record_is_no_failed_rank(workplace: Workplace) -> None:
    """Catches ranks whose exit code 1, for a record that failed, is taken for a rank that died."""
    path = workplace.config.alignments / "alpha_A" / "uniref90_hits.a3m"
    path.write_text(path.read_text()[:-5])
    done = run_forked(command(workplace.change(seeds=1), 2))
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 done, 0 kept, 1 failed" in done.stdout


PLANTED = """
import os
import signal
import time
if "RANK" in os.environ:
    import torch.distributed as dist
    from evodsp.inference import seeds

    where = os.environ["PLANTED"]
    real_passes, real_broadcast = seeds.run_passes, dist.broadcast

    def passes(model, batch, *given):
        if batch["aatype"].shape[-1] == 22:
            if where == "kernel":
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ["RANK"] == "0":
                time.sleep(60)  # it is ended in the middle of its pass
            raise MemoryError
        return real_passes(model, batch, *given)

    def broadcast(tensor, **more):
        if tensor.shape[-1:] == (22,) and not tensor.is_floating_point():
            raise MemoryError
        return real_broadcast(tensor, **more)

    if where != "features":
        seeds.run_passes = passes
    elif os.environ["RANK"] == "1":
        dist.broadcast = broadcast
"""
"""Ranks have too little memory for 22 residues. PLANTED in the environment says where it ends: in the 'passes', or while
'features' arrive, or the 'kernel' kills who has too little of it."""


def with_long(workplace: Workplace) -> list[str]:
    """The command line of such a run, with a long record between two short ones."""
    text = "".join(f">{name}\n{letters}\n" for name, letters in (("a", OTHER), ("long", QUERY), ("b", OTHER)))
    workplace.config.fasta.write_text(text)
    return command(workplace.change(alignments=workplace.root, seeds=1), 2)


def under_torchrun(
    workplace: Workplace, where: str, launch: list[str], words: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run two such ranks of torchrun. Python runs a file sitecustomize.py when it starts."""
    folder = workplace.root / "planted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANTED)
    environment = {"PLANTED": where, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    program = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *launch, "-m", "evodsp"]
    return run([*program, *words], 300, environment)


def check_without_long(workplace: Workplace, said: str, reason: str) -> None:
    """Check what a start that leaves the record out has said and written."""
    output = workplace.config.output
    assert "1 done, 1 kept, 1 failed" in said
    assert {path.name for path in output.iterdir()} == {
        "a", "b", ".long.begun", "failures.json", "index.html", "predictions.csv", "predict.log",
    }  # fmt: skip
    (entry,) = json.loads((output / "failures.json").read_text())["failures"]
    assert entry["name"] == "long"
    assert entry["reason"].startswith(f"long: {reason}")
    assert entry["reason"].endswith(f"; or delete {output / '.long.begun'} to try it again")


TAKEN_OVER = r"(evodsp: warning: .*\.lock: process \d+ on .* is gone; its lock is taken over\n)?"
"""Where a rank that held the lock of these records was killed, the lock is still there at the next run."""


@pytest.mark.verify_but("passes")
@pytest.mark.parametrize("where", ["passes", "features"])
def test_memory_of_one_rank_costs_one_record(workplace: Workplace, where: str) -> None:
    """Catches a rank without memory that ends every start at the same record: those behind it are never predicted."""
    words = with_long(workplace)
    done = run_forked(words, PLANTED, PLANTED=where)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    rank_1, launcher = done.stderr.splitlines()
    assert rank_1.startswith(
        "evodsp: error: long: 22 residues do not fit into the memory of this machine; lower --working_"
    )
    assert rank_1.endswith("; the same command leaves this record out and keeps what is finished")
    assert re.fullmatch(r"evodsp: error: rank 1 .* failed with exit code 1; the other ranks were ended", launcher)
    done = run_forked(words, PLANTED, PLANTED=where)
    assert done.returncode == 1
    assert re.fullmatch(TAKEN_OVER, done.stderr)
    check_without_long(workplace, done.stdout, "22 residues do not fit into the memory of this machine")


@pytest.mark.verify
@pytest.mark.parametrize(
    ("where", "reason"), [("passes", "22 residues do not fit"), ("kernel", "left out, because 2 runs ended")]
)
def test_a_record_that_torchrun_starts_again_without(workplace: Workplace, where: str, reason: str) -> None:
    """Catches restarts that all end at one record, and a restart because a record failed."""
    done = under_torchrun(workplace, where, ["--max-restarts=3"], with_long(workplace))
    assert done.returncode == 0, done.stderr
    check_without_long(workplace, done.stdout, reason)
    assert done.stdout.count("/3] b:") == 1, "a run with a failed record is not started again"


@pytest.mark.verify
def test_a_rank_that_the_kernel_kills(workplace: Workplace) -> None:
    """Catches a run that ends without a word about why, starts that all end at the same record, one that gives a record up for
    a job that ended for another reason, and a record that is left out for good."""
    words = with_long(workplace)
    said = r"evodsp: error: rank \d \(pid \d+ on .*\) was killed by SIGKILL; the other ranks were ended\. Probably out of .*\n"
    for _ in range(2):
        done = run_forked(words, PLANTED, PLANTED="kernel")
        assert done.returncode == 1
        assert re.fullmatch(TAKEN_OVER + said, done.stderr), done.stderr
    done = run_forked(words, PLANTED, PLANTED="kernel")
    assert done.returncode == 1
    assert re.fullmatch(TAKEN_OVER, done.stderr), done.stderr
    check_without_long(workplace, done.stdout, "left out, because 2 runs ended while they computed it")
    (workplace.config.output / ".long.begun").unlink()
    done = run_forked(words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 done, 2 kept, 0 failed" in done.stdout


def test_a_mistake_starts_no_ranks(workplace: Workplace, predicted: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """99 processes that each load the model to find out that the protein is too short."""
    started: list[int] = []
    monkeypatch.setattr("evodsp.inference.command.launch", lambda ranks, words: started.append(ranks) or 0)
    for change, said in (
        ({"parallel": SequenceConfig(20)}, r"alpha_A: --parallel.sequence is 20, but .* it can be at most"),
        ({"parallel": SequenceConfig(2), "fasta": Path("nowhere.fasta")}, r"nowhere.fasta: no such file or folder"),
        ({"parallel": SequenceConfig(2), "checkpoint": Path("nowhere.ckpt")}, r"nowhere.ckpt: no such checkpoint"),
    ):
        with pytest.raises(UserError, match=said):
            start_ranks(workplace.change(**change), [])
    assert started == []
    predicted.copied(workplace.config.output)
    assert start_ranks(workplace.change(parallel=SequenceConfig(20)), []) == 0, "results that are kept need no ranks"
    assert started == [20]


def in_a_pass(words: list[str]) -> tuple[ForkedCommand, list[int]]:
    """A command whose ranks are at work, and their process ids."""
    process = ForkedCommand(words)
    while "seed 0: model" not in process.said():
        assert process.running(), process.finish()
        time.sleep(0.05)
    return process, children(process.pid)


def test_ctrl_c_ends_all_ranks(workplace: Workplace) -> None:
    """Catches ranks that keep running after Ctrl-C ended the command that started them."""
    words = command(workplace.change(seeds=5000), 2)
    process, ranks = in_a_pass(words)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGINT)
    start = time.monotonic()
    assert process.finish().returncode == 130
    assert time.monotonic() - start < 15
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list(workplace.root.glob("deep/**/*.cif"))


def children(pid: int) -> list[int]:
    """The ids of the processes whose parent is `pid`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended in the meantime
            continue
        if int(fields[1]) == pid:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("sent", "expected", "seconds"),
    [
        (
            signal.SIGKILL,
            r"rank 1 \(pid {pid} on .*\) was killed by SIGKILL; the other ranks were ended\. Probably out of memory: .*",
            15,
        ),
        pytest.param(
            signal.SIGSTOP, r"rank 1 \(pid {pid} on .*\) sent no heartbeat for [24] s .*; the run is ended", 30,
            marks=pytest.mark.verify,
        ),
    ],
    ids=["kill", "stop"],
)  # fmt: skip
def test_a_lost_rank_ends_the_run_and_is_named(
    workplace: Workplace, sent: signal.Signals, expected: str, seconds: float
) -> None:
    """Catches ranks that wait forever for a dead or stopped one, and an error that does not name the rank."""
    words = command(workplace.change(seeds=5000), 2, "--parallel.timeout=4")
    process, ranks = in_a_pass(words)
    (pid,) = (pid for pid in ranks if number_of(pid) == 1)
    os.kill(pid, sent)
    start = time.monotonic()
    done = process.finish()
    assert time.monotonic() - start < seconds
    assert done.returncode == 1
    assert re.fullmatch(r"evodsp: error: " + expected.format(pid=pid) + "\n", done.stderr), done.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list(workplace.root.glob("deep/**/*.cif"))
