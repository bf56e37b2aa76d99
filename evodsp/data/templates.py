"""Template hits and their structures into template features (AF2 supplement, sections 1.2.3 and 1.2.9).

The hit says which residue of the query goes with which residue of the template; the structure file says where that residue's
atoms are. Between the two the template's sequence may differ (a newer entry, a file without SEQRES), so the hit is first
looked for in the structure's sequence, letter by letter, and realigned if it is not there.

Shapes: T templates, R residues of the query, n residues of a hit, L residues of a chain, P paired columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from Bio.Align import PairwiseAligner
from jaxtyping import Float32, Int8, Int64

from evodsp.data.records import Chain, ProteinSequence, Structure
from evodsp.data.template_hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.alphabet import GAP, RESTYPE_ORDER, RESTYPES, UNKNOWN, decode, encode
from evodsp.geometry.residues import CA, CB

MAX_TEMPLATES = 20
"""Templates that AF2 keeps of a search; the model is given up to 4 of them."""
MIN_IDENTITY = 0.9
"""Identical residues of a realigned hit over the length of the shorter sequence."""
MIN_ATOMS = 5
"""A template with fewer atoms in the aligned residues says nothing."""
MAX_CA_DISTANCE = 150.0
"""Between neighbours in the chain, in Å; more means that the file is wrong, or that its parts are laid out in a unit cell."""

HHBLITS_LETTERS = "".join(sorted(RESTYPES)) + "X-"
"""Order of the 22 letters of AF2's raw `template_aatype` (not that of the processed one, which is our own)."""
_HHBLITS_TO_OURS = encode(HHBLITS_LETTERS)
_OURS_TO_HHBLITS = np.argsort(_HHBLITS_TO_OURS)


