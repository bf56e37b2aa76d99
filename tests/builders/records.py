"""Comparing records field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def same(first: Any, second: Any) -> None:
    """Every field of two records is equal, arrays in type, shape and bits; deletions may be integers of several types."""
    for item in dataclasses.fields(first):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if item.name == "deletions":
            np.testing.assert_array_equal(one, other)
        elif isinstance(one, np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), item.name
            assert one.tobytes() == other.tobytes(), item.name
        elif isinstance(one, tuple) and one and dataclasses.is_dataclass(one[0]):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                same(a, b)
        elif dataclasses.is_dataclass(one):
            same(one, other)
        elif isinstance(one, dict):
            assert one.keys() == other.keys(), item.name
            for key in one:
                assert len(one[key]) == len(other[key])
                for a, b in zip(one[key], other[key], strict=True):
                    same(a, b)
        else:
            assert one == other, item.name
