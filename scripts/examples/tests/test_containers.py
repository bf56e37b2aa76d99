"""The recipes of containers: what they install, in a new environment and without a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import evodsp
from tests.builders.pages import ROOT

FOLDER = ROOT / "scripts" / "examples" / "containers"
RECIPES = (FOLDER / "Dockerfile", FOLDER / "evodsp.def")


def test_both_recipes_install_the_same() -> None:
    """Catches a package, a base or a file that one recipe has and the other lacks."""
    packages, bases, steps = (
        [re.findall(pattern, path.read_text(), re.MULTILINE) for path in RECIPES]
        for pattern in (
            r"--no-install-recommends (.*?)(?: \\)?$",
            r"nvidia/cuda:(\S+)",
            r"(?<=\s)/opt/build/install.sh .*$",
        )
    )
    for found in (packages, bases, steps):
        assert len(found[0]) == 1
        assert found[0] == found[1]
    for file in ("constraints.txt", "dist/evodsp-*.whl", "scripts/examples/containers/install.sh"):
        for path in (*RECIPES, FOLDER / "Dockerfile.dockerignore"):
            assert file in path.read_text(), f"{path.name}: {file}"


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    """Catches an environment without evodsp that nobody notices before the first job, and an old wheel beside the new one."""
    for wheels in ([], ["evodsp-0.1.0-py3-none-any.whl", "evodsp-0.2.0-py3-none-any.whl"]):
        for name in wheels:
            (tmp_path / name).touch()
        done = subprocess.run([FOLDER / "install.sh", tmp_path, tmp_path / "new"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "expected one evodsp-*.whl" in done.stderr
        assert not (tmp_path / "new").exists()


@pytest.mark.verify
def test_what_the_recipes_install_works(tmp_path: Path) -> None:
    """Catches versions that exclude one another, a package that the wheel does not ask for, and files that it does not hold. It
    takes minutes: it builds the wheel and installs PyTorch from the package index that pip is set to."""
    checkout, build = tmp_path / "checkout", tmp_path / "build"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", build, checkout]
    subprocess.run(words, check=True)
    shutil.copy2(ROOT / "constraints.txt", build)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [FOLDER / "install.sh", build, tmp_path / "new"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"evodsp {evodsp.__version__}\n")
    short = ["--output=run", "--trainer.max_steps=1", "--data.train.crop_size=16", "--data.validation_chains=null"]
    for words in (["fit", "--config=quickstart", *short], ["slurm", "--output=scripts"]):
        done = subprocess.run(
            [tmp_path / "new/bin/evodsp", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert (tmp_path / "scripts/fit.sbatch").is_file()
