"""Which residues of a complex a training sample keeps (AlphaFold-Multimer, supplement 7.2): pieces of its chains, or a
neighbourhood of an interface.

Residues are numbered through the complex from 0, one chain after another. Positions are in Å. Shapes: N residues of the
complex, n of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64

from evodsp.data.samples.crop import Crop, piece
from evodsp.rng import Draws

INTERFACE_DISTANCE = 10.0
"""CA atoms of two chains that are nearer than this in Å belong to an interface."""

_TIE_BREAKER = 1e-3  # Å per residue, so that of equally near residues the first is kept
_ROWS_AT_ONCE = 128


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
    cutoff: float = INTERFACE_DISTANCE,
) -> Int64[np.ndarray, " n"]:
    """The residues whose CA atom is nearer than `cutoff` to a CA atom of another chain, ascending.

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
        first, last = along[here][[0, -1]] + [-cutoff, cutoff]
        others = slice(np.searchsorted(along, first, "left"), np.searchsorted(along, last, "right"))
        close = _squared_distances(positions[here], positions[others]) < cutoff**2
        near[here] = (close & (chain[here, None] != chain[others])).any(1)
    return np.sort(resolved[near])


def _squared_distances(x: Float[np.ndarray, "m 3"], y: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "m n"]:
    """In float64, because the tie-breaker is small beside distances."""
    total = np.zeros((len(x), len(y)))
    for one, other in zip(x.T.astype(np.float64), y.T.astype(np.float64), strict=True):
        total += np.square(one[:, None] - other)
    return total
