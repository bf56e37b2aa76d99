"""Structure folders: the file of an entry, and the source of its release date."""

from __future__ import annotations

import json
import pickle
from datetime import date
from pathlib import Path

import pytest

from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import FileFormatError, UserError


def test_release_date_is_the_files_first_revision(real_data: Path) -> None:
    """Catches the last revision taken for the first: release dates would be too late."""
    folder = StructureFolder(real_data / "mmcif_files")
    assert folder.release_date("2crb") == date(2005, 11, 20)
    assert folder.release_date("1psm") == date(1995, 2, 7)
    assert folder.release_date("9xyz") is None


@pytest.mark.parametrize("place", ["structures", ".", "data_caches"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("mmcif_cache.json", {"1abc": {"release_date": "2001-02-03", "chain_ids": ["A"]}, "2abc": {}}),
        ("chain_data_cache.json", {"1abc_A": {"release_date": "2001-02-03"}, "1abc_B": {"release_date": "2001-02-03"}}),
    ],
)
def test_release_dates_of_caches(tmp_path: Path, name: str, cache: dict, place: str) -> None:
    """Catches a cache that is ignored (every file would be read for its date), and chain keys split wrongly."""
    structures = tmp_path / "structures"
    structures.mkdir()
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / name).write_text(json.dumps(cache))
    folder = StructureFolder(structures)
    assert folder.release_date("1abc") == date(2001, 2, 3)
    assert folder.release_date("2abc") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"1abc": {"release_date": "soon"}}', "the release_date of '1abc' is 'soon', not a date"),
        ("[1]", "expected"),
        ("{", "not JSON"),
    ],
)
def test_broken_caches_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mmcif_cache.json").write_text(text)
    with pytest.raises(FileFormatError, match=message) as caught:
        StructureFolder(tmp_path).release_date("1abc")
    assert "\n" not in str(caught.value)


def test_missing_entries_are_named_and_the_folder_travels(tmp_path: Path, real_data: Path) -> None:
    """Catches an entry without a file that ends in a traceback, and parsed files sent to workers."""
    with pytest.raises(UserError, match="no such structure directory"):
        StructureFolder(tmp_path / "nowhere")
    folder = pickle.loads(pickle.dumps(StructureFolder(real_data / "mmcif_files")))
    assert set(folder.structure("5kc1").chains) >= {"F", "J"}
    with pytest.raises(UserError, match=r"no 2cra\.cif.*Did you mean '2crb'"):
        folder.structure("2cra")
