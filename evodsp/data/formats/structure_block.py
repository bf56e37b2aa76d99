"""The mmCIF block of a structure file, whatever its format (mmCIF, PDB; gzipped or not).

A plain mmCIF file is taken as it stands. Of all others, PDB files and mmCIF files that lack sequences, numbers or columns,
`completed` makes full mmCIF, so that one reader (`evodsp.data.formats.mmcif`) assembles all of them.

Where the file is no plain mmCIF, the protein chains that gemmi read become an mmCIF block with entities. This is the one
place where records become chains: parts of a chain are joined, copies and chains without names are separated and named,
residues of force fields get their names in the PDB, and each residue its place in the listed sequence. Where the file lists
none, the chain's sequence is that of its residues.
"""

from __future__ import annotations

import contextlib
import re
import string
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gemmi
import numpy as np
from gemmi import cif
from jaxtyping import Float64

from evodsp.data.formats.chains import (
    AMINO_ACID_OF,
    HEAVY_ATOMS,
    AtomRecord,
    ChainPart,
    FoundChain,
    PartPlace,
    Site,
    amino_acid_name,
    are_plain,
    atom_names,
    bonded,
    find_chain,
    holds,
    is_ensemble,
    is_known,
    listed_name,
    placed,
    places,
    rows_of,
    sequences_of_chains,
    unquoted,
)
from evodsp.errors import FileFormatError, UserError
from evodsp.geometry.residues import MONOMER_LETTERS
from evodsp.printing import LONGEST_REASON, quoted
from evodsp.reading.text_files import text_of

_NAMED = 5
"""Most residues that a message names."""
_LEAST = 4
"""Fewest CA of a model whose copies are recognized."""
_MOVED, _RIGID, _APART = 1.0, 0.05, 2.0
"""Å: a model that is the first one moved as a whole, by more than the first of these, with no other difference than the second,
and no CA nearer to it than the third, is another copy in an assembly."""


@dataclass(frozen=True)
class Completed:
    """The mmCIF block with the atoms of a file. `notes`: (author chain id, remark for the user). `breaks`: by author chain id,
    for the chains of which the file lists no sequence, the residues behind which they break (see `Chain.breaks`).
    `unlisted`: by author chain id, residues with atoms that the listed sequence does not have."""

    block: cif.Block
    notes: tuple[tuple[str, str], ...] = ()
    breaks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unlisted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """The records of a part, as one chain."""

    part: ChainPart
    found: FoundChain
    listed: list[list[str]] | None


def completed(
    structure: gemmi.Structure,
    place_of: Callable[[int, gemmi.Chain, gemmi.Residue], PartPlace],
    listed: Mapping[str, list[list[str]]],
) -> Completed:
    """The structure with its protein chains alone. `place_of`: where the residue of a model's chain belongs. `listed`: the
    sequences in the file, by entity chain (mmCIF) or chain. All models are parts of it."""
    pieces = _pieces(structure, place_of, listed)
    notes = [(piece.part.chain, _left_out(piece)) for piece in pieces if piece.found.left_out]
    pieces = _joined([piece for piece in pieces if piece.found.sites])
    if not pieces:
        return Completed(structure.make_mmcif_document().sole_block())  # the reader says that there is no protein
    models = len({piece.part.model for piece in pieces})
    names = _names([piece.part for piece in pieces])
    if len(names) != len({piece.part.chain for piece in pieces}):
        structure.assemblies.clear()
    notes += _separated(pieces, names, models)
    return _as_block(structure, dict(zip(names, pieces, strict=True)), notes)


