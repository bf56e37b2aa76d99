"""A predicted structure as mmCIF or PDB text. The B-factor column holds pLDDT, 0 (no idea) to 100 (sure).

The same structure gives the same bytes, always: no dates, no host names. Shapes: R residues, 37 atom types (atom37 order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import gemmi
import numpy as np
from jaxtyping import Float32, Float64, Integer

from evodsp.data.mmcif_writer import mmcif_text
from evodsp.data.records import Chain
from evodsp.errors import UserError
from evodsp.geometry.alphabet import RESTYPE_1TO3, RESTYPES_WITH_X
from evodsp.geometry.residues import ATOM_TYPES

_PDB_MOST_RESIDUES = 9_999
_PDB_MOST_SERIALS = 99_999
_SEQRES_PER_LINE = 13


@dataclass(frozen=True)
class AlignedError:
    """What the head of the predicted aligned error says of one chain."""

    pae: Float32[np.ndarray, "R R"]
    """Expected error in Å of each residue's CA (second axis), seen from each residue's backbone frame (first axis)."""
    highest: float
    """The greatest error in Å that the head can state."""
    ptm: float
    """Predicted TM-score, 0..1."""


@dataclass(frozen=True)
class PredictedStructure:
    """One predicted chain. Residues are numbered from 1; those of type X have no atoms."""

    name: str
    aatype: Integer[np.ndarray, " R"]
    """0..19, X = 20."""
    positions: Float32[np.ndarray, "R 37 3"]
    """Å."""
    mask: Float32[np.ndarray, "R 37"]
    """1 where the atom exists."""
    plddt: Float32[np.ndarray, " R"]
    """0..100."""
    chain_id: str = "A"
    aligned_error: AlignedError | None = None
    """None where the model has no head for it."""

    @property
    def sequence(self) -> str:
        return "".join(RESTYPES_WITH_X[code] for code in self.aatype)

    @property
    def ascii_name(self) -> str:
        """The name as both formats allow it: '?' for a letter outside ASCII."""
        return self.name.encode("ascii", "replace").decode()

    @property
    def mean_plddt(self) -> float:
        return float(self.plddt.mean(dtype=np.float64))

    @property
    def confidence_line(self) -> str:
        """Such as 'mean pLDDT 81.2, pTM 0.74'."""
        ptm = "" if self.aligned_error is None else f", pTM {self.aligned_error.ptm:.2f}"
        return f"mean pLDDT {self.mean_plddt:.1f}{ptm}"


def structure_text(structure: PredictedStructure, file_format: Literal["cif", "pdb"]) -> str:
    """The structure in the given format. Raises UserError where the format cannot hold it or a number is not finite."""
    # Confidence is written for residues without atoms (X), too.
    finite = np.isfinite(structure.plddt) & (np.isfinite(structure.positions).all(-1) | (structure.mask <= 0.5)).all(-1)
    if structure.aligned_error is not None:
        finite &= np.isfinite(structure.aligned_error.pae).all(-1)
    if not finite.all():
        raise UserError(
            f"{structure.name}: residue {int(finite.argmin()) + 1} came out of the model as nan or infinity, "
            "not as numbers; the checkpoint's training has diverged, take an earlier one"
        )
    return mmcif_model_text(structure) if file_format == "cif" else pdb_text(structure)


def mmcif_model_text(structure: PredictedStructure) -> str:
    """mmCIF with the confidence items of the ModelCIF dictionary (_ma_qa_metric_global, _ma_qa_metric_local)."""
    name, length = structure.ascii_name, len(structure.aatype)
    missing = np.logical_not((structure.mask > 0.5).any(-1))
    chain = Chain(
        pdb_id=name,
        chain_id=structure.chain_id,
        sequence=structure.sequence,
        residue_number=np.where(missing, 0, np.arange(1, length + 1)).astype(np.int32),
        insertion_code=("",) * length,
        is_missing=missing,
        positions=structure.positions,
        mask=structure.mask,
    )
    title = f"Prediction of {name}; B-factors are pLDDT"
    text = mmcif_text([chain], [structure.plddt], {"_struct.entry_id": name, "_struct.title": title})
    document = gemmi.cif.read_string(text)
    block = document.sole_block()
    block.set_mmcif_category(
        "_ma_qa_metric.",
        {"id": ["1", "2"], "mode": ["global", "local"], "name": ["pLDDT"] * 2, "type": ["pLDDT"] * 2},
    )
    block.set_mmcif_category(
        "_ma_qa_metric_global.",
        {"ordinal_id": ["1"], "model_id": ["1"], "metric_id": ["1"], "metric_value": [f"{structure.mean_plddt:.2f}"]},
    )
    numbers = [str(n) for n in range(1, length + 1)]
    block.set_mmcif_category(
        "_ma_qa_metric_local.",
        {
            "label_asym_id": ["A"] * length,
            "label_comp_id": _residue_names(structure),
            "label_seq_id": numbers,
            "metric_id": ["2"] * length,
            "metric_value": np.char.mod("%.2f", structure.plddt.astype(np.float64)).tolist(),
            "model_id": ["1"] * length,
            "ordinal_id": numbers,
        },
    )
    return str(document.as_string(gemmi.cif.WriteOptions(gemmi.cif.Style.Pdbx)))


def pdb_text(structure: PredictedStructure) -> str:
    """PDB text, format 3.3: TITLE, REMARK, SEQRES, ATOM, TER and END, 80 columns each.

    Raises UserError if the fixed columns cannot hold the structure, and says that mmCIF can.
    """
    residue, atom = np.nonzero(structure.mask > 0.5)
    names = _residue_names(structure)
    # + 0.0 turns the -0.000 of a rounded small negative number into 0.000
    positions = np.round(structure.positions[residue, atom].astype(np.float64), 3) + 0.0
    _check_pdb_limits(structure, positions)
    chain = structure.chain_id
    lines = [
        f"TITLE     {f'PREDICTION OF {structure.ascii_name}'[:70]}",
        "REMARK   1 B-FACTORS ARE PLDDT, 0 TO 100; COORDINATES ARE PREDICTED",
    ]
    for start in range(0, len(names), _SEQRES_PER_LINE):
        row = " ".join(names[start : start + _SEQRES_PER_LINE])
        lines.append(f"SEQRES {start // _SEQRES_PER_LINE + 1:3d} {chain} {len(names):4d}  {row}")
    columns = zip(residue.tolist(), atom.tolist(), positions.tolist(), structure.plddt[residue].tolist(), strict=True)
    for serial, (r, a, (x, y, z), plddt) in enumerate(columns, start=1):
        lines.append(
            f"ATOM  {serial:5d}  {ATOM_TYPES[a]:<3s} {names[r]:>3s} {chain}{r + 1:4d}    "
            f"{x:8.3f}{y:8.3f}{z:8.3f}{1.0:6.2f}{plddt:6.2f}          {ATOM_TYPES[a][0]:>2s}"
        )
    lines += [f"TER   {len(residue) + 1:5d}      {names[residue[-1]]:>3s} {chain}{residue[-1] + 1:4d}", "END"]
    return "".join(f"{line:<80s}\n" for line in lines)


def _residue_names(structure: PredictedStructure) -> list[str]:
    return [RESTYPE_1TO3.get(letter, "UNK") for letter in structure.sequence]


def _check_pdb_limits(structure: PredictedStructure, positions: Float64[np.ndarray, "atoms 3"]) -> None:
    atoms = len(positions)
    mend = "; use --format cif"
    if len(structure.aatype) > _PDB_MOST_RESIDUES:
        raise UserError(
            f"{structure.name}: {len(structure.aatype):,} residues, but a PDB file holds {_PDB_MOST_RESIDUES:,}{mend}"
        )
    if atoms + 1 > _PDB_MOST_SERIALS:  # TER takes a serial number, too
        raise UserError(f"{structure.name}: {atoms:,} atoms, but a PDB file holds {_PDB_MOST_SERIALS - 1:,}{mend}")
    if atoms == 0:
        raise UserError(f"{structure.name}: no atoms to write; all {len(structure.aatype)} residues are X")
    if len(structure.chain_id) != 1:
        raise UserError(f"{structure.name}: chain '{structure.chain_id}', but a PDB file's is a single character{mend}")
    if positions.max() > 9999.999 or positions.min() < -999.999:
        raise UserError(
            f"{structure.name}: coordinates {positions.min():.3f} to {positions.max():.3f} Å, "
            f"but a PDB file holds -999.999 to 9999.999{mend}"
        )
