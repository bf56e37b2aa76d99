"""What a run says of a rank that was killed. The ranks themselves: tests/inference/test_parallel_predict.py."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from evodsp.launch import last_words


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Where the ranks of a run met."""
    met = dist.HashStore()
    monkeypatch.setattr(last_words, "lasting_store", lambda: met)
    return met


def test_every_group_at_work_is_named(store: dist.Store) -> None:
    """Catches a group that is left out, one that is named although it is done, and a sentence about nothing."""
    assert last_words.noted(store) == ""
    for group, work in enumerate(("'a'", "", "'b'")):
        last_words.note_work(group, 4, work, "lower --x")
    assert last_words.noted(store).startswith("At work on 'a' (group 0), 'b' (group 2). Memory may have ended")
    assert last_words.noted(store).endswith(": lower --x")
    last_words.note_work(0, 4, "", "lower --x")
    last_words.note_work(2, 4, "", "lower --x")
    assert last_words.noted(store) == ""


def test_a_second_attempt_has_its_own_last_words(store: dist.Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches the record of an earlier attempt that is blamed, ranks that are silent ever after one gave a record up, and words
    that several ranks say."""
    last_words.note_work(0, 1, "'early'", "lower --x")
    last_words.keep_silent()
    last_words._say()
    last_words.forget()
    assert last_words.noted(store) == ""
    last_words.note_work(0, 1, "'late'", "lower --x")
    last_words._say()
    last_words._say()
    said = capsys.readouterr().err
    assert said.count("evodsp: ") == said.count("\n") == 1
    assert "At work on 'late'. " in said