def _pieces(
    structure: gemmi.Structure,
    place_of: Callable[[int, gemmi.Chain, gemmi.Residue], PartPlace],
    listed: Mapping[str, list[list[str]]],
) -> list[_Piece]:
    """The parts of all models in the order of the file, with those records of a part together that stand apart."""
    chains: dict[ChainPart, gemmi.Chain] = {}
    at: dict[tuple[PartPlace, str, str], int] = {}  # place, number and name of a residue -> its place in its chain
    for number, model in enumerate(structure):
        for chain in model:
            for residue in chain:
                place = place_of(number, chain, residue)
                target = chains.setdefault(place.part, gemmi.Chain(place.part.chain))
                key = place, str(residue.seqid), residue.name
                if key in at:
                    for atom in residue:
                        target[at[key]].add_atom(atom)
                else:
                    at[key] = len(target)
                    target.add_residue(residue)
    found = []
    for part, chain in chains.items():
        _rename(chain)
        sequence = listed.get(part.entity_chain or part.chain)
        monomers = {name for names in sequence or () for name in names}
        of_chain = find_chain(chain, monomers)
        if monomers and not any(map(is_known, monomers)):  # a nucleic acid
            of_chain = replace(find_chain(chain), sites=[])
        found.append(_Piece(part, of_chain, sequence))
    return found


def _rename(chain: gemmi.Chain) -> None:
    """Give residues and atoms of force fields their names in the PDB."""
    for residue in chain:
        if residue.name in AMINO_ACID_OF:
            residue.name = amino_acid_name(residue.name, [atom.name for atom in residue])
        if residue.name in HEAVY_ATOMS:
            names = atom_names(residue.name, [atom.name for atom in residue])
            for atom in residue if names else ():
                atom.name = names.get(atom.name, atom.name)


def _joined(pieces: Iterable[_Piece]) -> list[_Piece]:
    """The pieces, with those of one name together that follow each other by a peptide bond: numbers begin again at 10,000."""
    found: list[_Piece] = []
    for piece in pieces:
        last = next((k for k in reversed(range(len(found))) if _name(found[k].part) == _name(piece.part)), None)
        if last is None or not bonded(found[last].found.sites[-1], piece.found.sites[0]):
            found.append(piece)
            continue
        before = found[last]
        sites = [*before.found.sites, *piece.found.sites]
        whole = FoundChain(sites, before.found.left_out + piece.found.left_out)
        found[last] = replace(before, found=whole)
    return found


def _name(part: ChainPart) -> tuple[str, str, str]:
    return part.model, part.chain, part.entity_chain


def is_assembly(structure: gemmi.Structure) -> bool:
    """Whether every other model is the first one moved as a whole to another place. The CA atoms are enough."""
    fixed = _alpha(structure[0]) if len(structure) > 1 else np.zeros((0, 3))
    for model in list(structure)[1:]:
        moved = _alpha(model)
        if len(moved) != len(fixed) or len(fixed) < _LEAST:
            return False
        first, second = ([gemmi.Position(*place) for place in one.tolist()] for one in (fixed, moved))
        rigid = gemmi.superpose_positions(first, second)
        shift = np.sqrt(((fixed - moved) ** 2).sum(axis=-1).mean())
        near = min(float(np.linalg.norm(fixed - place, axis=-1).min()) for place in moved)
        if rigid.rmsd > _RIGID or shift < _MOVED or near < _APART:
            return False
    return len(structure) > 1


def _alpha(model: gemmi.Model) -> Float64[np.ndarray, "n 3"]:
    places = [atom.pos.tolist() for chain in model for residue in chain for atom in residue if atom.name == "CA"]
    return np.array(places, float).reshape(-1, 3)


def _names(parts: Sequence[ChainPart]) -> list[str]:
    """A name for each chain: its own, A-2 for the second of the name A as in the PDB's files of assemblies. Chains without
    names have those of their segments, or letters; a single one has none."""
    unnamed = [part for part in parts if not part.chain]
    segments = [part.segment for part in unnamed]
    has_segments = len(set(segments)) == len(segments) and all(segment.isalnum() for segment in segments)
    used = {part.chain for part in parts} | set(segments)
    letters = (letter for letter in string.ascii_uppercase + string.ascii_lowercase if letter not in used)
    found: list[str] = []
    for part in parts:
        name = part.chain
        if not name and len(unnamed) > 1:
            name = part.segment if has_segments else next(letters, "chain")
        taken, number = name, 1
        while taken in found:
            number += 1
            taken = f"{name}-{number}"
        found.append(taken)
    return found


