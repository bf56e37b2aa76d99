"""Groups of CPU ranks by what carries their exchanges."""

from __future__ import annotations

from typing import Any, Literal

from evodsp.parallel.group import Group
from evodsp.selftest.shared_device import HostGroup

Carrier = Literal["gloo", "host copies"]
"""`gloo`: what a run on CPUs uses; asynchronous, as NCCL is. `host copies`: for ranks that share a GPU."""


def group_by(carrier: Carrier, handle: Any) -> Group:
    """A group whose exchanges `carrier` carries. One rank has nobody to exchange with."""
    if carrier == "gloo" or handle.size() == 1:
        return Group(handle)
    return HostGroup(handle)
