"""The chains of a structure file: which atom records belong to each, the sequence that the file lists (SEQRES,
_entity_poly_seq) or else that of the residues, and the names of residues and atoms in the PDB (HIE is HIS, CD of ILE
is CD1).

A chain is what has one name: its records may stand in several runs. Two things split a name. Where a residue comes again
that is there already, a copy of the chain begins (assemblies saved in one file). And records without a chain name are
separated by what separates them: TER, the segment, numbers that go back. Parts that a peptide bond joins become one chain
again in `structure_block`, which sees the atoms. MODEL records are models of one molecule, or an assembly if they hold
different chains.

Residues are placed by their numbers and by their parents' one-letter codes, never by their names: programs rename residues
(CYX, HIE), and people change them and keep the list. Residues that the list does not have are put into it, where they are.

A chain's residues are its amino acids in the order of the file. They are not sorted: numbers may run backwards (IMGT's 112A
is before 112) or jump (Kabat's). A residue that the file calls HETATM, or lists behind the chain's end, belongs to the chain
only if a peptide bond joins it: ligands such as a free glycine do not. Nothing stands for residues that are missing at a
break.

The names are in `evodsp/geometry/tables` (`forcefield_names.csv`, `forcefield_atoms.csv`). Some are other monomers in the
PDB (HSE is homoserine there, CHARMM's histidine elsewhere), so a residue's atoms decide.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import dist, floor
from pathlib import Path
from typing import NamedTuple

import gemmi
import numpy as np
from Bio.Data.PDBData import protein_letters_3to1_extended
from gemmi import cif
from jaxtyping import Float64, Int64

from evodsp.errors import FileFormatError
from evodsp.geometry.residues import (
    MONOMER_LETTERS,
    RESTYPE_1TO3,
    RESTYPE_NAME_TO_ATOM14_NAMES,
    RESTYPES,
    monomer_letter,
    read_table,
)
from evodsp.printing import shown


def unquoted(text: str) -> str:
    """The value of a CIF token. A single quote character, which gemmi writes for odd insertion codes of PDB files, is kept."""
    return cif.as_string(text) if len(text) > 1 else text


def holds(block: cif.Block, *tags: str) -> bool:
    """Whether every tag has at least one value."""
    return all(len(block.find_values(tag)) > 0 for tag in tags)


def rows_of(block: cif.Block, *tags: str) -> list[tuple[str, ...]]:
    """Unquoted values of the given columns of one category."""
    return [tuple(unquoted(text) for text in row) for row in block.find(list(tags))]


def values_of(block: cif.Block, tag: str) -> list[str]:
    """Unquoted values of a tag that are neither '?' nor '.'."""
    return [unquoted(text) for text in block.find_values(tag) if not cif.is_null(text)]


AMINO_ACID_OF: dict[str, str] = {
    name: row["residue"] for row in read_table("forcefield_names.csv") for name in row["names"].split()
}
"""The amino acid of each name of a force field."""
HEAVY_ATOMS: dict[str, frozenset[str]] = {
    name: frozenset(filter(None, RESTYPE_NAME_TO_ATOM14_NAMES[name])) | {"OXT"}
    for name in map(RESTYPE_1TO3.__getitem__, RESTYPES)
}
"""The heavy atoms that each amino acid may have."""
_ALIASES = [tuple(row.values()) for row in read_table("forcefield_atoms.csv")]
_AMBIGUOUS = frozenset({"N", "CA", "C", "O", "OXT", "CB", "CG"})
"""Atoms that do not tell histidine from homoserine, nor glutamate from glutamine."""


def is_heavy(atom: str) -> bool:
    """Whether an atom of an amino acid is no hydrogen, by its name."""
    return not atom.lstrip("0123456789").startswith(("H", "D"))


def listed_name(name: str) -> str:
    """The PDB's name of a monomer in a list of residues, where no atoms can tell."""
    return name if name in MONOMER_LETTERS else AMINO_ACID_OF.get(name, name)


def letters_of(name: str) -> set[str]:
    """The letters that a monomer's name may stand for, in the PDB and in force fields."""
    return {monomer_letter(name), monomer_letter(AMINO_ACID_OF.get(name, name))}


