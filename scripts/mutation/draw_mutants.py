"""Draws breaks of the package by a seed, and looks for tests that find them.

    python -m scripts.mutation.draw_mutants [--seed S] [--first I] [--number N] [--only TEXT ...] [--since REVISION]
                                            [--seconds T | --workers N] [--output FILE] [--again WORD ...] [--list]

Each break is one change in the syntax tree of a module: a comparison is flipped, a number is one more, + is -, `and` is `or`,
a `not` or a keyword argument is gone, a call's first argument is returned in its place. Kinds take turns. `make verify` draws
a few in the files that changed; nothing keeps them, since a table of source text would have to follow every change.

One run of pytest tells which tests execute which of the expressions: it runs on a copy in which each notes that it is executed
(`notes.py`), and takes all tests with `--workers`, else those of the files that import the broken modules, the nearest first,
until the time is over. The nearest tests run again on each broken package, up to the first that fails, as many packages at a
time as there are workers:

    caught       a test failed that passes on the unbroken package, or the package can no longer be imported
    hangs        a test does not end
    SURVIVED     all tests that execute the break passed: look whether it changes anything, and write a test if it does
    NOT REACHED  no test executed it, or none within the time
    gone         the code of a row of `--again` is no longer there

`--output` keeps the results, with the commit, in a CSV file. `--again WORD` tries rows of that file with this result or number
anew, in today's source. A row that names a test is tried by that test alone, whether or not it is marked verify: write it into
the column `test` if you know which should find the break.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.shared import SHARED

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "commit", "seed", "number", "file", "line", "kind", "text", "broken", "result", "tests", "test", "seconds",
)  # fmt: skip
SEEN, FILES = 100, 8
"""Most tests that try a break, and most test files that are searched for those that execute it, without `--workers`."""
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Break:
    """One expression of one file, and what stands in its place."""

    file: str
    line: int
    begin: int
    end: int
    """The expression's place, `begin` to `end`, in bytes of the file."""
    kind: str
    text: str
    broken: str

    def applied(self, source: bytes) -> str:
        """The broken file."""
        return (source[: self.begin] + f"({self.broken})".encode() + source[self.end :]).decode()


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """The breaks of one node: kind, expression, what takes its place."""
    match node:
        case ast.Compare(ops=[operator]):
            new = copy.copy(node)
            new.ops = [_FLIPPED[type(operator)]()]
            yield "comparison", node, new
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "one more", node, ast.Constant(value + 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "minus", node, ast.BinOp(left, ast.Sub(), right)
        case ast.BoolOp(op=operator, values=values):
            yield "and, or", node, ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "no not", node, operand
        case ast.Call(func=function, args=arguments, keywords=keywords):
            for keyword in (keyword for keyword in keywords if keyword.arg is not None):
                yield "no keyword", node, ast.Call(function, arguments, [k for k in keywords if k is not keyword])
        case ast.Return(value=ast.Call(args=[first, *_]) as call) if not isinstance(first, ast.Starred):
            yield "first argument", call, first


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without annotations, decorators, patterns, what only a message shows, and what runs on a GPU only."""
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "triton.jit" for one in node.decorator_list):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "pattern") or isinstance(
            node, ast.JoinedStr | ast.Raise | ast.Assert
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _expressions(child)


def breaks_of(file: str, source: bytes) -> Iterator[Break]:
    """All breaks of a file."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    for node in _expressions(ast.parse(source)):
        for kind, old, new in changes(node):
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 1) - 1] + (old.end_col_offset or 0)
            yield Break(file, old.lineno, begin, end, kind, source[begin:end].decode(), ast.unparse(new))


def same_break(row: dict[str, str]) -> Break | None:
    """The break of a recorded row in today's source: of those that read the same, the nearest to its line."""
    path = ROOT / row["file"]
    found = [*breaks_of(row["file"], path.read_bytes())] if path.is_file() else []
    same = [b for b in found if (b.kind, b.text, b.broken) == (row["kind"], row["text"], row["broken"])]
    return min(same, key=lambda b: abs(b.line - int(row["line"])), default=None)


def package_files(only: Sequence[str] = (), since: str | None = None) -> list[str]:
    """Files of the package whose path contains one of `only`, and that changed since a git revision."""
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "evodsp").rglob("*.py"))]
    if since is not None:
        words = ["git", "diff", "--name-only", "--relative", since, "--", "evodsp"]
        changed = subprocess.check_output(words, cwd=ROOT, text=True).splitlines()
        files = [file for file in files if file in changed]
    return [file for file in files if not only or any(text in file for text in only)]


def drawn(seed: int, files: Sequence[str]) -> list[Break]:
    """All breaks of these files in random order, one kind after another."""
    by_kind = defaultdict[str, list[Break]](list)
    for file in files:
        for found in breaks_of(file, (ROOT / file).read_bytes()):
            by_kind[found.kind].append(found)
    order = random.Random(seed)
    for breaks in by_kind.values():
        order.shuffle(breaks)
    return [found for turn in zip_longest(*by_kind.values()) for found in turn if found is not None]


