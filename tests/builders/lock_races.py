"""`python -m tests.builders.lock_races 100`: processes race for locks, are killed while they hold them, and make one index."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from evodsp.cli import main
from evodsp.data.index import scan
from evodsp.errors import UserError
from evodsp.files import lock

DATA = Path(__file__).parents[2] / "data"


def forked(function: Callable[[], int]) -> int:
    """Call a function in a process of its own, which ends with what it returns. Returns the process's number."""
    if child := os.fork():
        return child
    code = 99
    try:
        code = function()
    finally:
        os._exit(code)


def ended(children: list[int]) -> list[int]:
    """Exit codes; the number of the signal, negative, of one that was killed."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def stale_lock(folder: Path, draw: random.Random) -> None:
    """Four processes find the lock of a dead one: one of them takes it over."""
    path = folder / "run.lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 4_194_304, "born": "1", "job": None}))

    at = time.monotonic() + draw.uniform(0.01, 0.03)

    def take() -> int:
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            with lock(path, folder, "trains there"):
                end = time.monotonic() + 10
                while len(list(folder.glob("refused*"))) < 3 and time.monotonic() < end:
                    time.sleep(0.001)  # not gone before the last one has tried
                return 0
        except UserError:
            (folder / f"refused{os.getpid()}").touch()
            return 2

    codes = ended([forked(take) for _ in range(4)])
    assert sorted(codes) == [0, 2, 2, 2], codes


def killed_holders(folder: Path, draw: random.Random) -> None:
    """Four processes take the lock again and again, and some are killed while they hold it: no two hold it, each gets it."""
    path, inside = folder / "run.lock", folder / "inside"

    def take(seed: int, is_killed: bool) -> int:
        own, turns = random.Random(seed), 0
        while turns < 5:
            try:
                with lock(path, folder, "trains there"):
                    inside.touch(exist_ok=False)
                    time.sleep(own.uniform(0, 0.002))
                    inside.unlink()
                    turns += 1
                    if is_killed and turns == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
            except UserError:
                time.sleep(own.uniform(0, 0.002))
        return 0

    plan = [(draw.randrange(1 << 30), number % 2 == 0) for number in range(4)]
    codes = ended([forked(lambda given=given: take(*given)) for given in plan])
    assert codes == [-signal.SIGKILL, 0, -signal.SIGKILL, 0], codes
    with lock(path, folder, "trains there"):  # of the last one, if it was killed
        pass
    assert not path.exists()


def one_index(folder: Path, draw: random.Random) -> None:
    """Of two scans one makes the index; if that one is killed, the next one does."""
    words = [
        "data",
        "index",
        f"--alignment_dir={DATA}/alignments",
        f"--structure_dir={DATA}/mmcif_files",
        "--workers=0",
    ]
    words.append(f"--output={folder}/index")

    def make(said: Path) -> int:
        with said.open("w") as file, contextlib.redirect_stderr(file):
            return main(words)

    both = [forked(lambda number=number: make(folder / f"said{number}")) for number in range(2)]
    is_killed = draw.random() < 0.5
    if is_killed:
        time.sleep(draw.uniform(0, 0.1))
        os.kill(both[0], signal.SIGKILL)
    codes = ended(both)
    told = [(folder / f"said{number}").read_text() for number, code in enumerate(codes) if code == 2]
    assert all("makes an index there" in text or "there is an index already" in text for text in told), told
    assert all(text.count("\n") <= 2 for text in told), told
    if is_killed:
        assert codes[0] in (0, 2, -signal.SIGKILL), codes
        assert codes[1] in (0, 2), codes
        words.append("--overwrite")
        again = ended([forked(lambda: make(folder / "said2"))])
        assert again == [0], (codes, again, (folder / "said2").read_text())
    else:
        assert sorted(codes) == [0, 2], (codes, told)
    left = {path.name for path in folder.iterdir()} - {"said0", "said1", "said2"}
    assert left == {"index"}, left


def run(rounds: int) -> None:
    """All races, so many times. Raises AssertionError for one that has two winners, or none."""
    assert scan.make_index, "imported before the first fork, so that races begin at once"
    draw = random.Random(0)
    for _ in range(rounds):
        for race in (stale_lock, killed_holders, one_index):
            with tempfile.TemporaryDirectory() as folder:
                race(Path(folder), draw)
    print(f"{rounds} rounds of each race: one winner")


if __name__ == "__main__":
    run(int(sys.argv[1]))
