"""Writes made-up chains as mmCIF entries.

The text has what common readers expect: the polymer sequence with its missing residues (_entity_poly_seq,
_pdbx_poly_seq_scheme), both numberings of every atom (label_* and auth_*), experimental method, resolution and revision
date. gemmi does the quoting. Dictionary: PDBx/mmCIF v5 (https://mmcif.wwpdb.org).
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gemmi
import numpy as np

from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.geometry.residues import ATOM_TYPES, residue_name

# Columns of a category; None is written as `?` (unknown), False as `.` (does not apply).
Table = dict[str, list[Any]]

_ATOM_NAMES = np.array(ATOM_TYPES)
# The first letter of every heavy atom of the 20 amino acids is its element: C, N, O or S.
_ELEMENTS = np.array([name[0] for name in ATOM_TYPES])


def write_mmcif(
    path: Path | str,
    chains: Sequence[Chain],
    b_factors: Sequence[np.ndarray] | None = None,
    items: Mapping[str, str] | None = None,
    tables: Mapping[str, Table] | None = None,
) -> None:
    """Write `mmcif_text(chains, b_factors, items, tables)` to `path`, completely or not at all. Raises UserError as it does."""
    text = mmcif_text(chains, b_factors, items, tables)
    write_text(path, text)


def mmcif_text(
    chains: Sequence[Chain],
    b_factors: Sequence[np.ndarray] | None = None,
    items: Mapping[str, str] | None = None,
    tables: Mapping[str, Table] | None = None,
) -> str:
    """One entry as mmCIF text.

    `chains`: the chains of one entry, in order; `pdb_id`, method, resolution and release date of the entry are the first
    chain's. `b_factors`: for each chain, [L] or [L, 37] in Å^2 (or pLDDT, 0..100); None writes 0. `items`: further single
    values by full tag, e.g. {"_struct.title": "…"}; they replace values written here. `tables`: further categories by name,
    such as `assembly_tables`.

    Raises UserError for no chains, a chain without atoms, two chains of one name, a coordinate that is not finite, and
    B-factors whose length is not the chain's.
    """
    if not chains:
        raise UserError("no chain to write; an mmCIF entry needs at least one")
    _check(chains)
    if b_factors is None:
        b_factors = [np.zeros(len(chain)) for chain in chains]
    if len(b_factors) != len(chains):
        raise UserError(f"{chains[0].key}: B-factors for {len(b_factors)} chains, but {len(chains)} chains")

    sequences = list(dict.fromkeys(chain.sequence for chain in chains))  # one entity for each distinct sequence
    entity_of = [sequences.index(chain.sequence) + 1 for chain in chains]
    document = gemmi.cif.Document()
    block = document.add_new_block(chains[0].pdb_id)
    _write_entry(block, chains[0])
    _write_entities(block, chains, sequences, entity_of)
    schemes = [_residue_columns(c, e, _label_asym(n)) for n, (c, e) in enumerate(zip(chains, entity_of, strict=True))]
    block.set_mmcif_category("_pdbx_poly_seq_scheme.", _join(schemes))
    atoms = [
        _atom_columns(c, e, _label_asym(n), b)
        for n, (c, e, b) in enumerate(zip(chains, entity_of, b_factors, strict=True))
    ]
    columns = _join(atoms)
    serial = [str(n) for n in range(1, len(columns["type_symbol"]) + 1)]
    block.set_mmcif_category(
        "_atom_site.",
        {"group_PDB": ["ATOM"] * len(serial), "id": serial, **columns, "pdbx_PDB_model_num": ["1"] * len(serial)},
    )
    for tag, value in (items or {}).items():
        block.set_pair(tag, gemmi.cif.quote(value))
    for name, table in (tables or {}).items():
        block.set_mmcif_category(f"{name}.", table)
    return str(document.as_string(gemmi.cif.WriteOptions(gemmi.cif.Style.Pdbx)))


def assembly_tables(chains: Sequence[Chain]) -> dict[str, Table]:
    """The categories of a biological assembly, called 1, of which all chains are a part where they are."""
    asyms = ",".join(_label_asym(n) for n in range(len(chains)))
    matrix = {f"matrix[{i}][{j}]": ["1.0" if i == j else "0.0"] for i in (1, 2, 3) for j in (1, 2, 3)}
    return {
        "_pdbx_struct_assembly": {
            "id": ["1"],
            "details": ["author_defined_assembly"],
            "oligomeric_count": [str(len(chains))],
        },
        "_pdbx_struct_assembly_gen": {"assembly_id": ["1"], "oper_expression": ["1"], "asym_id_list": [asyms]},
        "_pdbx_struct_oper_list": {
            "id": ["1"],
            "type": ["identity operation"],
            **matrix,
            **{f"vector[{i}]": ["0.0"] for i in (1, 2, 3)},
        },
    }


def _check(chains: Sequence[Chain]) -> None:
    seen: set[str] = set()
    for chain in chains:
        if chain.chain_id in seen:
            raise UserError(f"{chain.key}: two chains named '{chain.chain_id}' in one entry; give them different names")
        seen.add(chain.chain_id)
        present = chain.mask > 0.5
        if not present.any():
            raise UserError(f"{chain.key}: no atoms to write; all {len(chain)} residues are masked")
        bad = ~np.isfinite(chain.positions[present])
        if bad.any():
            residue = int(np.nonzero(present)[0][np.nonzero(bad.any(-1))[0][0]])
            raise UserError(
                f"{chain.key}: residue {residue + 1} has a coordinate that is not finite; nothing was written"
            )


def _label_asym(index: int) -> str:
    """A, B, …, Z, AA, AB, …: the label_asym_id of a chain, which is independent of the author's chain id."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = string.ascii_uppercase[letter] + name
    return name


