"""Which residues a sample keeps: of a chain a piece of it (supplement 1.2.8), of a complex pieces of its chains, or a
neighbourhood of an interface (AlphaFold-Multimer, supplement 7.2).

Residues of a complex are numbered from 0, one chain after another. Positions are in Å. Shapes: R residues of the crop, N
residues of the complex, n of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

from evodsp.rng import Draws

INTERFACE_DISTANCE = 10.0
"""CA atoms of two chains that are nearer than this in Å belong to an interface."""

_TIE_BREAKER = 1e-3  # Å per residue, so that of equally near residues the first is kept
_ROWS_AT_ONCE = 128


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


def complex_crop(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
    crop_size: int | None,
    draws: Draws,
    spatial_fraction: float,
) -> Crop:
    """A random crop of `crop_size` residues of a complex; the whole complex if it is not larger.

    `lengths`: residues of each chain. `positions`, `mask`: its CA atoms, 1 where they are resolved. With probability
    `spatial_fraction` the crop is spatial, if there is an interface; otherwise it is contiguous.
    """
    if crop_size is None or sum(lengths) <= crop_size:
        return piece(0, sum(lengths))
    if draws.at("crop_kind").uniform(1)[0] < spatial_fraction:
        crop = spatial_crop(lengths, positions, mask, crop_size, draws)
        if crop is not None:
            return crop
    return contiguous_crop(lengths, crop_size, draws)


def contiguous_crop(lengths: Sequence[int], crop_size: int, draws: Draws) -> Crop:
    """A piece of each chain, `crop_size` residues in all, or all of the complex if it is smaller (algorithm 1).

    Chains take their pieces in random order. Each has a uniformly random length, from what the chains after it cannot make up
    for to what is left, and a uniformly random start. A piece may have no residues.
    """
    starts = np.cumsum([0, *lengths])
    draws = draws.at("contiguous_crop")
    shares, places = draws.at("pieces").uniform(2, len(lengths))
    wanted, remaining = min(crop_size, int(starts[-1])), int(starts[-1])
    residues = []
    for chain in draws.at("order").permutation(len(lengths)):
        length = lengths[chain]
        remaining -= length
        least, most = max(0, wanted - remaining), min(wanted, length)
        size = least + int(shares[chain] * (most - least + 1))
        wanted -= size
        first = starts[chain] + int(places[chain] * (length - size + 1))
        residues.append(np.arange(first, first + size))
    return Crop(np.sort(np.concatenate(residues)))


def spatial_crop(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
    crop_size: int,
    draws: Draws,
) -> Crop | None:
    """The `crop_size` residues that are nearest to a random residue of an interface (algorithm 2); None without interfaces.

    Distances are between CA atoms. Residues without one come after all others, in order.
    """
    interface = interface_residues(lengths, positions, mask)
    if not len(interface):
        return None
    centre = interface[draws.at("spatial_crop").integer(0, len(interface))]
    distance = np.sqrt(_squared_distances(positions[centre, None], positions)[0])
    distance = np.where(mask > 0, distance + _TIE_BREAKER * np.arange(len(mask)), np.inf)
    return Crop(np.sort(np.argsort(distance, kind="stable")[:crop_size]))


def interface_residues(
    lengths: Sequence[int],
    positions: Float[np.ndarray, "N 3"],
    mask: Float[np.ndarray, " N"],
) -> Int64[np.ndarray, " n"]:
    """The residues whose CA atom is nearer than `INTERFACE_DISTANCE` to a CA atom of another chain, ascending.

    Memory is linear in the number of residues.
    """
    chain, resolved = np.repeat(np.arange(len(lengths)), lengths), np.flatnonzero(mask > 0)
    if not len(resolved):
        return resolved
    # Sorted along the longest axis of the complex, atoms that may be near to some rows are a part of all atoms.
    axis = np.ptp(positions[resolved], 0).argmax()
    resolved = resolved[np.argsort(positions[resolved, axis], kind="stable")]
    chain, positions = chain[resolved], positions[resolved]
    along = positions[:, axis]
    near = np.zeros(len(resolved), bool)
    for start in range(0, len(resolved), _ROWS_AT_ONCE):
        here = slice(start, start + _ROWS_AT_ONCE)
        first, last = along[here][[0, -1]] + [-INTERFACE_DISTANCE, INTERFACE_DISTANCE]
        others = slice(np.searchsorted(along, first, "left"), np.searchsorted(along, last, "right"))
        close = _squared_distances(positions[here], positions[others]) < INTERFACE_DISTANCE**2
        near[here] = (close & (chain[here, None] != chain[others])).any(1)
    return np.sort(resolved[near])


def _squared_distances(x: Float[np.ndarray, "m 3"], y: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "m n"]:
    """In float64, because the tie-breaker is small beside distances."""
    total = np.zeros((len(x), len(y)))
    for one, other in zip(x.T.astype(np.float64), y.T.astype(np.float64), strict=True):
        total += np.square(one[:, None] - other)
    return total
