"""mmCIF text of small entries."""

from __future__ import annotations

HEADER = """data_TEST
_exptl.method 'X-RAY DIFFRACTION'
_refine.ls_d_res_high 2.05
loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.revision_date
2 2011-07-13
1 2002-03-04
"""
COLUMNS = (
    *("group_PDB", "id", "type_symbol", "label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id"),
    *("auth_seq_id", "pdbx_PDB_ins_code", "auth_asym_id", "label_alt_id", "occupancy"),
    *("Cartn_x", "Cartn_y", "Cartn_z", "pdbx_PDB_model_num"),
)


def atom(name: str, residue: str, seq: int | str, x: float, **changes: object) -> str:
    """One row of _atom_site at (x, 0, 0); `changes` override columns by name."""
    row: dict[str, object] = dict.fromkeys(COLUMNS, "?")
    row |= {
        "group_PDB": "ATOM",
        "id": 1,
        "type_symbol": name.strip("'")[0],
        "label_atom_id": name,
        "label_comp_id": residue,
        "label_asym_id": "A",
    }
    row |= {"label_seq_id": seq, "auth_seq_id": seq, "auth_asym_id": "A", "label_alt_id": ".", "occupancy": "1.00"}
    row |= {"Cartn_x": x, "Cartn_y": 0, "Cartn_z": 0, "pdbx_PDB_model_num": 1} | changes
    return " ".join(str(value) for value in row.values())


def entry(seqres: dict[str, str], atoms: list[str], header: str = HEADER, kind: str = "'polypeptide(L)'") -> str:
    """mmCIF text. `seqres`: label_asym_id -> 'num:MON num:MON'."""
    text = header + "loop_\n_entity_poly.entity_id\n_entity_poly.type\n"
    text += "".join(f"{k} {kind}\n" for k in range(1, len(seqres) + 1))
    text += "loop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id\n"
    for k, monomers in enumerate(seqres.values(), 1):
        text += "".join(f"{k} {' '.join(monomer.split(':'))}\n" for monomer in monomers.split())
    text += "loop_\n_struct_asym.id\n_struct_asym.entity_id\n"
    text += "".join(f"{asym} {k}\n" for k, asym in enumerate(seqres, 1))
    return text + "loop_\n" + "".join(f"_atom_site.{c}\n" for c in COLUMNS) + "\n".join(atoms) + "\n"
