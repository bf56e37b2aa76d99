"""Random numbers with addresses: Philox4x32-10 over a key and a position.

A draw is a pure function of (seed, purpose, sample, cycle, layer, …, GLOBAL position). There is no generator state, so a run
draws the same numbers on every mesh of ranks, after a resume, in any worker, and when activations are recomputed.

The arithmetic uses only `* + ^ & >>` on 64-bit integers, which NumPy arrays and torch tensors share, so there is one copy
of it: feature pipelines call it with NumPy, dropout with torch on any device, and both get the same bits.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11 (constants of table 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32: four random 32-bit words.

    `counter`: four 32-bit words, `key`: two; each an int or an int64 array or tensor. They broadcast: a column of keys and a
    row of positions give all draws of many streams.
    """
    return philox_rounds(counter, (tuple(k + n * w for k, w in zip(key, WEYL, strict=True)) for n in range(ROUNDS)))


def philox_rounds(counter: tuple[Any, Any, Any, Any], keys: Iterable[tuple[Any, ...]]) -> tuple[Any, Any, Any, Any]:
    """`philox4x32` from the keys of its rounds, each `WEYL` more than the one before."""
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        # 32 x 32 -> 64 bits. In int64 the product may wrap to a negative number: its bits are right, and the masks remove the
        # sign extension. c1, c3 and the keys keep their upper halves, which those masks remove too, for fewer operations.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ k0) & _LOW, p1, ((p0 >> 32) ^ c3 ^ k1) & _LOW, p0
    return c0, c1 & _LOW, c2, c3 & _LOW


def key_words(key: Any) -> tuple[Any, Any]:
    """The two 32-bit words of a stream's key; `key`: an int, or an int64 array or tensor of `Draws.signed_key`."""
    return key & _LOW, (key >> 32) & _LOW


def at_least(word: Any, rate: float) -> Any:
    """Whether the uniform number that `word` gives (see `Draws.uniform_at`) is at least `rate`, which is rounded to fp32.

    `word`: int64 array or tensor. It compares integers instead of computing the uniform number.
    """
    return word >= math.ceil(float(np.float32(rate)) * (1 << 24)) << 8


@dataclass(frozen=True)
class Draws:
    """A stream of random numbers named by a path, e.g. `Draws.root(seed).at("msa_mask", sample, cycle)`.

    Streams with different paths are independent; `at` never changes the stream it is called on.
    """

    key: int

    @classmethod
    def root(cls, seed: int) -> Draws:
        return cls(0).at("evodsp", seed)

    def at(self, *path: str | int) -> Draws:
        """The sub-stream named by `path`."""
        text = repr((self.key, *(p if isinstance(p, str) else int(p) for p in path))).encode()
        return Draws(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def signed_key(self) -> int:
        """The key as a signed 64-bit integer with the same bits, for arrays and tensors of keys."""
        return self.key - ((self.key >> 63) << 64)

    def words(self, position: Any) -> tuple[Any, Any, Any, Any]:
        """Four random 32-bit words (as int64) for each global position; `position`: int64 array or tensor, any shape."""
        return philox4x32((position & _LOW, (position >> 32) & _LOW, 0, 0), key_words(self.key))

    def uniform_at(self, position: Any) -> Any:
        """Uniform numbers in [0, 1) for given global positions, as multiples of 2^-24 (exact in fp32)."""
        return (self.words(position)[0] >> 8) * (1.0 / (1 << 24))

    def uniform(self, *shape: int) -> np.ndarray:
        """float64 [*shape] in [0, 1); element p of the flattened array is the draw at position p."""
        return self.uniform_at(np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)).reshape(shape)

    def integer(self, low: int, high: int) -> int:
        """One integer, low <= n < high."""
        if high <= low:
            raise ValueError(f"empty range: low {low}, high {high}")
        return low + int(self.uniform(1)[0] * (high - low))

    def permutation(self, n: int) -> np.ndarray:
        """int64 [n]: a random order of 0..n-1."""
        high, low, _, _ = self.words(np.arange(n, dtype=np.int64))
        return np.lexsort((low, high))

    def gumbel(self, *shape: int) -> np.ndarray:
        """float64 [*shape]: standard Gumbel noise; argmax(log p + gumbel) draws from p."""
        u = (self.words(np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64))[1] + 0.5) / (1 << 32)
        return -np.log(-np.log(u)).reshape(shape)
