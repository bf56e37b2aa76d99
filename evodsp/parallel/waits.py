"""Measures how long a rank waits for collectives without computing: the part of communication that is not hidden."""

from __future__ import annotations

import time
from typing import Any

import torch


class WaitTimes:
    """Measures the waits for collectives of the groups that it was given to, between `begin` and `end`.

    On a CPU a wait is the time that the call takes. On a GPU the call returns at once, and the stream stands still until
    the communication is done; two events around the call measure this time. They are read at the end, so that nothing waits
    for them. Recording them takes microseconds of the host's time, so a run measures only some of its steps.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu, self._running = on_gpu, False
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def free(self) -> bool:
        """Whether measuring costs next to nothing."""
        return not self._on_gpu

    def begin(self) -> None:
        """Start measuring."""
        self._running, self._seconds, self._events = True, 0.0, []

    def wait(self, work: Any) -> None:
        """Wait for a collective that was launched with `async_op`."""
        if not self._running:
            work.wait()
        elif self._on_gpu:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            work.wait()
            after.record()
            self._events.append((before, after))
        else:
            begun = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - begun

    def end(self) -> float:
        """Seconds of waiting since `begin`, on the device if there is one. The host waits until the last wait is over."""
        self._running = False
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(before.elapsed_time(after) for before, after in self._events) / 1000
