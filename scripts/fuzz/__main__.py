"""Changed files for all readers of evodsp: whatever a file holds, a reader returns or raises a UserError of one line.

    .venv/bin/python -m scripts.fuzz --count 10000 [--seed 0] [--only structure index] [--keep DIR]
    .venv/bin/python -m scripts.fuzz --case 1234        one case alone, and what it finds

A case is a function of the seed and its number. What is found is printed and makes the exit code 1: another exception, a crash,
5 seconds of computing, a gigabyte of memory, a message of several lines or longer than anybody reads, or a file that the reader
leaves behind. (What acts on a terminal is escaped where messages are printed: `evodsp.printing`.)
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from evodsp.errors import UserError
from scripts.benchmarks.calling_lines import EVODSP
from scripts.fuzz.mutations import mutated
from scripts.fuzz.subjects import Subject, subjects, write

SECONDS, WALL_SECONDS = 5.0, 120.0
"""Longest times of a case: of computing, and of computing and waiting together. Waiting for a processor does not count, because
other programs may use it."""
MEMORY = 1 << 30
LONGEST_MESSAGE = 2500


def try_case(found: Sequence[Subject], seed: int, number: int, folder: Path) -> tuple[str, str | None]:
    """The subject of a case, and what is wrong with what its readers do; None: nothing. `folder` is empty."""
    rng = _draws(seed, number)
    subject = rng.choice(found)
    files = rng.choice(subject.inputs)
    others = [data for known in subject.inputs for data in known.values()]
    write(rng, lambda name, data: mutated(rng, name, data, others), files, folder)
    before = set(folder.rglob("*"))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    tempfile.tempdir = str(folder)
    try:
        for reader in subject.readers:
            begun = time.process_time()
            try:
                reader(folder)
            except UserError as error:
                messages.append(str(error))
            except BaseException as error:
                return subject.name, _raised(error)
            if (taken := time.process_time() - begun) > SECONDS:
                return subject.name, f"took {taken:.1f} s"
    finally:
        tempfile.tempdir = None
        logging.getLogger().removeHandler(handler)
    for message in messages:
        if "\n" in message or len(message) > LONGEST_MESSAGE:
            return subject.name, f"message {message[:300]!r}"
    left = set(folder.rglob("*")) - before
    return subject.name, f"left behind: {sorted(map(str, left))}" if left else None


def _draws(seed: int, number: int) -> Random:
    """The randomness of a case. Its first draw is the subject."""
    return Random(f"{seed}/{number}")


def _raised(error: BaseException) -> str:
    """The exception and the line of evodsp that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(EVODSP)]
    where = f"{frames[-1].filename.removeprefix(EVODSP)}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:200]!r}"


def _work(found: Sequence[Subject], seed: int, numbers: Sequence[int], at: Connection, now: Any) -> None:
    """Try cases, in a process of its own."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
            now[:] = number, time.monotonic(), time.process_time(), _without_processor("self")
            at.send((number, *try_case(found, seed, number, Path(folder))))


def try_cases(found: Sequence[Subject], seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str, str | None]]:
    """Cases with their subjects and what was found. A process that crashes or hangs is replaced."""
    context = multiprocessing.get_context("fork")
    now = context.Array("d", 4, lock=False)
    left = numbers
    while left:
        mine, theirs = context.Pipe(duplex=False)
        now[:] = left[0], time.monotonic(), 0.0, 0.0
        process = context.Process(target=_work, args=(found, seed, left, theirs, now))
        process.start()
        theirs.close()
        fault = None
        try:
            while left and (fault := _hangs(process.pid, now)) is None:
                if mine.poll(1.0):
                    answer = mine.recv()
                    left = left[1:]
                    yield answer
        except EOFError:
            process.join()
            fault = f"ends the process ({process.exitcode})"
        finally:
            process.kill()
            process.join()
        if fault is not None and left:
            yield left[0], _draws(seed, left[0]).choice(found).name, fault
            left = left[1:]


def _without_processor(pid: int | str | None) -> float:
    """Seconds for which a process could have computed and had no processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _hangs(pid: int | None, now: Sequence[float]) -> str | None:
    ticks = [int(x) for x in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]]
    computed = sum(ticks) / os.sysconf("SC_CLK_TCK") - now[2]
    waited = time.monotonic() - now[1] - (_without_processor(pid) - now[3])
    return f"does not end ({computed:.0f} s)" if computed > 2 * SECONDS or waited > WALL_SECONDS else None


def main(words: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", type=Path, help="run --case in this process, and leave its files in this folder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many seconds")
    parser.add_argument("--only", nargs="+", default=[], help="cases of these subjects")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="fuzz") as work:
        found = subjects(Path(work))
        if wrong := set(given.only) - {subject.name for subject in found}:
            parser.error(f"--only {' '.join(wrong)}: no such subject; there are {', '.join(s.name for s in found)}")
        first, count = (given.first, given.count) if given.case is None else (given.case, 1)
        numbers = [
            n
            for n in range(first, first + count)
            if not given.only or _draws(given.seed, n).choice(found).name in given.only
        ]
        if given.keep is not None and given.case is not None:
            given.keep.mkdir(parents=True)
            print(*try_case(found, given.seed, given.case, given.keep), sep=": ")
            return 0
        print(f"a fault again: python -m scripts.fuzz --seed {given.seed} --case N")
        counts: Counter[str] = Counter()
        faults: dict[tuple[str, str], list[int]] = {}
        begun = said = time.monotonic()
        for number, name, fault in try_cases(found, given.seed, numbers):
            counts[name] += 1
            if fault is not None:
                known = faults.setdefault((name, fault.split(": ")[0][:100]), [])
                known.append(number)
                if len(known) == 1:
                    print(f"case {number}, {name}: {fault}", flush=True)
            now = time.monotonic()
            if now - said > 60:
                said = now
                print(
                    f"{counts.total():,} cases, {counts.total() / (now - begun):.0f}/s, {len(faults)} faults",
                    flush=True,
                )
            if now - begun > given.seconds:
                break
    for (name, fault), cases in faults.items():
        print(f"{len(cases):6} {name}: {fault}, cases {' '.join(map(str, cases[:5]))}")
    print(f"seed {given.seed}: {counts.total():,} cases in {time.monotonic() - begun:.0f} s: {json.dumps(counts)}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
