"""Settings of `evodsp weights import` and `export`. Importing this costs nothing (no torch), so that their help is quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from evodsp.config import PRESETS, FeatureConfig
from evodsp.errors import UserError

_PUBLISHED = re.compile(r"model_([1-5])(_ptm)?$")
_OPENFOLD = re.compile(r"(?:initial_training|finetuning(_no_templ)?(_ptm)?_\d+)$")

Format = Literal["deepmind", "openfold", "openfold-legacy"]
_FORMATS: dict[str, Format] = {".npz": "deepmind", ".pt": "openfold"}


@dataclass(frozen=True)
class ImportConfig:
    """Which parameter file to read, and where to put the checkpoint."""

    checkpoint: Path
    """Parameter file to read: DeepMind's .npz or OpenFold's .pt in either of its namings, told apart by their content."""
    output: Path
    """Checkpoint to write, for `evodsp predict --checkpoint`."""
    preset: str | None = None
    """Model the parameters are of, such as model_1_ptm; null: as the file is named after it (params_model_1_ptm.npz,
    finetuning_ptm_2.pt). Stacks may differ in length."""
    like: Path | None = None
    """In place of a preset, a checkpoint of evodsp's whose sizes the parameters have: the one that they were exported from."""
    raw: bool = False
    """Of a training checkpoint of OpenFold's, use the weights of the last step instead of their moving average."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def __post_init__(self) -> None:
        if self.preset is not None and self.like is not None:
            raise UserError(f"--preset {self.preset} and --like {self.like} both give sizes; leave one out")


@dataclass(frozen=True)
class ExportConfig:
    """Which checkpoint to read, and where to put the parameter file."""

    checkpoint: Path
    """Checkpoint written by `evodsp fit` or `evodsp weights import`; or another parameter file, to convert it."""
    output: Path
    """Parameter file to write."""
    format: Format | None = None
    """Whose names and shapes: deepmind (.npz), openfold (.pt, version 2 and later), openfold-legacy (.pt, before version 2 and
    its published checkpoints); null: by the output's suffix, .npz or .pt."""
    preset: str | None = None
    """Model that another parameter file is of; null: as it is named. Checkpoints need none."""
    raw: bool = False
    """Use the raw weights of the checkpoint instead of their exponential moving average."""
    fused: bool = False
    """Keep both sides of triangle multiplication in one array, as newer models of DeepMind's and OpenFold's do."""
    overwrite: bool = False
    """Replace the output if it exists."""

    @property
    def output_format(self) -> Format:
        """The format given, or the suffix's. Raises UserError if neither says it."""
        found = self.format or _FORMATS.get(self.output.suffix)
        if found is None:
            raise UserError(
                f"{self.output}: the name does not say which format; end it in .npz or .pt, or give --format "
                f"{', '.join(get_args(Format))}"
            )
        return found


def preset_of(path: Path) -> str:
    """The preset that a file is named after: params_model_1_ptm.npz is of model_1_ptm. Raises UserError if it is of none.

    OpenFold's published checkpoints have its first model with templates or without them.
    """
    if found := _PUBLISHED.search(path.stem):
        return found[0]
    if found := _OPENFOLD.match(path.stem):
        return f"model_{3 if found[1] else 1}{found[2] or ''}"
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
