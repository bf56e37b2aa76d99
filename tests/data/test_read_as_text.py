"""Files that are read without `text_files`: other encodings and broken ones are one line, or of no consequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from evodsp.data.build import Account, BuildInputs, Part, build_part
from evodsp.data.index.scan import keep_parts
from evodsp.data.sources.feature_store import CHAINS
from evodsp.errors import FileFormatError
from evodsp.report.runs import read_curve


def test_a_curve_that_another_program_has_saved(tmp_path: Path) -> None:
    """Catches a byte-order mark, which spreadsheets write, taken for a part of the first column's name."""
    (tmp_path / "curve.csv").write_bytes(b"\xef\xbb\xbfstep,train/loss\n7,0.5\n")
    assert read_curve(tmp_path / "curve.csv") == {7: {"step": "7", "train/loss": "0.5"}}


@pytest.mark.parametrize(
    "content",
    [
        "step,loss\n1,2\n".encode("utf-16"),
        "step,größe\n1,2\n".encode("latin-1"),
        b"step,loss\n" + b"9" * 5000 + b",1\n",
    ],
    ids=["utf16", "latin1", "long_number"],
)
def test_a_curve_that_is_none(content: bytes, tmp_path: Path) -> None:
    """Catches tracebacks of the decoder and of a number of thousands of digits."""
    (tmp_path / "curve.csv").write_bytes(content)
    with pytest.raises(FileFormatError, match="no learning curve"):
        read_curve(tmp_path / "curve.csv")


def test_a_plan_of_other_bytes_is_another_plan(tmp_path: Path) -> None:
    """Catches a traceback over the rest of a scan that a full disk or another version has left."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "plan").write_bytes(b"\xff\xfe")
    keep_parts(tmp_path / "parts", "abc")
    assert (tmp_path / "parts" / "plan").read_bytes() == b"abc"
    (tmp_path / "parts" / "kept").touch()
    keep_parts(tmp_path / "parts", "abc")
    assert (tmp_path / "parts" / "kept").exists()


def test_a_chain_whose_folder_has_a_name_of_any_bytes(tmp_path: Path) -> None:
    """Catches a build that ends over a name which no text file can hold."""
    part = Part(tmp_path, CHAINS, 0, ("1ab\udce9_A",), BuildInputs(str(tmp_path), str(tmp_path), None, None))
    for folder in (part.shard.parent, part.account.parent):
        folder.mkdir(parents=True, exist_ok=True)
    assert build_part(part) == 1
    ((name, _),) = Account.read(part.account).failed
    assert name == "1ab\udce9_A"
