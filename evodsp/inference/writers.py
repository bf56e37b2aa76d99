"""A predicted structure as ModelCIF or PDB text. The B-factor column holds pLDDT, 0 (no confidence) to 100 (full confidence).

The same structure always gives the same bytes: no dates, no host names. Shapes: R residues, 37 atom types (atom37 order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import gemmi
import numpy as np
from jaxtyping import Float32, Integer

from evodsp.errors import UserError
from evodsp.geometry.alphabet import RESTYPES_WITH_X
from evodsp.inference.model_cif import UNKNOWN, Origin, model_cif_text

_PDB_MOST_RESIDUES = 9_999
_PDB_MOST_SERIALS = 99_999


@dataclass(frozen=True)
class AlignedError:
    """The predicted aligned error of one chain, and the TM-score predicted from it."""

    pae: Float32[np.ndarray, "R R"]
    """Expected error of each residue's CA (second axis), seen from each residue's backbone frame (first axis), in Å."""
    highest: float
    """The largest error that the head can predict, in Å."""
    ptm: float
    """Predicted TM-score, 0..1."""


@dataclass(frozen=True)
class PredictedStructure:
    """One predicted chain. Residues are numbered from 1; residues of type X have no atoms."""

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
    """None if the model has no head for it."""
    contacts: Float32[np.ndarray, "R R"] | None = None
    """How likely CB atoms are within 8 Å, 0..1, by the distogram; None where only the structure is known."""

    @property
    def sequence(self) -> str:
        return "".join(RESTYPES_WITH_X[code] for code in self.aatype)

    @property
    def ascii_name(self) -> str:
        """The name with '?' for letters outside ASCII, which neither format allows."""
        return self.name.encode("ascii", "replace").decode()

    @property
    def mean_plddt(self) -> float:
        return float(self.plddt.mean(dtype=np.float64))

    @property
    def confidence_line(self) -> str:
        """For the log, for example 'mean pLDDT 81.2, pTM 0.74'."""
        ptm = "" if self.aligned_error is None else f", pTM {self.aligned_error.ptm:.2f}"
        return f"mean pLDDT {self.mean_plddt:.1f}{ptm}"


def structure_text(
    structure: PredictedStructure, file_format: Literal["cif", "pdb"], origin: Origin = UNKNOWN, pae: bool = False
) -> str:
    """The structure in the given format. Raises UserError if the format cannot hold it or a number is not finite.

    `origin`: what ModelCIF says of how it was made; `pae`: whether it holds the aligned errors. PDB has no place for either.
    """
    # The confidence of residues without atoms (X) is written too.
    finite = np.isfinite(structure.plddt) & (np.isfinite(structure.positions).all(-1) | (structure.mask <= 0.5)).all(-1)
    if structure.aligned_error is not None:
        finite &= np.isfinite(structure.aligned_error.pae).all(-1)
    if not finite.all():
        raise UserError(
            f"{structure.name}: the model's output for residue {int(finite.argmin()) + 1} is nan or infinite; "
            "its training has diverged, use an earlier checkpoint"
        )
    if not (structure.mask > 0.5).any():
        raise UserError(f"{structure.name}: no atoms to write; all {len(structure.aatype)} residues are X")
    return model_cif_text(structure, origin, pae) if file_format == "cif" else pdb_text(structure)


def pdb_text(structure: PredictedStructure) -> str:
    """PDB text, format 3.3: the mmCIF text's structure as gemmi writes it.

    Raises UserError if the fixed columns cannot hold the structure, and says that mmCIF can.
    """
    _check_pdb_limits(structure)
    block = gemmi.cif.read_string(model_cif_text(structure, UNKNOWN)).sole_block()
    return gemmi.make_structure_from_block(block).make_pdb_string(gemmi.PdbWriteOptions(cryst1_record=False))


def _check_pdb_limits(structure: PredictedStructure) -> None:
    positions = np.round(structure.positions[structure.mask > 0.5].astype(np.float64), 3)
    atoms = len(positions)
    fix = "; use --format cif"
    if len(structure.aatype) > _PDB_MOST_RESIDUES:
        raise UserError(
            f"{structure.name}: {len(structure.aatype):,} residues, but a PDB file holds {_PDB_MOST_RESIDUES:,}{fix}"
        )
    if atoms + 1 > _PDB_MOST_SERIALS:  # TER takes a serial number too
        raise UserError(f"{structure.name}: {atoms:,} atoms, but a PDB file holds {_PDB_MOST_SERIALS - 1:,}{fix}")
    if len(structure.chain_id) != 1:
        raise UserError(f"{structure.name}: chain '{structure.chain_id}', but a PDB file's is a single character{fix}")
    if positions.max() > 9999.999 or positions.min() < -999.999:
        raise UserError(
            f"{structure.name}: coordinates {positions.min():.3f} to {positions.max():.3f} Å, "
            f"but a PDB file holds -999.999 to 9999.999{fix}"
        )