def _separated(pieces: Sequence[_Piece], names: Sequence[str], models: int) -> list[tuple[str, str]]:
    """Remarks on chains that are not those of the file's own names."""
    if models > 1:
        said = f"the models of the file are parts of one assembly, and are read as its chains: {some(names)}"
        return [(name, said) for name in names]
    notes = []
    groups: dict[str, list[str]] = {}
    for piece, name in zip(pieces, names, strict=True):
        groups.setdefault(piece.part.chain, []).append(name)
    for chain, several in groups.items():
        if len(several) > 1 and chain:
            said = f"chain '{quoted(chain)}' holds residues of the same numbers again, and is read as the chains"
            notes += [(name, f"{said} {some(several)}") for name in several]
        elif len(several) > 1:
            said = "the file names no chains; segments, TER and numbers that go back separate the chains"
            notes += [(name, f"{said} {some(several)}") for name in several]
    return notes


def _as_block(structure: gemmi.Structure, pieces: Mapping[str, _Piece], notes: list[tuple[str, str]]) -> Completed:
    """The chains as mmCIF, each an entity of its own."""
    model, breaks, unlisted = gemmi.Model(1), {}, {}
    structure.entities.clear()
    own = [_label(piece) for piece in pieces.values()]
    for number, (name, piece) in enumerate(pieces.items()):
        label = own[number] if own[number] and own.count(own[number]) == 1 else f"{number}?"
        sites = piece.found.sites
        if piece.listed is None:
            sequence = [list(dict.fromkeys(residue.name for residue in site.residues)) for site in sites]
            index = list(range(len(sites)))
            breaks[name] = piece.found.breaks
            if piece.found.breaks:
                notes.append((name, _broken(name, piece.found)))
            if unknown := [site for site in sites if site.residues[0].name not in {*MONOMER_LETTERS, "UNK"}]:
                notes.append(
                    (name, f"residues of chain '{quoted(name)}' have no known name and are X: {_some(unknown)}")
                )
        else:
            sequence, index, lacking = placed(piece.found, piece.listed)
            unlisted[name] = tuple(site.label for site in lacking)
        chain = gemmi.Chain(name)
        for at, site in zip(index, sites, strict=True):
            for residue in site.residues:
                residue.label_seq, residue.subchain, residue.entity_id = at + 1, label, label
                chain.add_residue(residue)
        model.add_chain(chain)
        entity = gemmi.Entity(label)
        entity.entity_type, entity.polymer_type = gemmi.EntityType.Polymer, gemmi.PolymerType.PeptideL
        entity.subchains = [label]
        entity.full_sequence = [",".join(names) for names in sequence]
        structure.entities.append(entity)
    while len(structure):
        del structure[-1]
    structure.add_model(model)
    return Completed(structure.make_mmcif_document().sole_block(), tuple(notes), breaks, unlisted)


def _label(piece: _Piece) -> str:
    """The label_asym_id of a chain, '' if its residues have several or none."""
    labels = {residue.subchain for site in piece.found.sites for residue in site.residues}
    return labels.pop() if len(labels) == 1 else ""


def _left_out(piece: _Piece) -> str:
    what = f"residues with N, CA and C that no peptide bond joins to chain '{quoted(piece.part.chain)}' are left out"
    return f"{what}: {_some(piece.found.left_out)}"


def _broken(name: str, found: FoundChain) -> str:
    places = _some([found.sites[index] for index in found.breaks])
    what = f"chain '{quoted(name)}' has no listed sequence and a gap behind {places}"
    return (
        f"{what}; the residues that are missing there are taken from its alignment, and without one they stay missing"
    )


def _some(sites: Sequence[Site]) -> str:
    return some([site.label for site in sites])


def some(labels: Sequence[str]) -> str:
    """The first of some residues, and the number of the others."""
    more = f" and {len(labels) - _NAMED:,} more" if len(labels) > _NAMED else ""
    return ", ".join(map(quoted, labels[:_NAMED])) + more


