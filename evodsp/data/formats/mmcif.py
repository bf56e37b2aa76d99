"""Parsing of structure files (mmCIF, PDB; gzipped or not) into protein chains with atom37 coordinates.

gemmi.cif reads the tokens and NumPy assembles the arrays: about ten times as fast as Biopython's MMCIFParser on the same
files (scripts/benchmarks/results/parsing.txt). `structure_block` makes full mmCIF of PDB files and of files without
sequences.

Conventions are AF2's (supplement 1.2.1): residues in SEQRES order; the first model; for each atom the alternative location
of highest occupancy (the first among equals); SE of selenomethionine as SD; arginine's NH1 is the one nearer to CD. Modified
residues have the letter of their parent (MSE: M, SEP: S) by Biopython's table, others X. Chain ids are the author's.

The biological assemblies of an entry say which chains they hold, and how many times, each moved by an operator:

    _pdbx_struct_assembly_gen    assembly, expression of operators, chains (label_asym_id)
    _pdbx_struct_oper_list       operator: a rotation and a translation

An expression lists operators: `1`, `1,3`, `1-60`, or a product of lists, `(1-60)(61-88)`: every operator of the first list
after every one of the second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from gemmi import cif
from jaxtyping import Bool, Float32, Float64, Int64

from evodsp.data.formats.chains import (
    HEAVY_ATOMS,
    MOST_DIFFERENT,
    is_heavy,
    letters_of,
    rows_of,
    sequences_of_chains,
    sequences_of_entities,
    unquoted,
    values_of,
)
from evodsp.data.formats.structure_block import block_without_atoms, is_pdb, read_block, some
from evodsp.data.records import Assembly, Chain, Structure
from evodsp.data.sources.layout import entry_of
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.geometry.residues import ATOM_ORDER, ATOM_TYPES, monomer_letter
from evodsp.printing import LONGEST_REASON, logger, quoted, shown
from evodsp.reading.text_files import text_of

MOST_COPIES = 1000
"""Most copies of chains in an assembly. The largest capsids have more, but no model takes them."""
_LARGEST = 1e9
_TERM = re.compile(r"(?:\([^()]*\))+|[^(),]+")
_GROUP = re.compile(r"\(([^()]*)\)")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True)
class Motion:
    """Place of a copy of a chain: x becomes `rotation` x + `translation`, in Å."""

    rotation: Float64[np.ndarray, "3 3"]
    translation: Float64[np.ndarray, "3"]

    def after(self, first: Motion) -> Motion:
        """The motion that moves by `first` and then by this one."""
        return Motion(self.rotation @ first.rotation, self.rotation @ first.translation + self.translation)

    def apply(self, positions: np.ndarray) -> np.ndarray:
        """Moved positions [..., 3], in double precision."""
        return positions.astype(np.float64) @ self.rotation.T + self.translation


IDENTITY = Motion(np.eye(3), np.zeros(3))


def copies_in(path: str | Path, block: cif.Block, assembly: str) -> list[tuple[str, Motion]]:
    """The copies of an assembly in the order of the file: (label_asym_id, motion). Ligands and water are among them.

    `path`: for messages. Raises FileFormatError if the entry has no such assembly, an operator is missing or no rigid motion,
    or there are more than `MOST_COPIES` copies.
    """
    tags = (f"_pdbx_struct_assembly_gen.{tag}" for tag in ("assembly_id", "oper_expression", "asym_id_list"))
    rows = rows_of(block, *tags)
    if not any(name == assembly for name, _, _ in rows):
        names = sorted({name for name, _, _ in rows})
        listed = f"its assemblies are {quoted(', '.join(names), LONGEST_REASON)}" if names else "it lists none"
        raise FileFormatError(
            path, f"no assembly '{quoted(assembly)}': {listed}.{nearest(assembly, names)} Give one of these"
        )
    operators = _operators(path, block)
    copies: list[tuple[str, Motion]] = []
    for name, expression, chains in rows:
        if name != assembly:
            continue
        asyms = [asym for asym in map(str.strip, chains.split(",")) if asym]
        for product in _products(path, expression, MOST_COPIES):
            motion = IDENTITY
            for identifier in product:
                if identifier not in operators:
                    found = f"assembly {assembly} needs the operator {shown(identifier)}, which the file does not list"
                    raise FileFormatError(path, f"{found}; correct the file")
                motion = motion.after(operators[identifier])
            copies += [(asym, motion) for asym in asyms]
            if len(copies) > MOST_COPIES:
                found = f"assembly {assembly} has more than {MOST_COPIES:,} copies of chains"
                raise FileFormatError(path, f"{found}; take the asymmetric unit instead")
    return copies


def has_assemblies(block: cif.Block) -> bool:
    """Whether the entry lists assemblies."""
    return bool(block.find_values("_pdbx_struct_assembly_gen.assembly_id"))


def _products(path: str | Path, expression: str, most: int) -> list[tuple[str, ...]]:
    """The products of operators that an expression lists, each in the order in which it is written."""
    found: list[tuple[str, ...]] = []
    text = "".join(expression.split())
    terms = _TERM.findall(text)
    if ",".join(terms) != text or not terms:
        raise _no_expression(path, expression)
    for term in terms:
        groups = [_listed(path, group, expression, most) for group in _GROUP.findall(term) or [term]]
        if len(found) + np.prod([float(len(group)) for group in groups]) > most:
            raise FileFormatError(
                path, f"'{quoted(expression)}' stands for more than {most:,} operators; correct the file"
            )
        found += itertools.product(*groups)
    return found


def _listed(path: str | Path, group: str, expression: str, most: int) -> list[str]:
    """The operators of a list such as 1,3,5-8."""
    found: list[str] = []
    for item in group.split(","):
        if span := _RANGE.fullmatch(item):
            first, last = int(span[1]), int(span[2])
            if not first <= last < first + most:
                raise _no_expression(path, expression)
            found += map(str, range(first, last + 1))
        elif item:
            found.append(item)
        else:
            raise _no_expression(path, expression)
    return found


def _operators(path: str | Path, block: cif.Block) -> dict[str, Motion]:
    """The rigid motions that the entry lists, by their names."""
    numbers = [f"matrix[{row}][{column}]" for row in (1, 2, 3) for column in (1, 2, 3)]
    tags = ["id", *numbers, *(f"vector[{row}]" for row in (1, 2, 3))]
    found: dict[str, Motion] = {}
    for name, *texts in rows_of(block, *(f"_pdbx_struct_oper_list.{tag}" for tag in tags)):
        values = np.array([cif.as_number(text) for text in texts])
        rotation, translation = values[:9].reshape(3, 3), values[9:]
        is_finite = bool((np.abs(values) < _LARGEST).all())
        # A reflection, which racemic crystals have, would make chains of D-amino acids.
        if not is_finite or np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-2 or np.linalg.det(rotation) < 0:
            wrong = f"operator {shown(name)} of _pdbx_struct_oper_list is no rotation with a translation"
            raise FileFormatError(path, f"{wrong}; correct the file")
        found[name] = Motion(rotation, translation)
    return found


def _no_expression(path: str | Path, expression: str) -> FileFormatError:
    return FileFormatError(
        path, f"'{quoted(expression)}' is no expression of operators, such as 1,2 or (1-60)(61-88); correct the file"
    )


_ATOM_NAMES, _ATOM_INDICES = np.array(sorted(ATOM_TYPES)), np.argsort(ATOM_TYPES)
_CD, _NH1, _NH2 = (ATOM_ORDER[name] for name in ("CD", "NH1", "NH2"))
_RESOLUTIONS = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
_FARTHEST = 100_000
"""Å. Farther out float32 does not hold hundredths of an Å, and no assembly is so large."""
_SAME_PLACE, _REACH = 2.0, 12.0
"""Longest distance in Å between two locations of one residue's CA, and of any of its atoms."""


