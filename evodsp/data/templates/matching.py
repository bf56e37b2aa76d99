"""Finding the residues of a hit in a structure.

The hit gives the template's sequence as the search database had it. The structure file may differ: a newer entry, renamed
chains, a file without SEQRES. So the hit is looked up in the structure's sequences, and realigned if it is not found.

Shapes: n residues of a hit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import numpy as np
from Bio.Align import PairwiseAligner
from jaxtyping import Int8, Int64

from evodsp.data.records import Chain
from evodsp.data.sources.structures import TemplateStructures
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import encode

MIN_IDENTITY = 0.9
"""Identical residues of a realigned hit over the length of the shorter sequence must be at least this."""


class TemplateRejection(Enum):
    """The reasons why hits that passed the filters give no templates; the values are for logs."""

    NO_STRUCTURE = "no structure"
    NO_CHAIN = "the structure has neither this protein chain nor another one with its sequence"
    LOW_IDENTITY = "the structure has a different sequence"
    BROKEN_CHAIN = "consecutive residues of the chain are too far apart"
    NO_ATOMS = "too few atoms in the aligned residues"
    SAME_RESIDUES = "a better template has the same residues"


@dataclass(frozen=True)
class Match:
    """The residues of a hit in a chain: their codes, and their indices in the chain, -1 where it lacks them."""

    chain: Chain
    residues: Int8[np.ndarray, " n"]
    index: Int64[np.ndarray, " n"]


def match_hit(hit: TemplateHit, structures: TemplateStructures) -> Match | TemplateRejection:
    """Find the hit's residues in its entry, in AF2's order of attempts:

    letter by letter in the chain that the hit names; letter by letter in the entry's other chains (entries are revised and
    their chains renamed); with X matching any letter; by realignment with the named chain, or with the only chain.

    Raises UserError for a structure file that cannot be read, FileFormatError for a broken one.
    """
    residues = encode(hit.residues)
    named = _named_chain(hit, structures)
    if named is not None and (start := named.sequence.find(hit.residues)) >= 0:
        return Match(named, residues, start + np.arange(len(residues)))
    chains = list(structures.structure(hit.pdb_id).chains.values())
    chains.sort(key=lambda chain: chain.chain_id != hit.chain_id)  # the named chain first; sorting is stable
    for find in (str.find, _find_with_unknowns):
        for chain in chains:
            if (start := find(chain.sequence, hit.residues)) >= 0:
                return Match(chain, residues, start + np.arange(len(residues)))
    if named is None and len(chains) > 1:
        return TemplateRejection.NO_CHAIN
    chain = chains[0]
    index = realign(hit.residues, chain.sequence)
    if index is None:
        return TemplateRejection.NO_CHAIN if named is None else TemplateRejection.LOW_IDENTITY
    # The atoms are taken from the structure, so the residue types are too.
    return Match(chain, encode(chain.sequence)[index], index)


def _named_chain(hit: TemplateHit, structures: TemplateStructures) -> Chain | None:
    """The chain that the hit names, None if the entry does not have it."""
    try:
        return structures.chain(hit.key)
    except UserError as error:
        # Only a missing chain rejects the hit. A broken or unreadable file is the user's mistake.
        if isinstance(error, FileFormatError) or isinstance(error.__cause__, OSError):
            raise
        return None


def _find_with_unknowns(sequence: str, residues: str) -> int:
    """`sequence.find(residues)`, where X on either side matches any letter."""
    found = re.search("".join("." if letter == "X" else f"[{letter}X]" for letter in residues), sequence)
    return -1 if found is None else found.start()


def realign(residues: str, sequence: str) -> Int64[np.ndarray, " n"] | None:
    """Index in `sequence` of each of the n `residues`, -1 where it has none; None if the two are not the same protein.

    The alignment is global; overhanging ends cost nothing. As in AF2 the identical residues must be at least `MIN_IDENTITY`
    of the SHORTER sequence. (Relative to the aligned columns, a few residues at the ends of unrelated sequences would
    pass.) An X matches nothing and costs nothing.
    """
    alignment = _aligner().align(residues, sequence)[0]
    first, second = alignment.indices
    paired = (first >= 0) & (second >= 0)
    index = np.full(len(residues), -1, np.int64)
    index[first[paired]] = second[paired]
    letters, aligned = (np.frombuffer(text.encode(), np.uint8) for text in (residues, sequence))
    identical = (index >= 0) & (letters == aligned[index]) & (letters != ord("X"))
    return index if identical.sum() >= MIN_IDENTITY * min(len(residues), len(sequence)) else None


def _aligner() -> PairwiseAligner:
    """Scores for two versions of one sequence: gaps are long (missing loops), substitutions rare."""
    aligner = PairwiseAligner(mode="global", match_score=2.0, mismatch_score=-1.0)
    aligner.open_internal_gap_score, aligner.extend_internal_gap_score = -4.0, -0.1
    aligner.end_gap_score = 0.0
    aligner.wildcard = "X"
    return aligner