_NEEDED = (
    *(f"_atom_site.{tag}" for tag in ("label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id")),
    *(f"_atom_site.Cartn_{axis}" for axis in "xyz"),
    *("_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"),
    *("_struct_asym.id", "_struct_asym.entity_id"),
)
_OPTIONAL = tuple(
    f"_atom_site.{tag}"
    for tag in ("auth_asym_id", "auth_seq_id", "pdbx_PDB_ins_code", "pdbx_PDB_model_num", "occupancy")
)
_ATOM_COLUMNS = tuple(tag for tag in (*_NEEDED, *_OPTIONAL) if tag.startswith("_atom_site."))
_PARSE_ERROR = re.compile(r"[^:]*:(\d+)(?::\d+\(\d+\))?:? ?(.*)", re.DOTALL)
_NUMBERED = re.compile(r"^(?:ATOM  |HETATM)[^\n]{70}[ \d]{3}\d[ \r]*$", re.MULTILINE)
"""Atoms of PDB files before 1996, whose lines end with the entry's name and their number: later files have elements there."""
_NUMBERED_COLUMNS = 72
"""Number of columns before the entry's name."""
_MARK, _END_OF_PLACE = 4, 54
"""Columns of a segment, and the last one of a place."""
_ATOMS, _WITH_RESIDUES = ("ATOM", "HETA"), ("ATOM", "HETA", "TER")
"""Records of atoms, and those that name a residue in the same columns."""
_PLACE_COLUMNS = (
    *("pdbx_PDB_model_num", "auth_asym_id", "label_asym_id", "auth_seq_id", "pdbx_PDB_ins_code"),
    *("label_comp_id", "label_atom_id", "label_alt_id", "group_PDB"),
)
_SUBSTITUTES = {
    "label_atom_id": "auth_atom_id",
    "label_comp_id": "auth_comp_id",
    "auth_asym_id": "label_asym_id",
    "label_asym_id": "auth_asym_id",
    "auth_seq_id": "label_seq_id",
}
"""Columns of _atom_site that are needed, and those that say the same."""
_DEFAULTS = {
    "label_asym_id": "",
    "auth_asym_id": "",
    "label_alt_id": "",
    "label_seq_id": "",
    "pdbx_PDB_ins_code": "",
    "pdbx_PDB_model_num": "1",
    "occupancy": "1",
    "group_PDB": "ATOM",
}


def read_block(path: str | Path) -> Completed:
    """The mmCIF block with the atoms of a file, whatever its format."""
    data = text_of(path)
    try:
        read = _read_pdb(data.decode()) if is_pdb(path) else _read_cif(path, data)
    except UserError:
        raise
    except Exception as error:  # gemmi raises any exception at all
        raise _not_valid(path, error) from error
    block = read.block
    if not holds(block, "_atom_site.Cartn_x"):
        raise FileFormatError(path, "no atoms (no _atom_site records); download the entry again or use another one")
    lengths = {len(block.find_values(tag)) for tag in _ATOM_COLUMNS} - {0}
    if len(lengths) > 1:
        raise FileFormatError(
            path, f"columns of _atom_site differ in length {sorted(lengths)}; download the entry again"
        )
    return read


def _read_pdb(text: str) -> Completed:
    text = text.encode("ascii", "replace").decode()  # gemmi counts columns in bytes
    lines = [
        "" if _kind(line) == "ANIS" else line for line in text.split("\n")
    ]  # gemmi refuses some; nothing reads them
    if _NUMBERED.search(text):
        lines = [line[:_NUMBERED_COLUMNS] for line in lines]
    _split_at_ends(lines)
    _shorten_names(lines)
    lines = _molecule(lines)
    records, at = _records_of(lines)
    found = places(records)
    marks = {} if are_plain(found) else _mark(lines, at, found)
    structure = gemmi.read_pdb_string("\n".join(lines))
    listed = {
        entity.name: [[listed_name(name) for name in names.split(",")] for names in entity.full_sequence]
        for entity in structure.entities
        if entity.full_sequence
    }

    def place_of(model: int, chain: gemmi.Chain, residue: gemmi.Residue) -> PartPlace:
        return marks[residue.segment] if marks else PartPlace(ChainPart(str(model), chain.name.strip()))

    return completed(structure, place_of, listed)


