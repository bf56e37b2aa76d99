"""The joined content of the files of a record: the chains of an assembly, their MSAs, and the hits of their template
searches.

A single chain is an assembly of one. Samples are made of such records (`evodsp.data.samples`), wherever they come from:
files that are parsed now (`joined_parts`), or a feature store in which they were kept (`evodsp.data.sources.feature_store`).

Residues that a structure file without a sequence (no SEQRES) does not have are found by a sequence that has them. A
refinement program writes the residues that were seen, and no sequence. The search for the alignment, or the prediction, was
made with all residues of the protein. The pieces between the breaks of the chain are found in that sequence, in their order;
what lies before, between and behind them is missing.

Shapes: L residues of the chain, M of the whole sequence, P of a piece, n places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int8, Int64

from evodsp.data.complexes.pairing import PairingMsa, PairingRule, rows_for_pairing, say_query_paired
from evodsp.data.records import Alignment, Assembly, Chain, Kind, ProteinSequence
from evodsp.data.sources.msa import MsaFeatures, QueryMismatch, check_query, matched_alignments, matched_hits, msa_of
from evodsp.data.templates.hits import TemplateHit
from evodsp.geometry.residues import UNKNOWN, decode, encode


def with_missing_residues(chain: Chain, whole: Int8[np.ndarray, " M"]) -> Chain | None:
    """The chain with the residues of `whole` (codes), those without coordinates masked.

    None if the file lists the chain's sequence, so there is nothing to be found; if `whole` has gaps; or if the pieces between
    the breaks do not lie in it in exactly one way. X on either side matches any letter.
    """
    if chain.breaks is None or (whole > UNKNOWN).any():
        return None
    pieces = np.split(encode(chain.sequence), [after + 1 for after in chain.breaks])
    first = _placed(pieces, whole)
    # From the end, everything mirrored: the last way. If it is the first way too, there is no other.
    last = _placed([piece[::-1] for piece in pieces[::-1]], whole[::-1])
    if first is None or last is None:
        return None
    ends = [len(whole) - start for start in last[::-1]]
    if any(start + len(piece) != end for start, piece, end in zip(first, pieces, ends, strict=True)):
        return None
    place = np.concatenate([np.arange(len(piece)) + start for start, piece in zip(first, pieces, strict=True)])
    return _spread(chain, place, decode(whole))


def _placed(pieces: Sequence[Int8[np.ndarray, " _"]], whole: Int8[np.ndarray, " M"]) -> list[int] | None:
    """A start for each piece, behind the piece before it and as early as possible; None if one finds no place."""
    found, end = [], 0
    for piece in pieces:
        starts = _starts(piece, whole[end:])
        if not len(starts):
            return None
        found.append(end + int(starts[0]))
        end = found[-1] + len(piece)
    return found


def _starts(piece: Int8[np.ndarray, " P"], whole: Int8[np.ndarray, " M"]) -> Int64[np.ndarray, " n"]:
    """Positions of the piece in the whole sequence, in ascending order."""
    at = np.arange(max(0, len(whole) - len(piece) + 1))
    for place, code in enumerate(piece):  # all windows at once would be as large as the product of the lengths
        if code != UNKNOWN:
            letters = whole[at + place]
            at = at[(letters == code) | (letters == UNKNOWN)]
    return at


def _spread(chain: Chain, place: Int64[np.ndarray, " L"], letters: str) -> Chain:
    """The chain with residue i at `place[i]` of `letters`, and residues without coordinates at the others."""
    length = len(letters)
    sequence, codes = list(letters), [""] * length
    for at, letter, code in zip(place.tolist(), chain.sequence, chain.insertion_code, strict=True):
        sequence[at], codes[at] = letter, code

    def at_place(values: np.ndarray) -> np.ndarray:
        spread = np.zeros((length, *values.shape[1:]), values.dtype)
        spread[place] = values
        return spread

    return replace(
        chain,
        sequence="".join(sequence),
        residue_number=at_place(chain.residue_number),
        insertion_code=tuple(codes),
        is_missing=~at_place(~chain.is_missing),
        positions=at_place(chain.positions),
        mask=at_place(chain.mask),
        alternatives=tuple((int(place[index]), several) for index, several in chain.alternatives),
        breaks=None,
    )


@dataclass(frozen=True)
class ChainMsas:
    """A chain of a complex: its MSA, and the MSA whose rows are paired with those of other chains.

    Raises UserError if the first row of one of them is not the chain's sequence; X matches any letter.
    """

    query: ProteinSequence
    msa: MsaFeatures
    pairing: PairingMsa | None = None
    """None: only the query is paired."""

    def __post_init__(self) -> None:
        name, sequence = self.query.name, encode(self.query.letters)
        firsts = {"MSA": self.msa.msa[0]} | ({} if self.pairing is None else {"MSA for pairing": self.pairing.msa[0]})
        for what, first in firsts.items():
            where = f"chain '{name}': the first row of its {what}"
            check_query(where, first, "its sequence", sequence, "search again with this sequence")

    def to_pair(self) -> PairingMsa:
        """The rows for pairing: the query alone if there are no others."""
        if self.pairing is not None:
            return self.pairing
        return PairingMsa(self.msa.msa[:1], self.msa.deletions[:1], ("",))


@dataclass(frozen=True)
class Parsed:
    """An assembly and the MSAs of its chains, in the same order.

    `hits`: by sequence, the hits of its template searches, in the order of the files; empty if they were not asked for.
    """

    assembly: Assembly
    chains: tuple[ChainMsas, ...]
    hits: Mapping[str, tuple[TemplateHit, ...]] = field(default_factory=dict)

    @property
    def of_each_sequence(self) -> dict[str, ChainMsas]:
        """The first chain of each sequence, in their order."""
        first: dict[str, ChainMsas] = {}
        for own in self.chains:
            first.setdefault(own.query.letters, own)
        return first


@runtime_checkable
class RecordSource(Protocol):
    """A source of records for samples: files, or a feature store."""

    @property
    def kind(self) -> Kind:
        """Kind of the keys."""

    def parsed(self, key: str, with_hits: bool = False) -> Parsed:
        """The record, with the hits of template searches if they are wanted. Raises UserError if a part cannot be read, or if
        its parts have different sequences."""


@runtime_checkable
class Searches(Protocol):
    """Alignments and template hits by chain key; `evodsp.data.sources.chain_files.ChainFiles` reads them from files."""

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        """The alignments of the chain, in the order in which they are merged. `query`: the chain's sequence."""

    def alignments_for_pairing(self, key: str, query: ProteinSequence, reads: Callable[[str], bool]) -> list[Alignment]:
        """The alignments whose rows are paired with those of other chains; `reads` tells them by the names of their files."""

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        """The hits of the chain's template searches."""


