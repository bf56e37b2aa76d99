"""The mmCIF block of a structure file, whatever its format (mmCIF, PDB; gzipped or not).

gemmi completes PDB files, and mmCIF files without polymer sequences, to full mmCIF, so that one reader
(`evodsp.data.formats.mmcif`) assembles all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gemmi
from gemmi import cif

from evodsp.data.formats.unlisted_chains import FoundChain, Site, find_chain
from evodsp.errors import FileFormatError
from evodsp.reading.quoting import LONGEST_REASON, quoted
from evodsp.reading.text_files import read_bytes

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
_NUMBERED = re.compile(rb"^(?:ATOM  |HETATM)[^\n]{70}[ \d]{3}\d[ \r]*$", re.MULTILINE)
"""Atoms of PDB files before 1996, whose lines end with the entry's name and their number: later files have elements there."""
_NUMBERED_COLUMNS = 72
"""Number of columns before the entry's name."""
_NAMED = 5
"""Most residues that a message names."""


@dataclass(frozen=True)
class Completed:
    """The mmCIF block with the atoms of a file. `notes`: (author chain id, remark for the user). `breaks`: by author chain id,
    for the chains of which the file lists no sequence, the residues behind which they break (see `Chain.breaks`)."""

    block: cif.Block
    notes: tuple[tuple[str, str], ...] = ()
    breaks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_block(path: str | Path) -> Completed:
    """The mmCIF block with the atoms of a file, whatever its format."""
    data = read_bytes(path)
    try:
        if is_pdb(path):
            text = data.decode().encode("ascii", "replace")  # gemmi counts columns in bytes
            longest = _NUMBERED_COLUMNS if _NUMBERED.search(text) else 0
            completed = _completed(gemmi.read_pdb_string(text, max_line_length=longest))
        else:
            block = next((b for b in cif.read_string(data) if _holds(b, "_atom_site.Cartn_x")), cif.Block(""))
            completed = Completed(block)
            if _holds(block, "_atom_site.Cartn_x") and not _holds(block, *_NEEDED):
                completed = _completed(gemmi.make_structure_from_block(block))
    except Exception as error:  # gemmi raises any exception at all
        raise _not_valid(path, error) from error
    block = completed.block
    if not _holds(block, "_atom_site.Cartn_x"):
        raise FileFormatError(path, "no atoms (no _atom_site records); download the entry again or use another one")
    lengths = {len(block.find_values(tag)) for tag in _ATOM_COLUMNS} - {0}
    if len(lengths) > 1:
        raise FileFormatError(
            path, f"columns of _atom_site differ in length {sorted(lengths)}; download the entry again"
        )
    return completed


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
    return next((block for block in blocks if _holds(block, *needed)), None)


def is_pdb(path: str | Path) -> bool:
    return str(path).lower().removesuffix(".gz").endswith((".pdb", ".ent"))


def _not_valid(path: str | Path, error: Exception) -> FileFormatError:
    """gemmi's error as one line."""
    found = _PARSE_ERROR.match(str(error))
    line, reason = (int(found.group(1)), found.group(2)) if found else (None, str(error))
    message = f"not a valid structure file, or truncated ({quoted(reason, LONGEST_REASON)}); download it again"
    return FileFormatError(path, message, line)


def _completed(structure: gemmi.Structure) -> Completed:
    """The first model as mmCIF with entities. A protein chain without a listed sequence is given the one of its residues."""
    while len(structure) > 1:
        del structure[-1]
    for chain in structure[0]:
        chain.name = chain.name.strip()
    chains = [(chain.name, chain, find_chain(chain)) for chain in structure[0]]
    for _, chain, found in chains:
        _declare(chain, found)
    structure.setup_entities()
    listed = {
        subchain
        for entity in structure.entities
        if entity.entity_type == gemmi.EntityType.Polymer and entity.full_sequence
        for subchain in entity.subchains
    }
    structure.assign_label_seq_id(force=True)
    notes, breaks = [], {}
    for number, (name, chain, found) in enumerate(chains):
        if found.left_out:
            notes.append((name, _left_out(name, found)))
        if not listed.isdisjoint(residue.subchain for residue in chain) or not found.sites:
            continue
        _number(structure, chain, found, f"{number}?")
        breaks[name] = found.breaks
        if found.breaks:
            notes.append((name, _broken(name, found)))
    return Completed(structure.make_mmcif_document().sole_block(), tuple(notes), breaks)


def _declare(chain: gemmi.Chain, found: FoundChain) -> None:
    """Say which residues are the polymer's if the file does not: gemmi would end a chain without TER at its first HETATM."""
    if found.sites and all(residue.entity_type == gemmi.EntityType.Unknown for residue in chain):
        for residue in chain:
            residue.entity_type = gemmi.EntityType.Water if residue.is_water() else gemmi.EntityType.NonPolymer
        for site in found.sites:
            for residue in site.residues:
                residue.entity_type = gemmi.EntityType.Polymer


def _number(structure: gemmi.Structure, chain: gemmi.Chain, found: FoundChain, name: str) -> None:
    """Make a chain's sites an entity called `name`, and number them."""
    for entity in structure.entities:
        entity.subchains = [s for s in entity.subchains if s not in {residue.subchain for residue in chain}]
    for residue in chain:
        residue.label_seq, residue.subchain = None, f"{name}x"
    for number, site in enumerate(found.sites, 1):
        for residue in site.residues:
            residue.label_seq, residue.subchain, residue.entity_id = number, name, name
    entity = gemmi.Entity(name)
    entity.entity_type, entity.polymer_type = gemmi.EntityType.Polymer, gemmi.PolymerType.PeptideL
    entity.subchains = [name]
    entity.full_sequence = [",".join(dict.fromkeys(r.name for r in site.residues)) for site in found.sites]
    structure.entities.append(entity)


def _left_out(name: str, found: FoundChain) -> str:
    what = f"residues with N, CA and C that no peptide bond joins to chain '{name}' are left out"
    return f"{what}: {_some(found.left_out)}"


def _broken(name: str, found: FoundChain) -> str:
    what = f"the file lists no sequence of chain '{name}', which breaks behind {_some([found.sites[i] for i in found.breaks])}"
    return f"{what}; its alignment says which residues are missing, and without one nothing stands for them"


def _some(sites: list[Site]) -> str:
    more = f" and {len(sites) - _NAMED:,} more" if len(sites) > _NAMED else ""
    return ", ".join(site.label for site in sites[:_NAMED]) + more


def unquoted(text: str) -> str:
    """The value of a CIF token. A single quote character, which gemmi writes for odd insertion codes of PDB files, is kept."""
    return cif.as_string(text) if len(text) > 1 else text


def _holds(block: cif.Block, *tags: str) -> bool:
    """Whether every tag has at least one value."""
    return all(len(block.find_values(tag)) > 0 for tag in tags)


def rows_of(block: cif.Block, *tags: str) -> list[tuple[str, ...]]:
    """Unquoted values of the given columns of one category."""
    return [tuple(unquoted(text) for text in row) for row in block.find(list(tags))]


def values_of(block: cif.Block, tag: str) -> list[str]:
    """Unquoted values of a tag that are neither '?' nor '.'."""
    return [unquoted(text) for text in block.find_values(tag) if not cif.is_null(text)]