def read_structure(path: str | Path) -> Structure:
    """All protein chains of a structure file that have coordinates, by author chain id.

    Raises FileFormatError for a file that is not mmCIF or PDB, is truncated, or holds no atoms or no protein chain.
    """
    entry = _Entry(path)
    chains = {chain_id: entry.chain(chain_id) for chain_id in entry.asym_of_chain}
    return Structure(entry.pdb_id, entry.method, entry.resolution, entry.release_date, chains)


def read_chain(path: str | Path, chain_id: str) -> Chain:
    """One protein chain, by its author chain id ('': the only one). The coordinates of other chains are not parsed.

    Raises UserError, listing the protein chains, if this one is not among them; FileFormatError as `read_structure` does.
    """
    entry = _Entry(path)
    return entry.chain(entry.name_of(chain_id))


def read_assembly(path: str | Path, assembly: str | None = "1") -> Assembly:
    """The protein chains of a biological assembly, each moved to its place, in the order of the file.

    `assembly`: its name in the file; None: the asymmetric unit, every chain once. A file that lists no assemblies, such as a
    predicted model or a PDB file, is one: its chains are the asymmetric unit's, too. Raises FileFormatError for an assembly
    that the file does not list or that has no protein chain, and as `read_structure` does.
    """
    entry = _Entry(path)
    if assembly is None or not has_assemblies(entry.block):
        copies = [(chain_id, IDENTITY) for chain_id in entry.asym_of_chain]
    else:
        chain_of_asym = {asym: chain_id for chain_id, asym in entry.asym_of_chain.items()}
        moved = copies_in(path, entry.block, assembly)
        copies = [(chain_of_asym[asym], motion) for asym, motion in moved if asym in chain_of_asym]
    if not copies:
        raise FileFormatError(path, f"assembly {assembly} has no protein chain with coordinates; take another one")
    parsed = {chain_id: entry.chain(chain_id) for chain_id in dict.fromkeys(chain_id for chain_id, _ in copies)}
    counts: Counter[str] = Counter()
    names, chains = [], []
    for chain_id, motion in copies:
        counts[chain_id] += 1
        names.append(chain_id if counts[chain_id] == 1 else f"{chain_id}-{counts[chain_id]}")
        chains.append(_moved(parsed[chain_id], motion))
    return Assembly(entry.pdb_id, tuple(names), tuple(chains))


