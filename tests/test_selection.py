"""The part of the verify tests that CI runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import concerns, ordered

ROOT = Path(__file__).resolve().parents[1]
TESTS = [f"tests/model/test_sharded.py::test_it[{n}]" for n in range(4)] + [
    "tests/test_notebooks.py::test_runs",
    "tests/test_demo.py::test_it",
]
MADE_UP = """
import time
import pytest
{imports}

@pytest.mark.verify
@pytest.mark.parametrize("number", range(5))
def test_slow(number):
    time.sleep(0.2)

def test_quick():
    pass
"""


@pytest.mark.parametrize(
    ("test", "changed", "expected"),
    [
        ("tests/model/test_sharded.py::test_it", "evodsp/model/evoformer.py", True),
        ("tests/test_notebooks.py::test_runs", "notebooks/train_on_your_family.ipynb", True),
        ("tests/parallel/test_exact.py::test_it[evodsp/parallel/functional.py]", "evodsp/parallel/functional.py", True),
        ("tests/parallel/test_gradients.py::test_it", "evodsp/training/gradients.py", True),
        ("tests/model/test_sharded.py::test_it", "evodsp/losses/structure.py", False),
        ("tests/test_demo.py::test_it", "scripts/examples/slurm/train.sh", False),
        ("scripts/paper/tests/test_memory.py::test_it", "scripts/paper/plots.py", True),
        ("scripts/benchmarks/tests/test_bench.py::test_it", "evodsp/model/evoformer.py", True),
        ("scripts/benchmarks/tests/test_bench.py::test_it", "evodsp/inference/relaxation.py", False),
    ],
)
def test_what_concerns_a_change_is_known_by_its_path(test: str, changed: str, expected: bool) -> None:
    """A change of the model whose CI runs the sweeps of something else."""
    assert concerns(test, [changed]) == expected


def test_order_rotates_and_alternates() -> None:
    """A test that no commit ever reaches, or one that is lost or run twice."""
    orders = [ordered(TESTS, word, ["notebooks/train_on_your_family.ipynb"]) for word in "abcdefghijklmnop"]
    assert all(sorted(order) == sorted(TESTS) for order in orders)
    assert all(order[0] == "tests/test_notebooks.py::test_runs" for order in orders)
    assert {order[1] for order in orders} == set(TESTS) - {"tests/test_notebooks.py::test_runs"}
    assert ordered(TESTS, "a", []) == ordered(list(reversed(TESTS)), "a", [])


def test_a_spent_budget_starts_nothing_more_and_says_so(tmp_path: Path) -> None:
    """Verify tests that are left out silently, or that run past CI's time."""
    hooks = "from tests.selection import *"
    (tmp_path / "conftest.py").write_text(f"{hooks}  # noqa: F403\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = verify\n")
    (tmp_path / "test_made_up.py").write_text(MADE_UP.format(imports=""))
    done = run_with_budget(tmp_path, 0.005)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = int(done.stdout.splitlines()[-1].split(" skipped")[0].split()[-1])
    assert 1 <= skipped <= 4
    assert f"{6 - skipped} passed" in done.stdout.splitlines()[-1]
    assert f"{skipped} verify tests not run to the end" in done.stdout
    assert "test_made_up.py::test_slow" in done.stdout


def test_a_test_that_runs_past_the_budget_is_ended(tmp_path: Path) -> None:
    """One test of a quarter of an hour, started in the last second of the budget, with which CI is cut off. In a worker, as CI
    runs it, whose skips only reach the summary as reports."""
    (tmp_path / "conftest.py").write_text("from tests.selection import *  # noqa: F403\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = verify\n")
    waits = "    subprocess.run(['sleep', '50'])"
    (tmp_path / "test_long.py").write_text(
        f"import subprocess\nimport pytest\n\n@pytest.mark.verify\ndef test():\n{waits}\n"
    )
    done = run_with_budget(tmp_path, 0.02, "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout.splitlines()[-1]
    assert "1 verify tests not run to the end" in done.stdout


@pytest.mark.parametrize("lost", [False, True])
def test_all_parameters_but_those_that_are_named_are_verify_tests(tmp_path: Path, lost: bool) -> None:
    """A case that no command runs, or one that both run; a name of no case, with which `make test` would run none."""
    (tmp_path / "conftest.py").write_text("from tests.selection import *  # noqa: F403\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  verify\n  verify_but\n")
    names = '"3-*", "[1]-a"' + (', "no such case"' if lost else "")
    (tmp_path / "test_cases.py").write_text(
        f"import pytest\n\n@pytest.mark.verify_but({names})\n"
        '@pytest.mark.parametrize("letter", ["a", "b"])\n@pytest.mark.parametrize("number", ["[1]", "2", "3"])\n'
        "def test(number, letter):\n    pass\n\ndef test_other():\n    pass\n"
    )
    done = [run_pytest(tmp_path, "-m", marks) for marks in ("verify", "not verify")]
    if lost:
        assert [run.returncode for run in done] == 2 * [pytest.ExitCode.USAGE_ERROR]
        assert "verify_but names no case of test_cases.py::test: no such case" in done[0].stderr
    else:
        assert [run.stdout.splitlines()[-1].split(" in ")[0] for run in done] == [
            "3 passed, 4 deselected",
            "4 passed, 3 deselected",
        ]


def run_with_budget(folder: Path, minutes: float, *words: str) -> subprocess.CompletedProcess[str]:
    return run_pytest(folder, "--budget-minutes", str(minutes), "--rotate", "x", *words)


def run_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest on the tests of `folder`, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *words, str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip


def test_ctrl_c_reaches_what_tests_start() -> None:
    """Catches tests that fail in the background of a script, where every process is started with Ctrl-C ignored."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