def _molecule(lines: list[str]) -> list[str]:
    """The lines without the models that are other models of the first one's molecule; trajectories have thousands."""
    models = [at for at, line in enumerate(lines) if _kind(line) == "MODE"]
    if len(models) < 2:
        return lines
    kept = (*_ATOMS, "MODE", "ENDM")
    alpha = [
        line for line in lines if _kind(line) in kept and (_kind(line) not in _ATOMS or line[12:16].strip() == "CA")
    ]
    with contextlib.suppress(RuntimeError, ValueError):  # the reader of the whole file says what is wrong
        if is_ensemble(_records_of(alpha)[0]) and not is_assembly(gemmi.read_pdb_string("\n".join(alpha))):
            return lines[: models[1]]
    return lines


def _split_at_ends(lines: list[str]) -> None:
    """Make MODEL records of END records that more atoms follow, at the first of which gemmi would stop."""
    kinds = [_kind(line) for line in lines]
    last = max((at for at, kind in enumerate(kinds) if kind in _ATOMS), default=0)
    ends = [at for at, kind in enumerate(kinds[:last]) if kind == "END"]
    for number, at in enumerate(ends, 2):
        lines[at] = "" if "MODE" in kinds else f"ENDMDL\nMODEL {number:8}"


def _kind(line: str) -> str:
    """The record that a line is, by its first four letters as for gemmi: behind them may stand a long serial number."""
    return line[:4].rstrip().upper()


def _shorten_names(lines: list[str]) -> None:
    """Write residue names of four letters, in columns 18 to 21, as the names of their amino acids. Column 21 is the first
    letter of a chain's name where other names stand before it, too."""
    wide = [
        (at, line[20:22], line[17:21])
        for at, line in enumerate(lines)
        if line[20:21].strip() and _kind(line) in _WITH_RESIDUES
    ]
    others = {chain for _, chain, name in wide if name not in AMINO_ACID_OF}
    for at, chain, name in wide:
        if chain not in others:
            lines[at] = f"{lines[at][:17]}{AMINO_ACID_OF[name]} {lines[at][21:]}"


def _records_of(lines: Iterable[str]) -> tuple[list[AtomRecord], list[int]]:
    """The atom records of a PDB file, and the place of each among the lines."""
    records: list[AtomRecord] = []
    numbers, model, end = [], 0, 0
    for at, line in enumerate(lines):
        kind = _kind(line)
        if kind in _ATOMS:
            fields = line[20:22], line[72:76], line[22:27], line[17:20], line[12:16], line[16:17]
            chain, segment, number, name, atom, altloc = map(str.strip, fields)
            records.append(AtomRecord(str(model), chain, "", segment, number, name, atom, altloc, kind == "HETA", end))
            numbers.append(at)
        elif kind == "TER":
            end += 1
        elif kind in ("ENDM", "MODE"):
            model += bool(records) and records[-1].model == str(model)
    return records, numbers


def _mark(lines: list[str], numbers: Sequence[int], found: Sequence[PartPlace]) -> dict[str, PartPlace]:
    """Write the place of each atom record where segments stand, which gemmi keeps apart; returns the place of each mark."""
    marks: dict[PartPlace, str] = {}
    for at, place in zip(numbers, found, strict=True):
        mark = marks.setdefault(place, np.base_repr(len(marks), 36).zfill(_MARK))
        line = lines[at].rstrip("\r")
        if len(line) >= _END_OF_PLACE:  # a shorter one is damaged
            line = line if line[_END_OF_PLACE:60].strip() else f"{line[:_END_OF_PLACE]}  1.00{line[60:]}"
            lines[at] = f"{line[:72]:72}{mark}{line[76:]:4}"
    return {mark: place for place, mark in marks.items()}