def _moved(chain: Chain, motion: Motion) -> Chain:
    """The chain in another place. Atoms that are not there stay at zero."""
    positions = motion.apply(chain.positions) * chain.mask[..., None]
    return dataclasses.replace(chain, positions=positions.astype(np.float32))


def read_confidence(path: str | Path, chain_id: str) -> Float32[np.ndarray, " L"]:
    """pLDDT (0 to 100) of each residue of a predicted chain: the B-factor of its CA atom, 0 without one.

    Raises FileFormatError if there are no B-factors, or none above 1, and as `read_chain` does.
    """
    entry = _Entry(path)
    return entry.confidence(entry.name_of(chain_id))


def read_release_date(path: str | Path) -> date | None:
    """The date of the entry's first release, None if the file has none. Raises FileFormatError as `read_structure` does."""
    return _release_date(read_block(path).block)


@dataclass(frozen=True)
class Header:
    """The facts that a structure file lists before its atoms. `resolution` is in Å, None if the method has none (NMR)."""

    resolution: float | None
    release_date: date | None
    sequences: dict[str, str]
    """SEQRES of the protein chains by author chain id. A residue with several monomers has the letter of the first."""
    entities: dict[str, str]
    """The entity of each of these chains, as the file numbers it. PDB files do not number entities, so it is empty for
    them."""


