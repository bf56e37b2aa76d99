"""A finished prediction in Python: arrays, files, and what a notebook shows of it. It reads the files of the target's
folder.

So the numbers are those of the files: coordinates to 0.001 Å, pLDDT and aligned errors to 0.01. Each file is read when it is
first asked for. Shapes: R residues, 37 atom types (atom37 order).

`evodsp predict --plots true` writes pictures of it beside a target's report.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from evodsp.data.records import Alignment
from evodsp.errors import UserError
from evodsp.files import whole_folder, write_text
from evodsp.geometry.residues import CA
from evodsp.inference.pages.figures import Figure, confidence_figure, coverage_figure
from evodsp.inference.pages.residue_charts import coverage, pae_uri, strip, trace
from evodsp.inference.representations import read_arrays
from evodsp.inference.results import (
    REPORT,
    Key,
    PredictionResult,
    key_of,
    read_aligned_error,
    read_contacts,
    read_structure,
    read_with_ranking,
    stem,
)
from evodsp.inference.structure_files import AlignedError, ChainSpan, Origin, PredictedStructure, structure_text
from evodsp.printing import counted
from evodsp.report.page import render

_MOST_ROWS = 10
"""Rows of the table in a notebook."""


@dataclass(frozen=True)
class RankedStructure:
    """One predicted structure of a target, of one seed and one model."""

    result: PredictionResult = field(repr=False)
    key: Key
    """Its seed, or `<model>_seed_<k>` if there are several models."""
    seed: int
    """Seed of its features."""
    model: str | None
    """Name of its model if several models predicted, else None."""
    mean_plddt: float
    """Mean pLDDT over the residues, 0..100."""
    ptm: float | None
    """Predicted TM-score, 0..1; None if the model has no head for it."""
    iptm: float | None
    """Predicted TM-score of the interfaces of a complex, 0..1; None for a single chain, or without the head."""
    origin: Origin = field(repr=False)
    holder: object = field(default=None, repr=False, compare=False)
    """The holder of the `Prediction`, which keeps the folder."""
    saved: Mapping[str, Any] | None = field(default=None, repr=False)
    """Entry of ranking.json about the arrays that were saved; None if there are none."""

    @property
    def positions(self) -> Float32[np.ndarray, "R 37 3"]:
        """Positions of the atoms, in Å."""
        return self._structure.positions

    @property
    def mask(self) -> Float32[np.ndarray, "R 37"]:
        """1 where the atom exists."""
        return self._structure.mask

    @property
    def plddt(self) -> Float32[np.ndarray, " R"]:
        """Predicted lDDT-CA of each residue, 0..100."""
        return self._structure.plddt

    @property
    def pae(self) -> Float32[np.ndarray, "R R"] | None:
        """Expected error (Å) of each residue's CA (second axis), seen from each residue's frame (first axis); None if the model
        has no head for it."""
        return None if self._errors is None else self._errors.pae

    @cached_property
    def contacts(self) -> Float32[np.ndarray, "R R"] | None:
        """Contact probability (CB atoms within 8 Å), 0..1, by the distogram; None where an older version wrote the results."""
        return read_contacts(self.result.folder, self.key)

    @cached_property
    def representations(self) -> Mapping[str, Any]:
        """The arrays that were saved (option `save`), by name; {} if none were. `evodsp.inference.representations` gives their
        shapes. They are NumPy's, or torch's if the file is a .safetensors file."""
        return {} if self.saved is None else read_arrays(self.result.folder, self.saved)

    @property
    def sequence(self) -> str:
        """One letter for each residue, of all chains."""
        return self._structure.sequence

    @property
    def chains(self) -> tuple[ChainSpan, ...]:
        """The chains, in their order: `positions[chain.residues]` are those of one of them."""
        return self._structure.chains

    def to_cif(self, pae: bool = False) -> str:
        """The structure as ModelCIF text. `pae`: whether it holds the aligned errors, if there are any."""
        structure = self._structure
        if pae and self._errors is not None:
            structure = replace(structure, aligned_error=self._errors)
        return structure_text(structure, "cif", self.origin, pae)

    def to_pdb(self) -> str:
        """The structure as PDB text. Raises UserError if it is too large for the format."""
        return structure_text(self._structure, "pdb")

    def plot(self) -> Figure:
        """pLDDT along the sequence, contacts, and the aligned errors if there are any, as SVG."""
        highest = 0.0 if self._errors is None else self._errors.highest
        title = f"{self.result.name}, {_called(self)}"
        chains = self.chains if len(self.chains) > 1 else ()
        return confidence_figure(self.plddt, self.pae, highest, self.contacts, title, chains)

    @cached_property
    def _structure(self) -> PredictedStructure:
        return read_structure(self.result, self.key)

    @cached_property
    def _errors(self) -> AlignedError | None:
        return None if self.ptm is None else read_aligned_error(self.result.folder, self.key, self.ptm)


@dataclass(frozen=True, repr=False)
class Prediction(PredictionResult):
    """The predictions of one target. Its arrays and texts belong to the best one, `ranked[0]`."""

    ranked: tuple[RankedStructure, ...] = ()
    """All seeds and models, best first: by mean pLDDT, complexes by 0.8 ipTM + 0.2 pTM."""
    holder: object = field(default=None, repr=False, compare=False)
    """Removes the folder when nothing refers to it any more, if the user named no output folder."""

    @classmethod
    def read(cls, folder: str | Path) -> Prediction:
        """The finished prediction in a target's folder, as the command has written it. Raises UserError if there is none."""
        return cls.of(read_with_ranking(Path(folder))[0])

    @classmethod
    def of(cls, result: PredictionResult, holder: object = None) -> Prediction:
        """The predictions of a finished result. Raises UserError if its folder is incomplete."""
        _, ranking = read_with_ranking(result.folder)
        settings: Mapping[str, Mapping[str, Any]] = ranking.get("models", {})
        ranked = tuple(
            RankedStructure(
                result,
                key_of(entry),
                int(entry["seed"]),
                entry.get("model"),
                float(entry["mean_plddt"]),
                entry.get("ptm"),
                entry.get("iptm"),
                Origin.of(entry, settings[entry["model"]] if "model" in entry else ranking["settings"]),
                holder,
                entry.get("saved"),
            )
            for entry in ranking["ranking"]
        )
        return cls(
            result.name, result.folder, result.format, result.mean_plddt, result.kept, ranked=ranked, holder=holder
        )

    @property
    def positions(self) -> Float32[np.ndarray, "R 37 3"]:
        """Positions of the atoms, in Å."""
        return self.ranked[0].positions

    @property
    def mask(self) -> Float32[np.ndarray, "R 37"]:
        """1 where the atom exists."""
        return self.ranked[0].mask

    @property
    def plddt(self) -> Float32[np.ndarray, " R"]:
        """Predicted lDDT-CA of each residue, 0..100."""
        return self.ranked[0].plddt

    @property
    def pae(self) -> Float32[np.ndarray, "R R"] | None:
        """Expected errors in Å, as `RankedStructure.pae` describes them; None if the model has no head for it."""
        return self.ranked[0].pae

    @property
    def contacts(self) -> Float32[np.ndarray, "R R"] | None:
        """Probabilities 0..1, as in `RankedStructure.contacts`."""
        return self.ranked[0].contacts

    @property
    def representations(self) -> Mapping[str, Any]:
        """The saved arrays, as in `RankedStructure.representations`."""
        return self.ranked[0].representations

    @property
    def ptm(self) -> float | None:
        """Predicted TM-score, 0..1; None if the model has no head for it."""
        return self.ranked[0].ptm

    @property
    def iptm(self) -> float | None:
        """Predicted TM-score of the interfaces, 0..1; None for a single chain, or without the head."""
        return self.ranked[0].iptm

    @property
    def sequence(self) -> str:
        """One letter for each residue, of all chains."""
        return self.ranked[0].sequence

    @property
    def chains(self) -> tuple[ChainSpan, ...]:
        """The chains, as in `RankedStructure.chains`."""
        return self.ranked[0].chains

    def to_cif(self, pae: bool = False) -> str:
        """The best structure as ModelCIF text. `pae`: whether it holds the aligned errors, if there are any."""
        return self.ranked[0].to_cif(pae)

    def to_pdb(self) -> str:
        """The best structure as PDB text. Raises UserError if it is too large for the format."""
        return self.ranked[0].to_pdb()

    def plot(self) -> Figure:
        """pLDDT along the sequence, contacts, and the aligned errors if there are any, as SVG."""
        return self.ranked[0].plot()

    def save(self, path: str | Path) -> Path:
        """Write the best structure to `path` if it ends with .cif or .pdb; else all files into the new folder `path`.

        Returns the path. An existing file is replaced. Raises UserError if the folder exists, or nothing can be written.
        """
        path = Path(path)
        try:
            if path.suffix in (".cif", ".pdb"):
                text = self.to_cif() if path.suffix == ".cif" else self.to_pdb()
                write_text(path, text)
                return path
            if path.exists():
                raise UserError(f"{path}: exists already; give a new folder, or a file that ends with .cif or .pdb")
            with whole_folder(path) as new:
                shutil.copytree(self.folder, new, dirs_exist_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another path") from error
        return path

    def show(self, height: int = 640) -> PageView:
        """The target's page (report.html) inside the notebook: structure in 3D, confidence and all seeds. `height`: pixels.

        It needs no network. It adds about 0.6 MB to the notebook's file. A saved notebook shows it wherever scripts run.
        """
        if height < 1:
            raise UserError(f"height is {height}, but must be at least 1 pixel")
        best = self.ranked[0]
        page = (self.folder / REPORT).read_text(encoding="utf-8")
        return PageView(page, str(trace(best.positions[:, CA], best.mask[:, CA], best.plddt, best.chains)), height)

    def __repr__(self) -> str:
        return f"Prediction({self.name}: {', '.join(self._figures())})"

    def _figures(self) -> list[str]:
        best = self.ranked[0]
        ptm = [] if best.ptm is None else [f"pTM {best.ptm:.2f}"]
        ptm += [] if best.iptm is None else [f"ipTM {best.iptm:.2f}"]
        return [counted(len(self.ranked), "structure"), f"best mean pLDDT {best.mean_plddt:.1f}", *ptm]

    def _repr_html_(self) -> str:
        best = self.ranked[0]
        chains = [f"{len(best.chains)} chains"] if len(best.chains) > 1 else []
        figures = [f"{len(best.plddt):,} residues", *chains, *self._figures()]
        cells = [
            (_called(one), f"{one.mean_plddt:.1f}", "" if one.ptm is None else f"{one.ptm:.2f}") for one in self.ranked
        ]
        image, highest = "", ""
        if best._errors is not None:
            pae, highest = best._errors.pae, f"{best._errors.highest:g}"
            step = -(-len(pae) // 150)
            image = pae_uri(pae[::step, ::step], best._errors.highest)
        made = render(
            "inference/pages/notebook.html.j2",
            name=self.name,
            figures=figures,
            strip=strip(best.plddt, "pLDDT along the sequence", width="100%", height=10),
            rows=[(rank, *row) for rank, row in enumerate(cells[:_MOST_ROWS], start=1)],
            left_out=len(cells) - _MOST_ROWS,
            image=image,
            highest=highest,
        )
        return str(made)


@dataclass(frozen=True)
class PageView:
    """A page that a notebook shows in a frame of its own, and a picture for places that show no frames."""

    page: str = field(repr=False)
    """The whole HTML document."""
    picture: str = field(repr=False)
    """The picture, as SVG."""
    height: int
    """Height of the frame in pixels."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Called by Jupyter, which shows the richest of these that it can."""
        frame = render("inference/pages/frame.html.j2", page=self.page, height=self.height)
        return {"text/html": str(frame), "image/svg+xml": self.picture, "text/plain": repr(self)}


def _called(one: RankedStructure) -> str:
    return f"seed {one.seed}" if one.model is None else f"{one.model}, seed {one.seed}"


COVERAGE = "alignment_coverage.svg"


def confidence_name(one: RankedStructure) -> str:
    """The file of a structure's confidence."""
    return f"{stem(one.key)}_confidence.svg"


def write_plots(result: PredictionResult, alignments: Callable[[], Sequence[Alignment]]) -> None:
    """Write the pictures of a finished result that are missing.

    `alignments`: reads those that it was predicted from. A single sequence has no picture of their coverage.
    """
    figures: dict[str, Callable[[], Figure | None]] = {
        confidence_name(one): one.plot for one in Prediction.of(result).ranked
    }
    figures[COVERAGE] = lambda: _coverage(result.name, alignments())
    for name, draw in figures.items():
        file = result.folder / name
        if not file.exists() and (figure := draw()) is not None:
            write_text(file, figure)


def _coverage(name: str, alignments: Sequence[Alignment]) -> Figure | None:
    if not alignments or (found := coverage(alignments)).sequences == 1:
        return None
    return coverage_figure(found, name)
