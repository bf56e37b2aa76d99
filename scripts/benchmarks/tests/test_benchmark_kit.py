"""`scripts/benchmarks/kit.sh`, with a stand-in for Python 3.12: what it packs, and how a command finds it elsewhere."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "benchmarks" / "kit.sh"
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  -c*) echo 3 12 ;;
  *pip*) while [[ $1 != --target ]]; do shift; done; printf '%s\\n' "${@:3}" >"$2/from_index.py" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def at_hand(tmp_path: Path) -> Path:
    """A folder with a stand-in for Python 3.12, a clone of OpenFold, and cuEquivariance's wheels."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.replace("{python}", shlex.quote(sys.executable)))
    python.chmod(0o755)
    model = tmp_path / "clone" / "openfold" / "model"
    model.mkdir(parents=True)
    (model / "evoformer.py").write_text("WHOSE = 'openfold'\n")
    (tmp_path / "clone" / "evodsp.py").write_text("raise ImportError('of the clone')\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("cuequivariance", "cuequivariance_ops_cu13", "cuequivariance_ops_torch_cu13", "cuequivariance_torch"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3.whl", "w") as archive:
            archive.writestr(f"{name.removesuffix('_cu13')}/__init__.py", "")
            archive.writestr("include/gtest.h", "")
    return tmp_path


def pack(at_hand: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(at_hand / "python")}
    return subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, check=False, env=environment, cwd=at_hand
    )


def test_a_command_finds_everything(at_hand: Path) -> None:
    """Catches a kit that lacks a package, hides the source behind a clone, or loses the command's words or exit code."""
    kit, site = at_hand / "kit", at_hand / "a site"
    done = pack(at_hand, kit, "--openfold", at_hand / "clone", "--cuequivariance", at_hand / "wheels")
    assert done.returncode == 0, done.stderr
    assert "MiB, packages openfold cuequivariance" in done.stdout
    program = """
import sys, evodsp, cuequivariance_ops, cuequivariance_ops_torch, cuequivariance_torch
from openfold.model.evoformer import WHOSE
print(evodsp.__file__, WHOSE, sys.argv[1:])
sys.exit(7)
"""
    (site / "packages").mkdir(parents=True)
    (site / "packages" / "from_index.py").write_text("of an unpacking that was cut off")
    # As on another machine: nothing but the kit and the source.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "EVODSP_SITE": str(site)}
    for _ in range(2):
        run = subprocess.run(
            [kit / "run.sh", "python3", "-P", "-c", program, "two words"],
            capture_output=True, text=True, check=False, env=environment, cwd=ROOT,
        )  # fmt: skip
        assert run.returncode == 7, run.stderr
        assert run.stdout == f"{ROOT / 'evodsp' / '__init__.py'} openfold ['two words']\n"
    listed = (site / "packages" / "from_index.py").read_text().split()
    assert listed == (kit / "packages.txt").read_text().split()
    assert {word.partition("=")[0] for word in listed} >= {"gemmi", "ihm", "dm-tree", "platformdirs"}
    assert not list(site.glob("*/include"))


def test_mistakes(at_hand: Path) -> None:
    """Catches a mistake that is seen after minutes of work, or that is not explained in one line."""
    (at_hand / "empty").mkdir()
    for words, said in {
        (): "name the folder",
        ("empty",): "empty exists",
        ("kit", "--openfold", "empty"): "name a clone of OpenFold",
        ("kit", "--cuequivariance", "empty"): "lacks a wheel",
        ("kit", "--peer", "empty"): "--peer is not an option",
    }.items():
        done = pack(at_hand, *words)
        assert done.returncode == 1
        assert said in done.stderr.splitlines()[-1]
        assert not (at_hand / "kit").exists()
