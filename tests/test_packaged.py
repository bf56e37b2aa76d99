"""The configs and data that come with evodsp, by name and outside of a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import evodsp
from evodsp import packaged
from evodsp.errors import UserError
from evodsp.inference.targets import find_targets
from evodsp.packaged import packaged_folder, read_run_config, with_packaged_configs
from tests.builders.pages import ROOT


def test_a_config_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user's file of that name that is not taken, options of the user that the packaged data override, and data of
    the working folder that are not used."""
    monkeypatch.chdir(tmp_path)
    file, data = packaged_folder("configs") / "quickstart.yaml", packaged_folder("data")
    for words in (["--config", "quickstart"], ["--config=quickstart"], ["-c", "quickstart"]):
        found = with_packaged_configs([*words, "--data.train_chains", "mine.txt"])
        assert found[:2] == [words[0].partition("=")[0], str(file)]
        assert f"--data.alignment_dir={data / 'alignments'}" in found
        assert [word for word in found if "train_chains" in word] == ["--data.train_chains"], "it would be given twice"
        assert f"--data.validation_chains={data / 'validation.txt'}" in found
    for value in ("quickstart.yaml", "configs/quickstart"):
        assert with_packaged_configs(["--config", value]) == ["--config", value]
    with pytest.raises(UserError, match=r"--config quickstrat: no such file, .*: af2_finetune, .*quickstart"):
        with_packaged_configs(["--config", "quickstrat"])
    (tmp_path / "quickstart").touch()
    assert with_packaged_configs(["--config", "quickstart"]) == ["--config", "quickstart"]
    (tmp_path / "quickstart").unlink()
    (tmp_path / "data").symlink_to(data)
    assert with_packaged_configs(["--config", "quickstart"]) == ["--config", str(file)]


def test_other_commands_read_a_config_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `evodsp plan` and `evodsp data doctor`, which read parts of a config, without the packaged ones."""
    monkeypatch.chdir(tmp_path)
    content, data = read_run_config(Path("quickstart")), packaged_folder("data")
    assert content["data"]["structure_dir"] == str(data / "mmcif_files")
    assert content["data"]["samples_per_epoch"] == 500
    (tmp_path / "data").symlink_to(data)
    assert read_run_config(Path("quickstart"))["data"]["structure_dir"] == "data/mmcif_files"


def test_a_checkout_beside_hides_nothing(tmp_path: Path) -> None:
    """Catches an editable install whose package is hidden, from `python -m evodsp` and from worker processes, by the checkout
    `evodsp` in the folder where they run."""
    (tmp_path / "evodsp" / "data").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", "import evodsp.data.pool; print(evodsp.__file__)"]
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == evodsp.__file__, found.stderr


def test_where_a_wheel_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a package that looks for a checkout around it."""
    (tmp_path / "evodsp" / "packaged" / "configs").mkdir(parents=True)
    monkeypatch.setattr(packaged, "__file__", str(tmp_path / "evodsp" / "packaged.py"))
    assert packaged_folder("configs") == tmp_path / "evodsp" / "packaged" / "configs"
    assert packaged_folder("data") == tmp_path / "data"
    assert packaged_folder("slurm") == tmp_path / "scripts" / "examples" / "slurm"


@pytest.mark.parametrize("alignments", [None, "data/alignments/s005_A"])
def test_the_documented_commands_say_where_the_proteins_are(
    alignments: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches 'no such file' as the only answer to README's `evodsp predict data/fasta/…` with an installed evodsp."""
    monkeypatch.chdir(tmp_path)
    missing = "fasta/s005_A.fasta" if alignments is None else "alignments/s005_A"
    with pytest.raises(
        UserError, match=f"^data/{missing}: no such .*; the one that comes with evodsp is .*/data/{missing}$"
    ):
        find_targets([Path("data/fasta/s005_A.fasta")], alignments and Path(alignments))
    with pytest.raises(UserError, match="no such file or folder; give FASTA, A3M or CSV files"):
        find_targets([Path("data/fasta/mine.fasta")], None)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make wheel` does, from a copy of what git tracks: building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _tracked():
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "checkout" / name)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(folder / "checkout")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


@pytest.mark.verify
def test_the_wheel_holds_the_package(wheel: Path) -> None:
    """Catches a module, a table, a config or a protein that is left out, and a version that is another."""
    assert wheel.name == f"evodsp-{evodsp.__version__}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = _tracked()
    assert {name for name in tracked if name.startswith("evodsp/")} <= held
    assert {f"evodsp/packaged/{name}" for name in tracked if name.startswith(("configs/", "data/"))} <= held
    scripts = {name for name in tracked if name.startswith("scripts/examples/slurm/") and not name.endswith(".sh")}
    assert {f"evodsp/packaged/slurm/{Path(name).name}" for name in scripts} == {
        name for name in held if name.startswith("evodsp/packaged/slurm/")
    }


@pytest.mark.verify
def test_a_wheel_trains_and_predicts_outside_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """The environment has this one's dependencies, but not this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (work := tmp_path / "work").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def python(*words: str) -> str:
        words = (sys.executable, "-P", *words)
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(tmp_path / "site") in python("-c", "import evodsp; print(evodsp.__file__)")
    short = ["--data.train.crop_size=16", "--data.samples_per_epoch=2", "--trainer.max_steps=2"]
    python("-m", "evodsp", "fit", "--config", "quickstart", "--output=run", *short)
    fasta = tmp_path / "site" / "evodsp" / "packaged" / "data" / "fasta" / "s005_A.fasta"
    python("-m", "evodsp", "predict", str(fasta), "--checkpoint=run/checkpoints/last.ckpt", "--output=out")
    assert (work / "out" / "s005_A" / "report.html").is_file()
    python("-m", "evodsp", "predict", "--example", "--output=example")
    assert (work / "example" / "index.html").is_file()
    python("-m", "evodsp", "slurm", "--output=scripts")
    assert (work / "scripts" / "fit.sbatch").is_file()
