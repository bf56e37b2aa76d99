"""Breaks the package on purpose, one line at a time, and checks that the test named beside each break fails.

    python -m scripts.mutation.mutants [--list] [--only TEXT] [--share I/N]

`mutants.toml` holds breaks that once survived the whole test suite, and others like them. The script copies the package into
a temporary folder and runs all named tests there unbroken: they must pass. Then it applies one break after another and
expects the named test to fail. A break that cannot be imported does not count as found. Exit code 1: a mutant survived, or
could not be tried.

`--share I/N` tries every N-th mutant, starting with number I (from 0).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "scripts" / "mutation" / "mutants.toml"
TIMEOUT = 300.0
"""Seconds after which a test that hangs is ended."""


@dataclass(frozen=True)
class Mutant:
    """One break and the test that must find it."""

    name: str
    file: str
    """Path of the broken file, relative to the repository."""
    text: str
    """What is replaced. It must occur exactly once in the file."""
    broken: str
    test: str
    """Test id. Without parameters it stands for every parametrisation; one failure is enough."""


def read_table(path: Path = TABLE) -> tuple[Mutant, ...]:
    """The mutants of a table."""
    return tuple(Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"])


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    result: str
    """`caught`, `SURVIVED`, or why it could not be tried."""
    seconds: float


def broken_text(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole broken file. Raises ValueError if the text to replace is not there exactly once."""
    path = root / mutant.file
    source = path.read_text() if path.is_file() else ""
    if (count := source.count(mutant.text)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.text!r} occurs {count} times in {mutant.file}, expected once")
    return source.replace(mutant.text, mutant.broken)


def share_of(mutants: Sequence[Mutant], share: str) -> list[Mutant]:
    """Every N-th mutant from number I on. `share`: "I/N", I from 0."""
    number, _, shares = share.partition("/")
    return list(mutants[int(number) :: int(shares)])


def try_mutants(mutants: Sequence[Mutant], say: Callable[[str], None] = print) -> list[Outcome]:
    """Run every mutant's test, unbroken and broken, and print a line for each. Takes about 5 s a mutant."""
    texts = {mutant: broken_text(mutant) for mutant in mutants}
    with copied() as copy:
        tests = list(dict.fromkeys(mutant.test for mutant in mutants))
        passed = run_tests(copy, tests, Record(), 4 * TIMEOUT)
        outcomes = []
        for mutant in mutants:
            begin = time.monotonic()
            unbroken = _of(passed, mutant.test)
            if not unbroken or set(unbroken) != {"passed"}:
                result = f"NOT TRIED: unbroken, its test came to {sorted(set(unbroken)) or 'nothing'}"
            else:
                path = copy / mutant.file
                source = path.read_text()
                path.write_text(texts[mutant])
                found = _of(run_tests(copy, [mutant.test], Record(), TIMEOUT), mutant.test)
                path.write_text(source)
                result = (
                    "caught"
                    if "failed" in found
                    else "SURVIVED"
                    if set(found) == {"passed"}
                    else "NOT TRIED: no test ran"
                )
            outcomes.append(Outcome(mutant, result, time.monotonic() - begin))
            say(f"{result:9} {outcomes[-1].seconds:5.1f} s  {mutant.name}  ({mutant.test})")
    return outcomes


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what tests need, in a temporary folder; golden numbers beside it, where there are any."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder) / "checkout"
        for name in ("evodsp", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "conftest.py", "configs", "data", "docs"):
            (copy / name).symlink_to(ROOT / name)
        if (ROOT.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        yield copy


class Record:
    """A pytest plugin that keeps the outcome of every test's call."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = (
                report.outcome if report.when == "call" else f"{report.outcome} in {report.when}"
            )


def _of(outcomes: dict[str, str], test: str) -> list[str]:
    """Outcomes of a test, of all its parametrisations."""
    return [outcome for name, outcome in outcomes.items() if name == test or name.startswith(f"{test}[")]


def run_tests(copy: Path, words: Sequence[str], record: Record, seconds: float) -> dict[str, str]:
    """Outcome by test id, of tests run in `copy` by a forked process: torch is imported once, evodsp anew each time.

    `words`: for pytest. `record`: a plugin for that process. None have an outcome if they take longer than `seconds`; then
    there is no file `outcomes.json` beside the copy.
    """
    result = copy.parent / "outcomes.json"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(copy, words, record, result)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    return json.loads(result.read_text()) if result.is_file() else {}


def _child(copy: Path, words: Sequence[str], record: Record, result: Path) -> None:
    """Run pytest in `copy`, write the outcomes, and end this process."""
    os.setsid()
    os.chdir(copy)
    quiet = os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.dont_write_bytecode = True  # a file that is broken twice within a second would be taken for the first one
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("evodsp", "tests", "scripts")]:
        del sys.modules[name]
    import pytest

    pytest.main([*words, "-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={copy}"], plugins=[record])
    evodsp = sys.modules.get("evodsp")
    assert evodsp is None or Path(str(evodsp.__file__)).is_relative_to(copy), "not the copy was tested"
    result.write_text(json.dumps(record.outcomes))
    os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutation.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, run nothing")
    parser.add_argument("--only", metavar="TEXT", help="try the mutants whose name or file contains TEXT")
    parser.add_argument(
        "--share", metavar="I/N", default="0/1", help="try every N-th mutant, starting with number I (from 0)"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, help="read other mutants than those of scripts/mutation/mutants.toml"
    )
    options = parser.parse_args(words)
    chosen = [
        mutant
        for mutant in share_of(read_table(options.table), options.share)
        if (options.only or "") in f"{mutant.name} {mutant.file}"
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}  {mutant.file}  {mutant.test}")
        return 0
    outcomes = try_mutants(chosen)
    bad = [outcome for outcome in outcomes if outcome.result != "caught"]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants caught")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # These take seconds to import. The forked processes have them already.
    import jaxtyping  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.device_mesh  # noqa: F401

    sys.exit(main())
