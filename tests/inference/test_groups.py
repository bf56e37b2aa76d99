"""Several groups of ranks share the records of one command."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.errors import UserError
from evodsp.inference import seeds
from evodsp.inference.config import PredictConfig
from evodsp.inference.groups import Groups
from evodsp.inference.predict import predict, predict_records
from evodsp.parallel.config import SequenceConfig
from evodsp.parallel.group import Group, own_group
from tests.builders.hostile import Attack
from tests.builders.prediction import read_json, silent
from tests.ranks import RankPool

from .conftest import OTHER, QUERY, Workplace

LONG = QUERY * 2


def records(workplace: Workplace, *letters: str, **change: Any) -> PredictConfig:
    """Records of these sequences, without alignments."""
    text = "".join(f">r{number}\n{sequence}\n" for number, sequence in enumerate(letters))
    workplace.config.fasta.write_text(text)
    return workplace.change(seeds=1, recycles=0, **change)


def take_slowly(handle: Any, total: int) -> list[int]:
    """The places that a rank gets; rank 0 hands in its first one only when all others are done."""
    groups, taken = Groups(Group(handle), None), []
    for place in groups.places(total):
        taken.append(place)
        if groups.number == 0 and len(taken) == 1:
            while not groups.finished(total - 1):
                time.sleep(0.01)
        groups.finish([f"{place}"])
    while not groups.finished(total):
        time.sleep(0.01)
    assert sorted(int(line) for _, (line,) in groups.news()) == list(range(total))
    assert not list(groups.news()), "all have been read"
    assert groups.gathered({place: -place for place in taken}, total) == {place: -place for place in range(total)}
    return taken


def test_a_fast_group_takes_what_a_slow_one_leaves(pool: RankPool) -> None:
    """Catches records that are divided beforehand, taken twice, or lost."""
    slow, fast = pool.run(2, take_slowly, 7)
    assert len(slow) <= 1  # none on a busy machine, where the fast one is done before the slow one begins
    assert sorted(slow + fast) == list(range(7))
    slow, fast = pool.run(2, take_slowly, 5)
    assert sorted(slow + fast) == list(range(5)), "a second run begins anew"


def said_by(call: Callable[[], object]) -> str:
    """The one line of a UserError. Empty if there is none: a rank that fails would leave the other one waiting."""
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def disturbed(handle: Any, trace: Path) -> list[str]:
    """Write into the store of two groups what no rank writes, in place of the second one's lines and of counts; return what
    the first one says of each."""
    said = []
    for key, value in (("said/1/0", pickle.dumps(Attack(trace))), ("said/1/0", b'"a line"'), ("taken", b"-9")):
        groups = Groups(Group(handle), None)
        if handle.rank() == 1:
            groups.finish(["a line"])
            groups._store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes as well
        handle.barrier().wait()
        if handle.rank() == 0:
            said.append(said_by(lambda groups=groups: (list(groups.news()), list(groups.places(2)))))
    groups = Groups(Group(handle), None)
    return [*said, said_by(lambda: groups.gathered({handle.rank(): None}, 3))]


def test_the_store_of_groups_runs_no_code(pool: RankPool, tmp_path: Path) -> None:
    """Catches code of whoever reaches the port of the ranks' store in a rank; and records that are lost, or a rank that waits
    or dies without a word, because somebody has changed the counts."""
    first, second = pool.run(2, disturbed, tmp_path / "attacked")
    for line, said in zip(
        first,
        (
            "key said/1/0: found '",
            "key said/1/0: found '\"a line\"', expected a list",
            "key taken: found -8, expected a number above 0",
            "1 more than groups have taken",
        ),
        strict=True,
    ):
        assert said in line
        assert "another program writes into it" in line
    assert second == first[-1:]
    assert not (tmp_path / "attacked").exists()


def in_groups(handle: Any, config: PredictConfig, size: int) -> tuple[list[str], list[str], list[str]] | str:
    """Predict in groups of `size` ranks: names of the results, names of the failures, and the lines that rank 0 reports."""
    lines: list[str] = []
    own = None
    if size > 1:
        own = Group(own_group(torch.arange(handle.size()).view(-1, size)))
    groups = Groups(Group(handle), own)
    try:
        outcome = predict_records(config, lines.append if handle.rank() == 0 else silent, own, groups)
    except UserError as error:
        return str(error)
    return [r.name for r in outcome.results], [f.name for f in outcome.failures], lines


def same_structures(one: Path, other: Path, names: list[str]) -> None:
    for name in names:
        assert (one / name / "seed_0.cif").read_bytes() == (other / name / "seed_0.cif").read_bytes()


def test_groups_of_one_rank_share_the_records(workplace: Workplace, pool: RankPool) -> None:
    """Catches records that are predicted twice or by nobody, a failure that ends another group, structures that depend on the
    group, and lines of a group that nobody sees."""
    config = records(workplace, OTHER, QUERY, "GST1", LONG, OTHER, "X" * 9, QUERY)
    found = pool.run(2, in_groups, config, 1)
    names, failed, lines = found[0]
    assert found[1][:2] == (names, failed)
    assert names == ["r0", "r1", "r3", "r4", "r6"]
    assert sorted(failed) == ["r2", "r5"]
    assert {path.name for path in config.output.iterdir()} == {*names, "failures.json", "index.html", "predictions.csv"}
    assert len(read_json(config.output / "failures.json")["failures"]) == 2
    assert "2 groups of ranks take 5 records, the longest first" in lines
    assert sum("residues" in line and "/5]" in line for line in lines) == 5
    assert lines[-1].startswith("5 done, 0 kept, 2 failed")
    alone = replace(config, output=workplace.root / "alone")
    predict(alone, silent)
    same_structures(config.output, alone.output, names)
    kept = pool.run(2, in_groups, config, 1)[0][2]
    assert kept[-1].startswith("0 done, 5 kept, 2 failed")


def fail_with_long(handle: Any, config: PredictConfig) -> Any:
    """Predict in groups of one rank, on a machine that is too small for the longest record."""
    real = seeds.run_passes

    def full(model: Any, batch: dict[str, torch.Tensor], *given: Any) -> Any:
        if batch["aatype"].shape[-1] == len(LONG):
            raise MemoryError
        return real(model, batch, *given)

    seeds.run_passes = full
    try:
        return in_groups(handle, config, 1)
    finally:
        seeds.run_passes = real


def test_memory_of_one_group_is_no_matter_of_the_others(workplace: Workplace, pool: RankPool) -> None:
    """Catches a record that is too large for its group and takes the others' records along."""
    config = records(workplace, OTHER, LONG, QUERY)
    for names, failed, _ in pool.run(2, fail_with_long, config):
        assert (names, failed) == (["r0", "r2"], ["r1"])