@dataclass(frozen=True)
class TemplateFeatures:
    """The templates of one query, best first; T may be 0. Residues without a counterpart are gaps, all masked.

    `names`: chain keys, '<pdbid>_<chain>'. `aatype`: the TEMPLATE's residues, 0..19, X = 20, gap = 21. `positions` in Å, 0
    where `mask` is 0. `sum_probs`: the search's score, 0 where it has none (hmmsearch).
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

    @cached_property
    def sequences(self) -> tuple[str, ...]:
        """One-letter codes of each template along the query, '-' for a gap."""
        return tuple(decode(row) for row in self.aatype)

    @classmethod
    def none(cls, residues: int) -> TemplateFeatures:
        """No template at all, for a query of that many residues."""
        row = _Row.gaps(residues)
        return cls((), row.aatype[None][:0], row.positions[None][:0], row.mask[None][:0], np.zeros(0, np.float32))

    def select(
        self, templates: Int64[np.ndarray, " K"] | slice = slice(None), residues: slice = slice(None)
    ) -> TemplateFeatures:
        """The given templates, in the given order, cropped to the given residues of the query."""
        chosen = np.arange(len(self))[templates]
        return TemplateFeatures(
            names=tuple(self.names[number] for number in chosen.tolist()),
            aatype=self.aatype[chosen, residues],
            positions=self.positions[chosen, residues],
            mask=self.mask[chosen, residues],
            sum_probs=self.sum_probs[chosen],
        )

    def raw(self) -> dict[str, np.ndarray]:
        """AF2's raw features, under its names: `template_aatype` is one-hot [T, R, 22] in the order `HHBLITS_LETTERS`,
        `template_sum_probs` is [T, 1], sequences and domain names are bytes."""
        one_hot = np.eye(len(HHBLITS_LETTERS), dtype=np.float32)
        return {
            "template_aatype": one_hot[_OURS_TO_HHBLITS[self.aatype]],
            "template_all_atom_positions": self.positions,
            "template_all_atom_masks": self.mask,
            "template_sequence": np.array([row.encode() for row in self.sequences], dtype=np.bytes_),
            "template_domain_names": np.array([name.encode() for name in self.names], dtype=np.bytes_),
            "template_sum_probs": self.sum_probs[:, None],
        }

    @classmethod
    def from_raw(cls, features: Mapping[str, np.ndarray]) -> TemplateFeatures:
        """The inverse of `raw`. Raises UserError if an array is missing or its shape does not go with the others."""
        needed = ("aatype", "all_atom_positions", "all_atom_masks", "domain_names", "sum_probs")
        if missing := [f"template_{name}" for name in needed if f"template_{name}" not in features]:
            raise UserError(f"raw template features lack {', '.join(missing)}; write all of them")
        one_hot, positions, mask, names, scores = (np.asarray(features[f"template_{name}"]) for name in needed)
        expected = (*one_hot.shape[:2], 22), (*one_hot.shape[:2], 37, 3), (*one_hot.shape[:2], 37), (len(one_hot),)
        found = one_hot.shape, positions.shape, mask.shape, names.shape
        if found != expected or scores.size != len(one_hot):
            raise UserError(
                f"raw template features: aatype, all_atom_positions, all_atom_masks and domain_names are {found}, expected "
                f"{expected}, with {len(one_hot)} sum_probs (found {scores.size}); make them again"
            )
        return cls(
            names=tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names.tolist()),
            aatype=_HHBLITS_TO_OURS[one_hot.argmax(-1)],
            positions=positions.astype(np.float32),
            mask=mask.astype(np.float32),
            sum_probs=scores.reshape(-1).astype(np.float32),
        )

    def processed(self) -> dict[str, np.ndarray]:
        """The model's input, under AF2's names: [T, ...] without padding. AF2 pads T and R with zeros, `template_mask` too."""
        beta, beta_mask = pseudo_beta(self.aatype, self.positions, self.mask)
        return {
            "template_aatype": self.aatype.astype(np.int32),
            "template_all_atom_positions": self.positions,
            "template_all_atom_masks": self.mask,
            "template_pseudo_beta": beta,
            "template_pseudo_beta_mask": beta_mask,
            "template_mask": np.ones(len(self), np.float32),
            "template_sum_probs": self.sum_probs[:, None],
        }


def pseudo_beta(
    aatype: Int8[np.ndarray, "*b"], positions: Float32[np.ndarray, "*b 37 3"], mask: Float32[np.ndarray, "*b 37"]
) -> tuple[Float32[np.ndarray, "*b 3"], Float32[np.ndarray, "*b"]]:
    """CB position in Å (CA for glycine) and whether that atom is there."""
    is_glycine = aatype == RESTYPE_ORDER["G"]
    beta = np.where(is_glycine[..., None], positions[..., CA, :], positions[..., CB, :])
    return beta, np.where(is_glycine, mask[..., CA], mask[..., CB])


class TemplateRejection(Enum):
    """Why a selected hit gives no template; the value is for logs."""

    NO_STRUCTURE = "no structure"
    NO_CHAIN = "no such protein chain in the structure, nor another one of that sequence"
    LOW_IDENTITY = "the structure's sequence is another one"
    BROKEN_CHAIN = "neighbours of the chain lie too far apart"
    NO_ATOMS = "too few atoms in the aligned residues"


@runtime_checkable
class ChainSource(Protocol):
    """Where template structures come from; `evodsp.data.store.FeatureStore` is one."""

    def has_structure(self, key: str) -> bool:
        """Whether there is a file for the chain's entry."""

    def chain(self, key: str) -> Chain:
        """The chain; UserError if the entry does not have it, FileFormatError if the file is broken."""

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of the entry; FileFormatError if the file is broken."""


def template_features(
    query: ProteinSequence, hits: Iterable[TemplateHit], structures: ChainSource, limit: int = MAX_TEMPLATES
) -> tuple[TemplateFeatures, dict[TemplateRejection, tuple[str, ...]]]:
    """The first `limit` usable hits by falling `sum_probs` (given order among equals), and the keys of those rejected
    before the limit was reached, by reason.

    `hits`: already filtered (`template_hits.select_hits`). A residue of the query is a gap where the hit has none.
    Raises UserError for a negative limit and a hit whose query is not `query`; an unreadable or broken structure file is
    the user's mistake too, and is not counted as a rejection. The names are of the chains whose atoms were taken, which
    need not be those of the hits (`_locate`).
    """
    if limit < 0:
        raise UserError(f"the limit of templates is {limit}; give 0 or more")
    wanted = encode(query.letters)
    kept: list[tuple[TemplateHit, _Row]] = []
    rejected: dict[TemplateRejection, tuple[str, ...]] = {}
    for hit in sorted(hits, key=_falling_score):
        if len(kept) == limit:
            break
        _check_query(hit, query, wanted)
        found = _template_row(hit, structures, len(query))
        if isinstance(found, TemplateRejection):
            rejected[found] = (*rejected.get(found, ()), hit.key)
        else:
            kept.append((hit, found))
    rows = [row for _, row in kept]
    templates = (
        TemplateFeatures(
            names=tuple(row.key for row in rows),
            aatype=np.stack([row.aatype for row in rows]),
            positions=np.stack([row.positions for row in rows]),
            mask=np.stack([row.mask for row in rows]),
            sum_probs=np.array([hit.sum_probs or 0.0 for hit, _ in kept], np.float32),
        )
        if rows
        else TemplateFeatures.none(len(query))
    )
    return templates, rejected


def rejection_summary(rejected: Mapping[TemplateRejection, tuple[str, ...]]) -> str:
    """One line for the log: count, reason and keys, such as '1 hit: no structure (1hf9_B)'. Empty if there are none."""
    return "; ".join(
        f"{len(keys)} hit{'s' if len(keys) > 1 else ''}: {reason.value} ({', '.join(keys)})"
        for reason, keys in rejected.items()
    )


@dataclass(frozen=True)
class _Row:
    """One template along the query: the atoms of chain `key`."""

    key: str
    aatype: Int8[np.ndarray, " R"]
    positions: Float32[np.ndarray, "R 37 3"]
    mask: Float32[np.ndarray, "R 37"]

    @classmethod
    def gaps(cls, length: int, key: str = "") -> _Row:
        positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
        return cls(key, np.full(length, GAP, np.int8), positions, mask)


def _falling_score(hit: TemplateHit) -> float:
    return -(hit.sum_probs or 0.0)


def _check_query(hit: TemplateHit, query: ProteinSequence, wanted: Int8[np.ndarray, " R"]) -> None:
    """The query that was searched must be this one; X on either side matches anything."""
    columns = hit.indices_query[hit.indices_query >= 0]
    mend = "search again with this query"
    if columns.size and columns.max() >= len(wanted):
        raise UserError(
            f"hit '{hit.key}': aligned to residue {columns.max() + 1} of the query, '{query.name}' has {len(wanted)}; {mend}"
        )
    letters = encode(hit.query.replace("-", ""))
    differs = np.flatnonzero((letters != wanted[columns]) & (letters != UNKNOWN) & (wanted[columns] != UNKNOWN))
    if differs.size:
        at = columns[differs[0]]
        raise UserError(
            f"hit '{hit.key}': its query has '{decode(letters[differs[:1]])}' at position {at + 1}, '{query.name}' has "
            f"'{query.letters[at]}' ({differs.size} positions differ); {mend}"
        )


def _template_row(hit: TemplateHit, structures: ChainSource, length: int) -> _Row | TemplateRejection:
    """The hit's atoms along the query of `length` residues, or why it has none."""
    if not structures.has_structure(hit.key):
        return TemplateRejection.NO_STRUCTURE
    located = _locate(hit, structures)
    if isinstance(located, TemplateRejection):
        return located
    chain, letters, residue = located
    if _has_distant_neighbours(chain):
        return TemplateRejection.BROKEN_CHAIN
    column, own = hit.pairs.T
    there = residue[own] >= 0
    column, own = column[there], own[there]
    row = _Row.gaps(length, f"{hit.pdb_id}_{chain.chain_id}")
    row.aatype[column] = letters[own]
    row.positions[column] = chain.positions[residue[own]]
    row.mask[column] = chain.mask[residue[own]]
    return row if row.mask.sum() >= MIN_ATOMS else TemplateRejection.NO_ATOMS


