"""Which chains of a complex are identical, and the numbers that tell the model so.

Shapes: R residues of all chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from evodsp.data.records import ProteinSequence
from evodsp.errors import UserError


@dataclass(frozen=True)
class Entity:
    """All chains with one sequence. `members`: their places in the list of chains, ascending."""

    letters: str
    members: tuple[int, ...]


@dataclass(frozen=True)
class ChainIds:
    """Four numbers of each residue, as in AlphaFold-Multimer's code. All but `residue_index` count from 1.

    `asym_id`: the chain. `entity_id`: its sequence. `sym_id`: the chain among those with its sequence. `residue_index`: the
    place in the chain, from 0.
    """

    asym_id: Int32[np.ndarray, " R"]
    entity_id: Int32[np.ndarray, " R"]
    sym_id: Int32[np.ndarray, " R"]
    residue_index: Int32[np.ndarray, " R"]


def entities_of(chains: Sequence[ProteinSequence]) -> tuple[Entity, ...]:
    """The entities of a complex, in the order in which their sequences first occur.

    Raises UserError if there are no chains, or two have the same name.
    """
    if not chains:
        raise UserError("a complex without chains; give at least one")
    place_of_name: dict[str, int] = {}
    members: dict[str, list[int]] = {}
    for place, chain in enumerate(chains):
        first = place_of_name.setdefault(chain.name, place)
        if first != place:
            raise UserError(f"chains {first + 1} and {place + 1} have the same name '{chain.name}'; rename one of them")
        members.setdefault(chain.letters, []).append(place)
    return tuple(Entity(letters, tuple(places)) for letters, places in members.items())


def chain_ids(entities: Sequence[Entity]) -> ChainIds:
    """The numbers of all residues where the chains of each entity stand side by side."""
    copies = [
        (entity, copy, len(e.letters)) for entity, e in enumerate(entities, 1) for copy, _ in enumerate(e.members, 1)
    ]
    lengths = [length for *_, length in copies]

    def per_residue(numbers: Sequence[int]) -> Int32[np.ndarray, " R"]:
        return np.repeat(np.array(numbers, np.int32), lengths)

    return ChainIds(
        asym_id=per_residue(range(1, len(copies) + 1)),
        entity_id=per_residue([entity for entity, *_ in copies]),
        sym_id=per_residue([copy for _, copy, _ in copies]),
        residue_index=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
    )


def columns_of(entities: Sequence[Entity]) -> Int64[np.ndarray, " R"]:
    """The column of each residue, of the chains in the order in which they were listed. Columns are those of `chain_ids`."""
    chains = [(member, len(entity.letters)) for entity in entities for member in entity.members]
    starts = np.cumsum([0, *(length for _, length in chains)])
    places = sorted((member, start, length) for (member, length), start in zip(chains, starts.tolist(), strict=False))
    return np.concatenate([np.arange(start, start + length) for _, start, length in places])