def read_header(path: str | Path) -> Header:
    """The header of a structure file. Atoms of an mmCIF file are not parsed: it takes a tenth of the time of `read_structure`.

    Truncated tables of atoms and chains without coordinates are not noticed. Raises FileFormatError as `read_structure` does.
    """
    block = None if is_pdb(path) else block_without_atoms(path, text_of(path))
    if block is None:
        whole = read_structure(path)
        sequences = {name: chain.sequence for name, chain in whole.chains.items()}
        return Header(whole.resolution, whole.release_date, sequences, {})
    monomers = {
        entity: _letters([names[0] for _, names in sorted(of_number.items())])
        for entity, of_number in sequences_of_entities(path, block).items()
    }
    found: dict[str, str] = {}
    entities: dict[str, str] = {}
    for entity, names in rows_of(block, "_entity_poly.entity_id", "_entity_poly.pdbx_strand_id"):
        for name in filter(None, map(str.strip, names.split(","))):
            # One author id on two polymers (rare): the longer one is meant.
            if entity in monomers and len(monomers[entity]) > len(found.get(name, "")):
                found[name], entities[name] = monomers[entity], entity
    return Header(_resolution(block), _release_date(block), found, entities)


class _Entry:
    """A parsed entry: its header, the sequence of each protein polymer, and the rows of its atoms."""

    def __init__(self, path: str | Path) -> None:
        completed = read_block(path)
        self.path, self.block, self.pdb_id = path, completed.block, entry_of(Path(path))
        self.method = ", ".join(values_of(self.block, "_exptl.method")).lower()
        self.resolution, self.release_date = _resolution(self.block), _release_date(self.block)
        self.seqres = sequences_of_chains(path, self.block)
        self.asym_of_chain, self.rows_of_asym, shorter = _chain_rows(self.block, self.seqres)
        if not self.asym_of_chain:
            raise FileFormatError(path, "no protein chain with coordinates; use an entry that holds a protein")
        self.notes = _notes(path, (*completed.notes, *shorter), self.asym_of_chain)
        """By author chain id: remarks for the user on its residues."""
        self.breaks, self.unlisted = completed.breaks, completed.unlisted

    def name_of(self, chain_id: str) -> str:
        """The author id of a protein chain ('': of the only one). Raises UserError, listing the chains, for another id."""
        if not chain_id and len(self.asym_of_chain) == 1:
            (chain_id,) = self.asym_of_chain
        if chain_id not in self.asym_of_chain:
            names = sorted(name or "''" for name in self.asym_of_chain)
            hint = f"{nearest(chain_id, names)} Chains: {quoted(', '.join(names), LONGEST_REASON)}; give one of these"
            raise UserError(f"{self.path}: no protein chain '{chain_id}'.{hint}")
        return chain_id

    def column(self, tag: str, rows: Int64[np.ndarray, " n"], missing: str) -> np.ndarray:
        """Unquoted strings [n] of an _atom_site column; `missing` replaces '?', '.' and an absent column."""
        found = self.block.find_values(f"_atom_site.{tag}")
        if not found or not rows.size:
            return np.full(len(rows), missing)
        first = int(rows.min())
        raw = np.array(list(islice(found, first, int(rows.max()) + 1)))[rows - first]
        unique, inverse = np.unique(raw, return_inverse=True)
        return np.array([missing if cif.is_null(text) else unquoted(text) for text in unique])[inverse]

    def numbers(self, tag: str, rows: Int64[np.ndarray, " n"], missing: str = "") -> Float64[np.ndarray, " n"]:
        """Finite numbers [n] of an _atom_site column, without standard deviations in parentheses."""
        texts = self.column(tag, rows, missing)
        try:
            values = texts.astype(np.float64)
        except ValueError:
            values = np.array([cif.as_number(text) for text in texts.tolist()])
        if (bad := np.flatnonzero(~(np.abs(values) < _LARGEST))).size:
            at, text = rows[bad[0]] + 1, str(texts[bad[0]])
            found = f"_atom_site.{tag} of atom row {at} is {shown(text)}, not a number"
            raise FileFormatError(self.path, f"{found}; correct the file")
        return values

    def confidence(self, chain_id: str) -> Float32[np.ndarray, " L"]:
        """pLDDT of each listed residue, from the B-factors (`read_confidence`)."""
        rows, numbers, residue = self._residues(chain_id)
        alpha = self.column("label_atom_id", rows, "") == "CA"
        found = np.zeros(len(numbers), np.float32)
        found[residue[alpha]] = self.numbers("B_iso_or_equiv", rows[alpha], "0")
        if not 1 < found.max() <= 100:
            message = f"B-factors reach {found.max():g}, but in a predicted structure they are the pLDDT, 0 to 100"
            raise FileFormatError(self.path, f"{message}; write them so, or remove the file")
        return found

    def _residues(
        self, chain_id: str
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " L"], Int64[np.ndarray, " n"]]:
        """The chain's rows of _atom_site, its sequence numbers, and which of these each row's residue has."""
        asym = self.asym_of_chain[chain_id]
        rows = self.rows_of_asym[asym]
        numbers = np.array(sorted(self.seqres[asym]))
        sequence_ids = self.numbers("label_seq_id", rows).astype(np.int64)
        residue = np.searchsorted(numbers, sequence_ids).clip(max=len(numbers) - 1)
        if (outside := np.flatnonzero(numbers[residue] != sequence_ids)).size:
            found = f"an atom of chain {chain_id} has label_seq_id {sequence_ids[outside[0]]}"
            listed = f"{numbers[0]}..{numbers[-1]}"
            raise FileFormatError(self.path, f"{found}, which SEQRES ({listed}) does not list; correct the file")
        return rows, numbers, residue

    def chain(self, chain_id: str) -> Chain:
        """Assemble one chain: [L, 37, 3] positions in SEQRES order."""
        rows, numbers, residue = self._residues(chain_id)
        monomers = self.seqres[self.asym_of_chain[chain_id]]
        names = self.column("label_comp_id", rows, "")
        occupancy = self.numbers("occupancy", rows, "1")
        listed = [monomers[number] for number in numbers.tolist()]
        residue_names, kept = _one_monomer_each(residue, names, occupancy, listed)
        rows, residue, names, occupancy = rows[kept], residue[kept], names[kept], occupancy[kept]

        length = len(numbers)
        seen, first = np.unique(residue, return_index=True)
        notes = self._differences(chain_id, rows[first], listed, seen, names[first])
        residue_names[seen] = [
            own if _is_another(own, listed[at]) and monomer_letter(own) != "X" else name
            for at, own, name in zip(seen.tolist(), names[first].tolist(), residue_names[seen].tolist(), strict=True)
        ]
        positions, mask, on_atoms = self._atom37(rows, residue, names, occupancy, length)
        _name_arginine_nitrogens(positions, mask, residue_names == "ARG")
        residue_number, insertion_code = np.zeros(length, np.int32), np.full(length, "", dtype="U8")
        residue_number[seen] = self.numbers("auth_seq_id", rows[first], "0")
        insertion_code[seen] = self.column("pdbx_PDB_ins_code", rows[first], "")
        is_missing = np.ones(length, bool)
        is_missing[seen] = False
        return Chain(
            pdb_id=self.pdb_id,
            chain_id=chain_id,
            sequence=_letters(residue_names.tolist()),
            residue_number=residue_number,
            insertion_code=tuple(insertion_code.tolist()),
            is_missing=is_missing,
            positions=positions,
            mask=mask,
            resolution=self.resolution,
            method=self.method,
            release_date=self.release_date,
            alternatives=tuple(
                (index, "".join(monomer_letter(name) for name in monomers[number]))
                for index, number in enumerate(numbers.tolist())
                if len(monomers[number]) > 1
            ),
            notes=self.notes[chain_id] + _said(self.path, (*notes, *on_atoms)),
            breaks=self.breaks.get(chain_id),
        )

    def _atom37(
        self,
        rows: Int64[np.ndarray, " n"],
        residue: Int64[np.ndarray, " n"],
        names: np.ndarray,
        occupancy: Float64[np.ndarray, " n"],
        length: int,
    ) -> tuple[Float32[np.ndarray, "L 37 3"], Float32[np.ndarray, "L 37"], tuple[str, ...]]:
        """Positions and mask of the given atom rows; `residue` and `names` are each row's index and monomer. The third: remarks
        on atoms that occur twice, and on those that no slot holds."""
        atoms = self.column("label_atom_id", rows, "")
        atoms[(atoms == "SE") & (names == "MSE")] = "SD"
        found = np.searchsorted(_ATOM_NAMES, atoms).clip(max=len(_ATOM_NAMES) - 1)
        known = np.flatnonzero(_ATOM_NAMES[found] == atoms)
        slots, best = _first_of_each(residue[known] * 37 + _ATOM_INDICES[found[known]], occupancy[known])
        chosen = rows[known[best]]
        positions, mask = np.zeros((length * 37, 3), np.float32), np.zeros(length * 37, np.float32)
        positions[slots] = self._places(chosen)
        mask[slots] = 1.0
        notes = self._lost(rows, atoms, names, known)
        if len(slots) < len(known):
            notes += self._repeated(rows[known], residue[known] * 37 + _ATOM_INDICES[found[known]], atoms[known])
        return positions.reshape(length, 37, 3), mask.reshape(length, 37), notes

    def _places(self, rows: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, "n 3"]:
        """Positions of these rows in Å. Raises FileFormatError for one that is out of reach."""
        placed = np.stack([self.numbers(f"Cartn_{axis}", rows) for axis in "xyz"], axis=-1)
        if (far := np.flatnonzero(np.abs(placed).max(axis=-1, initial=0) > _FARTHEST)).size:
            atom = self.column("label_atom_id", rows[far[:1]], "?")[0]
            found = f"atom {atom} of {self._label(int(rows[far[0]]))} is at {np.abs(placed[far[0]]).max():g} Å"
            fix = "correct the file, or leave the chain out"
            raise FileFormatError(self.path, f"{found}, but coordinates reach at most {_FARTHEST:,} Å; {fix}")
        return placed

    def _label(self, row: int) -> str:
        """A row's residue in messages, such as GLY 201A."""
        tags = ("label_comp_id", "auth_seq_id", "pdbx_PDB_ins_code")
        name, number, code = (str(self.column(tag, np.array([row]), "")[0]) for tag in tags)
        return f"{name} {number}{code}"

    def _differences(
        self, chain_id: str, rows: Int64[np.ndarray, " n"], listed: list[list[str]], seen: np.ndarray, names: np.ndarray
    ) -> tuple[str, ...]:
        """Remarks on residues of which the atoms say something else than the list. `rows`, `seen`, `names`: a row, the index
        and the name of each residue with atoms. Raises FileFormatError if they are many: the list is another protein's."""
        other: list[str] = []
        unnamed: list[str] = []
        for row, at, name in zip(rows.tolist(), seen.tolist(), names.tolist(), strict=True):
            if _is_another(name, listed[at]):
                group = unnamed if monomer_letter(name) == "X" else other
                group.append(f"{self._label(row)} for {listed[at][0]}")
        unlisted = list(self.unlisted.get(chain_id, ()))
        if len(other) + len(unlisted) > max(1, MOST_DIFFERENT * len(seen)):
            found = f"{len(other) + len(unlisted):,} of its {len(seen):,} residues differ ({some(other + unlisted)})"
            fix = "correct SEQRES (_entity_poly_seq), or remove it"
            raise FileFormatError(
                self.path, f"the sequence listed of chain '{quoted(chain_id)}' is not that of its atoms: {found}; {fix}"
            )
        lists = f"the sequence listed of chain '{quoted(chain_id)}'"
        groups = {
            f"{lists} has other residues than its atoms, whose names are taken": other,
            f"{lists} names residues that are unknown in its atoms, and is taken": unnamed,
            f"{lists} lacks residues that have atoms, which are put into it": unlisted,
        }
        return tuple(f"{note}: {some(labels)}" for note, labels in groups.items() if labels)

    def _lost(
        self, rows: Int64[np.ndarray, " n"], atoms: np.ndarray, names: np.ndarray, known: Int64[np.ndarray, " k"]
    ) -> tuple[str, ...]:
        """A remark on heavy atoms of amino acids that no slot holds; modified residues have such, of course."""
        others = np.ones(len(rows), bool)
        others[known] = False
        heavy = [name for name in np.unique(atoms[others]).tolist() if is_heavy(name)]
        lost = np.flatnonzero(others & np.isin(atoms, heavy) & np.isin(names, list(HEAVY_ATOMS))) if heavy else ()
        labels = [f"{atoms[at]} of {self._label(int(rows[at]))}" for at in lost]
        return (f"atoms that no amino acid has under their names are left out: {some(labels)}",) if labels else ()

    def _repeated(
        self, rows: Int64[np.ndarray, " n"], slots: Int64[np.ndarray, " n"], atoms: np.ndarray
    ) -> tuple[str, ...]:
        """A remark on atoms that occur twice in one alternative location. Raises FileFormatError where they are far apart: they
        are another residue's."""
        locations, code = np.unique(self.column("label_alt_id", rows, ""), return_inverse=True)
        _, first, inverse = np.unique(slots * len(locations) + code, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[inverse] != np.arange(len(rows)))
        if not again.size:
            return ()
        apart = np.linalg.norm(self._places(rows[again]) - self._places(rows[first[inverse[again]]]), axis=-1)
        labels = [f"{atoms[at]} of {self._label(int(rows[at]))}" for at in again]
        if (far := np.flatnonzero(apart > np.where(atoms[again] == "CA", _SAME_PLACE, _REACH))).size:
            found = (
                f"{labels[far[0]]} occurs twice, {apart[far[0]]:.1f} Å apart, in one chain ({len(far):,} such atoms)"
            )
            raise FileFormatError(self.path, f"{found}; give copies of a chain names of their own")
        said = "atoms occur twice without an alternative location, and the one of highest occupancy is taken"
        return (f"{said}: {some(labels)}",)


