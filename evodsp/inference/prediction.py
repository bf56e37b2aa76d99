"""A prediction in Python: arrays, files in either format, and what a notebook shows of it. Shapes: R residues, atom37 order."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from evodsp.errors import UserError
from evodsp.inference.model_cif import Origin
from evodsp.inference.residue_charts import pae_uri, plddt_chart
from evodsp.inference.results import (
    RANKING,
    REPORT,
    Key,
    PredictionResult,
    key_of,
    read_aligned_error,
    read_result,
    read_structure,
)
from evodsp.inference.writers import PredictedStructure, structure_text

_STYLE = (
    ".evodsp svg{width:100%;max-width:760px;height:auto}.evodsp svg text{font-size:12px;fill:currentColor;opacity:.7}"
    ".evodsp .axis{stroke:#8888}.evodsp .plddt{fill:none;stroke:currentColor;stroke-width:1.6}.evodsp .cursor{display:none}"
    ".evodsp img{width:220px;image-rendering:pixelated;border:1px solid #8888}"
    ".evodsp .parts{display:flex;gap:20px;flex-wrap:wrap}"
)  # fmt: skip
_MOST_SHOWN = 600
"""Residues of the picture of aligned errors; longer chains are thinned out."""


@dataclass(frozen=True, repr=False)
class Prediction(PredictionResult):
    """The predictions of one target. Arrays, texts and pictures are the best one's; `of(key)` gives another one's.

    The files are read when they are asked for first.
    """

    key: Key | None = None
    """Which of them this object shows; None: the best."""
    kept_alive: Any = field(default=None, compare=False)
    """The temporary folder that holds the files, if the caller named no output."""

    @classmethod
    def read(cls, folder: str | Path) -> Prediction:
        """The finished result in a target's folder. Raises UserError if there is none."""
        return cls(**vars(read_result(Path(folder))))

    def of(self, key: Key) -> Prediction:
        """The same, showing the prediction `key`: a seed, or '<model>_seed_<k>'. Raises UserError if there is no such one."""
        if key not in self.mean_plddt:
            raise UserError(f"{self.name}: no prediction '{key}'; there are {', '.join(map(str, self.mean_plddt))}")
        return replace(self, key=key)

    @property
    def shown(self) -> Key:
        """The key of the prediction that this object shows."""
        return self.best if self.key is None else self.key

    @cached_property
    def predicted(self) -> PredictedStructure:
        """The structure with everything that belongs to it."""
        structure = read_structure(self, self.shown)
        return replace(structure, aligned_error=read_aligned_error(self, self.shown))

    @property
    def sequence(self) -> str:
        """One letter for each residue."""
        return self.predicted.sequence

    @property
    def positions(self) -> Float32[np.ndarray, "R 37 3"]:
        """Å."""
        return self.predicted.positions

    @property
    def mask(self) -> Float32[np.ndarray, "R 37"]:
        """1 where the atom exists."""
        return self.predicted.mask

    @property
    def plddt(self) -> Float32[np.ndarray, " R"]:
        """0..100."""
        return self.predicted.plddt

    @property
    def pae(self) -> Float32[np.ndarray, "R R"] | None:
        """Expected error in Å of each residue's CA (second axis), seen from each residue's frame; None without that head."""
        error = self.predicted.aligned_error
        return None if error is None else error.pae

    @property
    def ptm(self) -> float | None:
        """Predicted TM-score, 0..1; None for models without that head."""
        error = self.predicted.aligned_error
        return None if error is None else error.ptm

    def to_cif(self) -> str:
        """The structure as ModelCIF."""
        ranking = json.loads((self.folder / RANKING).read_text(encoding="utf-8"))
        (entry,) = (entry for entry in ranking["ranking"] if key_of(entry) == self.shown)
        settings = ranking["models"][entry["model"]] if "models" in ranking else ranking["settings"]
        return structure_text(self.predicted, "cif", Origin.of(entry, settings))

    def to_pdb(self) -> str:
        """The structure as PDB. Raises UserError if the format cannot hold it."""
        return structure_text(self.predicted, "pdb")

    def save(self, path: str | Path) -> Path:
        """Write the structure to a file, .cif or .pdb; or, to a folder, all files of the target. Returns the path.

        Raises UserError if the name ends otherwise, or the folder exists.
        """
        path = Path(path)
        if path.suffix in (".cif", ".pdb"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.to_cif() if path.suffix == ".cif" else self.to_pdb(), encoding="utf-8")
        elif path.suffix:
            raise UserError(f"{path}: structures are written as .cif or .pdb; or name a folder, for all files")
        elif path.exists():
            raise UserError(f"{path}: exists already; name a new folder, or a .cif or .pdb file")
        else:
            shutil.copytree(self.folder, path)
        return path

    def show(self, height: int = 620) -> None:
        """Show the target's page in the notebook: the structure in 3D, aligned errors, confidence, alignments, all predictions.

        `height`: of the frame, in pixels. Raises UserError outside of a notebook.
        """
        page = self.folder / REPORT
        try:
            from IPython import get_ipython
            from IPython.display import HTML, display
        except ImportError:
            running = None
        else:
            running = get_ipython()
        if running is None:
            raise UserError(f"no notebook is running; open {page} in a browser")
        # A frame of its own: scripts of the page run in every front end, and its style does not change the notebook's.
        text = escape(page.read_text(encoding="utf-8"), quote=True)
        display(HTML(f'<iframe srcdoc="{text}" width="100%" height="{height}" style="border:0"></iframe>'))

    def __repr__(self) -> str:
        ptm = "" if self.ptm is None else f", pTM {self.ptm:.2f}"
        return f"<{self.name} ({self._which}): {len(self.plddt)} residues, mean pLDDT {self.plddt.mean():.1f}{ptm}>"

    @property
    def _which(self) -> str:
        """For example 'seed 1, best of 3'."""
        called = self.shown if isinstance(self.shown, str) else f"seed {self.shown}"
        return f"{called}, {'best of' if self.shown == self.best else 'one of'} {len(self.mean_plddt)}"

    def _repr_html_(self) -> str:
        """A small picture without scripts, which notebooks store: numbers, pLDDT, aligned errors."""
        chart = plddt_chart({0: self.plddt}, 0)
        numbers = f"{len(self.plddt):,} residues, mean pLDDT {self.plddt.mean():.1f}"
        errors = ""
        if (error := self.predicted.aligned_error) is not None:
            numbers += f", pTM {error.ptm:.2f}"
            step = -(-len(error.pae) // _MOST_SHOWN)
            picture = pae_uri(error.pae[::step, ::step], error.highest)
            errors = f'<div>Predicted aligned error<br><img alt="aligned error" src="{picture}"></div>'
        title = f"<b>{escape(self.name)}</b> ({escape(self._which)}): {numbers}"
        return (
            f'<div class="evodsp"><style>{_STYLE}</style><p>{title}</p>'
            f'<div class="parts"><div style="flex:1">pLDDT along the sequence<br>{chart}</div>{errors}</div></div>'
        )