def amino_acid_name(name: str, atoms: Iterable[str]) -> str:
    """The PDB's name of a residue with these atoms; the same name if no force field has it, or the atoms do not fit."""
    if (amino_acid := AMINO_ACID_OF.get(name)) is None:
        return name
    heavy = {atom_names(amino_acid, atoms).get(atom, atom) for atom in atoms if is_heavy(atom)}
    means_another = name in MONOMER_LETTERS and MONOMER_LETTERS[name] != monomer_letter(amino_acid)
    fits = heavy <= HEAVY_ATOMS[amino_acid] and not (means_another and heavy <= _AMBIGUOUS)
    return amino_acid if fits else name


def atom_names(residue: str, atoms: Iterable[str]) -> dict[str, str]:
    """The PDB's names of those atoms of an amino acid that have another one."""
    if residue not in HEAVY_ATOMS:
        return {}
    present, found = set(atoms), {}
    for of_residue, atom, name in _ALIASES:
        if of_residue in (residue, "any") and atom in present and name not in present:
            found[atom] = name
            present.add(name)
    return found


_PEPTIDE_BOND = 2.0
"""Longest distance in Å between C and the next N, 1.33 in a good model. Where it is longer, residues are missing."""
_CA_TO_CA = 4.2
"""Longest distance in Å between neighbours' CA, 3.8 in a good model; it serves models that have no other atoms."""
_SAME_PLACE = 2.0
"""Longest distance in Å between the CA of two monomers at one place."""
_BACKBONE = ("N", "CA", "C")
_BEHIND_THE_END = (gemmi.EntityType.NonPolymer, gemmi.EntityType.Branched, gemmi.EntityType.Water)


@dataclass(frozen=True)
class Site:
    """One place of a chain: a residue, or several monomers that were seen there (microheterogeneity)."""

    residues: tuple[gemmi.Residue, ...]
    is_atom: bool
    """Whether it has an amino acid that the file does not call HETATM."""
    is_certain: bool
    """Whether it is not behind the chain's end either: it then needs no peptide bond to belong to the chain."""
    nitrogen: Float64[np.ndarray, "n 3"]
    alpha: Float64[np.ndarray, "a 3"]
    carbon: Float64[np.ndarray, "c 3"]

    @property
    def label(self) -> str:
        """The site's name in messages, such as GLY 201."""
        return f"{self.residues[0].name} {self.residues[0].seqid}"


@dataclass(frozen=True)
class FoundChain:
    """The sites of a chain, in its order, and its amino acids (all of N, CA and C) that do not belong to it."""

    sites: list[Site]
    left_out: list[Site]

    @property
    def breaks(self) -> tuple[int, ...]:
        """The indices of the sites behind which the chain breaks."""
        pairs = enumerate(pairwise(self.sites))
        return tuple(i for i, (a, b) in pairs if len(a.carbon) and len(b.nitrogen) and not bonded(a, b))


@lru_cache
def is_amino_acid(name: str) -> bool:
    """Whether a monomer is an amino acid, by gemmi's table."""
    residue = gemmi.find_tabulated_residue(name)
    return residue is not None and residue.is_amino_acid()


def find_chain(chain: gemmi.Chain, listed: Container[str] = ()) -> FoundChain:
    """The residues of one author chain that are its polymer's; none if it holds no protein. `listed`: the monomers of its
    sequence, if the file lists it; those that the file calls the polymer's need no peptide bond."""
    sites = list(_sites(chain, listed))
    pieces: list[list[Site]] = []
    for site in sites:
        if pieces and bonded(pieces[-1][-1], site):
            pieces[-1].append(site)
        else:
            pieces.append([site])
    own = [any(s.is_certain for s in piece) or (len(piece) > 1 and any(s.is_atom for s in piece)) for piece in pieces]
    if not any(own):  # some programs call all residues HETATM
        own = [len(piece) > 1 for piece in pieces]
    found = [site for piece, is_own in zip(pieces, own, strict=True) if is_own for site in piece]
    others = [piece for piece, is_own in zip(pieces, own, strict=True) if not is_own]
    found, others = _joined(found, others)
    return FoundChain(
        found, [s for piece in others for s in piece if len(s.nitrogen) and len(s.alpha) and len(s.carbon)]
    )


def _sites(chain: gemmi.Chain, listed: Container[str]) -> Iterator[Site]:
    """The places of the amino acids of a chain, and of residues that may be modified ones."""
    group: list[gemmi.Residue] = []
    for residue in chain:
        if not (
            is_known(residue.name)
            or _is_listed(residue, listed)
            or (_atoms(residue, "CA").size and _ends(residue)[0].size + _ends(residue)[1].size)
        ):
            continue
        if group and (residue.seqid != group[0].seqid or not _same_place(group[0], residue)):
            yield _site(group, listed)
            group = []
        group.append(residue)
    if group:
        yield _site(group, listed)


