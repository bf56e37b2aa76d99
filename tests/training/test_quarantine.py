"""`evodsp fit` on data with bad chains: it goes on, names them in a list, and a resume takes the same samples."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.data.samples.selection import ChainDraws
from evodsp.errors import FileFormatError, UserError
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from evodsp.training.chains import find_chains
from evodsp.training.command import TrainingCLI
from evodsp.training.loader import FailedChain, Quarantine, QuarantineFull, failures_of, read_quarantine
from tests.builders.bad_chains import BAD, samples, write_data_set
from tests.builders.planted_store import KILLER, SLEEPER
from tests.builders.processes import ROOT


def test_the_file_holds_each_chain_once_and_is_read_again(tmp_path: Path) -> None:
    """A chain named by every rank that met it, an order that depends on ranks, or a list that a resume cannot read."""
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(5, path)
    quarantine.add([FailedChain("b", 7, "slow"), FailedChain("a", 4, "cut"), FailedChain("b", 6, "slow")])
    quarantine.add([FailedChain("b", 9, "slow again")])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["chain"], line["sample"], line["reason"]) for line in lines] == [("a", 4, "cut"), ("b", 6, "slow")]
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert read_quarantine(path) == quarantine.failures == failures_of(quarantine.state())
    assert [sorted(quarantine.chains_at(sample)) for sample in (3, 4, 6)] == [[], ["a"], ["a", "b"]]


def test_a_list_beyond_the_limit_is_written_and_stops(tmp_path: Path) -> None:
    """A run that stops without naming the last chain, or goes on after a resume although nothing was corrected."""
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(1, path)
    quarantine.add([FailedChain("a", 4, "cut")])
    with pytest.raises(
        QuarantineFull, match=r"2 chains failed, the last b \(slow\), but data.max_quarantined is 1; .*jsonl"
    ):
        quarantine.add([FailedChain("b", 5, "slow")])
    known = read_quarantine(path)
    assert known is not None
    assert [failure.chain for failure in known] == ["a", "b"]
    with pytest.raises(QuarantineFull):
        Quarantine(1).restore(known)


def test_lines_may_be_deleted_and_others_are_refused(tmp_path: Path) -> None:
    """A traceback for a file that a user has edited; an emptied file that counts as none, so that the checkpoint's list
    returns."""
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) is None
    path.write_text("")
    assert read_quarantine(path) == []
    good = '{"chain": "a", "sample": 1, "reason": "cut"}\n'
    for bad in (
        "{",
        "[]",
        "3",
        '{"chain": "a"}',
        '{"chain": "a", "sample": "1", "reason": ""}',
        '{"chain": "a", "x": 1}',
    ):
        path.write_text(good + bad + "\n")
        with pytest.raises(FileFormatError, match=r"quarantine.jsonl:2: expected .*delete the line"):
            read_quarantine(path)
    path.write_text(good)
    assert read_quarantine(path) == [FailedChain("a", 1, "cut")]


PLANT, RECORD = "tests.builders.bad_chains.Plant", "tests.builders.bad_chains.Record"


@pytest.fixture(autouse=True)
def chains_are_not_read_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a data set of more chains."""
    monkeypatch.setattr("evodsp.training.chains.MOST_CHAINS_READ", 0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_set(tmp_path_factory.mktemp("bad"), good=7)


def words(config: Path, output: Path, steps: int, *options: str, callback: str = PLANT) -> list[str]:
    return ["fit", f"--config={config}", f"--output={output}", f"--trainer.max_steps={steps}",
            f"--trainer.callbacks={callback}", *options]  # fmt: skip


def first_failures(good: int, samples: int) -> list[tuple[int, str]]:
    """The sample at which each bad chain is met first: as a sample's own chain, or as the replacement of another bad one."""
    draws = ChainDraws(Draws.root(0).at("data"), [f"1{number:03d}_A" for number in range(good)] + BAD)
    found: dict[str, int] = {}
    for sample in range(samples):
        attempt = 0
        while (chain := draws.candidate(sample, attempt)) in BAD:
            found.setdefault(chain, sample)
            attempt += 1
    return sorted((sample, chain) for chain, sample in found.items())


def quarantined(output: Path) -> list[tuple[int, str]]:
    lines = (output / "quarantine.jsonl").read_text().splitlines()
    return [(entry["sample"], entry["chain"]) for entry in map(json.loads, lines)]


@pytest.mark.verify
def test_bad_chains_end_neither_a_run_nor_its_resume(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends at its first bad chain, hides it, repeats it after a resume, or resumes with other samples; a
    quarantine that is lost when the run goes on in another folder."""
    whole, parts, moved = tmp_path / "whole", tmp_path / "parts", tmp_path / "moved"
    assert main(words(config, whole, 14)) == 0
    first = first_failures(7, 14)
    assert len(first) == len(BAD)
    assert quarantined(whole) == first
    assert "Traceback" not in capsys.readouterr().err
    for chain in BAD:
        assert caplog.text.count(f"chain {chain} is left out") == 1
    reasons = {entry["chain"]: entry["reason"] for entry in map(json.loads, (whole / "quarantine.jsonl").open())}
    assert reasons[SLEEPER] == "took longer than data.time_limit, 5 s"
    assert "killed by SIGKILL" in reasons[KILLER]
    assert "uniref90_hits.a3m" in reasons[BAD[0]]
    curve = read_curve(whole / "curve.csv")
    assert list(curve) == list(range(14))
    assert all(math.isfinite(float(row["train/loss"])) for row in curve.values())
    assert all(0 <= float(row["train/waiting_percent"]) <= 100 for row in curve.values())

    assert main(words(config, parts, 7)) == 0
    before = (parts / "quarantine.jsonl").read_text()
    assert main(words(config, parts, 14, "--ckpt_path=last")) == 0
    assert (parts / "quarantine.jsonl").read_text().startswith(before), "what was known is not met again"
    assert samples(parts) == samples(whole)
    alone = ("--data.num_workers=0", "--data.time_limit=null")  # all bad chains are known, so that none is read
    assert main(words(config, moved, 15, f"--ckpt_path={whole}/checkpoints/last.ckpt", *alone)) == 0
    assert quarantined(moved) == first


def test_a_resume_does_not_read_quarantined_chains_in_advance(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small data sets: a chain that broke during the run, and was left out, makes every resume an error."""
    monkeypatch.setattr("evodsp.training.chains.MOST_CHAINS_READ", 64)
    data = TrainingCLI("fit", words(config, tmp_path, 1)[1:]).settings.data
    with pytest.raises(UserError, match=r"9qry_A|9cut_A|9bin_A"):
        find_chains(data)
    assert set(BAD) <= set(find_chains(data, set(BAD)).train)


def test_too_many_bad_chains_stop_the_run_after_a_checkpoint(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of training lost with the run, a resume that goes on although nothing changed, or one that cannot be made to."""
    output = tmp_path / "run"
    options = ["--data.num_workers=0", "--data.time_limit=null", "--checkpoint_every=100"]
    options += ["--data.samples_per_epoch=50", "--trainer.limit_val_batches=0"]
    assert main(words(config, output, 14, *options, "--data.max_quarantined=1", callback=RECORD)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("evodsp: error: 2 chains failed, the last ")
    assert "data.max_quarantined is 1" in last
    (_, second) = quarantined(output)
    assert sorted(samples(output)) == list(range(second[0]))
    assert (output / "checkpoints" / "last.ckpt").is_file()
    resume = ["--ckpt_path=last", *options]
    assert main(words(config, output, 14, *resume, "--data.max_quarantined=1", callback=RECORD)) == 2
    assert main(words(config, output, 14, *resume, "--data.max_quarantined=9", callback=RECORD)) == 0
    assert sorted(samples(output)) == list(range(14))


@pytest.mark.verify
def test_200_steps_on_two_ranks(tmp_path: Path) -> None:
    """5 % of the chains are bad: steps that are left out, chains named twice, other samples that move, ranks that differ."""
    config = write_data_set(tmp_path, good=95)
    runs = {name: tmp_path / name for name in ("whole", "parts", "without", "data")}
    sequence = "--parallel.sequence=2"

    def run(name: str, steps: int, *options: str, callback: str = PLANT) -> None:
        command = [sys.executable, "-m", "evodsp", *words(config, runs[name], steps, *options, callback=callback)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr

    options = ["--checkpoint_every=50", "--data.validation_chains=null", "--data.samples_per_epoch=200"]
    options += [
        "--data.train.uniform_recycling=false"
    ]  # the number is drawn once a batch, and meshes differ in batches
    run("whole", 200, sequence, *options)
    first = first_failures(95, 200)
    assert len(first) == len(BAD)
    assert quarantined(runs["whole"]) == first
    seen = samples(runs["whole"])
    assert sorted(seen) == list(range(200))
    assert samples(runs["whole"], rank=1) == seen
    assert list(read_curve(runs["whole"] / "curve.csv")) == list(range(200))

    run("parts", 110, sequence, *options)
    run("parts", 200, sequence, *options, "--ckpt_path=last")
    assert samples(runs["parts"]) == seen

    # The list without them: all five are left out from the first sample on, so none is ever read.
    run("without", 1, sequence, *options, callback=RECORD)
    (runs["without"] / "samples_0.jsonl").unlink()
    lines = [json.dumps({"chain": chain, "sample": 0, "reason": "removed"}) for chain in BAD]
    (runs["without"] / "quarantine.jsonl").write_text("\n".join(lines) + "\n")
    run("without", 200, sequence, *options, "--ckpt_path=last", callback=RECORD)
    without = samples(runs["without"])
    assert all(checksum == seen[index] for index, checksum in without.items())
    assert len(without) == 199

    # Two ranks that read different samples, and a resume.
    run("data", 60, "--trainer.devices=2", *options)
    run("data", 100, "--trainer.devices=2", *options, "--ckpt_path=last")
    assert quarantined(runs["data"]) == first
    assert samples(runs["data"]) | samples(runs["data"], rank=1) == seen
    print(f"200 steps, {len(first)} bad chains: {first}")
