"""A complex on disk, made once for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evodsp.data.sources.opening import ComplexFiles
from tests.builders.complex_files import write_complex, write_shortened


@pytest.fixture(scope="session")
def complex_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of `write_complex`; beside them the entries 2abc and 3abc, without the first 6 and 7 residues of each chain."""
    folder = tmp_path_factory.mktemp("complex")
    structures = write_complex(folder)[1]
    for entry, left_out in (("2abc", 6), ("3abc", 7)):
        write_shortened(structures, entry, left_out)
        (structures / f"{entry}.cif").rename(folder / f"{entry}.cif")
    return folder


@pytest.fixture
def folders(complex_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Folders of alignments and structures with the entry 1abc of `write_complex`."""
    for name in ("alignments", "mmcif_files"):
        shutil.copytree(complex_folder / name, tmp_path / name)
    return tmp_path / "alignments", tmp_path / "mmcif_files"


@pytest.fixture
def files(folders: tuple[Path, Path]) -> ComplexFiles:
    """The entry 1abc, of the chains A, B (with one sequence) and C."""
    return ComplexFiles(*folders)
