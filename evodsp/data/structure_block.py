"""The mmCIF block of a structure file, whatever its format (mmCIF, PDB; gzipped or not).

gemmi completes PDB files, and mmCIF files without polymer sequences, to full mmCIF, so that one reader
(`evodsp.data.mmcif`) assembles all of them.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import gemmi
from gemmi import cif

from evodsp.data.text_files import read_bytes
from evodsp.errors import FileFormatError

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


def read_block(path: str | Path) -> cif.Block:
    """The mmCIF block with the atoms of a file, whatever its format."""
    data = read_bytes(path)
    try:
        if is_pdb(path):
            text = data.decode().encode("ascii", "replace")  # gemmi counts columns in bytes
            block = _completed(gemmi.read_pdb_string(text))
        else:
            block = next((b for b in cif.read_string(data) if _holds(b, "_atom_site.Cartn_x")), cif.Block(""))
            if _holds(block, "_atom_site.Cartn_x") and not _holds(block, *_NEEDED):
                block = _completed(gemmi.make_structure_from_block(block))
    except (ValueError, RuntimeError, IndexError) as error:
        raise _not_valid(path, error) from error
    if not _holds(block, "_atom_site.Cartn_x"):
        raise FileFormatError(path, "no atoms (no _atom_site records); download the entry again or use another one")
    lengths = {len(block.find_values(tag)) for tag in _ATOM_COLUMNS} - {0}
    if len(lengths) > 1:
        raise FileFormatError(
            path, f"columns of _atom_site differ in length {sorted(lengths)}; download the entry again"
        )
    return block


def block_without_atoms(path: str | Path, data: bytes) -> cif.Block | None:
    """The mmCIF block with the sequences, parsed without the tables of atoms; None if it lacks what `read_header` needs."""
    for table in (b"\nloop_\n_atom_site.", b"\nloop_\n_atom_site_anisotrop."):
        if (start := data.find(table)) >= 0 and (end := data.find(b"\n#", start)) >= 0:
            data = data[:start] + data[end:]
    try:
        blocks = cif.read_string(data)
    except (ValueError, RuntimeError) as error:
        raise _not_valid(path, error) from error
    needed = ("_entity_poly.pdbx_strand_id", "_entity_poly_seq.mon_id")
    return next((block for block in blocks if _holds(block, *needed)), None)


def is_pdb(path: str | Path) -> bool:
    return str(path).lower().removesuffix(".gz").endswith((".pdb", ".ent"))


def _not_valid(path: str | Path, error: Exception) -> FileFormatError:
    """gemmi's error as one line."""
    found = _PARSE_ERROR.match(str(error))
    line, reason = (int(found.group(1)), found.group(2)) if found else (None, str(error))
    message = f"not a valid structure file, or truncated ({' '.join(reason.split())}); download it again"
    return FileFormatError(path, message, line)


def _completed(structure: gemmi.Structure) -> cif.Block:
    """The structure as mmCIF with entities, and with SEQRES taken from the atoms if the file has none."""
    structure.setup_entities()
    for entity in structure.entities:
        if entity.entity_type == gemmi.EntityType.Polymer and not entity.full_sequence and entity.subchains:
            entity.full_sequence = [
                residue.name for residue in structure[0].get_subchain(entity.subchains[0]).first_conformer()
            ]
            for model, subchain in product(structure, entity.subchains):
                for residue in model.get_subchain(subchain):
                    residue.label_seq = None  # it numbers a sequence that the file does not list
    structure.assign_label_seq_id(force=True)
    return structure.make_mmcif_document().sole_block()


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
