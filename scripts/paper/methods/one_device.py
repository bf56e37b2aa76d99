"""The model as it is: every rank computes everything."""

from __future__ import annotations

from evodsp.parallel.group import Phase

from ..transformer import Transformer
from .base import Counts, Groups, Method, Parallel


class OneDevice(Method):
    """No parallelism. What the other methods are compared with."""

    name, title = "one_device", "One device"

    def apply(self, model: Transformer, groups: Groups) -> Parallel:
        return Parallel(model, self, groups)

    def layer_traffic(self, phase: Phase) -> Counts:
        return {}