def _residue_names(sequence: str) -> np.ndarray:
    return np.array([residue_name(letter) for letter in sequence])


def _write_entry(block: gemmi.cif.Block, chain: Chain) -> None:
    method = chain.method or "THEORETICAL MODEL"
    values = {
        "_entry.id": chain.pdb_id,
        "_exptl.entry_id": chain.pdb_id,
        "_exptl.method": method.upper(),
    }
    if chain.resolution is not None:
        values |= {"_refine.entry_id": chain.pdb_id, "_refine.ls_d_res_high": f"{chain.resolution:.2f}"}
    if chain.release_date is not None:
        day = chain.release_date.isoformat()
        values |= {
            "_pdbx_database_status.entry_id": chain.pdb_id,
            "_pdbx_database_status.recvd_initial_deposition_date": day,
            "_pdbx_audit_revision_history.ordinal": "1",
            "_pdbx_audit_revision_history.data_content_type": "Structure model",
            "_pdbx_audit_revision_history.major_revision": "1",
            "_pdbx_audit_revision_history.minor_revision": "0",
            "_pdbx_audit_revision_history.revision_date": day,
        }
    for tag, value in values.items():
        block.set_pair(tag, gemmi.cif.quote(value))


def _write_entities(
    block: gemmi.cif.Block, chains: Sequence[Chain], sequences: Sequence[str], entity_of: Sequence[int]
) -> None:
    """_entity, _entity_poly, _entity_poly_seq, _struct_asym and _chem_comp."""
    ids = [str(n + 1) for n in range(len(sequences))]
    block.set_mmcif_category("_entity.", {"id": ids, "type": ["polymer"] * len(ids)})
    strands = [",".join(c.chain_id for c, e in zip(chains, entity_of, strict=True) if str(e) == n) for n in ids]
    block.set_mmcif_category(
        "_entity_poly.",
        {
            "entity_id": ids,
            "type": ["polypeptide(L)"] * len(ids),
            "pdbx_seq_one_letter_code_can": list(sequences),
            "pdbx_strand_id": strands,
        },
    )
    names = [_residue_names(sequence) for sequence in sequences]
    block.set_mmcif_category(
        "_entity_poly_seq.",
        {
            "entity_id": np.repeat(ids, [len(n) for n in names]).tolist(),
            "num": [str(n) for s in sequences for n in range(1, len(s) + 1)],
            "mon_id": np.concatenate(names).tolist(),
            "hetero": ["n"] * sum(map(len, sequences)),
        },
    )
    block.set_mmcif_category(
        "_struct_asym.",
        {"id": [_label_asym(n) for n in range(len(chains))], "entity_id": [str(e) for e in entity_of]},
    )
    kinds = sorted({str(name) for chain_names in names for name in chain_names})
    # Readers recognise proteins by "peptide" in this type.
    block.set_mmcif_category(
        "_chem_comp.",
        {"id": kinds, "type": ["peptide linking" if kind == "GLY" else "L-peptide linking" for kind in kinds]},
    )


