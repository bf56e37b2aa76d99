"""Records that parsers, feature pipeline and writers exchange. They are frozen and checked when they are made.

Shapes: N sequences of an alignment, L columns or residues, 37 atom types in AF2's atom37 order. Residue codes are those of
`evodsp.geometry.residues`.

Entities say which chains of a complex are identical, and give the numbers that tell the model so.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int8, Int32, Int64, Integer

from evodsp.errors import UserError
from evodsp.geometry.residues import GAP

Kind = Literal["chains", "complexes"]
CHAINS: Kind = "chains"
COMPLEXES: Kind = "complexes"
KINDS = (CHAINS, COMPLEXES)
"""Kinds of keys: a single chain, or the chains of an entry's assembly. A feature store's table has this name."""
ONE_OF: dict[Kind, str] = {CHAINS: "chain", COMPLEXES: "complex"}


@dataclass(frozen=True)
class ProteinSequence:
    """One FASTA record. `letters` are upper-case one-letter codes, `name` is the first word of the header.

    `alternatives`: its residues with several monomers, as in `Chain`.
    """

    name: str
    letters: str
    description: str = ""
    alternatives: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("a sequence without a name")
        if not self.letters:
            raise UserError(f"sequence '{self.name}' is empty")

    def __len__(self) -> int:
        return len(self.letters)


class RowNames(Sequence[str]):
    """The names of an alignment's rows. Each takes its letters and 8 bytes more; a tuple's would take 60."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text, self._ends = bytearray(), array("q", [0])
        self.extend(names)

    def extend(self, names: Iterable[str]) -> None:
        """Add names."""
        encoded = [name.encode() for name in names]
        self._ends.extend(islice(accumulate(map(len, encoded), initial=len(self._text)), 1, None))
        self._text += b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: Any) -> Any:
        row = range(len(self))[row]
        if isinstance(row, range):
            return RowNames(map(self.__getitem__, row))
        return self._text[self._ends[row] : self._ends[row + 1]].decode()


@dataclass(frozen=True)
class Alignment:
    """A parsed multiple sequence alignment; row 0 is the query.

    `residues`: codes 0..21, gap = 21. `deletions`: number of residues to the left of each column that have no column of
    their own (lower case in A3M), as integers of any size. `source`: the file, for messages.
    """

    source: str
    names: Sequence[str]
    residues: Int8[np.ndarray, "N L"]
    deletions: Integer[np.ndarray, "N L"]

    def __post_init__(self) -> None:
        if self.residues.shape != self.deletions.shape:
            raise UserError(
                f"{self.source}: residues {self.residues.shape} and deletions {self.deletions.shape} differ in shape"
            )
        if len(self.names) != len(self.residues):
            raise UserError(f"{self.source}: {len(self.names)} names for {len(self.residues)} sequences")
        if self.residues.size == 0:
            raise UserError(f"{self.source}: no sequences in the alignment; remove the file or run the search again")
        if self.residues.min() < 0 or self.residues.max() > GAP:
            raise UserError(
                f"{self.source}: residue codes must be 0..21, found {self.residues.min()}..{self.residues.max()}"
            )

    def __len__(self) -> int:
        return len(self.residues)

    @property
    def columns(self) -> int:
        return int(self.residues.shape[1])


@dataclass(frozen=True)
class Chain:
    """One protein chain of a structure file, in SEQRES order. Residues without coordinates are included and masked.

    `positions` are in Å. `residue_number` and `insertion_code` are the author's (pdbx_PDB_ins_code, '' if there is none);
    they are 0 and '' for residues without coordinates. `alternatives`: index and letters of each residue for which SEQRES
    lists several monomers (microheterogeneity), in its order; `sequence` has one of them. `notes`: remarks for the user on
    how the file was read, such as residues that were left out. `breaks`: where the file lists no sequence, the indices of the
    residues behind which the chain breaks, so that residues may be missing; None if it lists one. Feature stores keep neither.
    """

    pdb_id: str
    chain_id: str
    sequence: str
    residue_number: Int32[np.ndarray, " L"]
    insertion_code: tuple[str, ...]
    is_missing: np.ndarray  # bool [L]: in SEQRES but not in the ATOM records
    positions: Float32[np.ndarray, "L 37 3"]
    mask: Float32[np.ndarray, "L 37"]
    resolution: float | None = None
    method: str = ""
    release_date: date | None = None
    alternatives: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    breaks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {
            "sequence": len(self.sequence),
            "residue_number": len(self.residue_number),
            "insertion_code": len(self.insertion_code),
            "is_missing": len(self.is_missing),
            "positions": len(self.positions),
            "mask": len(self.mask),
        }
        if len(set(sizes.values())) != 1:
            raise UserError(f"chain {self.key}: its arrays differ in length: {sizes}")

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def key(self) -> str:
        return f"{self.pdb_id}_{self.chain_id}"

    def query(self, key: str) -> ProteinSequence:
        """The chain's sequence, for searches and alignments under the name `key`."""
        return ProteinSequence(key, self.sequence, alternatives=self.alternatives)


@dataclass(frozen=True)
class Assembly:
    """Protein chains that belong together: those of a biological assembly or of the asymmetric unit, each where it lies.

    A chain that occurs several times is there several times, each with coordinates of its own, and with the author's id of
    the chain of which it is a copy. `names`: one for each, A for the first copy of chain A, A-2 for the second one, as in the
    PDB's files of assemblies. `key`: that of a single chain which stands for itself, and whose name it is; None for the
    chains of an entry.
    """

    pdb_id: str
    names: tuple[str, ...]
    chains: tuple[Chain, ...]
    key: str | None = None

    def __post_init__(self) -> None:
        if not self.chains or len(self.names) != len(self.chains) or len(set(self.names)) != len(self.names):
            raise UserError(f"assembly {self.pdb_id}: {len(self.chains)} chains have the names {', '.join(self.names)}")

    @classmethod
    def of_chain(cls, key: str, chain: Chain) -> Assembly:
        """A single chain."""
        return cls(chain.pdb_id, (key,), (chain,), key)

    def __len__(self) -> int:
        return sum(map(len, self.chains))

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of each chain."""
        return tuple(chain.key if self.key is None else self.key for chain in self.chains)

    @property
    def entities(self) -> tuple[int, ...]:
        """The number of each chain's sequence, from 0 in the order in which they first occur."""
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(chain.sequence, len(numbers)) for chain in self.chains)


@dataclass(frozen=True)
class Structure:
    """A structure file: its header and its protein chains by author chain id, first model only.

    `resolution` is in Å, None if the method has none (NMR). `release_date`: the date of the first revision.
    """

    pdb_id: str
    method: str
    resolution: float | None
    release_date: date | None
    chains: dict[str, Chain]


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
