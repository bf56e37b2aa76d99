"""What reading a chain or a complex as training does shows about it."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from evodsp.data.doctor.leaks import DEFINITION, Overlap, overlap
from evodsp.data.records import Chain
from evodsp.data.samples.distillation import PredictedStore, chains_of
from evodsp.data.similarity.comparison import ComparedChains, ComparedKeys, Letters
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.query_check import QueryMismatch
from evodsp.data.sources.store import Store
from evodsp.errors import UserError
from evodsp.reading.quoting import one_line

State = Literal["good", "mismatching", "unreadable"]
Unit = Literal["chain", "complex"]
"""What a key stands for."""
UNITS: dict[Unit, str] = {"chain": "chains", "complex": "complexes"}
"""The plural of each."""


@dataclass(frozen=True)
class Examined:
    """A chain or complex that was read, or the reason why it could not be read. Unknown numbers of a bad one are 0."""

    key: str
    state: State
    reason: str = ""
    sequences: tuple[str, ...] = ()
    """The sequences of its chains."""
    resolution: float = math.nan
    """Its resolution in Å; 0 if the method has none."""
    release_date: str = ""
    depth: int = 0
    """Number of different sequences in the merged MSA; of a complex in those of all chains."""
    packed_bytes: int = 0
    """Its estimated size in a store: the rows and coordinates, packed by zlib."""
    seconds: float = 0.0
    """The time that reading and merging took."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how its structure was read."""
    pairing_notes: tuple[str, ...] = ()
    """Remarks for the user on its rows for pairing."""


@runtime_checkable
class Examiner(Protocol):
    """Looks at the keys of one kind, chains or complexes. Processes can be sent it."""

    @property
    def store(self) -> Store:
        """The store of the keys."""

    @property
    def unit(self) -> Unit:
        """What a key stands for."""

    @property
    def comparison(self) -> ComparedKeys:
        """How keys are compared."""

    @property
    def definition(self) -> str:
        """What `overlap` takes for alike, for reports."""

    @property
    def place(self) -> str:
        """The folders and the index, or the store, that it reads, for reports."""

    def examine(self, key: str) -> Examined:
        """Read one. An error that the user can repair is in the result; any other is raised."""

    def overlap(self, sets: tuple[str, str], first: Letters, second: Letters) -> Overlap:
        """Compare two sets."""

    def differs_from_index(self, key: str) -> bool:
        """Whether the files of a key are others than the index says."""


def read_bad(key: str, error: UserError) -> Examined:
    """A chain or complex that could not be read."""
    state: State = "mismatching" if isinstance(error, QueryMismatch) else "unreadable"
    return Examined(key, state, one_line(str(error)))


def packed_size(msa: MsaFeatures, chain: Chain) -> int:
    """The estimated bytes of a chain in a store."""
    rows = msa.msa.astype(np.uint8).tobytes()
    return len(zlib.compress(rows, 1)) + len(zlib.compress(chain.positions.tobytes(), 1))


@dataclass(frozen=True)
class ChainExaminer:
    """Looks at single chains. `cache`: OpenFold's chain_data_cache.json, which has sequences."""

    source: ChainFiles | PredictedStore | FeatureStore
    cache: str | None = None
    unit: Unit = "chain"
    definition: str = DEFINITION

    @property
    def store(self) -> ChainFiles | FeatureStore:
        """See `Examiner`."""
        return chains_of(self.source)

    @property
    def comparison(self) -> ComparedChains:
        """See `Examiner`."""
        return ComparedChains(self.source, self.cache)

    @property
    def place(self) -> str:
        """See `Examiner`."""
        store = self.store
        if isinstance(store, FeatureStore):
            return store.address
        index = "no index" if store.index is None else store.index.path
        return f"{store.alignment_dir}, {store.structure_dir}, {index}"

    def examine(self, key: str) -> Examined:
        """See `Examiner`."""
        begun = time.perf_counter()
        try:
            parsed = self.source.parsed(key, with_hits=False)
        except UserError as error:
            return read_bad(key, error)
        seconds = time.perf_counter() - begun
        chain, msa = parsed.chain, parsed.msa
        return Examined(
            key,
            "good",
            sequences=(chain.sequence,),
            resolution=chain.resolution or 0.0,
            release_date="" if chain.release_date is None else chain.release_date.isoformat(),
            depth=msa.num_alignments,
            packed_bytes=packed_size(msa, chain),
            seconds=seconds,
            notes=chain.notes,
        )

    def overlap(self, sets: tuple[str, str], first: Letters, second: Letters) -> Overlap:
        """See `Examiner`."""
        return overlap(sets, *({key: "".join(letters) for key, letters in part.items()} for part in (first, second)))

    def differs_from_index(self, key: str) -> bool:
        """See `Examiner`."""
        return isinstance(self.store, ChainFiles) and self.store.differs_from_index(key)