def test_groups_that_find_nothing_usable_all_say_so(workplace: Workplace, pool: RankPool) -> None:
    """Catches a group that waits for records that there are not."""
    config = records(workplace, "X" * 9, "GST1")
    before = workplace.snapshot()
    said = pool.run(2, in_groups, config, 1)
    assert len(set(said)) == 1
    assert "None of the 2 records" in said[0]
    assert workplace.snapshot() == before


@pytest.mark.verify
def test_groups_of_two_ranks_share_the_records(workplace: Workplace, pool: RankPool) -> None:
    """Catches collectives of a group that include ranks of another one, and ranks that wait for the one that draws."""
    config = records(workplace, OTHER, QUERY, LONG, OTHER, parallel=SequenceConfig(2), plots=True)
    for names, failed, lines in pool.run(4, in_groups, config, 2):
        assert (names, failed) == (["r0", "r1", "r2", "r3"], [])
        assert not any("could not be written" in line for line in lines)
    timings = read_json(config.output / "r2" / "timings.json")
    assert len(timings["ranks"]) == 2
    assert pictures(config.output) == {name: {"seed_0_confidence.svg"} for name in names}


def pictures(output: Path) -> dict[str, set[str]]:
    return {folder.name: {path.name for path in folder.glob("*.svg")} for folder in output.glob("r*")}


def test_groups_draw_the_pictures_of_their_records(workplace: Workplace, pool: RankPool) -> None:
    """Catches pictures that only the first group draws, and finished records that get none."""
    config = records(workplace, OTHER, QUERY)
    predict(config, silent)
    for names, failed, lines in pool.run(2, in_groups, replace(config, plots=True), 1):
        assert (names, failed) == (["r0", "r1"], [])
        assert not any("could not be written" in line for line in lines)
    assert pictures(config.output) == {name: {"seed_0_confidence.svg"} for name in names}  # no alignments, no coverage


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`evodsp predict` as `ranks` ranks of torchrun, with one thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        f"--nproc-per-node={ranks}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "-m",
        "evodsp",
        "predict",
    ]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.verify
def test_forty_records_on_two_data_ranks(workplace: Workplace) -> None:
    """Catches any of five hostile records that ends the run of one of two groups, and a good record that is lost with them."""
    hostile = {"empty": "", "long": OTHER * 10_000, "letters": "GST1!", "broken": OTHER, "unknown": "X" * 10}
    good = [f"good_{number}" for number in range(35)]
    given = [(name, OTHER) for name in good]
    for place, record in zip((0, 9, 18, 27, 39), hostile.items(), strict=True):
        given.insert(place, record)
    workplace.config.fasta.write_text("".join(f">{name}\n{letters}\n" for name, letters in given))
    flat, output = workplace.root / "flat", workplace.root / "out"
    flat.mkdir()
    (flat / "broken.a3m").write_bytes(b"\x93\x00no alignment")
    words = [str(workplace.config.fasta), f"--alignments={flat}", f"--checkpoint={workplace.config.checkpoint}"]
    done = torchrun(2, *words, f"--output={output}", "--device=cpu", "--recycles=1")
    assert done.returncode == 1, done.stderr
    assert f"35 done, 0 kept, 5 failed; reasons in {output / 'failures.json'}" in done.stdout
    assert {path.name for path in output.iterdir()} == {
        *good,
        "failures.json",
        "index.html",
        "predictions.csv",
        "predict.log",
    }
    assert {entry["name"] for entry in read_json(output / "failures.json")["failures"]} == set(hostile)
    shared = len(re.findall(r"^\(group 1\) \[", done.stdout, re.MULTILINE))
    assert 5 <= shared <= 30, "both groups work"
    assert (output / "predict.log").read_text().count("(group 1)") == shared
