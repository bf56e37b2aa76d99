"""What a pickle of NumPy's arrays says, read without calling what it names."""

from __future__ import annotations

import numpy as np
import pytest

from evodsp.reading.array_files import RecordedType


@pytest.mark.parametrize("state", [None, (), (3,), "<", (3, "=")], ids=str)
def test_a_type_that_names_no_byte_order(state: object) -> None:
    """Catches a file whose types have no state, or one that is too short, which ends the command with a traceback."""
    kind = RecordedType("U1")
    if state is not None:
        kind.__setstate__(state)
    assert kind.dtype("U") == np.dtype("U1")
