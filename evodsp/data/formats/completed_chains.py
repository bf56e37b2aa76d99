"""The protein chains of a structure that gemmi read, whatever the format, as an mmCIF block with entities.

This is the one place where records become chains: parts of a chain are joined, copies and chains without names are separated
and named, residues of force fields get their names in the PDB, and each residue its place in the listed sequence. Where the
file lists none, the chain's sequence is that of its residues.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import gemmi
import numpy as np
from gemmi import cif
from jaxtyping import Float64

from evodsp.data.formats.forcefield_names import AMINO_ACID_OF, HEAVY_ATOMS, amino_acid_name, atom_names
from evodsp.data.formats.listed_sequences import placed
from evodsp.data.formats.record_parts import ChainPart, PartPlace
from evodsp.data.formats.unlisted_chains import FoundChain, Site, bonded, find_chain, is_known
from evodsp.geometry.residues import MONOMER_LETTERS
from evodsp.printing import quoted

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
    what = f"the file lists no sequence of chain '{quoted(name)}', which breaks behind {places}"
    return f"{what}; its alignment says which residues are missing, and without one nothing stands for them"


def _some(sites: Sequence[Site]) -> str:
    return some([site.label for site in sites])


def some(labels: Sequence[str]) -> str:
    """The first of some residues, and the number of the others."""
    more = f" and {len(labels) - _NAMED:,} more" if len(labels) > _NAMED else ""
    return ", ".join(map(quoted, labels[:_NAMED])) + more
