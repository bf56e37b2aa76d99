"""The joined content of one chain's files: its structure, its MSA and the hits of its template searches.

Samples are made of it (`evodsp.data.samples.dataset`), wherever it comes from: files that are parsed now (`parse_chain`), or
a feature store in which it was kept (`evodsp.data.sources.feature_store`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evodsp.data.records import Alignment, Chain, ProteinSequence
from evodsp.data.sources.missing_residues import with_missing_residues
from evodsp.data.sources.msa import MsaFeatures, merge_alignments, query_only
from evodsp.data.sources.query_check import QueryMismatch, matched_alignments, matched_hits
from evodsp.data.templates.hits import TemplateHit
from evodsp.geometry.alphabet import encode


@dataclass(frozen=True)
class ParsedChain:
    """One chain. `msa`: its merged alignments. `hits`: the hits of its template searches, in the order of the files; empty if
    they were not asked for."""

    chain: Chain
    msa: MsaFeatures
    hits: tuple[TemplateHit, ...] = ()


@runtime_checkable
class ChainSource(Protocol):
    """A source of chains for samples; `evodsp.data.sources.chain_files.ChainFiles` reads them from files."""

    def parsed(self, key: str, with_hits: bool) -> ParsedChain:
        """The chain. Raises UserError if it cannot be read, or if its parts have different sequences."""


@runtime_checkable
class ChainStore(Protocol):
    """Alignments, structures and template hits by chain key; `evodsp.data.sources.chain_files.ChainFiles` implements it."""

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        """The alignments of the chain, in the order in which they are merged. `query`: the chain's sequence."""

    def chain(self, key: str) -> Chain:
        """The structure of the chain."""

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        """The hits of the chain's template searches."""


def _alignments(store: ChainStore, key: str, chain: Chain) -> list[Alignment]:
    query = chain.query(key)
    return matched_alignments(store.alignments(key, query), query)


def parse_chain(store: ChainStore, key: str, with_hits: bool) -> ParsedChain:
    """Read the chain `key` of `store`, and its template hits if they are wanted. Without alignments the MSA is the query alone.

    Of a chain of which the file lists no sequence, the residues that are missing are those of the alignments' first row.

    Raises UserError if a part is missing or broken, or if its structure and its alignments have different sequences.
    """
    chain = store.chain(key)
    try:
        alignments = _alignments(store, key, chain)
    except QueryMismatch as mismatch:
        if chain.breaks is None or mismatch.found is None:
            raise
        if (whole := with_missing_residues(chain, mismatch.found)) is None:
            found = "the structure file lists no sequence, and its chain is not this row with some residues missing"
            raise QueryMismatch(f"{mismatch} ({found})") from mismatch
        chain, alignments = whole, _alignments(store, key, whole)
    query = chain.query(key)
    msa = merge_alignments(alignments) if alignments else query_only(encode(chain.sequence))
    return ParsedChain(chain, msa, matched_hits(store.template_hits(key, query), query) if with_hits else ())
