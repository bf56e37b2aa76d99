"""Settings of `evodsp score`. Importing this costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evodsp.errors import UserError


@dataclass(frozen=True)
class ScoreConfig:
    """Which predictions to compare with which structures, and where to write the scores."""

    predictions: Path
    """Output folder of `evodsp predict`, or a folder of structure files of any program, <name>.cif or .pdb."""
    structures: Path
    """Folder of the true structures, <pdbid>.cif or .pdb, also gzipped."""
    output: Path
    """Folder for scores.csv, for complexes also interfaces.csv, and if the predictions have pLDDT, for calibration.svg and a
    picture of each, distances_<name>.svg."""
    train: str | None = None
    """Predictions to score: those of chains that the model was trained on, a file with one per line, or <pdbid>_<chain>,…
    (complexes: <pdbid>,…). Training chains that are only copied are those of train_chains."""
    held_out: str | None = None
    """Predictions to score: those of chains that the model was not trained on, given likewise."""
    complexes: bool = False
    """Whether the names are those of complexes: each prediction has the chains of a structure, which are scored together."""
    assembly: str | None = "1"
    """For complexes: the biological assembly that is the truth; null: the asymmetric unit. A structure file that lists no
    assemblies is one."""
    baseline: Literal["nearest"] | None = None
    """nearest: name the nearest training chain (of a complex the nearest training complex, both by alignment score), and the
    score of a copy of it. The training chains or complexes are those of config, train_chains or train."""
    config: Path | None = None
    """For the baseline: config.yaml of the run's folder, or another file of `evodsp fit`. Its `data` block names the training
    chains and the folders or the store that they are in."""
    train_chains: str | None = None
    """For the baseline: text file of the training chains or complexes that are copied, one name per line; none of them is
    scored (train names those). null takes those of config, or train."""
    structure_dir: str | None = None
    """For the baseline: folder of the training chains' structures; null takes that of config, or structures."""

    def __post_init__(self) -> None:
        if self.assembly != "1" and not self.complexes:
            raise UserError(
                f"--assembly is {self.assembly}, but single chains are compared; give --complexes true, or leave it out"
            )
        if self.baseline is not None:
            if self.config is None and self.train_chains is None and self.train is None:
                raise UserError(
                    "--baseline nearest needs the training chains; give --config with the config.yaml of the run's folder, "
                    "--train_chains with a file of their names, or --train"
                )
            return
        for name in ("config", "train_chains", "structure_dir"):
            if (value := getattr(self, name)) is not None:
                fix = " (--train scores predictions of training chains)" if name == "train_chains" else ""
                raise UserError(
                    f"--{name} is {value}, but names what is copied; give --baseline nearest, or leave it out{fix}"
                )
