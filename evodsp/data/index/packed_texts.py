"""Many short texts in two arrays, which can be memory-mapped. A list of a million Python strings is private to its process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from jaxtyping import Int64, UInt8

_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # file names may be any bytes


class PackedTexts(Sequence[str]):
    """n texts. `starts`: where each begins, and the end of the last. `letters`: their UTF-8 bytes, one text after another."""

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
