"""The random numbers of MSA features, for all recycling iterations of a sample at once, on the device of the sample.

Shapes: C recycling iterations, N sequences, S clusters, L columns of the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from evodsp.rng import key_words, philox4x32

_LAST = torch.iinfo(torch.int64).max
_AT_ONCE = 1 << 14
"""On a CPU this many numbers are drawn at a time, so that the words between them stay in a core's cache."""


@dataclass(frozen=True)
class Drawn:
    """All random numbers that the features of a sample need."""

    order: Int64[Tensor, "C N"]
    """The query, the other rows of the MSA in random order, then the rows that block deletion leaves out."""
    replace: Float64[Tensor, "C S L"]
    """Uniform numbers that choose the letters to replace."""
    letter: Float64[Tensor, "C S L"]
    """Uniform numbers that choose the new letters."""


def draw(keys: Int64[Tensor, "C 3"], kept: Bool[Tensor, "C N"], clusters: int, columns: int) -> Drawn:
    """The numbers of the streams `raw_features.STREAMS`, whose keys are `keys`. `kept`: the rows that block deletion leaves."""
    size = len(keys), clusters, columns
    replace, letter = (uniform(keys[:, stream], clusters * columns).view(size) for stream in (1, 2))
    return Drawn(row_order(keys[:, 0], kept), replace, letter)


def uniform(keys: Int64[Tensor, " C"], number: int) -> Float64[Tensor, "C n"]:
    """Uniform numbers in [0, 1): `Draws.uniform` of each stream."""
    pieces = _words(keys, number)
    return torch.cat([(first >> 8).double() * (1.0 / (1 << 24)) for first, _ in pieces], 1)


def _words(keys: Int64[Tensor, " C"], number: int) -> Iterator[tuple[Int64[Tensor, "C n"], Int64[Tensor, "C n"]]]:
    """The first two random words (`Draws.words`) of the positions 0..`number` - 1 of each stream, in pieces."""
    at_once = max(1, _AT_ONCE // len(keys)) if keys.device.type == "cpu" else max(1, number)
    for positions in torch.arange(number, device=keys.device).split(at_once):
        first, second, _, _ = philox4x32((positions, 0, 0, 0), key_words(keys[:, None]))
        yield first, second


def row_order(keys: Int64[Tensor, " C"], kept: Bool[Tensor, "C N"]) -> Int64[Tensor, "C N"]:
    """The query, then the other kept rows in random order (`Draws.permutation`), then the rows that are not kept."""
    high, low = (torch.cat(words, 1) for words in zip(*_words(keys, kept.shape[1] - 1), strict=True))
    # One number to sort by; high words of 2^31 and more must not become negative.
    by = (((high - (1 << 31)) << 32) | low).masked_fill(~kept[:, 1:], _LAST)
    others = by.sort(dim=1, stable=True).indices + 1
    return torch.cat(
        [torch.zeros_like(others[:, :1]) if others.shape[1] else others.new_zeros(len(keys), 1), others], 1
    )