def marked(source: bytes, found: Iterable[tuple[int, Break]]) -> str:
    """The file in which each of these expressions notes its number when it is executed. One may lie within another."""
    inserted: list[tuple[int, bool, int, str]] = []
    for number, one in found:
        path = f"__import__('os').environ.get('MARKS', '/tmp') + '/{number}'"
        mark = f"(__import__('os').close(__import__('os').open({path}, {os.O_CREAT})) or ("
        # At one place what ends there comes first, and then the outermost that begins.
        inserted += [(one.begin, True, one.begin - one.end, mark), (one.end, False, 0, "))")]
    for place, _, _, text in sorted(inserted, reverse=True):
        source = source[:place] + text.encode() + source[place:]
    return source.decode()


class Importers:
    """Which files of a repository import which."""

    def __init__(self, root: Path = ROOT) -> None:
        self._of: dict[str, set[str]] = {}
        for path in (path for folder in ("evodsp", "tests") for path in (root / folder).rglob("*.py")):
            file = path.relative_to(root)
            for name in self._named(file, ast.parse(path.read_bytes())):
                for end in (".py", "/__init__.py"):
                    self._of.setdefault(name.replace(".", "/") + end, set()).add(file.as_posix())

    @staticmethod
    def _named(file: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                folder = file.parts[: -node.level] if node.level else ()
                module = ".".join([*folder, *([node.module] if node.module else [])])
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))

    def tests(self, file: str) -> list[str]:
        """Test files that reach a module by imports: the nearest first, then those of its folder."""
        steps, waiting = {file: 0}, deque([file])
        while waiting:
            at = waiting.popleft()
            for other in self._of.get(at, set()) - set(steps):
                steps[other] = steps[at] + 1
                waiting.append(other)
        found = [name for name in steps if Path(name).name.startswith("test_")]
        found.sort(key=lambda name: (steps[name], f"/{file.split('/')[1]}/" not in name, name))
        return found


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what tests need, in a temporary folder; golden numbers beside it, where there are any."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder) / "checkout"
        for name in ("evodsp", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "conftest.py", "configs", "data", "docs"):
            (copy / name).symlink_to(ROOT / name)
        if SHARED.is_dir():
            (Path(folder) / "shared").symlink_to(SHARED)
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


def run_tests(copy: Path, words: Sequence[str], seconds: float) -> dict[str, str]:
    """Outcome by test id, of tests run in `copy` by a forked process: torch is imported once, evodsp anew each time.

    `words`: for pytest. None have an outcome if they take longer than `seconds`; then there is no file `outcomes.json` beside
    the copy.
    """
    result = copy.parent / "outcomes.json"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(copy, words, result)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    return json.loads(result.read_text()) if result.is_file() else {}


def _child(copy: Path, words: Sequence[str], result: Path) -> None:
    """Run pytest in `copy`, write the outcomes, and end this process."""
    os.setsid()
    os.chdir(copy)
    quiet = os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ["PYTHONPATH"] = str(copy)  # of the processes that tests start
    # A file that is broken twice within a second would be taken for the first one.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("evodsp", "tests", "scripts")]:
        del sys.modules[name]
    import pytest

    record = Record()
    pytest.main([*words, "-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={copy}"], plugins=[record])
    evodsp = sys.modules.get("evodsp")
    assert evodsp is None or Path(str(evodsp.__file__)).is_relative_to(copy), "not the copy was tested"
    result.write_text(json.dumps(record.outcomes))
    os._exit(0)


def reaching(found: Sequence[Break], words: Sequence[str], folder: Path, seconds: float) -> list[list[str]]:
    """The tests that execute each of these breaks and pass, among those that pytest runs by these words."""
    sources = {one.file: (folder / one.file).read_bytes() for one in found}
    notes = folder.parent / "notes"
    shutil.rmtree(notes, ignore_errors=True)
    os.environ |= {"NOTES": str(notes), "SECONDS": str(seconds)}
    try:
        for file, source in sources.items():
            (folder / file).write_text(marked(source, [(n, one) for n, one in enumerate(found) if one.file == file]))
        run_tests(folder, [*words, "-p", "scripts.mutation.notes"], 60 + 2 * seconds)
    finally:
        for file, source in sources.items():
            (folder / file).write_bytes(source)
    by_worker = [json.loads(path.read_text()) for path in sorted(notes.glob("*/found.json"))]
    return [[test for tests in by_worker for test in tests.get(str(n), [])] for n in range(len(found))]