_Located = tuple[Chain, Int8[np.ndarray, " n"], Int64[np.ndarray, " n"]]


def _locate(hit: TemplateHit, structures: ChainSource) -> _Located | TemplateRejection:
    """(chain, letter and index in the chain of each of the hit's n residues, the index -1 where it has none), or why not.

    In AF2's order: the hit's residues letter by letter in the chain it names, then in the entry's other chains (entries
    are revised and their chains renamed), then with X matching anything, last by realignment with the named chain, or
    with the entry's only one.
    """
    letters = encode(hit.residues)
    named = _named_chain(hit, structures)
    if named is not None and (start := named.sequence.find(hit.residues)) >= 0:
        return named, letters, start + np.arange(len(letters))
    chains = list(structures.structure(hit.pdb_id).chains.values())
    # The named chain comes first: sorting is stable.
    chains.sort(key=lambda chain: chain.chain_id != hit.chain_id)
    for find in (str.find, _find_with_unknowns):
        for chain in chains:
            if (start := find(chain.sequence, hit.residues)) >= 0:
                return chain, letters, start + np.arange(len(letters))
    chain = chains[0]
    if named is None and len(chains) > 1:
        return TemplateRejection.NO_CHAIN
    residue = realign(hit.residues, chain.sequence)
    if residue is None:
        return TemplateRejection.NO_CHAIN if named is None else TemplateRejection.LOW_IDENTITY
    # The atoms are the structure's, so the letters are too.
    return chain, encode(chain.sequence)[residue], residue


