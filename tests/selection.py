"""pytest options with which CI runs a part of the verify tests: some related to the change, some in rotation.

Tests of the programs under scripts/ are verify tests too. They concern the files that they and their programs import.

A test marked `verify_but` is a verify test, but for the parameters whose ids match one of its patterns, like names of files.

`make verify` runs all of them, which takes longer than CI has. `--changed-since` and `--rotate` reorder the tests.
`--budget-minutes` stops starting verify tests after that time, and ends a test that is still running a quarter of it (`GRACE`)
later. Tests not started or not finished are reported as skipped and listed. Of several workers (`-n`) each has that time.
"""

from __future__ import annotations

import ast
import hashlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Parts of a path that say nothing about its subject.
_COMMON = {"evodsp", "test", "script", "init", "conftest", "main", "config", "command"}

GRACE = 0.25
"""How far past the budget a running test may go, as a fraction of the budget. CI is cut off, and then nothing lands."""

_deadline = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evodsp")
    group.addoption(
        "--changed-since", metavar="REVISION", help="let every second test concern a file changed since this revision"
    )
    group.addoption(
        "--rotate", metavar="WORD", help="order tests by a hash of this word and their ids, e.g. a commit's hash"
    )
    group.addoption(
        "--budget-minutes",
        type=float,
        metavar="MINUTES",
        help="start no verify test after this many minutes; list tests that were not run",
    )
    group.addoption("--rounds", type=int, default=20, metavar="N", help="how often verify tests repeat each race")


def words(path: str) -> set[str]:
    """The subjects of a path: its parts in lower case without common words and plural endings, e.g. {"model", "evoformer"}."""
    parts = re.split(r"[/._]", path.lower())
    return {part.rstrip("s") for part in parts if len(part) > 2} - _COMMON - {"py", "ipynb", "yaml", "md", "txt"}


def concerns(test: str, changed: Iterable[str]) -> bool:
    """Whether a test's id shares a folder or file name with a changed file, also within its parameters. Of a test under
    scripts/: or whether a changed file is one of those that it or its program imports.
    """
    changed = list(changed)
    about = words(re.sub(r"[\[\]]", "/", test))
    return any(about & words(path) for path in changed) or not imported(test.split("::")[0]).isdisjoint(changed)


@cache
def imported(test: str) -> frozenset[str]:
    """Files that a test file under scripts/ imports: all of scripts/, and of evodsp what these name themselves."""
    found: set[str] = set()
    left = {test} if test.startswith("scripts/") else set()
    while left:
        found |= left
        named = {name for file in left if file.startswith("scripts/") for name in _imports(file)}
        left = {file for file in named if (ROOT / file).is_file()} - found
    return frozenset(found - {test})


def _imports(file: str) -> Iterator[str]:
    """Paths of the modules that a file may import: of `from a import b` both a.py and a/b.py."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name.replace(".", "/") + ".py" for name in names)


def changed_files(revision: str) -> list[str]:
    """Files changed since a git revision. If git does not know the revision, none."""
    done = subprocess.run(
        ["git", "diff", "--name-only", revision, "--"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def ordered(tests: Iterable[str], rotate: str, changed: Iterable[str]) -> list[str]:
    """The tests in an order determined by `rotate`, alternating between tests that concern a changed file and others."""
    shuffled = sorted(tests, key=lambda test: hashlib.sha256(f"{rotate} {test}".encode()).digest())
    first = [test for test in shuffled if concerns(test, changed)]
    rest = [test for test in shuffled if test not in set(first)]
    return [test for test in chain.from_iterable(zip_longest(first, rest)) if test is not None]


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_mark_verify_but(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark verify tests before `-m` chooses. A pattern that matches nothing is an error. (Hooks are found by their prefix.)"""
    patterns: dict[tuple[str, str], bool] = {}
    for item in items:
        mark = item.get_closest_marker("verify_but")
        if mark is None:
            continue
        assert isinstance(item, pytest.Function)
        matched = [pattern for pattern in mark.args if fnmatchcase(item.callspec.id, pattern.replace("[", "[[]"))]
        for pattern in mark.args:
            name = (item.nodeid.split("[")[0], pattern)
            patterns[name] = patterns.get(name, False) or pattern in matched
        if not matched:
            item.add_marker(pytest.mark.verify)
    lost = [f"{test}: {pattern}" for (test, pattern), found in patterns.items() if not found]
    if lost and "::" not in "".join(config.args):
        raise pytest.UsageError("verify_but names no case of " + "; ".join(lost))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rotate, since = config.getoption("--rotate"), config.getoption("--changed-since")
    if rotate is None and since is None:
        return
    by_id = {item.nodeid: item for item in items}
    items[:] = [by_id[test] for test in ordered(by_id, rotate or "", changed_files(since) if since else [])]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    left = _seconds_left(item)
    if left is not None and left < 0:
        _leave_out(item, "not started")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """End a test that runs too long past the budget. The alarm interrupts waits for processes and sleeps too."""
    left = _seconds_left(item)
    if left is None:
        return (yield)
    before = signal.signal(signal.SIGALRM, lambda *_: _leave_out(item, "not finished"))
    signal.setitimer(signal.ITIMER_REAL, max(0.1, left + GRACE * 60 * item.config.getoption("--budget-minutes")))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seconds_left(item: pytest.Item) -> float | None:
    """Seconds until the budget is spent; None for a test that has none. The budget begins with the first verify test."""
    budget = item.config.getoption("--budget-minutes")
    if budget is None or item.get_closest_marker("verify") is None:
        return None
    return item.config.stash.setdefault(_deadline, time.monotonic() + 60 * budget) - time.monotonic()


def _leave_out(item: pytest.Item, why: str) -> NoReturn:
    pytest.skip(f"{why}: {_spent(item.config)}")


def _spent(config: pytest.Config) -> str:
    return f"the budget of {config.getoption('--budget-minutes'):g} minutes was spent"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--budget-minutes") is None:
        return
    skipped = terminalreporter.stats.get("skipped", [])
    tests = [report.nodeid for report in skipped if _spent(config) in str(report.longrepr)]
    if not tests:
        return
    terminalreporter.section(f"{len(tests)} verify tests not run to the end: the budget was spent")
    for name, count in sorted(Counter(test.split("[")[0] for test in tests).items()):
        terminalreporter.line(f"{count:4}  {name}")