def _site(residues: list[gemmi.Residue], listed: Container[str]) -> Site:
    nitrogen, carbon = (np.concatenate(ends) for ends in zip(*map(_ends, residues), strict=True))
    atoms = [residue for residue in residues if residue.het_flag != "H" and is_known(residue.name)]
    certain = any(residue.entity_type not in _BEHIND_THE_END for residue in atoms)
    certain = certain or any(_is_listed(residue, listed) for residue in residues)
    alpha = np.concatenate([_atoms(residue, "CA") for residue in residues])
    return Site(tuple(residues), bool(atoms), certain, nitrogen, alpha, carbon)


def _is_listed(residue: gemmi.Residue, listed: Container[str]) -> bool:
    """Whether the file says that the residue is the listed polymer's."""
    is_polymer = residue.entity_type == gemmi.EntityType.Polymer or residue.label_seq is not None
    return is_polymer and residue.name in listed


def is_known(name: str) -> bool:
    """Whether a monomer is an amino acid or was one. AlphaFold2's table of letters cannot tell: it has bases too."""
    return is_amino_acid(name) or name in protein_letters_3to1_extended


def _atoms(residue: gemmi.Residue, name: str) -> Float64[np.ndarray, "n 3"]:
    """Positions of an atom, in all its alternative locations."""
    found = np.array([atom.pos.tolist() for atom in residue if atom.name == name], float).reshape(-1, 3)
    return found[np.isfinite(found).all(axis=1)]


def _ends(residue: gemmi.Residue) -> tuple[Float64[np.ndarray, "n 3"], Float64[np.ndarray, "m 3"]]:
    """The atoms by which peptide bonds join a residue to the one before it and to the one behind it."""
    nitrogen, carbon = _atoms(residue, "N"), _atoms(residue, "C")
    if not nitrogen.size and not carbon.size and is_amino_acid(residue.name):
        # Atoms of chromophores, which were made of several residues, have names such as N1 and C3.
        nitrogen, carbon = (
            np.array([atom.pos.tolist() for atom in residue if atom.element.name == element]).reshape(-1, 3)
            for element in ("N", "C")
        )
        if len(carbon) == len(_atoms(residue, "CA")):  # a trace
            carbon = carbon[:0]
    return nitrogen, carbon


def _within(first: Float64[np.ndarray, "n 3"], second: Float64[np.ndarray, "m 3"], limit: float) -> bool:
    return bool((np.linalg.norm(first[:, None] - second, axis=-1) <= limit).any())


def _same_place(first: gemmi.Residue, second: gemmi.Residue) -> bool:
    """Whether two residues of one number are monomers at one place. Where insertion codes were dropped, they are neighbours."""
    places = _atoms(first, "CA"), _atoms(second, "CA")
    if not (places[0].size and places[1].size) or _within(*places, _SAME_PLACE):
        return True
    # gemmi splits a residue whose segment names differ.
    return first.name == second.name and not all(_atoms(r, name).size for r in (first, second) for name in _BACKBONE)


def bonded(first: Site, second: Site) -> bool:
    """Whether a peptide bond leads from the first to the second."""
    if len(first.carbon) and len(second.nitrogen):
        return _within(first.carbon, second.nitrogen, _PEPTIDE_BOND)
    return _within(first.alpha, second.alpha, _CA_TO_CA)


def _joined(found: list[Site], others: list[list[Site]]) -> tuple[list[Site], list[list[Site]]]:
    """The chain with those of the other pieces that peptide bonds join to it, in their places, and the rest of the pieces.

    Some programs list modified residues behind all others.
    """
    if not found or not others:
        return found, others
    sites = [*found, *(site for piece in others for site in piece)]
    carbons, nitrogens = _Cells([site.carbon for site in sites]), _Cells([site.nitrogen for site in sites])
    before = [carbons.near(piece[0].nitrogen) for piece in others]
    behind = [nitrogens.near(piece[-1].carbon) for piece in others]
    first_of, last_of, total = [], [], len(found)
    for piece in others:
        first_of.append(total)
        total += len(piece)
        last_of.append(total - 1)
    waiting: dict[int, list[int]] = {}  # site -> the pieces that it may join to the chain
    for number, partners in enumerate(zip(before, behind, strict=True)):
        for site in (*partners[0], *partners[1]):
            waiting.setdefault(site, []).append(number)
    following = {index: index + 1 for index in range(-1, len(found) - 1)} | {len(found) - 1: -1}
    preceding = {after: index for index, after in following.items()}
    queue = [number for number in range(len(others)) if any(s < len(found) for s in (*before[number], *behind[number]))]
    placed: set[int] = set()
    for number in queue:  # the queue grows
        slots = [s for s in before[number] if s in preceding] + [preceding[s] for s in behind[number] if s in preceding]
        free = (s for s in slots if s < 0 or following[s] < 0 or not bonded(sites[s], sites[following[s]]))
        if number in placed or (slot := next(free, None)) is None:
            continue
        placed.add(number)
        run, after = list(range(first_of[number], last_of[number] + 1)), following[slot]
        for left, right in pairwise([slot, *run, after]):
            following[left], preceding[right] = right, left
        queue.extend(n for end in {run[0], run[-1]} for n in waiting.get(end, []) if n not in placed)
    order, at = [], following[-1]
    while at >= 0:
        order.append(sites[at])
        at = following[at]
    return order, [piece for number, piece in enumerate(others) if number not in placed]


