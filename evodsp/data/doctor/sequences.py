"""The sequences of many chains, from what says them fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from evodsp.data.index.metadata import read_chain_cache
from evodsp.data.index.scan import first_record
from evodsp.data.pool import in_processes
from evodsp.data.samples.distillation import PredictedStore, chains_of
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.chain_folder import alignment_files, parse_alignment_file
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.errors import UserError
from evodsp.geometry.alphabet import decode
from evodsp.progress import progress


def sequences(
    source: ChainFiles | PredictedStore | FeatureStore,
    keys: Iterable[str],
    known: Mapping[str, str],
    cache: str | None,
    workers: int,
) -> dict[str, str]:
    """The sequence of each chain, '' if it cannot be found out.

    From `known`, the index, OpenFold's chain_data_cache.json (`cache`), otherwise from the first row of a file of the chain.
    """
    store = chains_of(source)
    found = {key: known.get(key, "") for key in keys}
    if isinstance(store, ChainFiles) and store.index is not None:
        index = store.index
        for key in [key for key, sequence in found.items() if not sequence]:
            row = index.keys.find(key)
            found[key] = "" if row is None else index.sequence(row)
    unknown = [key for key, sequence in found.items() if not sequence]
    if cache is not None and unknown:
        listed = read_chain_cache(Path(cache))
        found |= {key: listed[key].sequence for key in unknown if key in listed}
        unknown = [key for key in unknown if not found[key]]
    with progress("read sequences", len(unknown)) as advance:
        for key, sequence in in_processes(_sequence, ((store, key) for key in unknown), min(workers, len(unknown))):
            found[key] = sequence
            advance(1)
    return found


def _sequence(store: ChainFiles | FeatureStore, key: str) -> tuple[str, str]:
    """The chain and its sequence: the first row of its first alignment, of which no more is read than that takes."""
    try:
        if isinstance(store, FeatureStore):
            return key, store.parsed(key, with_hits=False).chain.sequence
        for path in alignment_files(store.alignment_dir / key):
            for alignment in parse_alignment_file(str(path), first_record(path)):
                if len(alignment.residues):
                    return key, decode(alignment.residues[0])
        return key, store.query(key).letters
    except (UserError, OSError):
        return key, ""
