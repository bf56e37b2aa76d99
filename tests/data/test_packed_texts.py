"""Texts in two arrays."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from evodsp.data.index.metadata import PackedTexts


def test_texts_are_found_as_in_a_sorted_list() -> None:
    """Catches a bisection that misses the first, the last, an empty or a non-ASCII text, or finds one that is not there."""
    generator = random.Random(0)
    texts = sorted({"".join(generator.choices("abZé_9\U0001f600", k=generator.randrange(6))) for _ in range(300)})
    packed = PackedTexts.of(texts)
    assert list(packed) == packed[:] == texts
    assert [packed.find(text) for text in texts] == list(range(len(texts)))
    for absent in ("aa!", "~", "Z\U0001f601"):
        assert packed.find(absent) is None
    assert packed[-1] == texts[-1]
    with pytest.raises(IndexError):
        packed[len(texts)]


def test_names_of_any_bytes_and_none() -> None:
    """Catches a file name that is not UTF-8 ending in a traceback, and an index without any text."""
    name = os.fsdecode(b"1abc\xff_A")
    assert PackedTexts.of([name])[0] == name
    assert len(PackedTexts.of([])) == 0
    assert PackedTexts.of([]).find("a") is None
    with pytest.raises(ValueError, match="do not end"):
        PackedTexts(np.array([0, 5]), np.zeros(4, np.uint8))