def _read_cif(path: str | Path, data: bytes) -> Completed:
    block = next((b for b in cif.read_string(data) if holds(b, "_atom_site.Cartn_x")), cif.Block(""))
    if not holds(block, "_atom_site.Cartn_x"):
        return Completed(block)
    listed = sequences_of_chains(path, block)
    if holds(block, *_NEEDED) and _is_plain(block, listed):
        return Completed(block)
    columns = _columns(path, block)
    models = columns["pdbx_PDB_model_num"]
    alpha = {tag: [text for text, atom in zip(texts, columns["label_atom_id"], strict=True) if atom == "CA"]
             for tag, texts in (columns.items() if models[0] != models[-1] else ())}  # fmt: skip
    if alpha and is_ensemble(_records_of_columns(alpha, listed)) and not is_assembly(_structure(block, alpha)):
        columns = {tag: [text for text, model in zip(texts, models, strict=True) if model == models[0]]
                   for tag, texts in columns.items()}  # fmt: skip
    records = _records_of_columns(columns, listed)
    found = places(records)
    marks: dict[PartPlace, str] = {}
    columns["auth_asym_id"] = [marks.setdefault(place, str(len(marks))) for place in found]
    place_of_mark = {mark: place for place, mark in marks.items()}
    sequences = {asym: [names for _, names in sorted(of_number.items())] for asym, of_number in listed.items()}
    return completed(
        _structure(block, columns),
        lambda _, chain, __: place_of_mark[chain.name],
        sequences,
    )


def _records_of_columns(columns: Mapping[str, list[str]], listed: Container[str]) -> list[AtomRecord]:
    """The atom records of an mmCIF file. `listed`: the entity chains of which it lists the sequences."""
    of_chain: dict[str, set[str]] = {}
    for chain, asym in set(zip(columns["auth_asym_id"], columns["label_asym_id"], strict=True)):
        if asym in listed:
            of_chain.setdefault(chain, set()).add(asym)
    only = {chain: min(several) for chain, several in of_chain.items() if len(several) == 1}
    return [
        AtomRecord(
            *(model, chain, asym if asym in listed else only.get(chain, ""), "", number + code, name, atom, altloc),
            het == "HETATM",
            0,
        )
        for model, chain, asym, number, code, name, atom, altloc, het in zip(
            *(columns[tag] for tag in _PLACE_COLUMNS), strict=True
        )
    ]


def _structure(block: cif.Block, columns: Mapping[str, list[str]]) -> gemmi.Structure:
    """The structure with these columns as its atoms."""
    block.set_mmcif_category("_atom_site.", {tag: [text or None for text in texts] for tag, texts in columns.items()})
    return gemmi.make_structure_from_block(block)


def _columns(path: str | Path, block: cif.Block) -> dict[str, list[str]]:
    """The columns of _atom_site by their names, without quotes, '' for '?' and '.'. Those that are absent and follow from
    others are added; raises FileFormatError, naming the column, for one that does not."""
    found = {
        tag: ["" if text is None or text is False else str(text) for text in texts]
        for tag, texts in block.get_mmcif_category("_atom_site.").items()
    }
    length = len(found["Cartn_x"])
    for tag, other in _SUBSTITUTES.items():
        if tag not in found and other not in found and tag not in _DEFAULTS:
            raise FileFormatError(path, f"the table of atoms has no column _atom_site.{tag}; add it")
        pair = (found.get(name, [_DEFAULTS.get(name, "")] * length) for name in (tag, other))
        found[tag] = [own or instead for own, instead in zip(*pair, strict=True)]
    for tag in ("Cartn_y", "Cartn_z"):
        if tag not in found:
            raise FileFormatError(path, f"the table of atoms has no column _atom_site.{tag}; add it")
    for tag, default in _DEFAULTS.items():
        found[tag] = [text or default for text in found.get(tag, [default] * length)]
    found.setdefault("id", list(map(str, range(1, length + 1))))
    elements = found.get("type_symbol", [""] * length)
    pairs = zip(elements, found["label_atom_id"], strict=True)
    found["type_symbol"] = [element or atom.lstrip("0123456789'\"")[:1] for element, atom in pairs]
    return found