def _named_chain(hit: TemplateHit, structures: ChainSource) -> Chain | None:
    """The chain that the hit names, None if its entry has none such."""
    try:
        return structures.chain(hit.key)
    except UserError as error:
        # Only a chain that is not there is the hit's fault. A broken file, or one that cannot be opened, is not.
        if isinstance(error, FileFormatError) or isinstance(error.__cause__, OSError):
            raise
        return None


def find_residues(residues: str, sequence: str) -> int | None:
    """Where `residues` first occurs in `sequence`: letter by letter, else with X on either side matching anything."""
    if (start := sequence.find(residues)) >= 0:
        return start
    return None if (start := _find_with_unknowns(sequence, residues)) < 0 else start


def _find_with_unknowns(sequence: str, residues: str) -> int:
    """As `sequence.find(residues)`, but X on either side matches anything."""
    found = re.search("".join("." if letter == "X" else f"[{letter}X]" for letter in residues), sequence)
    return -1 if found is None else found.start()


def realign(residues: str, sequence: str) -> Int64[np.ndarray, " n"] | None:
    """Index in `sequence` of each of the n `residues`, -1 where it has none; None if the two are not the same protein.

    Both lie whole in the alignment, overhanging ends cost nothing. As in AF2 the identical residues must be at least
    `MIN_IDENTITY` of the SHORTER sequence. That is never less strict than the identity over the aligned columns, which a
    few residues at the ends of unrelated sequences would pass. An X matches nothing and costs nothing.
    """
    alignment = _aligner().align(residues, sequence)[0]
    own, other = alignment.indices
    paired = (own >= 0) & (other >= 0)
    index = np.full(len(residues), -1, np.int64)
    index[own[paired]] = other[paired]
    letters, theirs = (np.frombuffer(text.encode(), np.uint8) for text in (residues, sequence))
    identical = (index >= 0) & (letters == theirs[index]) & (letters != ord("X"))
    return index if identical.sum() >= MIN_IDENTITY * min(len(residues), len(sequence)) else None


def _aligner() -> PairwiseAligner:
    """Scores for two versions of one sequence: gaps are long (missing loops), exchanges rare."""
    aligner = PairwiseAligner(mode="global", match_score=2.0, mismatch_score=-1.0)
    aligner.open_internal_gap_score, aligner.extend_internal_gap_score = -4.0, -0.1
    aligner.end_gap_score = 0.0
    aligner.wildcard = "X"
    return aligner


def _has_distant_neighbours(chain: Chain) -> bool:
    """Whether two successive residues of the chain, both with CA, are more than `MAX_CA_DISTANCE` apart."""
    there = chain.mask[:, CA] > 0
    distance = np.linalg.norm(np.diff(chain.positions[:, CA], axis=0), axis=-1)
    return bool((distance[there[1:] & there[:-1]] > MAX_CA_DISTANCE).any())