def nearest(tests: Iterable[str], files: Sequence[str]) -> list[str]:
    """At most `SEEN` of these tests: by turns one of each function, those of the first `files` first."""
    by_function = defaultdict[str, list[str]](list)
    for test in sorted(tests):
        by_function[test.split("[")[0]].append(test)
    place = {file: at for at, file in enumerate(files)}
    functions = sorted(by_function, key=lambda name: (place.get(name.split("::")[0], len(files)), name))
    turns = zip_longest(*(by_function[name] for name in functions))
    return [test for turn in turns for test in turn if test is not None][:SEEN]


def try_break(found: Break, tests: Sequence[str], folder: Path, seconds: float) -> tuple[str, int, str]:
    """The result, the number of tests that tried it, and the one that found it. `tests`: which pass without the break."""
    if not tests:
        return "NOT REACHED", 0, ""
    path = folder / found.file
    source = path.read_bytes()
    try:
        path.write_text(found.applied(source))
        outcomes = run_tests(folder, [*tests, "-x"], 60 + 4 * seconds)
    finally:
        path.write_bytes(source)
    failed = next((test for test, outcome in outcomes.items() if outcome.startswith("failed")), "")
    if failed or not outcomes:
        ended = (folder.parent / "outcomes.json").is_file()
        return "caught" if ended else "hangs", len(tests), failed or ("the import" if ended else "")
    return "SURVIVED", len(outcomes), ""


def try_in_a_copy(found: Break | None, tests: Sequence[str], seconds: float) -> dict[str, str]:
    """The columns of a row that say what came of a break. None: it is gone."""
    begin = time.monotonic()
    result, number, test = "gone", 0, ""
    if found is not None:
        with copied() as folder:
            result, number, test = try_break(found, tests, folder, seconds)
    return {"result": result, "tests": str(number), "test": test, "seconds": str(round(time.monotonic() - begin))}


def new_row(seed: int, number: int, found: Break) -> dict[str, str]:
    """The row of a break that was not tried."""
    row = dict.fromkeys(COLUMNS, "")
    return {**row, "seed": str(seed), "number": str(number), "file": found.file, "line": str(found.line), "kind": found.kind,
            "text": found.text, "broken": found.broken}  # fmt: skip


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of results; none if it does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """A file of results, whole."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first break, in the order of this seed")
    parser.add_argument("--number", type=int, default=40, help="number of breaks (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="draw from files whose path contains a TEXT"
    )
    parser.add_argument("--since", metavar="REVISION", help="draw from files that changed since this revision")
    parser.add_argument("--seconds", type=float, default=60.0, help="a break, to look for tests that execute it")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="look among all tests, by N processes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="rows are added to this CSV file")
    parser.add_argument("--again", nargs="+", metavar="WORD", help="try rows with these results or numbers anew")
    parser.add_argument("--list", action="store_true", help="print the breaks, run nothing")
    options = parser.parse_args(words)
    rows = read_rows(options.output) if options.output else []
    if options.again is not None:
        chosen = [(row, same_break(row)) for row in rows if {row["number"], row["result"]} & set(options.again)]
    else:
        order = list(enumerate(drawn(options.seed, package_files(options.only, options.since))))[
            options.first : options.first + options.number
        ]
        chosen = [(new_row(options.seed, number, found), found) for number, found in order]
        rows += [row for row, _ in chosen]
    if options.list:
        for row, _ in chosen:
            place = f"{row['number']:>5} {row['file']}:{row['line']}"
            print(f"{place}  {row['kind']}: {row['text']!r} -> {row['broken']!r}")
        return 0
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    importers = Importers()
    searched = [found for row, found in chosen if found is not None and "::" not in row["test"]]
    if options.workers:
        words, seconds = ["-n", str(options.workers), "--dist", "worksteal"], 7200.0
    else:
        words = list(dict.fromkeys(file for one in searched for file in importers.tests(one.file)[:FILES]))
        seconds = options.seconds * len(searched)
    with copied() as folder:
        reached = reaching(searched, [*words, "-m", "not verify"], folder, seconds) if searched else []
    by_break = dict(zip(searched, reached, strict=True))
    with ProcessPoolExecutor(max(1, options.workers), mp_context=get_context("fork")) as pool:
        tried = {}
        for row, found in chosen:
            tests = [row["test"]] if "::" in row["test"] else []
            if found is not None and not tests:
                tests = nearest(by_break[found], importers.tests(found.file))
            tried[pool.submit(try_in_a_copy, found, tests, options.seconds)] = row, found
        for one in as_completed(tried):
            row, found = tried[one]
            line = row["line"] if found is None else str(found.line)
            row.update(commit=commit, line=line, **one.result())
            if options.output:
                write_rows(options.output, [row for row in rows if row["result"]])
            print(
                f"{row['result']:11} {row['file']}:{line} {row['text']!r} -> {row['broken']!r} {row['test']}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # These take seconds to import. The forked processes have them already.
    import jaxtyping  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import torch.distributed.device_mesh  # noqa: F401

    sys.exit(main())
