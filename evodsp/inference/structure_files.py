"""A predicted structure as text: ModelCIF, the dictionary of computed models that wwPDB and ModelArchive read
(mmcif_ma.dic), or PDB. The B-factor column holds pLDDT, 0 (no confidence) to 100 (full confidence).

The library `modelcif` writes the sequence, the program with its parameters, the step that made the model, its atoms, and its
confidence. Predicted aligned errors are in the file only where they are asked for: their R x R rows are by far its largest
part, and AlphaFold DB keeps them in a JSON file of their own, as evodsp does too.

The same structure always gives the same bytes: no dates, no host names. Shapes: R residues, 37 atom types (atom37 order).
"""

from __future__ import annotations

import io
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import gemmi
import modelcif
import modelcif.data
import modelcif.dumper
import modelcif.model
import modelcif.protocol
import modelcif.qa_metric
import numpy as np
import torch
from jaxtyping import Float32, Float64, Integer

from evodsp.errors import UserError
from evodsp.geometry.frames import pseudo_beta
from evodsp.geometry.residues import ATOM_TYPES, RESTYPES_WITH_X
from evodsp.inference.interfaces import ComplexScores, Interface, interfaces_of
from evodsp.version import REPOSITORY, __version__

MOST_CHAINS = 702
"""As many as have names of one or two letters, A to ZZ."""
_PDB_NAMES = string.ascii_uppercase + string.ascii_lowercase + string.digits
MOST_IN_PDB = len(_PDB_NAMES)
"""PDB names a chain by one letter or digit."""


@dataclass(frozen=True)
class ChainSpan:
    """The place of a chain among the residues of all chains: from `start` up to `end`, from 0."""

    name: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def residues(self) -> slice:
        """The place as an index."""
        return slice(self.start, self.end)


