"""A model of `scripts/paper/configs` and the size of the input that it is measured with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .config import TransformerConfig

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Workload:
    """A 2-D transformer, and `batch` samples of `time` x `rows` x `columns` tokens (the spatial sequence is rows x columns)."""

    model: str
    """Name of a file of `scripts/paper/configs`."""
    time: int
    rows: int = 64
    columns: int = 64
    """64 x 64 = 4096: the paper's spatial sequence, of images of 1024 x 1024 pixels."""
    batch: int = 1
    checkpoint: bool = False
    """Whether activations are recomputed in the backward pass."""
    layers: int | None = None
    """Another number of layers than the model's."""

    @property
    def config(self) -> TransformerConfig:
        """The model's configuration. Raises UserError if there is none of this name."""
        config = TransformerConfig.load(CONFIGS / f"{self.model}.yaml")
        layers = config.layers if self.layers is None else self.layers
        return dataclasses.replace(config, layers=layers, checkpoint=self.checkpoint)

    @property
    def latents(self) -> tuple[int, int, int, int, int]:
        """Shape [B, c, T, H, W] of the model's input."""
        config = self.config
        frames, rows, columns = (
            size * patch for size, patch in zip((self.time, self.rows, self.columns), config.patch, strict=True)
        )
        return self.batch, config.in_channels, frames, rows, columns

    @property
    def tokens(self) -> int:
        """Tokens of one sample: the length of its sequence."""
        return prod((self.time, self.rows, self.columns))

    @property
    def sequence(self) -> int:
        """M: numbers in the sequence tensor [B, T, S, C]."""
        return self.batch * self.tokens * self.config.width
