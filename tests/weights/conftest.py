"""What the tests of untrusted files share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evodsp.model.alphafold import AlphaFold


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a model that takes memory is an error."""
    made = AlphaFold.__init__

    def refuse(self: AlphaFold, *args: Any, **options: Any) -> None:
        assert torch.empty(0).is_meta, "a model is built"
        made(self, *args, **options)

    monkeypatch.setattr(AlphaFold, "__init__", refuse)
