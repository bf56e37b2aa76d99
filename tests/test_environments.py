"""evodsp in other environments: README's lines with another Python, with the tested versions and with the newest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.builders.pages import ROOT
from tests.shared import reference_files

MINUTES = 20
"""How long each of the two environments may take; PyTorch's CUDA build for Linux is 5 GB."""
OF_EACH_ROOM = """
    data/test_parsers.py features geometry inference/test_api.py launch/test_store.py losses/test_torsion.py
    losses/test_sharded_losses.py model/kernels/test_operators.py parallel planner/test_plan.py reading report search selftest
    test_argument_parser.py test_cli.py training/test_bad_samples.py training/test_mesh.py weights/test_command.py
"""


def other_python() -> str | None:
    """A newer Python than the one that runs the tests, from the path or pyenv; None if there is none. pyenv also puts names of
    versions on the path that it does not start there."""
    for version in ("3.14", "3.13", "3.12"):
        if sys.version_info < tuple(map(int, version.split("."))):
            of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
            for found in (shutil.which(f"python{version}"), *map(str, reversed(of_pyenv))):
                if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
                    return found
    return None


@pytest.mark.verify
@pytest.mark.parametrize("versions", ["tested", "newest"])
def test_a_strangers_environment(versions: str, pytestconfig: pytest.Config) -> None:
    """Catches constraints that exclude one another, a release of PyTorch or another package with which evodsp no longer works,
    and what only the developers' Python accepts."""
    if (budget := pytestconfig.getoption("--budget-minutes")) is not None and budget < MINUTES:
        pytest.skip(f"needs {MINUTES} minutes, and this run has {budget:g}")
    if (python := other_python()) is None:
        pytest.skip("no newer Python at hand (python3.12, python3.13 or python3.14)")
    section = (ROOT / "README.md").read_text().split("For development")[1]
    make, install = re.findall(r"^(?:python3|\.venv/bin/pip) .*$", section, re.MULTILINE)[:2]
    if versions == "newest":
        install = install.replace("--constraint constraints.txt ", "")
    with tempfile.TemporaryDirectory(prefix="evodsp_environment_") as folder:
        clone = Path(folder) / "evodsp"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        out = Path(folder) / "out"
        for line in (
            make.replace("python3", python, 1), install.replace("pip install", "pip install --quiet"),
            f".venv/bin/evodsp fit --config quickstart --parallel.sequence 2 --trainer.max_steps 2 --output {out}/model",
            f".venv/bin/evodsp predict data/fasta/s010_A.fasta --alignments data/alignments/s010_A --output {out}/predictions"
            f" --checkpoint {out}/model/checkpoints/last.ckpt",
            f".venv/bin/python -m pytest -m 'not verify' {' '.join(f'tests/{name}' for name in OF_EACH_ROOM.split())}",
        ):  # fmt: skip
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(
                line,
                shell=True,
                cwd=clone,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            print(f"{line}\n{done.stdout[-6000:]}")
            assert done.returncode == 0, line
        assert (out / "predictions" / "s010_A" / "seed_0.cif").is_file()


@pytest.mark.verify
def test_constraints_that_exclude_one_another_are_found(tmp_path: Path) -> None:
    """Catches a check of the constraints that takes its packages from this machine's disk, or passes whatever they say."""
    broken = tmp_path / "constraints.txt"
    text = (ROOT / "constraints.txt").read_text()
    broken.write_text(re.sub(r"^triton==.*$", "triton==3.9.0", text, flags=re.MULTILINE))
    words = ["make", "resolve", "PLATFORMS=x86_64-manylinux_2_34", "PYTHONS=3.12"]
    done = subprocess.run([*words, f"CONSTRAINTS={broken}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "torch==2.13.0 depends on triton" in done.stderr


def test_somebody_elses_folder_is_not_ours(tmp_path: Path) -> None:
    """Catches a clone beside a folder that happens to be called `shared`, in which no test starts."""
    (tmp_path / "data").mkdir()
    assert not reference_files(tmp_path).exists()
    (tmp_path / "DESIGN.md").write_text("# evodsp: design")
    assert reference_files(tmp_path) == tmp_path