class _Cells:
    """Finds the sites with an atom a peptide bond away from a place, by cells of space: the time does not grow with the
    chain."""

    _MOST = 8
    """Most sites of a cell that are looked at: no molecule has more."""

    def __init__(self, atoms: list[Float64[np.ndarray, "_ 3"]]) -> None:
        self._cells: dict[tuple[int, ...], list[tuple[int, tuple[float, ...]]]] = {}
        for site, places in enumerate(atoms):
            for place in places.tolist():
                cell = self._cells.setdefault(_cell(place), [])
                if len(cell) < self._MOST:
                    cell.append((site, tuple(place)))

    def near(self, places: Float64[np.ndarray, "n 3"]) -> list[int]:
        """The sites near `places`, in their order."""
        found = set()
        for place in places[: self._MOST].tolist():
            x, y, z = _cell(place)
            for dx, dy, dz in product((-1, 0, 1), repeat=3):
                for site, other in self._cells.get((x + dx, y + dy, z + dz), ()):
                    if dist(place, other) <= _PEPTIDE_BOND:
                        found.add(site)
        return sorted(found)


def _cell(place: Sequence[float]) -> tuple[int, ...]:
    return tuple(floor(x / _PEPTIDE_BOND) for x in place)


MOST_DIFFERENT = 0.1
"""Largest share of a chain's residues that may differ from its list. Beyond it the list is another protein's."""
_MOST_DIGITS = 9
_NO_GAP = -60
"""Score of leaving out listed residues between two that a peptide bond joins, in units of which a match is 10."""


def sequences_of_chains(path: str | Path, block: cif.Block) -> dict[str, dict[int, list[str]]]:
    """SEQRES of every protein polymer: label_asym_id -> sequence number -> monomers (several: microheterogeneity)."""
    of_entity = sequences_of_entities(path, block)
    asyms = rows_of(block, "_struct_asym.id", "_struct_asym.entity_id")
    asyms = asyms or list(dict.fromkeys(rows_of(block, "_atom_site.label_asym_id", "_atom_site.label_entity_id")))
    return {asym: of_entity[entity] for asym, entity in asyms if entity in of_entity}


def sequences_of_entities(path: str | Path, block: cif.Block) -> dict[str, dict[int, list[str]]]:
    """SEQRES of every protein entity: entity -> sequence number -> monomers."""
    types = {entity: kind.lower() for entity, kind in rows_of(block, "_entity_poly.entity_id", "_entity_poly.type")}
    of_entity: dict[str, dict[int, list[str]]] = {}
    for entity, number, monomer in rows_of(
        block, "_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"
    ):
        kind = types.get(entity, "polypeptide")
        if "polypeptide" not in kind and kind != "other":
            continue
        if len(number) > _MOST_DIGITS or not re.fullmatch(r"-?\d+", number):
            raise FileFormatError(
                path, f"_entity_poly_seq.num is {shown(number)} but must be a number; correct the file"
            )
        of_entity.setdefault(entity, {}).setdefault(int(number), []).append(listed_name(monomer))
    if not types:
        return {entity: listed for entity, listed in of_entity.items() if any(_are_amino_acids(listed))}
    # python-modelcif, with which programs write predictions, calls a chain of glycine alone, which has no hand, `other`.
    return {
        entity: listed
        for entity, listed in of_entity.items()
        if types.get(entity) != "other" or all(_are_amino_acids(listed))
    }


