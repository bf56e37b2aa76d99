"""From filtered hits and their structures to template features (AF2 supplement, sections 1.2.3 and 1.2.9).

The hit says which residue of the template is aligned with which residue of the query; the structure holds its atoms.

Shapes: R residues of the query, 37 atom types.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int8

from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.sources.query_check import check_query
from evodsp.data.sources.structures import TemplateStructures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.hits import TemplateHit
from evodsp.data.templates.matching import TemplateRejection, match_hit
from evodsp.errors import UserError
from evodsp.geometry.residues import CA, GAP, encode

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
