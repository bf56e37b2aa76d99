"""The sizes of a transformer, and the YAML files that hold them (`scripts/paper/configs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evodsp.config import from_dict
from evodsp.errors import BELOW_ONE, SIZE, Range, SettingError, UserError, check_numbers
from evodsp.reading.text_files import read_yaml

AXES = (("time", "space"), ("time", "height", "width"))
"""The axes that a model may have."""
RANGES = {
    "layers": SIZE,
    "width": Range(2),
    "heads": SIZE,
    "in_channels": SIZE,
    "mlp_ratio": SIZE,
    "dropout": BELOW_ONE,
}


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer. Raises UserError on a value out of range."""

    layers: int
    """Layers, each with one block per axis."""
    width: int
    """C: channels of a token. A multiple of `heads`, and even."""
    heads: int
    """Attention heads."""
    axes: tuple[str, ...] = AXES[0]
    """Names of the token axes: (time, space), or (time, height, width)."""
    in_channels: int = 4
    """c: channels of the latents."""
    patch: tuple[int, int, int] = (1, 2, 2)
    """Frames, rows and columns of latents that make one token."""
    mlp_ratio: int = 4
    """Width of the MLP's hidden layer / `width`."""
    dropout: float = 0.0
    """Rate of dropout on the updates of both residual branches."""
    checkpoint: bool = False
    """Keep each block's input only, and compute the block again in the backward pass."""

    def __post_init__(self) -> None:
        for name in ("axes", "patch"):  # YAML has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_numbers(self, RANGES, "")
        if self.axes not in AXES:
            raise SettingError("axes", list(self.axes), " or ".join(str(list(axes)) for axes in AXES))
        if self.width % 2 or self.width % self.heads:
            raise SettingError("width", self.width, f"even and a multiple of heads, which is {self.heads}")

    @classmethod
    def load(cls, path: Path) -> TransformerConfig:
        """Read a YAML file. Raises UserError if it cannot be read, and for unknown or wrong settings."""
        return from_dict(cls, read_yaml(path))

    def token_sizes(self, latents: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the token axes for latents of shape [B, c, T, H, W]. Raises UserError if the shape does not fit."""
        if len(latents) != 5 or latents[1] != self.in_channels:
            raise UserError(f"latents have the shape {list(latents)}, but must be [B, {self.in_channels}, T, H, W]")
        if any(whole % size for whole, size in zip(latents[2:], self.patch, strict=True)):
            raise UserError(
                f"latents have {list(latents[2:])} frames, rows and columns, which patches of {list(self.patch)} do not "
                "divide; crop or pad them to multiples"
            )
        time, height, width = (whole // size for whole, size in zip(latents[2:], self.patch, strict=True))
        return (time, height * width) if len(self.axes) == 2 else (time, height, width)
