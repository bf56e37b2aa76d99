"""The model never makes the host wait for the GPU: it launches without reading a result and without copying a constant."""

from __future__ import annotations

import torch

from evodsp.model.alphafold import AlphaFold
from evodsp.rng import Draws
from tests.builders.host_waits import HostWaits
from tests.builders.small_model import config, features


def test_a_pass_with_templates_and_dropout_does_not_wait() -> None:
    """Catches constants, lists of atom slots and edges of bins that are copied to the device in every pass."""
    model = AlphaFold(config()).to("meta")
    batch = {
        name: value.to("meta", torch.float32 if value.is_floating_point() else None)
        for name, value in features(1).items()
    }
    model(batch)  # constants are copied in the first pass
    with HostWaits() as seen:
        output = model(batch, [Draws.root(0)])
        (output.structure.positions.sum() + output.representations["pair"].sum()).backward()
    # The keys of dropout, once a pass: from pinned memory on a GPU, so that the host does not wait.
    assert [wait for wait in seen.waits if not wait.startswith("_to_copy model/dropout.py")] == []