def chain_name(number: int) -> str:
    """The name of a chain by its number from 0: A to Z, AA to AZ, BA and so on."""
    letters = string.ascii_uppercase
    return (chain_name(number // len(letters) - 1) if number >= len(letters) else "") + letters[number % len(letters)]


def pdb_chain_name(number: int) -> str:
    """The same for a PDB file, whose names have one character: A to Z, a to z, 0 to 9. `number`: below `MOST_IN_PDB`."""
    return _PDB_NAMES[number]


def spans_of(lengths: Sequence[int]) -> tuple[ChainSpan, ...]:
    """The chains of these lengths, one after another."""
    borders = pairwise(accumulate(lengths, initial=0))
    return tuple(ChainSpan(chain_name(number), start, end) for number, (start, end) in enumerate(borders))


PAE_CATEGORY = "_ma_qa_metric_local_pairwise."
"""Beginning of the names of columns that hold aligned errors."""
_NEVER_FIRST = re.compile(r"[#$\]]|(data|loop|save|stop|global)_", re.IGNORECASE)
"""Beginnings that a CIF value may have only in quotes; python-modelcif does not quote all of these."""

_PDB_MOST_RESIDUES = 9_999
_PDB_MOST_SERIALS = 99_999


@dataclass(frozen=True)
class AlignedError:
    """The predicted aligned error of a structure, and the TM-score predicted from it."""

    pae: Float32[np.ndarray, "R R"]
    """Expected error of each residue's CA (second axis), seen from each residue's backbone frame (first axis), in Å."""
    highest: float
    """The largest error that the head can predict, in Å."""
    ptm: float
    """Predicted TM-score, 0..1."""
    of_chains: ComplexScores | None = None
    """The scores of the parts of a complex; None for a single chain."""


@dataclass(frozen=True)
class PredictedStructure:
    """One predicted chain, or the chains of a complex. Residues of each are numbered from 1; those of type X have no atoms."""

    name: str
    aatype: Integer[np.ndarray, " R"]
    """0..19, X = 20."""
    positions: Float32[np.ndarray, "R 37 3"]
    """Å."""
    mask: Float32[np.ndarray, "R 37"]
    """1 where the atom exists."""
    plddt: Float32[np.ndarray, " R"]
    """0..100."""
    lengths: tuple[int, ...] = ()
    """Number of residues of each chain, in their order; () for a single chain."""
    aligned_error: AlignedError | None = None
    """None if the model has no head for it."""
    contacts: Float32[np.ndarray, "R R"] | None = None
    """Contact probability (CB atoms within 8 Å), 0..1, by the distogram; None where only the structure is known."""
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Arrays of the model to keep (`evodsp.inference.representations`)."""

    @property
    def sequence(self) -> str:
        return "".join(RESTYPES_WITH_X[code] for code in self.aatype)

    @property
    def chains(self) -> tuple[ChainSpan, ...]:
        """The chains, in their order."""
        return spans_of(self.lengths or (len(self.aatype),))

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The scores of each chain's interface with each other chain, numbered from 1; none without aligned errors."""
        if self.aligned_error is None:
            return ()
        atoms = (torch.from_numpy(np.asarray(values)) for values in (self.aatype, self.positions, self.mask))
        beta, beta_mask = (values.numpy() for values in pseudo_beta(*atoms))
        numbers = np.repeat(np.arange(1, len(self.chains) + 1), [len(chain) for chain in self.chains])
        return interfaces_of(self.aligned_error.pae, numbers, beta, beta_mask, self.plddt)

    @property
    def ascii_name(self) -> str:
        """The name with '?' for letters outside ASCII, which neither format allows."""
        return self.name.encode("ascii", "replace").decode()

    @property
    def mean_plddt(self) -> float:
        return float(self.plddt.mean(dtype=np.float64))

    @property
    def confidence_line(self) -> str:
        """For the log, for example 'mean pLDDT 81.2, pTM 0.74', and of a complex ', ipTM 0.61'."""
        error = self.aligned_error
        ptm = "" if error is None else f", pTM {error.ptm:.2f}"
        iptm = "" if error is None or error.of_chains is None else f", ipTM {error.of_chains.iptm:.2f}"
        return f"mean pLDDT {self.mean_plddt:.1f}{ptm}{iptm}"


@dataclass(frozen=True)
class Origin:
    """Provenance of a structure."""

    seed: int | None = None
    ptm: float | None = None
    """Predicted TM-score, 0..1; None for models without that head."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings in ranking.json: the parameters' fingerprint, rows, recycling iterations, templates."""
    iptm: float | None = None
    """Predicted TM-score of the interfaces, 0..1; None for a single chain."""

    @classmethod
    def of(cls, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> Origin:
        """The origin that an entry of ranking.json tells."""
        return cls(entry["seed"], entry.get("ptm"), settings, entry.get("iptm"))


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


class _IPTM(modelcif.qa_metric.Global, modelcif.qa_metric.IpTM):
    """Predicted TM-score of the interfaces, 0 to 1"""

    name, software = "ipTM", None


class _PAE(modelcif.qa_metric.LocalPairwise, modelcif.qa_metric.PAE):
    """Expected error of the second residue's CA, seen from the first residue's backbone frame, in Å"""

    name, software = "PAE", None


class _Protein(modelcif.Entity):
    """A chain is a polymer also if it has a single residue, which python-modelcif would take for a ligand."""

    def is_polymeric(self) -> bool:
        return True


class _Model(modelcif.model.AbInitioModel):
    """The atoms of a structure, in the order of residues and of atom37. `places`: the chain and the number of each residue."""

    def __init__(
        self, structure: PredictedStructure, places: Sequence[tuple[modelcif.AsymUnit, int]], name: str
    ) -> None:
        asyms = tuple(dict.fromkeys(asym for asym, _ in places))
        super().__init__(assembly=modelcif.Assembly(asyms, name=_what(structure)), name=name)
        self._structure, self._places = structure, places

    def get_atoms(self) -> Iterator[modelcif.model.Atom]:
        one = self._structure
        plddt = _confidence(one)
        for residue, atom in zip(*np.nonzero(one.mask > 0.5), strict=True):
            x, y, z = one.positions[residue, atom].astype(np.float64)
            name = ATOM_TYPES[atom]
            asym, number = self._places[residue]
            # The first letter of every heavy atom of the 20 amino acids is its element.
            yield modelcif.model.Atom(asym, number, name, name[0], x, y, z, biso=plddt[residue], occupancy=1.0)


def model_cif_text(structure: PredictedStructure, origin: Origin, pae: bool = False) -> str:
    """The structure as ModelCIF. The same arguments always give the same bytes. `pae`: whether the aligned errors are in it,
    if there are any."""
    name = structure.ascii_name
    if _NEVER_FIRST.match(name):
        name = f"_{name}"
    system = modelcif.System(title=f"Prediction of {name}; B-factors are pLDDT", id=name)
    entities, places = _entities(structure, name), _places(structure)
    asyms = {
        chain.name: modelcif.AsymUnit(entities[_letters_of(structure, chain)], "predicted chain", strand_id=chain.name)
        for chain in structure.chains
    }
    where = [(asyms[chain], number) for chain, number in places]
    model = _Model(structure, where, "model" if origin.seed is None else f"seed {origin.seed}")
    present = (structure.mask > 0.5).any(-1)
    for residue in np.nonzero(~present)[0].tolist():
        asym, number = where[residue]
        model.not_modeled_residue_ranges.append(modelcif.model.NotModeledResidueRange(asym, number, number))
    local = _confidence(structure)
    model.qa_metrics.append(_GlobalPLDDT(round(float(local.mean()), 2)))
    if origin.ptm is not None:
        model.qa_metrics.append(_PTM(origin.ptm))
    if origin.iptm is not None:
        model.qa_metrics.append(_IPTM(origin.iptm))
    residues = [asym.residue(number) for asym, number in where]
    model.qa_metrics += map(_LocalPLDDT, residues, local.tolist())
    if pae and structure.aligned_error is not None:
        errors = np.round(structure.aligned_error.pae.astype(np.float64), 2).tolist()
        for first, row in zip(residues, errors, strict=True):
            model.qa_metrics += map(partial(_PAE, first), residues, row)
    system.model_groups.append(modelcif.model.ModelGroup([model], name="prediction"))
    protocol = modelcif.protocol.Protocol()
    protocol.steps.append(
        modelcif.protocol.ModelingStep(
            input_data=modelcif.data.DataGroup([*entities.values()]), output_data=model, software=_software(origin)
        )
    )
    system.protocols.append(protocol)
    text = io.StringIO()
    modelcif.dumper.write(text, [system])
    return text.getvalue()


def _what(structure: PredictedStructure) -> str:
    return "predicted complex" if structure.lengths else "predicted chain"


def _places(structure: PredictedStructure) -> list[tuple[str, int]]:
    """The name of the chain of each residue, and its number in the chain, from 1."""
    return [(chain.name, number) for chain in structure.chains for number in range(1, len(chain) + 1)]


def _letters_of(structure: PredictedStructure, chain: ChainSpan) -> str:
    return structure.sequence[chain.residues]


def _entities(structure: PredictedStructure, name: str) -> dict[str, _Protein]:
    """The entity of each sequence, in the order in which they first occur. `name`: of the structure."""
    named: dict[str, list[str]] = {}
    for chain in structure.chains:
        named.setdefault(_letters_of(structure, chain), []).append(chain.name)
    return {
        letters: _Protein(
            ["UNK" if letter == "X" else letter for letter in letters],
            description=name if len(named) == 1 else f"{name}, {' and '.join(chains)}",
        )
        for letters, chains in named.items()
    }


def _confidence(structure: PredictedStructure) -> Float64[np.ndarray, " R"]:
    """pLDDT as it is stored: a file that is made of the other format's then has the same bytes."""
    return np.round(structure.plddt.astype(np.float64), 2)


def _software(origin: Origin) -> modelcif.SoftwareGroup:
    """evodsp, with the settings of the run as parameters."""
    program = modelcif.Software(
        "evodsp",
        "model building",
        "Structure prediction with AlphaFold 2's network",
        REPOSITORY or None,
        "package",
        __version__,
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
    "precision", "matmul_precision", "dropout", "pairing",
}  # fmt: skip
"""The settings that are written. `checkpoint` is the fingerprint of the parameters."""


def structure_text(
    structure: PredictedStructure, file_format: Literal["cif", "pdb"], origin: Origin = UNKNOWN, pae: bool = False
) -> str:
    """The structure in the given format. Raises UserError if the format cannot hold it or a number is not finite.

    `origin`: how the structure was made, for ModelCIF; `pae`: whether ModelCIF holds the aligned errors. PDB has no place for
    either.
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
    made = gemmi.make_structure_from_block(block)
    for number in range(len(structure.chains)):
        if (short := pdb_chain_name(number)) != (name := chain_name(number)):
            made.rename_chain(name, short)
    return made.make_pdb_string(gemmi.PdbWriteOptions(cryst1_record=False))


def _check_pdb_limits(structure: PredictedStructure) -> None:
    positions = np.round(structure.positions[structure.mask > 0.5].astype(np.float64), 3)
    atoms = len(positions)
    fix = "; use --format cif"
    if (chains := len(structure.chains)) > MOST_IN_PDB:
        raise UserError(f"{structure.name}: {chains} chains, but a PDB file holds {MOST_IN_PDB}{fix}")
    if (longest := max(map(len, structure.chains))) > _PDB_MOST_RESIDUES:
        of = f" in chain {max(structure.chains, key=len).name}" if structure.lengths else ""
        raise UserError(f"{structure.name}: {longest:,} residues{of}, but a PDB file holds {_PDB_MOST_RESIDUES:,}{fix}")
    if atoms + chains > _PDB_MOST_SERIALS:  # the TER of each chain takes a serial number too
        raise UserError(f"{structure.name}: {atoms:,} atoms, but a PDB file holds {_PDB_MOST_SERIALS - chains:,}{fix}")
    if positions.max() > 9999.999 or positions.min() < -999.999:
        raise UserError(
            f"{structure.name}: coordinates {positions.min():.3f} to {positions.max():.3f} Å, "
            f"but a PDB file holds -999.999 to 9999.999{fix}"
        )
