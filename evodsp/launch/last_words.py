"""What is said if a rank is killed, which cannot say it itself: what the ranks were working on, and what to change.

The ranks note it in the store through which they met. evodsp's own launcher prints it. torchrun and srun end the ranks that are
left by SIGTERM, and one of these prints it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch.process_group import lasting_store
from evodsp.launch.store import number, text
from evodsp.printing import tell

_GROUPS, _WORK, _ADVICE, _SAID = "groups", "work/{}", "advice", "said"


def note_work(group: int, groups: int, work: str, advice: str) -> None:
    """Note what this group of ranks works on (empty: on nothing), and what helps if it was too much."""
    store = lasting_store()
    store.set(_WORK.format(group), work)
    store.set(_ADVICE, advice)
    store.set(_GROUPS, str(groups))


def noted(store: dist.Store) -> str:
    """What the ranks have noted, as sentences; empty if they have noted nothing. `store`: their `lasting_store`."""
    try:
        return _noted(store)
    except UserError as error:  # another error is reported; this is added to it
        return f"What they worked on is not known: {error}"


def _noted(store: dist.Store) -> str:
    if not store.check([_GROUPS]):
        return ""
    count = number(store, _GROUPS)
    known = [group for group in range(count) if store.check([_WORK.format(group)])]
    works = [(group, work) for group in known if (work := text(store, _WORK.format(group)))]
    if not works:
        return ""
    listed = ", ".join(work if count == 1 else f"{work} (group {group})" for group, work in works)
    return (
        f"At work on {listed}. Memory may have ended, for want of which Linux kills processes: {text(store, _ADVICE)}"
    )


def forget() -> None:
    """Forget what an earlier attempt of the ranks has noted and said. For one rank, before the others note anything."""
    store = lasting_store()
    store.set(_GROUPS, "0")
    store.set(_SAID, "0")


def keep_silent() -> None:
    """Let no rank print the last words: another message says why the run ends."""
    lasting_store().add(_SAID, 1)


@contextmanager
def said_if_ended() -> Iterator[None]:
    """Within this context SIGTERM ends the process as ever, but one of the ranks prints what `noted` says.

    A thread does so: the main thread may be waiting for another rank or a GPU, where no signal handler of Python's can run.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def wait() -> None:
        while caught := os.read(reading, 1):
            if caught[0] == signal.SIGTERM:
                _say()
                os._exit(128 + signal.SIGTERM)
        os.close(reading)

    former_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    former = signal.signal(signal.SIGTERM, lambda *_: None)  # with a handler, the signal is written to the pipe
    threading.Thread(target=wait, name="evodsp last words", daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
        signal.set_wakeup_fd(former_wakeup)
        os.close(writing)


def _say() -> None:
    try:
        store = lasting_store()
        if store.add(_SAID, 1) == 1 and (words := noted(store)):
            tell(f"evodsp: the ranks are ended (SIGTERM). {words}")
    except RuntimeError:  # the store's: its host is gone
        pass