def _is_plain(block: cif.Block, listed: Mapping[str, Mapping[int, list[str]]]) -> bool:
    """Whether a file that lists sequences can be read as it stands: monomers have the PDB's names, each residue of a listed
    chain has its number, each amino acid is in a list, and all models hold the same chains."""
    tags = ("label_asym_id", "label_seq_id", "label_comp_id", "label_atom_id")
    asyms, numbers, names, atoms = (list(block.find_values(f"_atom_site.{tag}")) for tag in tags)
    if len({len(asyms), len(numbers), len(names), len(atoms)}) > 1:
        return True  # the reader refuses it
    if not AMINO_ACID_OF.keys().isdisjoint(names):
        of_name: dict[str, set[str]] = {}
        for name, atom in zip(names, atoms, strict=True):
            if name in AMINO_ACID_OF:
                of_name.setdefault(name, set()).add(unquoted(atom))
        if any(amino_acid_name(name, own) != name for name, own in of_name.items()):
            return False
    alpha = [at for at, atom in enumerate(atoms) if atom == "CA" and is_known(names[at])]
    models = list(block.find_values("_atom_site.pdbx_PDB_model_num"))
    if len(models) == len(atoms) and models[0] != models[-1]:
        seen: dict[str, list[tuple[str, str, str]]] = {}
        for at in alpha:
            seen.setdefault(models[at], []).append((asyms[at], numbers[at], names[at]))
        residues = (
            AtomRecord(model, asym, "", "", number, name, "CA", "", False, 0)
            for model, own in seen.items()
            for asym, number, name in own
        )
        if any(own != seen[models[alpha[0]]] for own in seen.values()) and not is_ensemble(residues):
            return False
        alpha = [at for at in alpha if models[at] == models[0]]
    return not _are_unlisted(block, listed, [(at, asyms[at], numbers[at], names[at]) for at in alpha])


def _are_unlisted(
    block: cif.Block, listed: Mapping[str, Mapping[int, list[str]]], residues: Sequence[tuple[int, str, str, str]]
) -> bool:
    """Whether an amino acid that is no ligand lacks its number, or its chain a list. `residues`: the row of CA, the
    label_asym_id, the label_seq_id and the name of each."""
    polymers = {*block.find_values("_entity_poly.entity_id"), *block.find_values("_entity_poly_seq.entity_id")}
    chains = {
        asym for asym, entity in rows_of(block, "_struct_asym.id", "_struct_asym.entity_id") if entity in polymers
    }
    odd = [one for one in residues if cif.is_null(one[2]) or unquoted(one[1]) not in chains]
    groups = block.find_values("_atom_site.group_PDB")
    if any(len(groups) > at and groups[at] == "ATOM" for at, *_ in odd):
        return True
    authors = block.find_values("_atom_site.auth_asym_id") or block.find_values("_atom_site.label_asym_id")
    own_numbers = block.find_values("_atom_site.auth_seq_id")
    if not odd or len(own_numbers) <= odd[-1][0] or len(authors) <= odd[-1][0]:
        return False
    for at, _, _, name in odd:
        same = [
            one for one in residues if one not in odd and authors[one[0]] == authors[at] and unquoted(one[1]) in listed
        ]
        places = {int(number): int(own_numbers[row]) for row, _, number, _ in same}
        number = int(own_numbers[at])
        near = min(places, key=lambda place: abs(places[place] - number), default=None)
        if near is not None:
            expected = near + number - places[near]
            monomers = listed[unquoted(same[0][1])].get(expected, ())
            if expected not in places and unquoted(name) in monomers:
                return True
    return False


def block_without_atoms(path: str | Path, data: bytes) -> cif.Block | None:
    """The mmCIF block with the sequences, parsed without the tables of atoms; None if it lacks what `read_header` needs."""
    for table in (b"\nloop_\n_atom_site.", b"\nloop_\n_atom_site_anisotrop."):
        if (start := data.find(table)) >= 0 and (end := data.find(b"\n#", start)) >= 0:
            data = data[:start] + data[end:]
    try:
        blocks = cif.read_string(data)
    except Exception as error:
        raise _not_valid(path, error) from error
    needed = ("_entity_poly.pdbx_strand_id", "_entity_poly_seq.mon_id")
    return next((block for block in blocks if holds(block, *needed)), None)


def is_pdb(path: str | Path) -> bool:
    return str(path).lower().removesuffix(".gz").endswith((".pdb", ".ent"))


def _not_valid(path: str | Path, error: Exception) -> FileFormatError:
    """gemmi's error as one line."""
    found = _PARSE_ERROR.match(str(error))
    line, reason = (int(found.group(1)), found.group(2)) if found else (None, str(error))
    message = f"not a valid structure file, or truncated ({quoted(reason, LONGEST_REASON)}); download it again"
    return FileFormatError(path, message, line)
