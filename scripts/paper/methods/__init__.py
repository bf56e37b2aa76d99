"""The methods of the paper's comparison, by name. `base` explains their one interface."""

from __future__ import annotations

from evodsp.errors import UserError, nearest

from .base import Groups, Method, Parallel, volume
from .dsp import DSP
from .megatron_sp import MegatronSP
from .megatron_tp import MegatronTP
from .one_device import OneDevice
from .ring import Ring
from .ulysses import Ulysses

METHODS: dict[str, Method] = {
    method.name: method for method in (OneDevice(), DSP(), Ulysses(), MegatronSP(), MegatronTP(), Ring())
}
"""All methods, in the order of tables."""


def method_named(name: str) -> Method:
    """Raises UserError with the nearest name if there is none of this name."""
    if name not in METHODS:
        raise UserError(f"there is no method '{name}'; use one of {', '.join(METHODS)}.{nearest(name, METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Groups", "Method", "Parallel", "method_named", "volume"]
