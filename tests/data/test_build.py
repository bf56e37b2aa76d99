"""`evodsp data build`: chains that fail, workers that die, builds that are killed, divided among tasks, or repeated."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from evodsp.cli import main
from evodsp.data import build as command
from evodsp.data.build import Account, BuildInputs, BuildPlan, Part, build, build_part, build_parts
from evodsp.data.index import scan
from evodsp.data.pool import DaskCluster, LocalProcesses, executor
from evodsp.data.sources.feature_store import CHAINS, FeatureStore
from evodsp.errors import UserError
from evodsp.files import lock
from tests.builders.builds import build_with_deadly_chains, config, content, die_at_once, letters_of, write_chain
from tests.builders.processes import begin, free_port

needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="the extra `cluster` is not installed")
KEYS = [f"{number}abc_A" for number in range(1, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight chains."""
    root = tmp_path_factory.mktemp("chains")
    for number, key in enumerate(KEYS):
        write_chain(root, key, letters_of(number))
    return root


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "store"
    build(config(folder, output))
    return output


def test_bad_chains_are_named_and_left_out(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a build that one chain ends, a chain lost without a word, and reasons that name no file."""
    for number, key in enumerate(KEYS[:2]):
        write_chain(tmp_path, key, letters_of(number))
    write_chain(tmp_path, "3abc_A", "ACDEF", second="WCDEF")
    write_chain(tmp_path, "4abc_A", "ACDEF")
    (tmp_path / "mmcif_files" / "4abc.cif").write_text("data_\nloop_\n")
    (tmp_path / "alignments" / "5abc_A").mkdir()
    long = f"{'5' * 120}_A"
    (tmp_path / "alignments" / long).mkdir()
    words = ["--alignment_dir", str(tmp_path / "alignments"), "--structure_dir", str(tmp_path / "mmcif_files")]
    assert main(["data", "build", *words, "--output", str(tmp_path / "store"), "--workers", "2"]) == 0
    failed = [json.loads(line) for line in (tmp_path / "store" / "failed.jsonl").read_text().splitlines()]
    reasons = {entry["name"]: entry["reason"] for entry in failed}
    assert list(reasons) == ["3abc_A", "4abc_A", long, "5abc_A"]
    assert "hits.a3m" in reasons["3abc_A"]
    assert "4abc.cif" in reasons["4abc_A"]
    assert "cannot be stored" in reasons[long]
    assert "warning: 4 chains and 0 template structures were left out" in capfd.readouterr().err
    assert FeatureStore(str(tmp_path / "store")).keys() == KEYS[:2]


def test_all_chains_bad_is_no_store(tmp_path: Path) -> None:
    """Catches an empty store that training would open, and failures that a repaired folder keeps."""
    write_chain(tmp_path, "1abc_A", "ACDEF", second="WCDEF")
    for _ in range(2):
        with pytest.raises(UserError, match=r"failed\.jsonl: all 1 chain failed, the first with: .*hits\.a3m"):
            build(config(tmp_path, tmp_path / "store"))
    (tmp_path / "store/build.lock").touch()  # it was killed while it gave up
    write_chain(tmp_path, "1abc_A", "ACDEF")
    build(config(tmp_path, tmp_path / "store"))
    assert "1abc_A" in FeatureStore(str(tmp_path / "store"))


def test_chains_that_kill_their_worker_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build that ends, hangs or loses other chains when its only worker is killed, a worker that is the command's
    own process, and a deadly chain tried for ever."""
    write_chain(tmp_path, "9abc_A", letters_of(1))
    write_chain(tmp_path, "9bbc_A", letters_of(2))
    write_chain(tmp_path, "8abc_A", letters_of(3))
    monkeypatch.setattr(command, "build_parts", partial(build_parts, build=build_with_deadly_chains))
    build(config(tmp_path, tmp_path / "store", chains_per_shard=3, workers=1))
    assert FeatureStore(str(tmp_path / "store")).keys() == ["8abc_A"]
    failed = [json.loads(line) for line in (tmp_path / "store" / "failed.jsonl").read_text().splitlines()]
    assert [entry["name"] for entry in failed] == ["9abc_A", "9bbc_A"]
    assert "worker process was ended" in failed[0]["reason"]


def test_a_worker_that_dies_before_it_reads_is_no_chains_fault(folder: Path, tmp_path: Path) -> None:
    """Catches a chain blamed that an earlier build was reading when it was killed, and a loop without end."""
    plan = BuildPlan.of(config(folder, tmp_path / "store"))
    (tmp_path / "store" / "building").mkdir(parents=True)
    part = plan.parts(tmp_path / "store", CHAINS, plan.keys)[0]
    part.current.write_text(KEYS[0])
    with pytest.raises(UserError, match="the worker process that makes it was ended"):
        list(build_parts([part], LocalProcesses(1, isolated=True), die_at_once))


def kill_a_build(folder: Path, output: Path, finished: int = 1, after: float = 0.0) -> None:
    """Start a build and kill it `after` seconds from the moment at which so many shards are `finished`."""
    words = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    sizes = ["--chains_per_shard", "2", "--workers", "1"]
    process = begin([sys.executable, "-m", "evodsp", "data", "build", *words, *sizes, "--output", str(output)])
    while process.poll() is None and not (
        (output / "building" / "plan.json").is_file()
        and len(list((output / "building").glob("chains_*.json"))) >= finished
    ):
        time.sleep(0.001)
    time.sleep(after)
    process.kill()  # nothing happens if the build has ended already
    process.communicate()


def test_a_killed_build_goes_on(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Catches finished shards made again, half a shard kept or taken for a whole one, and a result that depends on the kill."""
    output = tmp_path / "store"
    kill_a_build(folder, output)
    first = next((output / "building").glob("chains_*.json"))
    shard = output / CHAINS / f"{first.stem.split('_')[1]}.tar"
    made = shard.stat().st_mtime_ns
    (output / CHAINS / ".00001.tar.4194304.partial").write_bytes(b"half a shard, of a worker that was killed")
    if not (output / "store.json").is_file():
        with pytest.raises(UserError, match="no feature store there"):
            FeatureStore(str(output))
    build(config(folder, output))
    assert shard.stat().st_mtime_ns == made
    assert content(output) == content(undisturbed)


@pytest.mark.verify
def test_ten_killed_builds(tmp_path: Path) -> None:
    """Catches a moment at which a kill leaves something that the next build takes for good."""
    chains, shards = 160, 80
    for number in range(chains):
        write_chain(tmp_path, f"{number + 100}a_A", letters_of(number % 20))
    undisturbed = tmp_path / "undisturbed"
    build(config(tmp_path, undisturbed))
    draw = random.Random(0)
    found = []
    for number in range(10):
        output = tmp_path / str(number)
        # The last shards are left alone: a build must not be done before its kill arrives.
        kill_a_build(tmp_path, output, finished=5 * number, after=draw.uniform(0, 0.02))
        assert not (output / "store.json").exists(), "the build had ended before it was killed"
        found.append(len(list((output / "building").glob("chains_*.json"))))
        build(config(tmp_path, output))
        assert content(output) == content(undisturbed)
    print(f"shards of {shards} that were finished when the build was killed: {found}")
    assert len(set(found)) >= 8, "the kills came at the same moments"
    assert sum(0 < number < shards for number in found) >= 8, "the kills came before or after the shards were made"


def test_tasks_build_one_store_together(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Catches tasks that do the same shards or leave some, and a store that depends on who built it."""
    output = tmp_path / "store"
    for share in ("0/2", "1/2"):
        build(config(folder, output, share=share))
        assert (output / "store.json").is_file() == (share == "1/2")
    assert content(output) == content(undisturbed)


@pytest.mark.parametrize(
    ("held", "wanted", "message"),
    [
        ("0-of-1", None, "builds a store there; end it first"),
        ("1-of-2", "1/2", "builds a store there; end it first"),
        ("1-of-2", None, "builds share 1/2 there; wait until it has ended"),
        ("1-of-2", "1/3", "builds share 1/2 there; wait until it has ended"),
        ("0-of-1", "1/3", "builds share 0/1 there; wait until it has ended"),
    ],
)
def test_two_builds_into_one_folder(folder: Path, tmp_path: Path, held: str, wanted: str | None, message: str) -> None:
    """Catches two processes that make the same shards, and one that completes the store while others build it."""
    output = tmp_path / "store"
    with lock(output / "building" / f"{held}.lock", output, "builds a store there"):
        by = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(UserError, match=f"--output {output}: {by} {message}"):
            build(config(folder, output, share=wanted))
        assert not list(output.rglob("*.json")), "it has begun all the same"


@pytest.mark.parametrize("stage", ["chains", "template structures"])
@pytest.mark.parametrize("bad", [False, True])
def test_tasks_that_end_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, bad: bool
) -> None:
    """Catches a store that two tasks complete: the second finds no accounts any more, or removes what the first wrote."""
    output, real = tmp_path / "store", command._built
    for key in KEYS[:2]:
        write_chain(tmp_path, key, "ACDEF", second="WCDEF" if bad else None)
    build(config(tmp_path, output, share="0/2", chains_per_shard=1))

    def built(given: Any, what: str, parts: Any) -> bool:
        done = real(given, what, parts)
        if what == stage:
            monkeypatch.setattr(command, "_built", real)
            with pytest.raises(UserError, match="all 2 chains failed") if bad else contextlib.nullcontext():
                build(config(tmp_path, output, share="0/2", chains_per_shard=1))  # the other task ends first
        return done

    monkeypatch.setattr(command, "_built", built)
    build(config(tmp_path, output, share="1/2", chains_per_shard=1))
    assert (output / "store.json").is_file() != bad
    assert not (output / "building").exists()
    assert not (output / "build.lock").exists()


def test_a_complete_or_foreign_folder_is_not_overwritten(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Catches a store of other chains continued, a store built twice, and a folder of the user's files filled up."""
    before = content(undisturbed)
    build(config(folder, undisturbed))
    with pytest.raises(UserError, match="holds a store with chains_per_shard 2, not 3"):
        build(config(folder, undisturbed, chains_per_shard=3))
    assert content(undisturbed) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder, nor a store that was begun"):
        build(config(folder, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "--workers is 0, but must be at least 1"),
        ({"share": "2/2"}, "--share is '2/2', but must be I/N"),
        ({"share": "-1/2"}, "--share is '-1/2', but must be I/N"),
        ({"share": "0/2", "scheduler": "tcp://x:1"}, "give one of them"),
        ({"obsolete": Path("obsolete.dat")}, "--template_structure_dir is not given"),
        ({"chains": Path("nowhere.txt")}, "no such file of chain names"),
        ({"template_structure_dir": Path("nowhere")}, "no such structure directory"),
    ],
)
def test_wrong_settings_are_one_line(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    """Catches settings that are found wrong only when a worker uses them, and a folder left behind by them."""
    with pytest.raises(UserError, match=message):
        build(config(folder, tmp_path / "store", **changes))
    assert not (tmp_path / "store").exists()


@pytest.mark.verify
@needs_dask
def test_a_scheduler_with_two_workers_of_which_one_is_killed(folder: Path, tmp_path: Path) -> None:
    """Catches shards that are lost with a worker, and processes of Dask's own that do not find evodsp or the folders."""
    for number in range(60):
        write_chain(tmp_path, f"{number + 10}ab_A", letters_of(number % 20))
    whole, output = tmp_path / "whole", tmp_path / "store"
    build(config(tmp_path, whole, chains_per_shard=1))
    address = f"tcp://127.0.0.1:{free_port()}"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard"]
    started = [begin([*dask, "--host", "127.0.0.1", "--port", address.rpartition(":")[2]])]
    started += [begin([*worker, "--nthreads", "1", "--local-directory", str(tmp_path / name)]) for name in ("a", "b")]
    finished: list[int] = []

    def kill_one() -> None:
        while len(list((output / "building").glob("chains_*.json"))) < 10:
            time.sleep(0.001)
        started[1].kill()
        finished.append(len(list((output / "building").glob("chains_*.json"))))

    watch = threading.Thread(target=kill_one, daemon=True)
    watch.start()
    try:
        build(config(tmp_path, output, chains_per_shard=1, scheduler=address))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    watch.join(timeout=1)
    print(f"shards that were finished when the worker was killed: {finished} of 60")
    assert finished[0] < 60
    assert content(output) == content(whole)


@pytest.mark.verify
@needs_dask
def test_a_local_dask_cluster_builds_the_same(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Catches a cluster that cannot be started, or that outlives the build."""
    build(config(folder, tmp_path / "store", scheduler="local", workers=2))
    assert content(tmp_path / "store") == content(undisturbed)


def test_a_scheduler_without_dask_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback where the extra is not installed, and `--scheduler` alone that means something else than a local
    cluster."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match="--scheduler needs Dask"):
        list(DaskCluster("tcp://127.0.0.1:1", 1).map(print, []))
    given = []

    def seen(*options: Any, **more: Any) -> Any:
        given.append(options)
        return executor(*options, **more)

    monkeypatch.setattr(command, "executor", seen)
    monkeypatch.setattr(scan, "executor", seen)
    options = ["--alignment_dir", str(folder / "alignments"), "--structure_dir", str(folder / "mmcif_files")]
    for name in ("build", "index"):
        assert main(["data", name, *options, "--scheduler", "--workers=2", "--output", str(tmp_path / name)]) == 2
        assert "--scheduler needs Dask, which is not installed" in capsys.readouterr().err
    assert given == [("local", 2)] * 2


def test_a_chain_whose_folder_has_a_name_of_any_bytes(tmp_path: Path) -> None:
    """Catches a build that ends over a name which no text file can hold."""
    part = Part(tmp_path, CHAINS, 0, ("1ab\udce9_A",), BuildInputs(str(tmp_path), str(tmp_path), None, None))
    for folder in (part.shard.parent, part.account.parent):
        folder.mkdir(parents=True, exist_ok=True)
    assert build_part(part) == 1
    ((name, _),) = Account.read(part.account).failed
    assert name == "1ab\udce9_A"
