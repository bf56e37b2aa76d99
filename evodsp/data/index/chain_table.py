"""The facts about each chain that are known without reading its files: the columns that filters, weights and reports need.

The index of a data set (`evodsp data index`) stores such a table and opens it as memory maps, so that the workers and ranks
of a machine share one copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import overload

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, UInt8

_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # file names may be any bytes


class PackedTexts(Sequence[str]):
    """n texts. `starts`: the position at which each begins, and the end of the last. `letters`: their UTF-8 bytes, one text
    after another."""

    def __init__(self, starts: Int64[np.ndarray, " n_plus_1"], letters: UInt8[np.ndarray, " m"]) -> None:
        if not len(starts) or starts[0] != 0 or starts[-1] != len(letters):
            raise ValueError(f"texts that do not end with their {len(letters)} letters")
        self.starts, self.letters = starts, letters

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedTexts:
        encoded = [text.encode(_ENCODING, _ERRORS) for text in texts]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            # Plain integers and bytes: slicing arrays would take ten times as long.
            starts, letters = self.starts.tolist(), self.letters.tobytes()
            rows = range(len(self))[index]
            return [letters[starts[row] : starts[row + 1]].decode(_ENCODING, _ERRORS) for row in rows]
        row = range(len(self))[index]
        return self._bytes(row).decode(_ENCODING, _ERRORS)

    def find(self, text: str) -> int | None:
        """The row of `text`, None if it is not there. The texts must be sorted. O(log n) comparisons."""
        # Bytes of UTF-8 sort as the letters do.
        wanted = text.encode(_ENCODING, _ERRORS)
        row = bisect_left(range(len(self)), wanted, key=self._bytes)
        return row if row < len(self) and self._bytes(row) == wanted else None

    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Bytes of each text."""
        return np.diff(self.starts)

    def _bytes(self, row: int) -> bytes:
        return self.letters[self.starts[row] : self.starts[row + 1]].tobytes()


UNKNOWN_DAY = np.iinfo(np.int32).min
"""Release day of a chain whose entry has no date."""
_EPOCH = date(1970, 1, 1).toordinal()
UNKNOWN_CLUSTER = -1
"""Cluster size of a chain that the cluster file does not list; OpenFold writes the same number."""

SHORT, LONG = 256, 512
"""Residues: shorter chains are taken as often as one of `SHORT`, longer ones as one of `LONG`."""


def day_of(released: date | None) -> int:
    """Days since 1970-01-01; `UNKNOWN_DAY` for None."""
    return UNKNOWN_DAY if released is None else released.toordinal() - _EPOCH


def date_of(day: int) -> date | None:
    """The inverse of `day_of`."""
    return None if day == UNKNOWN_DAY else date.fromordinal(day + _EPOCH)


@dataclass(frozen=True)
class ChainTable:
    """n chains, in the order of their keys. Each column has one entry per chain."""

    keys: Sequence[str]
    """`<entry>_<chain>`, sorted, distinct."""
    lengths: Int32[np.ndarray, " n"]
    """Residues of the whole chain (SEQRES); 0 if unknown."""
    resolutions: Float32[np.ndarray, " n"]
    """Resolutions in Å; 0 if the method has none (NMR), as in AlphaFold2's and OpenFold's caches; NaN if unknown."""
    release_days: Int32[np.ndarray, " n"]
    """Days since 1970-01-01; `UNKNOWN_DAY` if unknown."""
    cluster_sizes: Int32[np.ndarray, " n"]
    """Chains in the chain's sequence cluster, itself included; `UNKNOWN_CLUSTER` if unknown."""
    largest_fractions: Float32[np.ndarray, " n"]
    """Share of the commonest residue type in the sequence, X counted as a type of its own; NaN if the sequence is unknown."""
    unknown_fractions: Float32[np.ndarray, " n"]
    """Share of X in the sequence; NaN if the sequence is unknown."""
    representatives: Int32[np.ndarray, " n"]
    """Row of the chain whose alignments this chain uses: its own row, or that of an identical chain."""

    def __post_init__(self) -> None:
        for column in fields(self)[1:]:
            if (entries := len(getattr(self, column.name))) != len(self.keys):
                raise ValueError(f"{column.name} has {entries} entries for {len(self.keys)} chains")

    def __len__(self) -> int:
        return len(self.keys)

    def rows_of(self, keys: Iterable[str], name_of: Callable[[str], str]) -> list[int | None]:
        """The row of each of `keys`; None for one without. `name_of`: gives the name that the store has a key by (`Store`). Its
        row is that of a key without a row of its own."""
        row_of = dict(zip(self.keys[:], range(len(self)), strict=True))
        # `name_of` reads the structure, so it is asked only where the entry has a row that the key may have.
        return [
            row_of.get(name_of(key) if key not in row_of and key.rpartition("_")[0] in row_of else key) for key in keys
        ]

    def frequencies(self) -> Float64[np.ndarray, " n"]:
        """The frequency with which AlphaFold2 takes each chain: clamp(length, 256, 512) / 512, divided by the size of its
        sequence cluster.

        A chain whose cluster is unknown has that of its representative; if that is unknown too, the chains of one
        representative, which are identical, are a cluster. A chain of unknown length counts as short.
        """
        sizes = self.cluster_sizes.astype(np.float64)
        of_representative = sizes[self.representatives]
        identical = np.bincount(self.representatives, minlength=len(self))[self.representatives]
        sizes = np.where(sizes > 0, sizes, np.where(of_representative > 0, of_representative, identical))
        return np.clip(self.lengths, SHORT, LONG) / LONG / sizes
