"""The sequences of chains, from the quickest source that knows them: tables first, then one file of each chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from evodsp.data.executors import LocalProcesses
from evodsp.data.formats.mmcif import read_header
from evodsp.data.index.metadata import read_chain_cache
from evodsp.data.index.scan import first_record
from evodsp.data.pool import WorkerEndedError
from evodsp.data.samples.distillation import PredictedStore, chains_of
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.chain_folder import alignment_files, parse_alignments
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.layout import split_key
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.geometry.alphabet import decode
from evodsp.progress import progress


def listed_sequences(
    source: ChainFiles | PredictedStore | FeatureStore | StructureFolder,
    keys: Iterable[str],
    known: Mapping[str, str],
    cache: str | None,
) -> dict[str, str]:
    """The sequence of each chain that `known`, the index or OpenFold's chain_data_cache.json (`cache`) lists, otherwise ''."""
    store = _store(source)
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
    return found


def sequences(
    source: ChainFiles | PredictedStore | FeatureStore | StructureFolder,
    keys: Iterable[str],
    known: Mapping[str, str],
    cache: str | None,
    workers: int,
) -> dict[str, str]:
    """The sequence of each chain, '' if it is unknown.

    It is taken from tables (`listed_sequences`), otherwise from the first row of one of the chain's files.
    """
    found = listed_sequences(source, keys, known, cache)
    unknown = [key for key, sequence in found.items() if not sequence]
    if not unknown:
        return found
    with progress("read sequences", len(unknown)) as advance:
        for at, read in LocalProcesses(workers).map(read_sequence, [(source, key) for key in unknown]):
            found[unknown[at]] = "" if isinstance(read, WorkerEndedError) else read
            advance(1)
    return found


def read_sequence(source: ChainFiles | PredictedStore | FeatureStore | StructureFolder, key: str) -> str:
    """The first row of the chain's first alignment, or SEQRES; '' if neither can be read. No more is read than that takes."""
    store = _store(source)
    try:
        if isinstance(store, StructureFolder):
            known = read_header(store.file_of(key)).sequences
            return known.get(split_key(key)[1]) or store.chain(key).sequence
        if isinstance(store, FeatureStore):
            return store.chain(key).sequence
        for path in alignment_files(store.alignment_dir / store.name_of(key)):
            for alignment in parse_alignments([(path, first_record(path))]):
                return decode(alignment.residues[0])
        return store.query(key).letters
    except (UserError, OSError):
        return ""


def _store(
    source: ChainFiles | PredictedStore | FeatureStore | StructureFolder,
) -> ChainFiles | FeatureStore | StructureFolder:
    return source if isinstance(source, StructureFolder) else chains_of(source)
