"""Which chain each atom record of a structure file belongs to, whatever the format.

A chain is what has one name: its records may stand in several runs. Two things split a name. Where a residue comes again that
is there already, a copy of the chain begins (assemblies saved in one file). And records without a chain name are separated by
what separates them: TER, the segment, numbers that go back. Parts that a peptide bond joins become one chain again in
`completed_chains`, which sees the atoms. MODEL records are models of one molecule, or an assembly if they hold different
chains.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from evodsp.data.formats.forcefield_names import AMINO_ACID_OF
from evodsp.data.formats.unlisted_chains import is_known


class AtomRecord(NamedTuple):
    """What an atom record says about its place. `chain`: the author's name. `entity_chain`: the label_asym_id, if the file
    lists its sequence. `end`: how many TER records stand before it."""

    model: str
    chain: str
    entity_chain: str
    segment: str
    number: str
    name: str
    atom: str
    altloc: str
    is_het: bool
    end: int


class ChainPart(NamedTuple):
    """The records of one chain, or a piece of one. `copy`: how many parts with its other fields stand before it."""

    model: str
    chain: str
    entity_chain: str = ""
    segment: str = ""
    copy: int = 0


class PartPlace(NamedTuple):
    """Where a record belongs. `repeat`: residues of one number that follow each other differ in it."""

    part: ChainPart
    repeat: int = 0


class _Run:
    """The records of one name that were read so far."""

    def __init__(self) -> None:
        self.copy = self.end = self.repeat = 0
        self.seen: dict[
            str, dict[str, set[tuple[str, str]]]
        ] = {}  # number -> residue's name -> atoms and their locations
        self.at: tuple[str, str] = ("", "")  # the last record's number and residue's name
        self.last: int | None = None  # the number of the last amino acid that is no HETATM

    def place(self, record: AtomRecord) -> int:
        """The copy to which the next record belongs; `repeat` is then the record's."""
        at, site = (record.number, record.name), (record.atom, record.altloc)
        continues, known = at == self.at, _may_be_amino_acid(record.name)
        atoms = self.seen.get(record.number, {}).get(record.name, set())
        if known and not continues and self._begins(record, site in atoms):
            self.copy += 1
            self.seen, self.repeat, self.last, atoms = {}, 0, None, set()
        elif continues and site in atoms:
            self.repeat += 1
            self.seen[record.number][record.name] = atoms = set()
        elif not continues:
            self.repeat = 0
        if known and not record.is_het:
            self.last, self.end = _whole(record.number), record.end
        self.at = at
        if known or continues or not atoms:
            self.seen.setdefault(record.number, {}).setdefault(record.name, set()).add(site)
        return self.copy

    def _begins(self, record: AtomRecord, is_there: bool) -> bool:
        """Whether a residue begins a copy, or the next of the chains that have no name."""
        others = self.seen.get(record.number, {})
        # Two monomers at one place, or neighbours without their insertion codes, follow each other.
        is_new = record.name not in others and not record.is_het and not record.altloc
        is_other = is_new and self.at[0] != record.number
        if is_there or (is_other and any(map(_may_be_amino_acid, others))):
            return True
        number = _whole(record.number)
        goes_back = self.last is not None and number is not None and number < self.last
        return not record.chain and not record.is_het and self.last is not None and (goes_back or record.end > self.end)


def places(records: Iterable[AtomRecord]) -> list[PartPlace]:
    """The place of each record."""
    runs: dict[ChainPart, _Run] = {}
    found = []
    for record in records:
        name = ChainPart(record.model, record.chain, record.entity_chain, "" if record.chain else record.segment)
        run = runs.setdefault(name, _Run())
        copy = run.place(record)
        found.append(PartPlace(name if not copy else name._replace(copy=copy), run.repeat))
    return found


def are_plain(found: Iterable[PartPlace]) -> bool:
    """Whether each chain is all that has its name."""
    distinct = set(found)
    return len({place.part[:3] for place in distinct}) == len(distinct)


def is_ensemble(records: Iterable[AtomRecord]) -> bool:
    """Whether the models are models of one molecule: every chain of each is one of the first model's, with its sequence."""
    models: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for record in records:
        if _may_be_amino_acid(record.name):
            chain = models.setdefault(record.model, {}).setdefault((record.chain, record.segment), {})
            chain[record.number] = record.name
    first, *others = models.values() or [{}]
    return all(name in first and _alike(first[name], chain) for other in others for name, chain in other.items())


def _alike(first: dict[str, str], second: dict[str, str]) -> bool:
    """Whether nine of ten residues of the shorter chain have the same name in the other."""
    same = sum(first.get(number) == name for number, name in second.items())
    return same >= 0.9 * min(len(first), len(second))


@lru_cache
def _may_be_amino_acid(name: str) -> bool:
    return is_known(name) or name in AMINO_ACID_OF


def _whole(number: str) -> int | None:
    digits = number.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ")
    try:
        return int(digits)
    except ValueError:
        return None