def _notes(path: str | Path, notes: Iterable[tuple[str, str]], chains: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The notes of each chain, which are logged too. A note about a chain that is no protein is given to all chains."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(chains, ())
    for name, note in notes:
        _said(path, (note,))
        for chain in [name] if name in found else found:
            found[chain] += (note,)
    return found


def _said(path: str | Path, notes: tuple[str, ...]) -> tuple[str, ...]:
    """The notes, which are logged too."""
    for note in notes:
        _say(f"{path}: {note}")
    return notes


@lru_cache(maxsize=1024)
def _say(note: str) -> None:
    """Warn of this note, once in a process."""
    logger(__name__).warning(note)


def _one_monomer_each(
    residue: Int64[np.ndarray, " n"],
    names: np.ndarray,
    occupancy: Float64[np.ndarray, " n"],
    listed: list[list[str]],
) -> tuple[np.ndarray, Bool[np.ndarray, " n"]]:
    """The name of each of the L residues, and which rows are its: of several monomers, the one of highest occupancy.

    `residue`, `names`, `occupancy`: the residue, monomer and occupancy of each row. `listed`: the monomers of each residue in
    SEQRES. If SEQRES lists one and the rows have several (PDB files), that one is taken if it was seen.
    """
    unique, codes = np.unique(names, return_inverse=True)
    seen = np.unique(residue * len(unique) + codes) // max(1, len(unique))
    several = np.array([len(monomers) > 1 for monomers in listed])
    mixed = several | (np.bincount(seen, minlength=len(listed)) > 1)
    residue_names = np.array([monomers[0] for monomers in listed], dtype="U8")
    if not mixed.any():
        return residue_names, np.ones(len(residue), bool)
    at = np.flatnonzero(mixed[residue])
    is_listed = np.array([n in listed[k] for k, n in zip(residue[at].tolist(), names[at].tolist(), strict=True)], bool)
    # A listed monomer goes before any other: occupancies are far below the bonus.
    _, best = _first_of_each(residue[at], np.clip(occupancy[at], -_LARGEST, _LARGEST) + 4 * _LARGEST * is_listed)
    chosen = residue_names.copy()
    chosen[residue[at[best]]] = names[at[best]]
    residue_names[several] = chosen[several]
    return residue_names, ~mixed[residue] | (names == chosen[residue])


def _is_another(name: str, listed: list[str]) -> bool:
    """Whether a residue's name stands for none of its listed monomers."""
    return name not in listed and letters_of(name).isdisjoint(map(monomer_letter, listed))


def _first_of_each(
    keys: Int64[np.ndarray, " n"], occupancy: Float64[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """The distinct keys and, for each, the row of highest occupancy (the first among equals)."""
    order = np.argsort(-occupancy, kind="stable")
    unique, first = np.unique(keys[order], return_index=True)
    return unique, order[first]


def _name_arginine_nitrogens(
    positions: Float32[np.ndarray, "L 37 3"], mask: Float32[np.ndarray, "L 37"], is_arginine: Bool[np.ndarray, " L"]
) -> None:
    """Swap NH1 and NH2, in place, where NH2 is nearer to CD: some entries have the two names exchanged."""
    complete = np.flatnonzero(is_arginine & mask[:, [_CD, _NH1, _NH2]].all(axis=1))
    to_cd = np.linalg.norm(positions[complete][:, [_NH1, _NH2]] - positions[complete][:, [_CD]], axis=-1)
    swapped = complete[to_cd[:, 0] > to_cd[:, 1]]
    positions[swapped, _NH1], positions[swapped, _NH2] = positions[swapped, _NH2], positions[swapped, _NH1]


def _letters(monomers: list[str]) -> str:
    return "".join(monomer_letter(name) for name in monomers)


def _chain_rows(
    block: cif.Block, seqres: dict[str, dict[int, list[str]]]
) -> tuple[dict[str, str], dict[str, np.ndarray], list[tuple[str, str]]]:
    """(author chain id -> label_asym_id, label_asym_id -> rows of _atom_site in the first model) of protein polymers, and
    remarks on those that are not read."""
    asym = np.array(list(block.find_values("_atom_site.label_asym_id")))
    numbers = np.array(list(block.find_values("_atom_site.label_seq_id")))
    used = (numbers != ".") & (numbers != "?")  # ligands and water have no position in the polymer
    if models := block.find_values("_atom_site.pdbx_PDB_model_num"):
        model = np.array(list(models))
        used &= model == model[0]
    authors = block.find_values("_atom_site.auth_asym_id") or block.find_values("_atom_site.label_asym_id")
    asym_of_chain: dict[str, str] = {}
    rows_of_asym: dict[str, np.ndarray] = {}
    notes = []
    names, codes = np.unique(asym, return_inverse=True)
    for code, name in enumerate(map(unquoted, names.tolist())):
        if name in seqres and (rows := np.flatnonzero(used & (codes == code))).size:
            author = unquoted(authors[int(rows[0])])
            # One author id on two polymers (rare): the longer one is meant.
            if author in asym_of_chain:
                pair = sorted((name, asym_of_chain[author]), key=lambda one: len(seqres[one]))
                which = f"label_asym_id {quoted(pair[1])}, not {quoted(pair[0])}"
                said = f"two polymers are chain '{quoted(author)}', and the longer one is read: {which}"
                notes.append((author, said))
            if author not in asym_of_chain or len(seqres[name]) > len(seqres[asym_of_chain[author]]):
                asym_of_chain[author], rows_of_asym[name] = name, rows
    return asym_of_chain, rows_of_asym, notes


def _resolution(block: cif.Block) -> float | None:
    """Resolution in Å (X-ray or electron microscopy), None if there is none (NMR)."""
    values = (cif.as_number(text) for tag in _RESOLUTIONS for text in values_of(block, tag))
    return next((value for value in values if 0 < value < _LARGEST), None)


def _release_date(block: cif.Block) -> date | None:
    """Date of the first revision."""
    dates = []
    for text in values_of(block, "_pdbx_audit_revision_history.revision_date"):
        with contextlib.suppress(ValueError):
            dates.append(date.fromisoformat(text))
    return min(dates, default=None)
