"""The sequences of keys, from the quickest source that knows them: tables first, then one file of each chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from evodsp.data.executors import with_progress
from evodsp.data.index.metadata import read_chain_cache
from evodsp.data.pool import WorkerEndedError
from evodsp.data.sources.store import Store
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError

Letters = Mapping[str, tuple[str, ...]]
"""The sequences of the chains of each key; none where they are unknown."""
Sequences = Store | StructureFolder
"""What knows the sequences of keys."""


def listed_sequences(
    source: Sequences, keys: Iterable[str], known: Letters, cache: str | None
) -> dict[str, tuple[str, ...]]:
    """The sequences of each key that `known`, the index or OpenFold's chain_data_cache.json (`cache`) lists, otherwise none."""
    found = {key: known.get(key, ()) for key in keys}
    if not isinstance(source, StructureFolder) and (index := source.index) is not None:
        rows = {key: index.keys.find(key) for key, letters in found.items() if not letters}
        found |= {key: index.sequences_of(row) for key, row in rows.items() if row is not None}
    if cache is not None and not all(found.values()):
        listed = read_chain_cache(Path(cache))
        unknown = [key for key, letters in found.items() if not letters]
        found |= {key: (listed[key].sequence,) for key in unknown if key in listed and listed[key].sequence}
    return found


def sequences(
    source: Sequences, keys: Iterable[str], known: Mapping[str, str], cache: str | None, workers: int
) -> dict[str, str]:
    """The sequence of each chain: from tables (`listed_sequences`), otherwise from one of its files; '' if it is unknown."""
    given = {key: (sequence,) for key, sequence in known.items() if sequence}
    found = with_unlisted(source, listed_sequences(source, keys, given, cache), workers)
    return {key: "".join(letters) for key, letters in found.items()}


def with_unlisted(source: Sequences, listed: Letters, workers: int) -> dict[str, tuple[str, ...]]:
    """The sequences that are listed, and of the other keys those in their files. Shows progress."""
    found = dict(listed)
    if not (unknown := [key for key, letters in found.items() if not letters]):
        return found
    for at, read in with_progress("read sequences", read_sequences, [(source, key) for key in unknown], workers):
        found[unknown[at]] = () if isinstance(read, WorkerEndedError) else read
    return found


def read_sequences(source: Sequences, key: str) -> tuple[str, ...]:
    """The sequences of a key's chains from its files; none if they cannot be read."""
    try:
        return source.sequences_of(key)
    except (UserError, OSError):
        return ()
