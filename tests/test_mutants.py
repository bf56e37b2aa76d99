"""Breaks of the package that tests must find: `scripts/mutation/mutants.py`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts.mutation.mutants import broken_text, read_table

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = read_table()

TABLE = """
[[mutant]]
name = "no break at all"
file = "evodsp/rng.py"
text = "c0, c1, c2, c3 = counter"
broken = "(c0, c1, c2, c3) = counter"
test = "tests/test_rng.py::test_known_answers"

[[mutant]]
name = "cannot be imported"
file = "evodsp/rng.py"
text = "import hashlib"
broken = "import no_such_module"
test = "tests/test_rng.py::test_known_answers"

[[mutant]]
name = "too few rounds"
file = "evodsp/rng.py"
text = "rounds: int = 10"
broken = "rounds: int = 9"
test = "tests/test_rng.py::test_known_answers"
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.mutation.mutants", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_every_break_applies_and_its_test_exists() -> None:
    """A table that no longer fits the code: a break that is not applied would pass for one that is found."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        if mutant.file.endswith(".py"):
            ast.parse(broken_text(mutant))
        else:  # a batch script
            subprocess.run(["bash", "-n"], input=broken_text(mutant), text=True, check=True)
        file, test = mutant.test.split("[")[0].split("::")
        assert test in functions_of(file), mutant.test


@cache
def functions_of(file: str) -> set[str]:
    """Names of the functions of a file of tests, which many mutants share."""
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.verify
def test_a_mutant_that_survives_or_cannot_be_tried_is_an_error(tmp_path: Path) -> None:
    """A script that calls everything found: only a test that ran and failed has found a break."""
    (tmp_path / "table.toml").write_text(TABLE)
    done = run("--table", str(tmp_path / "table.toml"))
    results = [line.split()[0] for line in done.stdout.splitlines()]
    assert results == ["SURVIVED", "NOT", "caught", "1"], done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 3 mutants caught"
    assert done.returncode == 1


@pytest.mark.verify
@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_break_is_found(file: str) -> None:
    """A test that was changed or merged until it no longer finds what it was written for."""
    done = run("--only", file)
    assert done.returncode == 0, done.stdout + done.stderr