def _author_numbers(chain: Chain) -> np.ndarray:
    """int [L]: the author's residue numbers; missing residues are numbered on from the preceding residue."""
    present = ~chain.is_missing
    index = np.arange(len(chain))
    anchor = np.maximum.accumulate(np.where(present, index, -1))
    anchor = np.where(anchor < 0, np.argmax(present), anchor)
    return chain.residue_number[anchor] + index - anchor


def _residue_columns(chain: Chain, entity: int, asym: str) -> Table:
    """Columns of _pdbx_poly_seq_scheme: every residue of the sequence; the author's columns are `?` for missing residues."""
    length, missing = len(chain), chain.is_missing
    numbers = _author_numbers(chain).astype(str)
    names = _residue_names(chain.sequence)
    sequence_ids = np.arange(1, length + 1).astype(str)
    return {
        "asym_id": [asym] * length,
        "entity_id": [str(entity)] * length,
        "seq_id": sequence_ids.tolist(),
        "mon_id": names.tolist(),
        "ndb_seq_num": sequence_ids.tolist(),
        "pdb_seq_num": numbers.tolist(),
        "auth_seq_num": _or_unknown(numbers, missing),
        "pdb_mon_id": _or_unknown(names, missing),
        "auth_mon_id": _or_unknown(names, missing),
        "pdb_strand_id": [chain.chain_id] * length,
        "pdb_ins_code": [code or False for code in chain.insertion_code],
        "hetero": ["n"] * length,
    }


def _or_unknown(values: np.ndarray, unknown: np.ndarray) -> list[str | None]:
    """The values as a list, with None (written as `?`) where unknown."""
    out = values.astype(object)
    out[unknown] = None
    return out.tolist()


def _atom_columns(chain: Chain, entity: int, asym: str, b_factors: np.ndarray) -> Table:
    """Columns of _atom_site: residues in order, the atoms of each in atom37 order."""
    b_factors = np.asarray(b_factors, dtype=np.float64)
    if b_factors.shape not in ((len(chain),), (len(chain), len(ATOM_TYPES))):
        raise UserError(
            f"{chain.key}: B-factors of shape {b_factors.shape}, expected ({len(chain)},) or ({len(chain)}, 37)"
        )
    b_factors = np.broadcast_to(b_factors.reshape(len(chain), -1), chain.mask.shape)
    residue, atom = np.nonzero(chain.mask > 0.5)
    count = len(residue)
    xyz = np.char.mod("%.3f", chain.positions[residue, atom].astype(np.float64))
    names = _residue_names(chain.sequence)[residue].tolist()
    atoms = _ATOM_NAMES[atom].tolist()
    codes = np.array(chain.insertion_code, dtype=object)
    codes[codes == ""] = None
    return {
        "type_symbol": _ELEMENTS[atom].tolist(),
        "label_atom_id": atoms,
        "label_alt_id": [False] * count,
        "label_comp_id": names,
        "label_asym_id": [asym] * count,
        "label_entity_id": [str(entity)] * count,
        "label_seq_id": (residue + 1).astype(str).tolist(),
        "pdbx_PDB_ins_code": codes[residue].tolist(),
        "Cartn_x": xyz[:, 0].tolist(),
        "Cartn_y": xyz[:, 1].tolist(),
        "Cartn_z": xyz[:, 2].tolist(),
        "occupancy": ["1.00"] * count,
        "B_iso_or_equiv": np.char.mod("%.2f", b_factors[residue, atom]).tolist(),
        "auth_seq_id": _author_numbers(chain)[residue].astype(str).tolist(),
        "auth_comp_id": names,
        "auth_asym_id": [chain.chain_id] * count,
        "auth_atom_id": atoms,
    }


def _join(tables: Sequence[Table]) -> Table:
    """Concatenate the rows of tables with the same columns."""
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}
