"""Groups of CPU ranks by what carries their exchanges."""

from __future__ import annotations

from typing import Any, Literal

from evodsp.parallel.group import Group
from evodsp.parallel.sockets import Sockets

Carrier = Literal["gloo", "sockets"]
"""`sockets`: what a run on one machine uses. `gloo`: asynchronous, as NCCL is."""


def group_by(carrier: Carrier, handle: Any) -> Group:
    """A group whose exchanges `carrier` carries. One rank has nobody to exchange with."""
    if carrier == "gloo" or handle.size() == 1:
        return Group(handle)
    sockets = Sockets.of(handle, 60.0)
    assert sockets is not None
    return Group(handle, sockets=sockets)
