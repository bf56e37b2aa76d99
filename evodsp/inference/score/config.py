"""Settings of `evodsp score`. Importing this costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ScoreConfig:
    """Which predictions to compare with which structures, and where to write the scores."""

    predictions: Path
    """Output folder of `evodsp predict`."""
    structures: Path
    """Folder of the true structures, <pdbid>.cif or .pdb, also gzipped."""
    output: Path
    """Folder for scores.csv, calibration.png and a picture of each chain, distances_<chain>.png."""
    train: str | None = None
    """Chains that the model was trained on: a file with one per line, or <pdbid>_<chain>,…"""
    held_out: str | None = None
    """Chains that the model was not trained on, given likewise."""
