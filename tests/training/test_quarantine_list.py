"""The list of chains that a run leaves out, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evodsp.errors import FileFormatError
from evodsp.training.loader import FailedChain, Quarantine, QuarantineFull, failures_of, read_quarantine


def test_the_file_holds_each_chain_once_and_is_read_again(tmp_path: Path) -> None:
    """A chain named by every rank that met it, an order that depends on ranks, or a list that a resume cannot read."""
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(5, path)
    quarantine.add([FailedChain("b", 7, "slow"), FailedChain("a", 4, "cut"), FailedChain("b", 6, "slow")])
    quarantine.add([FailedChain("b", 9, "slow again")])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["chain"], line["sample"], line["reason"]) for line in lines] == [("a", 4, "cut"), ("b", 6, "slow")]
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert read_quarantine(path) == quarantine.failures == failures_of(quarantine.state())
    assert [sorted(quarantine.chains_at(sample)) for sample in (3, 4, 6)] == [[], ["a"], ["a", "b"]]


def test_a_list_beyond_the_limit_is_written_and_stops(tmp_path: Path) -> None:
    """A run that stops without naming the last chain, or goes on after a resume although nothing was corrected."""
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(1, path)
    quarantine.add([FailedChain("a", 4, "cut")])
    with pytest.raises(
        QuarantineFull, match=r"2 chains failed, the last b \(slow\), but data.max_quarantined is 1; .*jsonl"
    ):
        quarantine.add([FailedChain("b", 5, "slow")])
    known = read_quarantine(path)
    assert known is not None
    assert [failure.chain for failure in known] == ["a", "b"]
    with pytest.raises(QuarantineFull):
        Quarantine(1).restore(known)


def test_lines_may_be_deleted_and_others_are_refused(tmp_path: Path) -> None:
    """A traceback for a file that a user has edited; an emptied file that counts as none, so that the checkpoint's list
    returns."""
    path = tmp_path / "quarantine.jsonl"
    assert read_quarantine(path) is None
    path.write_text("")
    assert read_quarantine(path) == []
    good = '{"chain": "a", "sample": 1, "reason": "cut"}\n'
    for bad in (
        "{",
        "[]",
        "3",
        '{"chain": "a"}',
        '{"chain": "a", "sample": "1", "reason": ""}',
        '{"chain": "a", "x": 1}',
    ):
        path.write_text(good + bad + "\n")
        with pytest.raises(FileFormatError, match=r"quarantine.jsonl:2: expected .*delete the line"):
            read_quarantine(path)
    path.write_text(good)
    assert read_quarantine(path) == [FailedChain("a", 1, "cut")]
