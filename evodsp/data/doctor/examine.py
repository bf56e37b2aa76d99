"""Reading a chain completely, as training does, and saying what is wrong with it."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evodsp.data.sources.parsed_chain import ChainSource
from evodsp.data.sources.query_check import QueryMismatch
from evodsp.errors import UserError

State = Literal["good", "mismatching", "unreadable"]


@dataclass(frozen=True)
class Examined:
    """A chain that was read, or why it could not be. Numbers of a bad chain are 0 where they are not known."""

    key: str
    state: State
    reason: str = ""
    sequence: str = ""
    resolution: float = math.nan
    """In Å; 0 if the method has none."""
    release_date: str = ""
    depth: int = 0
    """Different sequences of the merged MSA."""
    packed_bytes: int = 0
    """Size in a store: rows and coordinates, packed by zlib."""
    seconds: float = 0.0
    """Time to read and merge."""
    notes: tuple[str, ...] = ()
    """What a user should know of how its structure was read."""


def examine(source: ChainSource, key: str) -> Examined:
    """Read one chain. What the user can repair is in the result; another error is raised."""
    begun = time.perf_counter()
    try:
        parsed = source.parsed(key, with_hits=False)
    except UserError as error:
        state: State = "mismatching" if isinstance(error, QueryMismatch) else "unreadable"
        return Examined(key, state, " ".join(str(error).split()))
    seconds = time.perf_counter() - begun
    chain, msa = parsed.chain, parsed.msa
    rows = msa.msa.astype(np.uint8).tobytes()
    return Examined(
        key,
        "good",
        sequence=chain.sequence,
        resolution=chain.resolution or 0.0,
        release_date="" if chain.release_date is None else chain.release_date.isoformat(),
        depth=msa.num_alignments,
        packed_bytes=len(zlib.compress(rows, 1)) + len(zlib.compress(chain.positions.tobytes(), 1)),
        seconds=seconds,
        notes=chain.notes,
    )
