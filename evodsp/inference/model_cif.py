"""A predicted structure as ModelCIF, the dictionary of computed models that wwPDB and ModelArchive read (mmcif_ma.dic).

The library `modelcif` writes it: the sequence, the program with its parameters, the step that made the model, its atoms, and
its confidence. Predicted aligned errors are in it only where they are asked for: their R x R rows are by far the largest part
of the file, and AlphaFold DB keeps them in a JSON file of their own, as evodsp does too. Shapes: R residues.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import modelcif
import modelcif.data
import modelcif.dumper
import modelcif.model
import modelcif.protocol
import modelcif.qa_metric
import numpy as np
from jaxtyping import Float64

from evodsp.geometry.residues import ATOM_TYPES
from evodsp.version import __version__

if TYPE_CHECKING:
    from evodsp.inference.writers import PredictedStructure

PAE_CATEGORY = "_ma_qa_metric_local_pairwise."
"""What the names of the columns of aligned errors begin with."""
_NEVER_FIRST = re.compile(r"[#$\]]|(data|loop|save|stop|global)_", re.IGNORECASE)
"""What no value of CIF may begin with, unless it is quoted; python-modelcif does not quote all of these."""
_LOCATION = "https://pypi.org/project/evodsp"


@dataclass(frozen=True)
class Origin:
    """How a structure was made."""

    seed: int | None = None
    ptm: float | None = None
    """Predicted TM-score, 0..1; None for models without that head."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of ranking.json: the parameters' fingerprint, rows, recycling iterations, templates."""

    @classmethod
    def of(cls, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> Origin:
        """Of an entry of ranking.json."""
        return cls(entry["seed"], entry.get("ptm"), settings)


UNKNOWN = Origin()


class _GlobalPLDDT(modelcif.qa_metric.Global, modelcif.qa_metric.PLDDT):
    """Predicted lDDT-CA, 0 to 100, mean over residues"""

    name, software = "pLDDT", None


class _LocalPLDDT(modelcif.qa_metric.Local, modelcif.qa_metric.PLDDT):
    """Predicted lDDT-CA of a residue, 0 to 100"""

    name, software = "pLDDT", None


class _PTM(modelcif.qa_metric.Global, modelcif.qa_metric.PTM):
    """Predicted TM-score, 0 to 1"""

    name, software = "pTM", None


class _PAE(modelcif.qa_metric.LocalPairwise, modelcif.qa_metric.PAE):
    """Expected error of the second residue's CA, seen from the first residue's backbone frame, in Å"""

    name, software = "PAE", None


class _Protein(modelcif.Entity):
    """A chain is a polymer also if it has a single residue, which python-modelcif would take for a ligand."""

    def is_polymeric(self) -> bool:
        return True


class _Model(modelcif.model.AbInitioModel):
    """The atoms of a structure, in the order of residues and of atom37."""

    def __init__(self, structure: PredictedStructure, asym: modelcif.AsymUnit, name: str) -> None:
        super().__init__(assembly=modelcif.Assembly((asym,), name="predicted chain"), name=name)
        self._structure, self._asym = structure, asym

    def get_atoms(self) -> Iterator[modelcif.model.Atom]:
        one = self._structure
        plddt = _confidence(one)
        for residue, atom in zip(*np.nonzero(one.mask > 0.5), strict=True):
            x, y, z = one.positions[residue, atom].astype(np.float64)
            name = ATOM_TYPES[atom]
            # The first letter of every heavy atom of the 20 amino acids is its element.
            yield modelcif.model.Atom(
                self._asym, int(residue) + 1, name, name[0], x, y, z, biso=plddt[residue], occupancy=1.0
            )


def model_cif_text(structure: PredictedStructure, origin: Origin, pae: bool = False) -> str:
    """The file. The same arguments always give the same bytes. `pae`: with the aligned errors, if the structure has them."""
    name = structure.ascii_name
    if _NEVER_FIRST.match(name):
        name = f"_{name}"
    system = modelcif.System(title=f"Prediction of {name}; B-factors are pLDDT", id=name)
    target = _Protein(["UNK" if letter == "X" else letter for letter in structure.sequence], description=name)
    asym = modelcif.AsymUnit(target, details="predicted chain", strand_id=structure.chain_id)
    model = _Model(structure, asym, "model" if origin.seed is None else f"seed {origin.seed}")
    present = (structure.mask > 0.5).any(-1)
    for residue in np.nonzero(~present)[0].tolist():
        model.not_modeled_residue_ranges.append(modelcif.model.NotModeledResidueRange(asym, residue + 1, residue + 1))
    local = _confidence(structure)
    model.qa_metrics.append(_GlobalPLDDT(round(float(local.mean()), 2)))
    if origin.ptm is not None:
        model.qa_metrics.append(_PTM(origin.ptm))
    residues = [asym.residue(number) for number in range(1, len(local) + 1)]
    model.qa_metrics += map(_LocalPLDDT, residues, local.tolist())
    if pae and structure.aligned_error is not None:
        errors = np.round(structure.aligned_error.pae.astype(np.float64), 2).tolist()
        for first, row in zip(residues, errors, strict=True):
            model.qa_metrics += map(partial(_PAE, first), residues, row)
    system.model_groups.append(modelcif.model.ModelGroup([model], name="prediction"))
    protocol = modelcif.protocol.Protocol()
    protocol.steps.append(
        modelcif.protocol.ModelingStep(
            input_data=modelcif.data.DataGroup([target]), output_data=model, software=_software(origin)
        )
    )
    system.protocols.append(protocol)
    text = io.StringIO()
    modelcif.dumper.write(text, [system])
    return text.getvalue()


def _confidence(structure: PredictedStructure) -> Float64[np.ndarray, " R"]:
    """pLDDT as it is stored: a file that is made of the other format's then has the same bytes."""
    return np.round(structure.plddt.astype(np.float64), 2)


def _software(origin: Origin) -> modelcif.SoftwareGroup:
    """evodsp, with the settings of the run as parameters."""
    program = modelcif.Software(
        "evodsp", "model building", "Structure prediction with AlphaFold 2's network", _LOCATION, "package", __version__
    )
    values = {"seed": origin.seed, **origin.settings}
    parameters = [
        modelcif.SoftwareParameter(name, ", ".join(value) if isinstance(value, list) else str(value))
        for name, value in values.items()
        if name in _PARAMETERS and value not in (None, [], "")
    ]
    return modelcif.SoftwareGroup([modelcif.SoftwareWithParameters(program, parameters)])


_PARAMETERS = {
    "seed", "checkpoint", "raw", "recycles", "msa_clusters", "extra_msa", "ensembles", "stop_tolerance", "templates",
    "precision", "matmul_precision",
}  # fmt: skip
"""The settings that are written. `checkpoint` is the fingerprint of the parameters."""
