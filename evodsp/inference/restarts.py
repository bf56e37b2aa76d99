"""Records that one of several ranks could not hold in memory: all ranks are started again, and leave them out.

A rank whose memory ends in the middle of a pass leaves the others in a collective, from which nothing gets them out. So it
notes the record in the store through which the ranks met, which outlives them, and ends with exit code AGAIN. evodsp's own
launcher then starts all ranks again; so does torchrun, if it may (--max-restarts). What is finished by then is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from evodsp.inference.failures import Failure
from evodsp.inference.run_log import may_be_made, missing
from evodsp.launch.last_words import keep_silent
from evodsp.launch.parent import AGAIN, launched_by_evodsp, starts_again
from evodsp.launch.process_group import lasting_store
from evodsp.launch.store import foreign, number, set_texts, texts
from evodsp.printing import tell
from evodsp.reading.quoting import shown

_COUNT, _ENTRY = "left_out", "left_out/{}"
_MISSING = "missing"


def left_out() -> list[Failure]:
    """The records that earlier attempts of this run gave up."""
    store = lasting_store()
    return [_failure(store, _ENTRY.format(entry)) for entry in range(store.add(_COUNT, 0))]


def _failure(store: dist.Store, key: str) -> Failure:
    match texts(store, key):
        case [name, reason]:
            return Failure(name, reason)
        case other:
            raise foreign(store, key, shown(other), "a name and a reason")


def missing_at_first(output: Path) -> list[Path]:
    """What the first attempt of this run had to make for its log (`evodsp.inference.run_log`)."""
    store = lasting_store()
    store.compare_set(_MISSING, "", str(len(missing(output))))
    return may_be_made(output)[: number(store, _MISSING)]  # what is missing begins with the file


def give_up(failure: Failure) -> NoReturn:
    """Note that the run is to go on without this record, say so, and end this process: the others cannot go on with it."""
    keep_silent()
    store = lasting_store()
    set_texts(store, _ENTRY.format(store.add(_COUNT, 0)), [failure.name, failure.reason])
    store.add(_COUNT, 1)
    then = (
        "all ranks are started again without this record"
        if launched_by_evodsp() or starts_again()
        else "the run ends; the same command without this record keeps what is finished"
    )
    tell(f"evodsp: {failure.reason}. The other ranks wait for this one, so {then}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(AGAIN)
