"""One MSA of all chains of a complex, as AlphaFold-Multimer's code makes it.

    entity 1      entity 2
    query         query        block 0: paired rows, at first the queries; the copies of an entity have the same row
    row           row
    row           gaps
    row           gaps         block 1: the other rows of entity 1
    gaps          row          block 2: the other rows of entity 2

Each sequence has its own templates, found by itself. Chains with one sequence have the same templates. Template k of a
complex is template k of each chain, side by side. It does not tell how the chains lie to each other, and the model does not
compare its positions across chains.

Shapes: N rows, R residues of all chains, L of one chain, P paired rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int8, Int32, Int64, Integer

from evodsp.data.complexes.pairing import ABSENT, MOST_OF_A_KEY, pair
from evodsp.data.records import ChainIds, Entity, ProteinSequence, chain_ids, entities_of
from evodsp.data.sources.parsed import ChainMsas, Parsed
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates, TemplateSource
from evodsp.errors import UserError
from evodsp.geometry.residues import GAP, encode_sequence

MOST_ROWS = 2048
MOST_PAIRED = 1024


@dataclass(frozen=True)
class MergedMsa:
    """The MSA of a complex; row 0 has the sequences of all chains as the alignments write them, in which X matches any letter.
    Every cell counts: AlphaFold-Multimer's `msa_mask` is 1.

    `block`: 0 for paired rows, else the `entity_id` of the only residues that the row covers. `entities`: the chains in the
    order of the columns.
    """

    msa: Int8[np.ndarray, "N R"]
    deletions: Int32[np.ndarray, "N R"]
    block: Int32[np.ndarray, " N"]
    ids: ChainIds
    entities: tuple[Entity, ...]

    def order(self) -> tuple[int, ...]:
        """The place of each chain, in the order of the columns, in the list of chains that were merged."""
        return tuple(member for entity in self.entities for member in entity.members)

    def aatype(self) -> Int32[np.ndarray, " R"]:
        """The residue types of the sequences of all chains. Where one of the two is X, row 0 has another letter."""
        return encode_sequence("".join(entity.letters * len(entity.members) for entity in self.entities))

    def of_rows(self, rows: Int64[np.ndarray, " n"]) -> MergedMsa:
        """The MSA of some rows, the query first."""
        return replace(self, msa=self.msa[rows], deletions=self.deletions[rows], block=self.block[rows])

    def bert_mask(self) -> Bool[np.ndarray, "N R"]:
        """The cells that may be masked for the masked-MSA loss: all but the gaps beside a block."""
        block = self.block[:, None]
        return (block == 0) | (block == self.ids.entity_id)


def merge(
    chains: Sequence[ChainMsas],
    most_rows: int = MOST_ROWS,
    most_paired: int = MOST_PAIRED,
    most_of_a_key: int = MOST_OF_A_KEY,
) -> MergedMsa:
    """The MSA of a complex. Chains with one sequence stand side by side, and have the MSAs of the first of them.

    Rows are paired (`pair`) unless all chains are identical. Each chain has at most `most_paired` paired rows, and at most
    `most_rows` with the rows of its block; paired rows of gaps only do not count. A row that is paired does not occur in the
    chain's block, even if the pairs end before it.

    Raises UserError if there are no chains, two have the same name, or the limits are not 1 <= most_paired <= most_rows.
    """
    if not 1 <= most_paired <= most_rows:
        raise UserError(f"{most_paired} paired rows of {most_rows} rows of a chain: give at least 1, and at most all")
    entities = entities_of([chain.query for chain in chains])
    firsts = [chains[entity.members[0]] for entity in entities]
    copies = [len(entity.members) for entity in entities]
    if len(entities) > 1:
        pairs = pair([chain.to_pair() for chain in firsts], copies, most_of_a_key)
    else:
        pairs = np.empty((0, 1), np.int64)
    parts = [_rows_of(chain, pairs[:, k], most_rows, most_paired) for k, chain in enumerate(firsts)]

    paired = min(len(pairs), most_paired)
    ids = chain_ids(entities)
    block = np.repeat(np.arange(len(parts) + 1, dtype=np.int32), [paired, *(len(other.msa) for _, other in parts)])
    msa = np.full((len(block), len(ids.asym_id)), GAP, np.int8)
    deletions = np.zeros(msa.shape, np.int32)
    for number, (both, count) in enumerate(zip(parts, copies, strict=True), 1):
        columns = _span(ids.entity_id, number)
        for rows, part in zip((slice(paired), _span(block, number)), both, strict=True):
            msa[rows, columns] = np.tile(part.msa, count)
            deletions[rows, columns] = np.tile(part.deletions, count)
    return MergedMsa(msa, deletions, block, ids, entities)


def _span(numbers: Int32[np.ndarray, " n"], number: int) -> slice:
    """Position of `number` in ascending numbers."""
    return slice(*np.searchsorted(numbers, (number, number + 1)))


class _Rows(NamedTuple):
    """Rows of an MSA."""

    msa: Int8[np.ndarray, "N L"]
    deletions: Integer[np.ndarray, "N L"]


def _rows_of(chain: ChainMsas, pairs: Int64[np.ndarray, " P"], most_rows: int, most_paired: int) -> tuple[_Rows, _Rows]:
    """The paired rows of a chain and those of its block, given the row of each pair."""
    source = chain.to_pair()
    paired = _taken(source.msa, pairs, GAP)
    is_paired = {row.tobytes() for row in paired}
    paired = paired[:most_paired]
    most_others = most_rows - int((paired != GAP).any(1).sum())
    others = (row for row, letters in enumerate(chain.msa.msa) if letters.tobytes() not in is_paired)
    kept = np.array(list(islice(others, most_others)), np.int64)
    deletions = _taken(source.deletions, pairs[:most_paired], 0)
    return _Rows(paired, deletions), _Rows(chain.msa.msa[kept], chain.msa.deletions[kept])


def _taken(values: np.ndarray, rows: Int64[np.ndarray, " P"], absent: int) -> np.ndarray:
    """The rows of `values`; `absent` in each cell of an absent row."""
    taken = values[rows]
    taken[rows == ABSENT] = absent
    return taken


def find_templates(source: TemplateSource, parsed: Parsed) -> dict[str, FoundTemplates]:
    """The templates of each sequence of a record. None is of the record's own entry or released after it.

    Raises UserError as `TemplateSource.find` does.
    """
    entry, released = parsed.assembly.pdb_id, parsed.assembly.chains[0].release_date
    names: dict[str, list[str]] = {}
    for key, chain in zip(parsed.assembly.keys, parsed.assembly.chains, strict=True):
        names.setdefault(chain.sequence, []).append(key)
    found = {}
    for letters, own in names.items():
        # A sequence is one of the chains that serve as templates if any of its copies is.
        name = next((name for name in own if source.lists(name)), own[0])
        hits = list(parsed.hits.get(letters, ()))
        found[letters] = source.find(hits, ProteinSequence(name, letters), released, entry)
    return found


def side_by_side(entities: Sequence[Entity], templates: Mapping[str, TemplateFeatures]) -> TemplateFeatures:
    """The templates of a complex whose chains stand in the order of `entities`, given those of each sequence.

    There are as many as the sequence with most of them has. Where another one has fewer, all numbers are 0, as in
    AlphaFold-Multimer's code: alanines without atoms. Names are those of all chains with ':' between them, '' for one that
    is not there. Scores of searches are of one chain each, so those of a complex are 0.
    """
    parts = [templates[entity.letters] for entity in entities for _ in entity.members]
    most = max(map(len, parts))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([_filled_up(getattr(part, name), most) for part in parts], axis=1)

    names = [(*part.names, *[""] * (most - len(part))) for part in parts]
    return TemplateFeatures(
        names=tuple(":".join(of_chains) for of_chains in zip(*names, strict=True)),
        aatype=joined("aatype"),
        positions=joined("positions"),
        mask=joined("mask"),
        sum_probs=np.zeros(most, np.float32),
    )


def _filled_up(values: np.ndarray, rows: int) -> np.ndarray:
    """The values with as many rows of zeros after them as are missing."""
    return np.concatenate([values, np.zeros((rows - len(values), *values.shape[1:]), values.dtype)])
