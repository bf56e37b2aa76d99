"""Dynamic Sequence Parallelism, from the public API of `evodsp.parallel`: the model's blocks say along which axis they compute.

The sharded axis is switched before a block that needs it whole: one all-to-all before each temporal block, one before each
spatial block. The first spatial block needs none, because the tokens are split along time.
"""

from __future__ import annotations

import copy

from evodsp.parallel import Ledger, Stage, parallelize
from evodsp.parallel.group import Kind, Phase

from ..transformer import Transformer
from .base import Counts, Groups, Method, Parallel


class DSP(Method):
    """Dynamic Sequence Parallelism."""

    name, title = "dsp", "DSP"

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        ranks = copy.copy(groups.layers)
        ranks.ledger = _SortedLedger(groups.layer_ledger, groups.end_ledger)
        tokens = " ".join(("batch", *model.config.axes))
        stages = {
            f"blocks.*.{axis}": Stage(axis, residual="inside", whole={"positions": tokens})
            for axis in model.config.axes
        }
        parallelize(model, ranks, f"{tokens} channel", stages, region="blocks")
        return Parallel(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        """Switches lie between the blocks, and blocks are what is recomputed: no switch is repeated."""
        return {} if phase == "recompute" else {"all-to-all": 2}

    def model_traffic(self, phase: Phase, layers: int) -> Counts:
        """The first spatial block finds the tokens sharded along time, as it needs them."""
        return {} if phase == "recompute" else {"all-to-all": 2 * layers - 1}


class _SortedLedger(Ledger):
    """Enters switches in the ledger of the layers; the gather at the end, and its transpose, in that of the model's ends."""

    def __init__(self, layers: Ledger, ends: Ledger) -> None:
        super().__init__()
        self._layers, self._ends = layers, ends

    def add(self, kind: Kind, elements: int, element_size: int, transposed: bool = False) -> None:
        ledger = self._layers if kind == "all-to-all" else self._ends
        ledger.add(kind, elements, element_size, transposed)
