"""Progress lines with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .part import Part


class Progress:
    """Counts the steps of some parts. Time left: the parts' own estimate, corrected by how long the past has taken."""

    def __init__(self, parts: Sequence[Part], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._expected, self._done = sum(part.seconds for part in parts), 0.0
        self._part: Part | None = None
        self._step = 0

    def begin(self, part: Part) -> None:
        """The next part starts."""
        self._part, self._step = part, 0

    def tick(self, text: str) -> None:
        """A step of the part starts: print it."""
        assert self._part is not None
        past = self._done + self._step / self._part.steps * self._part.seconds
        self._step += 1
        pace = (self._clock() - self._start) / past if past > 0.02 * self._expected else 1.0
        left = max(0.0, self._expected - past) * pace
        shown = f"{left / 60:.0f} min" if left > 90 else f"{left:.0f} s"
        print(f"{self._part.name} {self._step}/{self._part.steps}: {text}; about {shown} left", flush=True)

    def end(self) -> None:
        """The part is done."""
        assert self._part is not None
        self._done += self._part.seconds