def _are_amino_acids(listed: Mapping[int, list[str]]) -> Iterator[bool]:
    """Whether each monomer of an entity is an amino acid."""
    return (is_amino_acid(name) for names in listed.values() for name in names)


def placed(found: FoundChain, listed: Sequence[list[str]]) -> tuple[list[list[str]], list[int], list[Site]]:
    """The sites of a chain, in their order, in its listed sequence: by their numbers, or by an alignment of one-letter codes
    where that fits better.

    The monomers of each residue; each site's residue; and the sites that the list does not have, which are among the residues.
    """
    sites = found.sites
    own = [set().union(*(letters_of(residue.name) for residue in site.residues)) for site in sites]
    letters = [{monomer_letter(name) for name in names} for names in listed]
    ways = [way for way in (_by_number(sites, own, letters), _by_letter(found, own, letters)) if way is not None]
    index = min(ways, key=lambda way: _differences(way, own, letters))
    sequence: list[list[str]] = []
    numbers: list[int] = []
    done = 0
    for site, at in zip(sites, index, strict=True):
        if at is None:
            sequence.append(list(dict.fromkeys(residue.name for residue in site.residues)))
        else:
            sequence += listed[done : at + 1]
            done = at + 1
        numbers.append(len(sequence) - 1)
    sequence += listed[done:]
    return sequence, numbers, [site for site, at in zip(sites, index, strict=True) if at is None]


Way = Sequence[int | None]
"""The listed residue of each site, in ascending order; None for a site that is not listed."""


def _differences(way: Way, own: list[set[str]], letters: list[set[str]]) -> int:
    return sum(
        at is None or (one.isdisjoint(letters[at]) and "X" not in one | letters[at])
        for at, one in zip(way, own, strict=True)
    )


def _by_number(sites: list[Site], own: list[set[str]], letters: list[set[str]]) -> list[int | None] | None:
    """The place of each site if its number is its place in the list, but for a constant; None if no constant will do."""
    numbers = _numbers(sites)
    if (np.diff(numbers) < 1).any() or numbers[-1] - numbers[0] >= len(letters):
        return None
    first = numbers - numbers[0]
    codes = np.array([ord(next(iter(letter))) for letter in letters])
    mine = np.array([ord(next(iter(letter))) for letter in own])
    starts = np.arange(len(letters) - first[-1])
    equal = np.zeros(len(starts), np.int64)
    for offset, code in zip(first.tolist(), mine.tolist(), strict=True):
        equal += codes[starts + offset] == code
    best = np.flatnonzero(equal == equal.max())
    start = int(numbers[0]) - 1 if int(numbers[0]) - 1 in best else int(best[0])
    return (start + first).tolist()


def _numbers(sites: list[Site]) -> Int64[np.ndarray, " L"]:
    """The number of each site: its label_seq_id if it has one, else as far from the neighbour's as the author says."""
    found: list[int] = []
    listed = [site.residues[0].label_seq for site in sites]
    author = [site.residues[0].seqid.num or 0 for site in sites]
    offset = next((label - one for label, one in zip(listed, author, strict=True) if label is not None), 0)
    for label, one in zip(listed, author, strict=True):
        offset = offset if label is None else label - one
        found.append(one + offset)
    return np.array(found, np.int64)


def _by_letter(found: FoundChain, own: list[set[str]], letters: list[set[str]]) -> list[int | None]:
    """The place of each site by a global alignment: residues may be missing where the chain breaks or numbers jump, and at its
    ends."""
    scoring = gemmi.AlignmentScoring()
    scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 10, -5, -30, -1
    open_at = {*found.breaks, *np.flatnonzero(np.diff(_numbers(found.sites)) > 1).tolist()}
    gaps = [0, *(0 if i in open_at else _NO_GAP for i in range(len(own) - 1)), 0]
    listed = [min(one) for one in letters]
    mine = [min(one) for one in own]
    cigar = gemmi.align_string_sequences(listed, mine, gaps, scoring).cigar_str()
    way: list[int | None] = []
    at = 0
    for count, kind in re.findall(r"(\d+)([MID])", cigar):
        if kind == "M":
            way += range(at, at + int(count))
        elif kind == "D":
            way += [None] * int(count)
        at += int(count) * (kind != "D")
    return way


class AtomRecord(NamedTuple):
    """Place of an atom, as its record states it. `chain`: the author's name. `entity_chain`: the label_asym_id, if the file
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
    """Place of a record. `repeat`: residues of one number that follow each other differ in it."""

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
