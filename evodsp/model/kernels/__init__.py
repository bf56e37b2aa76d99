"""Operators of the model that have several implementations: one file a backend, the table of backends here, and `operators`,
which chooses among them.

This module does not import torch, so that settings are checked before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from evodsp.config import KernelsConfig
from evodsp.errors import SettingError, nearest


@dataclass(frozen=True)
class Backend:
    """A module of this folder, and where `auto` uses it."""

    module: str
    devices: tuple[str, ...] = ()
    """Device types on which `auto` tries the backend. On other devices it is used only if a setting names it."""
    package: str = ""
    """The package that it needs beside torch; '' if none."""
    extra: str = ""
    """The extra of evodsp that installs the package."""

    def load(self) -> ModuleType:
        """The module. Raises ImportError, with the command that installs the package if that is absent."""
        if self.package:
            try:
                import_module(self.package)
            except ModuleNotFoundError as error:
                if error.name != self.package:
                    raise
                raise ImportError(f"not installed (pip install 'evodsp[{self.extra}]')") from error
        return import_module(self.module)


BACKENDS: dict[str, Backend] = {
    "triton": Backend("evodsp.model.kernels.triton", ("cuda",), "triton", "triton"),
    "chunked": Backend("evodsp.model.kernels.chunked", ("cpu", "cuda", "mps", "xpu")),
    "sdpa": Backend("evodsp.model.kernels.sdpa"),
    "flash_attn": Backend("evodsp.model.kernels.flash_attn", (), "flash_attn", "gpu"),
    "cuequivariance": Backend("evodsp.model.kernels.cuequivariance", (), "cuequivariance_torch", "cuequivariance"),
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
