"""Notices a rank that has stopped, and says which one.

A rank that waits in a collective cannot tell for whom. So a thread of every rank writes two numbers into the store at which the
ranks met: a PULSE, which goes up by itself, and how many COLLECTIVES the rank has launched (torch counts them for each group).
Rank 0 reads all of them, the others read rank 0's:

- A pulse that stands still: the process is stopped (SIGSTOP, a debugger), starved, or its machine is gone or unreachable.
- All pulses go on, but nobody launches anything: a rank hangs in its own code and the others wait for it. It is the one that
  has launched fewest. Nobody has to report progress for this, and a training loop that forgets to cannot look stalled.

Whoever finds something writes a verdict into the store, says it on standard error and ends its process at once (the main thread
may be waiting in a collective, where no exception can reach it); the others read the verdict and end too.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

GIVEN_UP = 3
"""Exit code of a rank that ended because of another one."""

SILENCE_S = 60.0
"""A process that is alive but busy misses its pulse by a second or two; this leaves room for a machine that swaps."""

# Between finding the store gone and ending for it: at the end of a run, its host may be quicker than this rank.
_GRACE_S = 5.0


@dataclass(frozen=True)
class State:
    """What a rank writes about itself."""

    pulse: int
    collectives: int

    @classmethod
    def parse(cls, text: bytes) -> State:
        return cls(*map(int, text.split()))

    def __str__(self) -> str:
        return f"{self.pulse} {self.collectives}"


class StallDetector:
    """Finds the rank that all others wait for. Knows states and times only, no processes."""

    def __init__(self, silent_s: float, stalled_s: float) -> None:
        self.silent_s, self.stalled_s = silent_s, stalled_s
        self._states: dict[int, State] = {}
        self._pulse_seen: dict[int, float] = {}
        self._moved = self._asked = 0.0

    def verdict(self, states: Mapping[int, State], now: float) -> tuple[list[int], str] | None:
        """The ranks at fault and what is wrong with them, at time `now` (s); None while all is well."""
        if not self._states or now - self._asked > self.silent_s / 2:
            # The first look, or this process was stopped itself, perhaps with all others: a batch system suspends whole jobs.
            self._pulse_seen, self._moved = dict.fromkeys(states, now), now
        for rank, state in states.items():
            former = self._states.get(rank)
            if former is None or state.pulse != former.pulse:
                self._pulse_seen[rank] = now
            if former is None or state.collectives != former.collectives:
                self._moved = now
        self._states, self._asked = dict(states), now
        stalled = now - self._moved > self.stalled_s
        # Where nothing moves and a rank is silent it is that one, even if it has not been so for long.
        patience = self.silent_s / 2 if stalled else self.silent_s
        if silent := [rank for rank in states if now - self._pulse_seen[rank] > patience]:
            return silent, f"gave no sign of life for {patience:g} s (stopped, starved, or the machine is gone)"
        if stalled:
            least = min(state.collectives for state in states.values())
            most = max(state.collectives for state in states.values())
            if least == most:
                return [], f"no rank launched a collective for {self.stalled_s:g} s; all are past number {most}"
            behind = [rank for rank, state in states.items() if state.collectives == least]
            return behind, f"launched no collective for {self.stalled_s:g} s while others wait, {most - least} ahead"
        return None


class Watch(threading.Thread):
    """The thread of one rank. `store` must be a client of its own: the main thread may be waiting on another."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout_s: float) -> None:
        super().__init__(name="evodsp watch", daemon=True)
        self._store, self._rank = store, rank
        self._silent_s = min(SILENCE_S, timeout_s)
        self._interval = min(5.0, self._silent_s / 10)
        # Who sees rank 0 only cannot tell who is behind.
        self._judge = StallDetector(self._silent_s, timeout_s if rank == 0 else math.inf)
        self._watched = range(ranks) if rank == 0 else range(1)
        self._pulse = 0
        self._stop_asked = threading.Event()
        store.set(f"who/{rank}", f"rank {rank} (pid {os.getpid()} on {socket.gethostname()})")
        self._write_state()

    def run(self) -> None:
        """Until asked to stop, or the run has to end."""
        store = f"the ranks' store, kept by {self._store.get('who/0').decode()} or its launcher,"
        silent = f"{store} gave no answer for {self._silent_s:g} s (stopped, or the machine is gone)"
        while not self._stop_asked.wait(self._interval):
            # A store that was stopped keeps its connections, and an answer is waited for without limit.
            late = threading.Timer(self._silent_s, _end, [silent])
            late.daemon = True
            late.start()
            try:
                message = self._look()
            except RuntimeError as error:  # the store's
                late.cancel()
                if not self._stop_asked.wait(_GRACE_S):
                    why = " ".join(str(error).split("\n")[0].split())
                    _end(f"{store} is gone: {why}")
                return
            late.cancel()
            if message is not None:
                _end(message)

    def stop(self) -> None:
        """Look no more. Returns once the thread has ended."""
        self._stop_asked.set()
        self.join()

    def _look(self) -> str | None:
        self._write_state()
        if self._store.check(["verdict"]):
            return ""  # whoever found it has said it
        texts = self._store.multi_get([f"state/{rank}" for rank in self._watched])
        found = self._judge.verdict(
            {rank: State.parse(text) for rank, text in zip(self._watched, texts, strict=True)}, time.monotonic()
        )
        if found is None:
            return None
        ranks, what = found
        message = f"{', '.join(self._store.get(f'who/{rank}').decode() for rank in ranks)} {what}".strip()
        self._store.set("verdict", message)
        return message

    def _write_state(self) -> None:
        self._pulse += 1
        self._store.set(f"state/{self._rank}", str(State(self._pulse, _collectives())))


def watch_of_this_process() -> Watch | None:
    """The one that is running, if any."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, Watch)), None)


def _collectives() -> int:
    """How many collectives this rank has launched, in all its groups."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def _end(message: str) -> None:
    """End this process from a thread: nothing else gets a main thread out of a collective."""
    if message:
        print(f"evodsp: error: {message}; the run is ended", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(GIVEN_UP)
