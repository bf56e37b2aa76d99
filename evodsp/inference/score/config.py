"""Settings of `evodsp score`. This module does not import torch, so that its help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evodsp.config import LayerPrecision
from evodsp.errors import SIZE, UserError, check_numbers

ALIKE_FOR_BOTH = (
    *("alignments", "templates", "template_chains", "seeds", "recycles", "msa_clusters", "extra_msa", "device"),
    *("precision", "overwrite"),
)
"""Settings of `evodsp predict` that two models share."""
_OF_MODELS = ("after", "chains", "general", "preset", *ALIKE_FOR_BOTH)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Predictions, true structures, and the folder of the scores.

    With `before` and `after`: two models, which predict the structures first.
    """

    predictions: Path | None = None
    """Output folder of `evodsp predict`, or a folder of structure files of any program, <name>.cif or .pdb. Without train and
    held_out all that have a structure are scored."""
    structures: Path
    """Folder of the true structures, <pdbid>.cif or .pdb, also gzipped."""
    output: Path
    """Folder for scores.csv, for complexes also interfaces.csv, and if the predictions have pLDDT, for calibration.svg and a
    picture of each, distances_<name>.svg. Of two models: for judgement.html, judgement.csv, judgement.md, and their predictions
    in the folders before and after."""
    train: str | None = None
    """Predictions of chains that the model was trained on: a file with one per line, or <pdbid>_<chain>,…
    (complexes: <pdbid>,…). Training chains for the baseline: train_chains."""
    held_out: str | None = None
    """Predictions of chains that the model was not trained on, given likewise."""
    complexes: bool = False
    """Score complexes: the names are those of structures, whose chains are scored together."""
    assembly: str | None = "1"
    """Biological assembly that is the truth of a complex; null: the asymmetric unit. A structure file without assemblies is
    one."""
    baseline: Literal["nearest"] | None = None
    """Baseline beside the scores. nearest: a copy of the nearest training chain or complex, by alignment score. The training
    chains or complexes are those of config, train_chains or train."""
    config: Path | None = None
    """Config of the baseline: config.yaml of the run's folder, or another file of `evodsp fit`, whose `data` block names the
    training chains and the folders or the store that they are in."""
    train_chains: str | None = None
    """Training chains or complexes of the baseline: a text file, one name per line. They are copied, not scored (train names
    those). null takes those of config, or train."""
    structure_dir: str | None = None
    """Folder of the baseline's training structures; null takes that of config, or structures."""
    before: Path | None = None
    """Model before its fine-tuning, instead of predictions, as `evodsp predict --checkpoint` takes it, or a name of
    `evodsp weights fetch`. Copies of the nearest training structures are scored too: those of config or train_chains, or, if
    the model `after` lies in the folder of its run, of this run."""
    after: Path | None = None
    """Model after its fine-tuning, given likewise."""
    chains: Path | None = None
    """Text file of the chains (or complexes) that fine-tuning is to help, one name per line; no training chains."""
    general: Path | None = None
    """Text file of chains that are unlike the training set: they show what the model has forgotten."""
    alignments: Path | None = None
    """Folder of the alignments, as in `evodsp predict`. This and the settings below are those of both models."""
    templates: Path | None = None
    """Folder of template structures; null: no templates."""
    template_chains: Path | None = None
    """Text file of the chains in `templates` that serve as templates; null: those that search programs have found."""
    preset: str | None = None
    """Model that DeepMind's or OpenFold's parameters belong to; null: read from the file's name."""
    seeds: int = 1
    """Predictions of each chain by each model; the one that ranks first is scored."""
    recycles: int | None = None
    """Recycling iterations after the first pass; null: as in training."""
    msa_clusters: int | None = None
    """Rows of the clustered MSA; null: as in training."""
    extra_msa: int | None = None
    """Rows of the extra MSA; null: as in training."""
    device: str = "auto"
    """Device of the models."""
    precision: LayerPrecision = "fp32"
    """Precision of their layers."""
    overwrite: bool = False
    """Predict again what is finished."""

    def __post_init__(self) -> None:
        check_numbers(self, {"seeds": SIZE}, "--")
        if self.before is None:
            for name in _OF_MODELS:
                if (value := getattr(self, name)) != getattr(ScoreConfig, name):
                    raise UserError(f"--{name} is {value}, but is for two models; give --before, or leave it out")
            if self.predictions is None:
                raise UserError("nothing to score: give --predictions, or two models with --before and --after")
        else:
            for name in ("after", "chains"):
                if getattr(self, name) is None:
                    raise UserError(f"--before is {self.before}, but --{name} is not given; give it")
            for name in ("predictions", "train", "held_out"):
                if (value := getattr(self, name)) is not None:
                    raise UserError(
                        f"--{name} is {value}, but --before and --after make the predictions; give --chains, or leave it out"
                    )
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
        if self.before is not None:
            return
        for name in ("config", "train_chains", "structure_dir"):
            if (value := getattr(self, name)) is not None:
                fix = " (--train scores predictions of training chains)" if name == "train_chains" else ""
                raise UserError(
                    f"--{name} is {value}, but names what is copied; give --baseline nearest, or leave it out{fix}"
                )
