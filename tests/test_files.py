"""Files and folders are complete or absent, whenever their writer fails or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evodsp.files import whole_file, whole_folder
from tests.builders.pages import ROOT


def test_a_file_appears_only_when_its_block_ends(tmp_path: Path) -> None:
    """A writer that opens the target itself would show a half-written file."""
    target = tmp_path / "new" / "file.txt"
    with whole_file(target) as partial:
        partial.write_text("complete")
        assert not target.exists()
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == ["file.txt"]


def test_a_link_stays_a_link_to_the_new_file(tmp_path: Path) -> None:
    """A rename onto a link would leave the file that it points to as it was."""
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with whole_file(tmp_path / "link.txt") as partial:
        partial.write_text("new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_a_text_is_utf8_in_any_locale(tmp_path: Path) -> None:
    """Catches a run's config with a path such as Prüfung, which could not be written, or read again, in another locale."""
    program = f"from evodsp.files import write_text; write_text({str(tmp_path / 'a.txt')!r}, 'Pr\\u00fcfung\\n')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    # -S: in this locale Python itself cannot read what an editable install writes about a folder called Müller.
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)
    assert (tmp_path / "a.txt").read_bytes() == "Prüfung\n".encode()


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """`--output /dev/null` as root would remove the device for the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), whole_file(tmp_path / "pipe"):
        pytest.fail("the writer ran")
    assert (tmp_path / "pipe").is_fifo()


def test_a_failed_writer_keeps_the_old_file(tmp_path: Path) -> None:
    """A failure must not rename, and must not leave the temporary file behind."""
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError), whole_file(target) as partial:
        partial.write_text("half, then \ud800")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_folder_replaces_the_old_one_with_all_its_files(tmp_path: Path) -> None:
    """Files of the old folder must not survive beside the new ones; the mode must be an ordinary folder's."""
    target, ordinary = tmp_path / "results", tmp_path / "ordinary"
    ordinary.mkdir()
    target.mkdir()
    (target / "stale.txt").write_text("old")
    with whole_folder(target) as partial:
        (partial / "a.txt").write_text("new")
        assert os.listdir(target) == ["stale.txt"]
    assert os.listdir(target) == ["a.txt"]
    assert sorted(os.listdir(tmp_path)) == ["ordinary", "results"]
    assert target.stat().st_mode == ordinary.stat().st_mode


def test_a_failed_folder_keeps_the_old_one(tmp_path: Path) -> None:
    """The old folder must be moved aside only after the new one is complete."""
    target = tmp_path / "results"
    target.mkdir()
    (target / "a.txt").write_text("old")
    with pytest.raises(UnicodeEncodeError), whole_folder(target) as partial:
        (partial / "a.txt").write_text("half, then \ud800")
    assert (target / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["results"]


def test_a_failed_folder_removes_the_parents_created_for_it(tmp_path: Path) -> None:
    """Parents that were there before stay, those created for the failed folder go."""
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="broken"), whole_folder(tmp_path / "there" / "one" / "two" / "results"):
        raise ValueError("broken")
    assert os.listdir(tmp_path) == ["there"]
    assert os.listdir(tmp_path / "there") == []


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path) -> None:
    """Between the two renames `target` does not exist: if the second one fails, the first must be undone."""
    target = tmp_path / "results"
    target.mkdir()
    (target / "a.txt").write_text("old")
    with pytest.raises(FileNotFoundError), whole_folder(target) as partial:
        partial.rmdir()
    assert (target / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["results"]


@pytest.mark.parametrize("kind", ["whole_file", "whole_folder"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_killed_writer_leaves_the_target_as_it_was(tmp_path: Path, kind: str, existing: bool) -> None:
    """SIGKILL runs no `finally`: the target itself must never be written to."""
    target = tmp_path / "target"
    file = target if kind == "whole_file" else target / "a.txt"
    if existing:
        file.parent.mkdir(exist_ok=True)
        file.write_text("old")
    program = (
        "import os, signal, sys\n"
        f"from evodsp.files import {kind} as whole\n"
        "with whole(sys.argv[1]) as partial:\n"
        f"    path = partial if {kind == 'whole_file'} else partial / 'a.txt'\n"
        "    path.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(target)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (file.read_text() if target.exists() else None) == ("old" if existing else None)
    # The next writer is not disturbed by what the killed one left.
    with (whole_file if kind == "whole_file" else whole_folder)(target) as partial:
        (partial if kind == "whole_file" else partial / "a.txt").write_text("new")
    assert file.read_text() == "new"
