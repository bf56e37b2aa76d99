"""Settings of `evodsp weights import` and `export`. Importing this costs nothing (no torch), so that their help is quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evodsp.config import PRESETS, FeatureConfig
from evodsp.errors import UserError

_PUBLISHED = re.compile(r"model_([1-5])(_ptm)?$")


@dataclass(frozen=True)
class ImportConfig:
    """Which parameter file to read, and where to put the checkpoint."""

    input: Path
    """DeepMind's parameter file, params_model_<n>.npz or params_model_<n>_ptm.npz."""
    output: Path
    """Checkpoint to write, for `evodsp predict --checkpoint`."""
    preset: str | None = None
    """Model the parameters are of, such as model_1_ptm; null: as the name of the input ends. Stacks may differ in length."""
    overwrite: bool = False
    """Replace the output if it exists."""


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint to read, and where to put the parameter file."""

    checkpoint: Path
    """Checkpoint written by `evodsp fit` or `evodsp weights import`."""
    output: Path
    """Parameter file to write: .npz, DeepMind's names and shapes."""
    raw: bool = False
    """Use the raw weights of the checkpoint instead of their exponential moving average."""
    fused: bool = False
    """Keep left and right of triangle multiplication in one array, as DeepMind's newer releases do."""
    overwrite: bool = False
    """Replace the output if it exists."""


def preset_of(path: Path) -> str:
    """The preset that a file is named after: params_model_1_ptm.npz is of model_1_ptm. Raises UserError if it is of none."""
    if found := _PUBLISHED.search(path.stem):
        return found[0]
    raise UserError(
        f"{path}: the name does not say which model it is; give --preset, one of {', '.join(sorted(PRESETS))}"
    )


def published_features(preset: str) -> FeatureConfig:
    """The feature sizes that DeepMind predicts with (supplement, table 5); the defaults for a model of ours."""
    found = _PUBLISHED.fullmatch(preset)
    if not found:
        return FeatureConfig()
    number = int(found[1])
    return FeatureConfig(
        crop_size=None,
        msa_clusters=512,
        extra_msa=1024 if number in (2, 5) else 5120,
        max_templates=4 if PRESETS[preset].templates.enabled else 0,
        recycles=3,
        uniform_recycling=False,
    )


def check_output(path: Path, overwrite: bool) -> None:
    """Raise UserError if `path` cannot be written without losing something."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give --output the name of a file")
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists already; give another --output, or --overwrite")
