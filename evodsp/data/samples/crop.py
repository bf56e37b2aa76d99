"""Contiguous cropping of the residues of a sample (supplement 1.2.8)."""

from __future__ import annotations

from dataclasses import dataclass

from evodsp.rng import Draws


@dataclass(frozen=True)
class Crop:
    """The residues start, start + 1, …, start + length - 1 of a chain."""

    start: int
    length: int

    @property
    def residues(self) -> slice:
        return slice(self.start, self.start + self.length)


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
        return Crop(0, length)
    shift, position = draws.at("crop").uniform(2)
    return Crop(crop_start(length - crop_size, clamped, float(shift), float(position)), crop_size)


def centre_crop(length: int, crop_size: int | None) -> Crop:
    """The middle `crop_size` residues, for validation: the same crop in every run and epoch."""
    if crop_size is None or length <= crop_size:
        return Crop(0, length)
    return Crop((length - crop_size) // 2, crop_size)
