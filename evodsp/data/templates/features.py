"""The templates of one query as arrays along its residues, made from filtered hits and their structures (AF2 supplement,
sections 1.2.3 and 1.2.9, table 1).

Shapes: T templates, R residues of the query, 37 atom types.

The hit gives the template's sequence as the search database had it. The structure file may differ: a newer entry, renamed
chains, a file without SEQRES. So the hit is looked up in the structure's sequences, and realigned if it is not found.

Shapes: n residues of a hit.

The hit says which residue of the template is aligned with which residue of the query; the structure holds its atoms.

Shapes: R residues of the query, 37 atom types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from Bio.Align import PairwiseAligner
from jaxtyping import Float32, Int8, Int64

from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.sources.msa import check_query
from evodsp.data.sources.structures import TemplateStructures
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import CA, GAP, PSEUDO_BETA_SLOT, encode


@dataclass(frozen=True)
class TemplateFeatures:
    """The templates of one query, best first; T may be 0. Residues without a counterpart are gaps, all masked.

    `names`: chain keys, '<pdbid>_<chain>'. `aatype`: the TEMPLATE's residues, 0..19, X = 20, gap = 21. `positions` are in Å,
    0 where `mask` is 0. `sum_probs`: the search's score, 0 where it gives none (hmmsearch).
    """

    names: tuple[str, ...]
    aatype: Int8[np.ndarray, "T R"]
    positions: Float32[np.ndarray, "T R 37 3"]
    mask: Float32[np.ndarray, "T R 37"]
    sum_probs: Float32[np.ndarray, " T"]

    def __post_init__(self) -> None:
        templates, length = self.aatype.shape
        shapes = (self.positions.shape, self.mask.shape, self.sum_probs.shape, len(self.names))
        if shapes != ((templates, length, 37, 3), (templates, length, 37), (templates,), templates):
            raise ValueError(f"aatype {self.aatype.shape}; positions, mask, sum_probs, names {shapes}")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.aatype.nbytes + self.positions.nbytes + self.mask.nbytes + self.sum_probs.nbytes

    @classmethod
    def none(cls, residues: int) -> TemplateFeatures:
        """No templates, for a query of `residues` residues."""
        return cls(
            names=(),
            aatype=np.zeros((0, residues), np.int8),
            positions=np.zeros((0, residues, 37, 3), np.float32),
            mask=np.zeros((0, residues, 37), np.float32),
            sum_probs=np.zeros(0, np.float32),
        )

    def select(
        self,
        templates: Int64[np.ndarray, " K"] | slice = slice(None),
        residues: Int64[np.ndarray, " r"] | slice = slice(None),
    ) -> TemplateFeatures:
        """The given templates, in the given order, cropped to the given residues of the query."""
        chosen = np.arange(len(self))[templates]
        return TemplateFeatures(
            names=tuple(self.names[number] for number in chosen.tolist()),
            aatype=self.aatype[chosen][:, residues],
            positions=self.positions[chosen][:, residues],
            mask=self.mask[chosen][:, residues],
            sum_probs=self.sum_probs[chosen],
        )

    def processed(self) -> dict[str, np.ndarray]:
        """The model's input under AF2's names, [T, ...], without padding. (AF2 pads T and R with zeros.)"""
        slot = PSEUDO_BETA_SLOT[self.aatype]  # [T, R]
        return {
            "template_aatype": self.aatype.astype(np.int32),
            "template_all_atom_positions": self.positions,
            "template_all_atom_masks": self.mask,
            "template_pseudo_beta": np.take_along_axis(self.positions, slot[..., None, None], -2)[
                ..., 0, :
            ],  # [T, R, 3]
            "template_pseudo_beta_mask": np.take_along_axis(self.mask, slot[..., None], -1)[..., 0],
            "template_mask": np.ones(len(self), np.float32),
            "template_sum_probs": self.sum_probs[:, None],
        }


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


MAX_TEMPLATES = 20
"""Number of templates that AF2 keeps of a search; the model is given up to 4 of them."""
MIN_ATOMS = 5
"""A template with fewer atoms in the aligned residues is not used."""
MAX_CA_DISTANCE = 150.0
"""Limit of the distance in Å between neighbours in the chain. More means a broken file, or parts laid out in a unit cell."""


def template_features(
    query: ProteinSequence, hits: Iterable[TemplateHit], structures: TemplateStructures, limit: int = MAX_TEMPLATES
) -> tuple[TemplateFeatures, dict[TemplateRejection, tuple[str, ...]]]:
    """The first `limit` usable hits by falling `sum_probs` (given order among equals), and the keys of the hits that were
    rejected before the limit was reached, by reason.

    `hits`: already filtered (`filters.select_hits`). Of hits without `sum_probs` (hmmsearch) that have the same residues along
    the query one is taken, as in AlphaFold-Multimer's code: such a search finds each copy of a chain. The query's residues
    without a counterpart are gaps. The names are of the chains whose atoms were taken; they can differ from the hits' names
    (`matching.match_hit`).

    Raises UserError for a negative limit, for a hit of another query, and for a structure file that cannot be read or is
    broken: that is the user's mistake and not counted as a rejection.
    """
    if limit < 0:
        raise UserError(f"the limit of templates is {limit}; give 0 or more")
    kept: list[tuple[TemplateHit, _TemplateRow]] = []
    seen: set[bytes] = set()
    rejected: dict[TemplateRejection, tuple[str, ...]] = {}
    for hit in sorted(hits, key=lambda hit: -(hit.sum_probs or 0.0)):
        if len(kept) == limit:
            break
        _check_query(hit, query)
        found = _template_row(hit, structures, len(query))
        if isinstance(found, _TemplateRow) and hit.sum_probs is None:
            residues = found.aatype.tobytes()
            found = TemplateRejection.SAME_RESIDUES if residues in seen else found
            seen.add(residues)
        if isinstance(found, TemplateRejection):
            rejected[found] = (*rejected.get(found, ()), hit.key)
        else:
            kept.append((hit, found))
    if not kept:
        return TemplateFeatures.none(len(query)), rejected
    rows = [row for _, row in kept]
    templates = TemplateFeatures(
        names=tuple(row.key for row in rows),
        aatype=np.stack([row.aatype for row in rows]),
        positions=np.stack([row.positions for row in rows]),
        mask=np.stack([row.mask for row in rows]),
        sum_probs=np.array([hit.sum_probs or 0.0 for hit, _ in kept], np.float32),
    )
    return templates, rejected


@dataclass(frozen=True)
class _TemplateRow:
    """One template along the query: residues and atoms of chain `key`."""

    key: str
    aatype: Int8[np.ndarray, " R"]
    positions: Float32[np.ndarray, "R 37 3"]
    mask: Float32[np.ndarray, "R 37"]


def _check_query(hit: TemplateHit, query: ProteinSequence) -> None:
    """Raise UserError unless the hit was found with this query."""
    columns = hit.indices_query[hit.indices_query >= 0]
    if columns.size and columns.max() >= len(query):
        raise UserError(
            f"hit '{hit.key}': aligned to residue {columns.max() + 1} of the query, '{query.name}' has {len(query)}; "
            "search again with this query"
        )
    expected = encode(query.letters)[columns]
    searched = encode(hit.query.replace("-", ""))
    check_query(f"hit '{hit.key}': its query", searched, f"'{query.name}'", expected, "search again", columns)


def _template_row(hit: TemplateHit, structures: TemplateStructures, length: int) -> _TemplateRow | TemplateRejection:
    """The hit's atoms along the query of `length` residues, or the reason why there are none."""
    if not structures.has_structure(hit.key):
        return TemplateRejection.NO_STRUCTURE
    match = match_hit(hit, structures)
    if isinstance(match, TemplateRejection):
        return match
    if _has_distant_neighbours(match.chain):
        return TemplateRejection.BROKEN_CHAIN
    column, residue = hit.pairs.T  # in the query, in the hit
    in_chain = match.index[residue]
    column, residue, in_chain = (values[in_chain >= 0] for values in (column, residue, in_chain))
    row = _TemplateRow(
        key=f"{hit.pdb_id}_{match.chain.chain_id}",
        aatype=np.full(length, GAP, np.int8),
        positions=np.zeros((length, 37, 3), np.float32),
        mask=np.zeros((length, 37), np.float32),
    )
    row.aatype[column] = match.residues[residue]
    row.positions[column] = match.chain.positions[in_chain]
    row.mask[column] = match.chain.mask[in_chain]
    return row if row.mask.sum() >= MIN_ATOMS else TemplateRejection.NO_ATOMS


def _has_distant_neighbours(chain: Chain) -> bool:
    """Whether two consecutive residues of the chain, both with CA, are more than `MAX_CA_DISTANCE` apart."""
    present = chain.mask[:, CA] > 0
    distance = np.linalg.norm(np.diff(chain.positions[:, CA], axis=0), axis=-1)
    return bool((distance[present[1:] & present[:-1]] > MAX_CA_DISTANCE).any())
