"""Which residues of a chain a sample keeps (supplement 1.2.8): a piece of it. Shape: R residues of the crop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evodsp.rng import Draws


@dataclass(frozen=True, eq=False)
class Crop:
    """The residues that a sample keeps: their numbers in the chain from 0, ascending. They need not be neighbours."""

    residues: Int64[np.ndarray, " R"]

    def __len__(self) -> int:
        return len(self.residues)

    @property
    def first(self) -> int:
        """The first residue of a piece of the chain; -1 if the residues are not neighbours."""
        return int(self.residues[0]) if self.residues[-1] - self.residues[0] == len(self) - 1 else -1

    @property
    def index(self) -> slice | Int64[np.ndarray, " R"]:
        """The index of these residues; of a piece a slice, which copies nothing."""
        return self.residues if self.first < 0 else slice(self.first, self.first + len(self))


def piece(start: int, length: int) -> Crop:
    """The residues start, start + 1, …, start + length - 1 of a chain."""
    return Crop(np.arange(start, start + length))


def crop_start(surplus: int, clamped: bool, shift: float, position: float) -> int:
    """First residue of a training crop that leaves out `surplus` residues of the chain.

    `shift`, `position`: uniform random numbers in [0, 1). Samples with clamped FAPE start uniformly in 0..surplus. The others
    start uniformly in 0..surplus - x, with x uniform in 0..surplus, which favours the beginning of the chain.
    """
    last = surplus if clamped else surplus - int(shift * (surplus + 1))
    return int(position * (last + 1))


def training_crop(length: int, crop_size: int | None, clamped: bool, draws: Draws) -> Crop:
    """A random crop of `crop_size` residues of a chain; the whole chain if it is not longer."""
    if crop_size is None or length <= crop_size:
        return piece(0, length)
    shift, position = draws.at("crop").uniform(2)
    return piece(crop_start(length - crop_size, clamped, float(shift), float(position)), crop_size)


def centre_crop(length: int, crop_size: int | None) -> Crop:
    """The middle `crop_size` residues, for validation: the same crop in every run and epoch."""
    if crop_size is None or length <= crop_size:
        return piece(0, length)
    return piece((length - crop_size) // 2, crop_size)
