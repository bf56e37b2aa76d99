"""What was communicated: every collective, in order, with its bytes.

Bytes of an all-gather are its output's, of a reduce-scatter and an all-to-all its local input's, of an all-reduce twice its
input's, of a broadcast and a reduce one copy of what is sent: an all-gather or a reduce-scatter done one shard at a time counts
as it does in one piece. The part that a rank keeps counts: on the wire it is (N - 1) / N of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce"]


@dataclass(frozen=True)
class Entry:
    """One collective that one rank took part in."""

    kind: Kind
    elements: int
    bytes: int
    backward: bool
    """Launched by a backward pass (as the transpose of a forward one)."""


@dataclass
class Ledger:
    """The collectives of one rank since the ledger was made or last `recorded`."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, kind: Kind, elements: int, element_size: int, backward: bool) -> None:
        """Enter a collective that moves `elements` numbers of `element_size` bytes."""
        self.entries.append(Entry(kind, elements, elements * element_size, backward))

    def bytes(self, backward: bool | None = None) -> int:
        """Bytes of all entries, or of those of the forward or the backward pass."""
        return sum(entry.bytes for entry in self.entries if backward is None or entry.backward == backward)

    @contextmanager
    def recorded(self) -> Iterator[list[Entry]]:
        """The entries made inside the `with` block, in order."""
        start, found = len(self.entries), list[Entry]()
        try:
            yield found
        finally:
            found.extend(self.entries[start:])
