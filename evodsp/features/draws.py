"""The random numbers of MSA features, for all recycling iterations of a sample at once, on the device of the sample.

Shapes: C recycling iterations, N sequences, S clusters, L columns of the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from evodsp.rng import ROUNDS, WEYL, key_words, philox_rounds

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
    others, letters = kept.shape[1] - 1, clusters * columns
    order: list[tuple[Tensor, Tensor]] = []
    uniform: tuple[list[Tensor], list[Tensor]] = [], []
    for stream, first, second in _words(keys, (others, letters, letters)):
        if stream:
            uniform[stream - 1].append((first >> 8).double() * (1.0 / (1 << 24)))  # `Draws.uniform`
        else:
            order.append((first, second))
    replace, letter = (_joined(pieces).view(len(keys), clusters, columns) for pieces in uniform)
    high, low = (_joined(pieces) for pieces in zip(*order, strict=True))
    return Drawn(row_order(high, low, kept), replace, letter)


def _words(
    keys: Int64[Tensor, "C k"], numbers: Sequence[int]
) -> Iterator[tuple[int, Int64[Tensor, "C n"], Int64[Tensor, "C n"]]]:
    """The first two random words (`Draws.words`) of each stream, in pieces: the number of the stream, and its words.

    `numbers`: how many each stream has, which rises or falls. All streams are drawn at once, because a GPU's host needs longer
    to launch a generator's hundred operators than the GPU to draw the numbers that a shorter stream does not need.
    """
    at_once = max(1, _AT_ONCE // keys.numel() if keys.device.type == "cpu" else max(numbers))
    rounds, start = torch.arange(ROUNDS, device=keys.device)[:, None, None], 0
    of_rounds = [words + rounds * step for words, step in zip(key_words(keys), WEYL, strict=True)]
    for positions in torch.arange(max(numbers), device=keys.device).split(at_once):
        streams = [stream for stream, number in enumerate(numbers) if number > start or not start]
        own = zip(*(words[:, :, streams[0] : streams[-1] + 1, None] for words in of_rounds), strict=True)
        first, second, _, _ = philox_rounds((positions, 0, 0, 0), own)
        for place, stream in enumerate(streams):
            left = numbers[stream] - start
            yield stream, first[:, place, :left], second[:, place, :left]
        start += at_once


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def row_order(high: Int64[Tensor, "C n"], low: Int64[Tensor, "C n"], kept: Bool[Tensor, "C N"]) -> Int64[Tensor, "C N"]:
    """The query, then the other kept rows in random order (`Draws.permutation`), then the rows that are not kept.

    `high`, `low`: the random words of the other rows.
    """
    # One number to sort by; high words of 2^31 and more must not become negative.
    by = (((high - (1 << 31)) << 32) | low).masked_fill(~kept[:, 1:], _LAST)
    others = by.sort(dim=1, stable=True).indices + 1
    return torch.cat([others.new_zeros(len(others), 1), others], 1)
