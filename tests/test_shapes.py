"""Signatures are checked (`tests/shapes.py`), also of calls that look like earlier ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shapes import install

MODULE = """
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import no_type_check
import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

def product(left: Float[Tensor, "a b"], right: Float[Tensor, "b c"], cut: int = 0) -> Float[Tensor, "a c"]:
    return (left @ right)[cut:]

def axes(*tensors: Float[Tensor, "a"], **sizes: int) -> None:
    pass

def zeros(rows: int) -> Int64[np.ndarray, "{rows}"]:
    return np.zeros(abs(rows), np.int64)

def names(of: Sequence[str], by: dict[str, int], pair: tuple[int, str] | Float[Tensor, "a"] | None = None) -> None:
    pass

def half(number: int) -> int:
    return number // 2

@no_type_check
def free(number: int) -> int:
    return number

def mask(of: Chain) -> Float[Tensor, "n"]:
    return of.mask

class Layer:
    @property
    def size(self) -> Float[Tensor, "n"]:
        return self.held

    @staticmethod
    @cache
    def width(of: int) -> Float[Tensor, ""] | int:
        return of

@dataclass(frozen=True)
class Chain:
    positions: Float[Tensor, "n 3"]
    mask: Float[Tensor, " n"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module whose functions are checked."""
    (tmp_path / "checked_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    install(["checked_module"])
    yield import_module("checked_module")
    del sys.modules["checked_module"]


def test_each_break_of_a_signature(module: Any) -> None:
    """Catches a kind of signature that nothing checks, and a call that passes because one like it has passed."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape)

    layer, wrong_layer = module.Layer(), module.Layer()
    layer.held, wrong_layer.held = zeros(2), zeros(2, 2)
    calls = {
        "sizes that differ": (module.product, (zeros(2, 3), zeros(3, 4)), (zeros(2, 4), zeros(3, 4))),
        "an axis too many": (module.product, (zeros(2, 3), zeros(3, 4)), (zeros(1, 2, 3), zeros(3, 4))),
        "another dtype": (module.product, (zeros(2, 3), zeros(3, 4)), (zeros(2, 3).long(), zeros(3, 4).long())),
        "another result": (module.product, (zeros(2, 3), zeros(3, 4), 0), (zeros(2, 3), zeros(3, 4), 1)),
        "one of many": (module.axes, (zeros(2), zeros(2)), (zeros(2), zeros(3))),
        "a computed size": (module.zeros, (3,), (-3,)),
        "an item": (module.names, (["a"], {}), ([1], {})),
        "a key": (module.names, (["a"], {"a": 1}), (["a"], {1: 1})),
        "an item of a pair": (module.names, ([], {}, (1, "a")), ([], {}, (1, 2))),
        "a union": (module.names, ([], {}, None), ([], {}, 3)),
        "a property": (lambda of: of.size, (layer,), (wrong_layer,)),
        "below other decorators": (module.Layer.width, (1,), ("1",)),
        "a field": (module.Chain, (zeros(2, 3), zeros(2)), (zeros(2, 3), zeros(3))),
    }
    for name, (function, right, wrong) in calls.items():
        for passes in range(3):
            with pytest.raises(Exception, match=r"checked_module|is .*, not") as error:
                function(*wrong)
            assert type(error.value).__name__ in ("ShapeError", "TypeCheckError"), (name, passes)
            function(*right)


def test_keywords_are_checked(module: Any) -> None:
    """Catches arguments that are checked by position only."""
    module.axes(a=1)
    with pytest.raises(TypeError, match="not <class 'int'>"):
        module.axes(a="1")
    module.product(left=torch.zeros(2, 3), right=torch.zeros(3, 4))
    with pytest.raises(TypeError, match="right is"):
        module.product(left=torch.zeros(2, 3), right=torch.zeros(2, 4))


def test_a_class_that_is_replaced(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a signature that is read when a test has put something else in the place of a class that it names."""
    chain = module.Chain(torch.zeros(2, 3), torch.zeros(2))
    monkeypatch.setattr(module, "Chain", None)
    assert len(module.mask(chain)) == 2
    with pytest.raises(TypeError, match=r"not <class 'checked_module.Chain'>"):
        module.mask(None)


def test_what_wants_no_checks_has_none(module: Any) -> None:
    """Catches a decorated GPU kernel, whose source Triton then cannot read, and time for signatures that name no array."""
    assert module.half(3.0) == 1
    assert module.free("1") == "1"
    assert not hasattr(module.free, "__wrapped__")