@dataclass(frozen=True)
class Searched:
    """A chain of an assembly, and the key under which its searches are found."""

    query: ProteinSequence
    owner: str


def joined_parts(
    searches: Searches,
    assembly: Assembly,
    searched: Sequence[Searched],
    with_hits: bool,
    rule: PairingRule | None = None,
    warn: Callable[[str, str], None] = say_query_paired,
) -> Parsed:
    """The record of an assembly. `searched`: for each of its sequences one of its chains. `rule`: the one by which rows are
    paired; None: no rows are. `warn`: is told of chains without rows for pairing, and what such rows are.

    Without alignments the MSA is the query alone. Of chains of which the file lists no sequence, the residues that are missing
    are those of the alignments' first row. Raises UserError if a part is missing or broken, or if a structure and its
    alignments have different sequences.
    """
    chains = list(assembly.chains)
    msas: dict[str, ChainMsas] = {}
    hits: dict[str, tuple[TemplateHit, ...]] = {}
    for one in searched:
        places = [place for place, chain in enumerate(assembly.chains) if chain.sequence == one.query.letters]
        own, query, found = _completed([chains[place] for place in places], searches, one)
        for place, chain in zip(places, own, strict=True):
            chains[place] = chain
        pairing = None
        if rule is not None:
            rows = matched_alignments(searches.alignments_for_pairing(one.owner, query, rule.reads), query)
            pairing = rows_for_pairing(rows, rule, one.owner, warn)
        msas.setdefault(query.letters, ChainMsas(query, msa_of(found, query), pairing))
        if with_hits:
            hits.setdefault(query.letters, matched_hits(searches.template_hits(one.owner, query), query))
    named = zip(assembly.names, chains, strict=True)
    of_chains = (replace(msas[chain.sequence], query=ProteinSequence(name, chain.sequence)) for name, chain in named)
    return Parsed(replace(assembly, chains=tuple(chains)), tuple(of_chains), hits)


def parse_chain(searches: Searches, key: str, chain: Chain, with_hits: bool) -> Parsed:
    """The record of a single chain, whose name in it is its key. Raises UserError as `joined_parts` does."""
    return joined_parts(searches, Assembly.of_chain(key, chain), [Searched(chain.query(key), key)], with_hits)


def _completed(
    chains: list[Chain], searches: Searches, one: Searched
) -> tuple[list[Chain], ProteinSequence, list[Alignment]]:
    """Chains of one sequence, with the residues that only their alignments know; their sequence, and these alignments."""

    def alignments(query: ProteinSequence) -> list[Alignment]:
        return matched_alignments(searches.alignments(one.owner, query), query)

    try:
        return chains, one.query, alignments(one.query)
    except QueryMismatch as mismatch:
        if mismatch.found is None or any(chain.breaks is None for chain in chains):
            raise
        whole = [filled for chain in chains if (filled := with_missing_residues(chain, mismatch.found)) is not None]
        if len(whole) < len(chains):
            found = "the structure file lists no sequence, and its chain is not this row with some residues missing"
            raise QueryMismatch(f"{mismatch} ({found})") from mismatch
    query = ProteinSequence(one.query.name, whole[0].sequence)  # without SEQRES no residue has several monomers
    return whole, query, alignments(query)
