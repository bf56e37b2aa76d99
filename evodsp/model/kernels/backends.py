"""The table of backends. This module does not import torch, so that settings are checked before anything heavy is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from evodsp.config import KernelsConfig
from evodsp.errors import SettingError, nearest


@dataclass(frozen=True)
class Backend:
    """A module of this folder, and where `auto` uses it."""

    module: str
    devices: tuple[str, ...] = ()
    """Device types on which `auto` tries the backend. On other devices it is used only if a setting names it."""


BACKENDS: dict[str, Backend] = {
    "triton": Backend("evodsp.model.kernels.triton", ("cuda",)),
    "chunked": Backend("evodsp.model.kernels.chunked", ("cpu", "cuda", "mps", "xpu")),
    "sdpa": Backend("evodsp.model.kernels.sdpa"),
    "flash_attn": Backend("evodsp.model.kernels.flash_attn"),
    "cuequivariance": Backend("evodsp.model.kernels.cuequivariance"),
    "reference": Backend("evodsp.model.kernels.reference"),
}
"""The backends by name, in the order in which `auto` tries them."""


def check_names(config: KernelsConfig) -> None:
    """Raise SettingError if a setting names no backend."""
    names = ("auto", *BACKENDS)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None and value not in names:
            raise SettingError(
                f"kernels.{field.name}", f"'{value}'", f"one of {', '.join(names)}.{nearest(value, names)}"
            )
