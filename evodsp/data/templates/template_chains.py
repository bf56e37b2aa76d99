"""Templates without a search program: chains that the user names, compared with the query by alignment.

A family of a few hundred structures is its own template database. Every query is aligned with all of them, the best alignments
are its hits, and no date limits them, because the user's list does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evodsp.data.formats.mmcif import read_header
from evodsp.data.records import ProteinSequence
from evodsp.data.similarity.pairs import MOST_CELLS, Words, identity, paired, plain, score
from evodsp.data.sources.layout import split_key
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError

MOST_HITS = 20
"""Number of hits of a query, as many as AF2 keeps templates of a search."""
MOST_ALIGNED = 1000
"""Sequences that a query is aligned with: of a larger list those that share most words of four residues with it."""


@dataclass(frozen=True)
class TemplateChains:
    """Chains whose structures serve as templates.

    `sequences`: by chain key, in the user's order; of chains with equal sequences the first serves. `max_identity`: a query
    that is one of these chains gets no hit with a larger share of identical residues, 0 to 1, of the shorter of the two
    sequences. Otherwise near copies of training chains would teach a model to copy, and held-out chains have none.
    """

    sequences: Mapping[str, str]
    max_identity: float

    def hits(self, query: ProteinSequence) -> list[TemplateHit]:
        """The chains of other entries by falling alignment score, at most `MOST_HITS`, each with its alignment."""
        entry, limit = _entry(query.name), self.max_identity if self.lists(query.name) else 1.0
        letters = plain(query.letters)
        candidates = [
            (sequence, owner)
            for sequence in self._likeliest(letters)
            if (owner := next((key for key in self._owners[sequence] if _entry(key) != entry), None)) is not None
        ]
        ranked = sorted(candidates, key=lambda one: -score(letters, one[0]))
        found: list[TemplateHit] = []
        for sequence, owner in ranked:
            if len(found) == MOST_HITS:
                break
            if limit < 1.0 and identity(letters, sequence) > limit:
                continue
            if (hit := _hit(len(found) + 1, query, letters, owner, sequence)) is not None:
                found.append(hit)
        return found

    def lists(self, name: str) -> bool:
        """Whether a chain is one of these. An entry's name may be that of its only chain."""
        return name in self.sequences or name in self._entries

    def _likeliest(self, letters: str) -> list[str]:
        """The different sequences to align with, of those that are not too long for it."""
        sequences = [sequence for sequence in self._owners if len(sequence) * len(letters) <= MOST_CELLS]
        if len(self._owners) <= MOST_ALIGNED:
            return sequences
        shared = dict(zip(self._owners, self._words.shared_with(letters)[1].tolist(), strict=True))
        return sorted(sequences, key=lambda sequence: -shared[sequence])[:MOST_ALIGNED]

    @cached_property
    def _entries(self) -> frozenset[str]:
        return frozenset(split_key(key)[0] for key in self.sequences)

    @cached_property
    def _owners(self) -> dict[str, list[str]]:
        """The chains of each different sequence."""
        owners: dict[str, list[str]] = {}
        for key, sequence in self.sequences.items():
            if sequence:
                owners.setdefault(plain(sequence), []).append(key)
        return owners

    @cached_property
    def _words(self) -> Words:
        return Words(list(self._owners))

    def __getstate__(self) -> dict[str, object]:
        """Worker processes list sequences and words themselves: sending them takes longer."""
        return {"sequences": self.sequences, "max_identity": self.max_identity}


def listed_chains(structures: StructureFolder, names: Iterable[str]) -> dict[str, str]:
    """The chains of a list in which an entry stands for all of its chains, and their sequences.

    The sequence of a name that is a chain's, or an entry's that cannot be read, is ''.
    """
    found: dict[str, str] = {}
    for name in names:
        chain_id = split_key(name)[1]
        own = {} if chain_id else _sequences_of(structures, name)
        found |= {f"{name}_{one}": letters for one, letters in own.items()} if own else {name: ""}
    return found


def _sequences_of(structures: StructureFolder, entry: str) -> dict[str, str]:
    """The sequence of each chain of an entry; none if its file is missing or broken."""
    try:
        return read_header(structures.file_of(entry)).sequences
    except (UserError, OSError):
        return {}


def _entry(key: str) -> str:
    """The entry in a chain key, or in the name of a query, which may be any text."""
    return (key.rpartition("_")[0] or key).lower()


def _hit(rank: int, query: ProteinSequence, letters: str, owner: str, sequence: str) -> TemplateHit | None:
    """The chain's alignment with the query as a hit; None if it pairs no residues."""
    pairs = paired(letters, sequence)
    if not len(pairs):
        return None
    indices = np.full(len(letters), -1, np.int32)
    indices[pairs[:, 0]] = pairs[:, 1]
    entry, chain_id = split_key(owner)
    return TemplateHit(
        index=rank,
        name=owner,
        pdb_id=entry,
        chain_id=chain_id,
        aligned_columns=len(pairs),
        sum_probs=None,
        query=query.letters,
        hit_sequence=sequence[pairs[0, 1] : pairs[-1, 1] + 1],
        indices_query=np.arange(len(letters), dtype=np.int32),
        indices_hit=indices,
    )
