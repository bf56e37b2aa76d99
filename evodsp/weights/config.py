"""Settings of the commands `evodsp weights`. This module does not import torch, so the commands' help is quick."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from evodsp.config import LISTED_PRESETS, PRESETS, FeatureConfig, check_preset
from evodsp.errors import COUNT, POSITIVE, UserError, check_numbers

_PUBLISHED = re.compile(r"model_([1-5])(_ptm|_multimer(?:_v[23])?)?$")
_OPENFOLD = re.compile(r"(?:initial_training|finetuning(_no_templ)?(_ptm)?_\d+)$")

Format = Literal["deepmind", "openfold", "openfold-legacy", "safetensors"]
_FORMATS: dict[str, Format] = {".npz": "deepmind", ".pt": "openfold"}


@dataclass(frozen=True)
class ImportConfig:
    """Parameter file to read, and checkpoint to write."""

    checkpoint: Path
    """Parameters to read: DeepMind's .npz, OpenFold's .pt or .ckpt, or the folder that DeepSpeed wrote for OpenFold."""
    output: Path
    """Checkpoint to write, for `evodsp predict --checkpoint`."""
    preset: str | None = None
    """Model that the parameters belong to, such as model_1_ptm; null: read from the file's name (params_model_1_ptm.npz,
    finetuning_ptm_2.pt). The number of blocks in each stack is taken from the file."""
    like: Path | None = None
    """An evodsp checkpoint to take the sizes from, instead of a preset: the one that the parameters were exported from."""
    raw: bool = False
    """Take the last step's weights of an OpenFold training checkpoint instead of their moving average."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def __post_init__(self) -> None:
        check_preset(self.preset)
        if self.preset is not None and self.like is not None:
            raise UserError(f"--preset {self.preset} and --like {self.like} both give sizes; leave one out")


@dataclass(frozen=True)
class WeightsFetchConfig:
    """Published parameters to fetch, and their folder."""

    names: Sequence[str]
    """Models: model_1 to model_5, model_1_ptm to model_5_ptm, and for complexes model_1_multimer_v3 to model_5_multimer_v3; all
    five of a kind: all_monomer, all_ptm, all_multimer_v3."""
    output: Path | None = None
    """Folder to keep them in. null: $EVODSP_WEIGHTS, or evodsp/weights in the user's folder of caches (~/.cache)."""
    url: str | None = None
    """Address of a mirror: an uncompressed .tar archive, or a folder with params_<name>.npz and, where there are SHA-256 sums,
    SHA256SUMS. A name and a password may stand before the host (https://name:password@host). null: DeepMind's archive."""
    hours: float = 6.0
    """Hours after which the fetch of one model is stopped. Run the command again to continue."""

    def __post_init__(self) -> None:
        check_numbers(self, {"hours": POSITIVE}, "--")


@dataclass(frozen=True)
class RandomConfig:
    """The model whose random parameters are drawn, and their file."""

    output: Path
    """File to write, in DeepMind's format; name it params_<preset>.npz, so that its name says which model it is."""
    preset: str = "model_1_ptm"
    """Model, such as model_1_ptm or test."""
    seed: int = 0
    """Seed of the parameters."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def __post_init__(self) -> None:
        check_preset(self.preset)
        check_numbers(self, {"seed": COUNT}, "--")


@dataclass(frozen=True)
class ExportConfig:
    """Checkpoint to read, and parameter file to write."""

    checkpoint: Path
    """Checkpoint written by `evodsp fit` or `evodsp weights import`; or another program's parameters, to convert them."""
    output: Path
    """Parameter file to write; of the format safetensors, the folder."""
    format: Format | None = None
    """Names and shapes to write: deepmind (.npz), openfold (.pt, version 2 and later), openfold-legacy (.pt, releases before
    version 2 and the published checkpoints), safetensors (a folder: evodsp's own names, sizes and a model card); null: by the
    output's suffix, .npz or .pt."""
    preset: str | None = None
    """Model that another program's parameters belong to; null: read from the file's name. evodsp's checkpoints need none."""
    layers: list[str] = field(default_factory=list)
    """Sub-layers of your own that the model has, as its checkpoint names them: [NAME=PACKAGE.MODULE:CLASS]. Only what you
    name is imported."""
    raw: bool = False
    """Use the raw weights of the checkpoint instead of their exponential moving average."""
    fused: bool = False
    """Keep both sides of triangle multiplication in one array, as newer models of DeepMind and OpenFold do."""
    judgement: Path | None = None
    """Judgement for the model card of a folder: the judgement.md of `evodsp score --before --after` about this model."""
    overwrite: bool = False
    """Replace the output if it exists."""

    def __post_init__(self) -> None:
        check_preset(self.preset)
        if self.judgement is not None and self.format != "safetensors":
            raise UserError(
                f"--judgement is {self.judgement}, but only a model folder has a card; give --format safetensors"
            )
        if self.format == "safetensors" and self.fused:
            raise UserError("--fused is given with --format safetensors, which has evodsp's own arrays; leave it out")

    @property
    def output_format(self) -> Format:
        """The format given, or the one that the output's suffix implies. Raises UserError if there is neither."""
        found = self.format or _FORMATS.get(self.output.suffix)
        if found is None:
            raise UserError(
                f"{self.output}: the format is unknown from this name; end it in .npz or .pt, or give --format "
                f"{', '.join(get_args(Format))} (which writes a folder)"
            )
        if found == "safetensors" and self.output.suffix == ".safetensors":
            raise UserError(
                f"{self.output}: --format safetensors writes a folder; name it without the suffix .safetensors"
            )
        return found


def preset_of(path: Path) -> str:
    """The preset that a file's name stands for: model_1_ptm for params_model_1_ptm.npz, model_1_multimer_v3 likewise.

    OpenFold's published checkpoints are model_1 with templates and model_3 without (_no_templ). Raises UserError if the name
    stands for no preset.
    """
    if found := _PUBLISHED.search(path.stem):
        return found[0]
    if found := _OPENFOLD.match(path.stem):
        return f"model_{3 if found[1] else 1}{found[2] or ''}"
    raise UserError(f"{path}: the name does not say which model it is; give --preset, one of {LISTED_PRESETS}")


def published_features(preset: str) -> FeatureConfig:
    """The feature sizes that DeepMind predicts with (supplement, table 5; multimer: its code's configuration); the defaults for
    evodsp's own presets.
    """
    found = _PUBLISHED.fullmatch(preset)
    if not found:
        return FeatureConfig()
    number, kind = int(found[1]), found[2] or ""
    clusters, recycles = 512, 3
    if kind == "_multimer_v3":
        extra, recycles = 2048 if number <= 3 else 1152, 20
    elif kind.startswith("_multimer"):
        extra, clusters = 1152, 256
    else:
        extra = 1024 if number in (2, 5) else 5120
    return FeatureConfig(
        crop_size=None,
        msa_clusters=clusters,
        extra_msa=extra,
        max_templates=4 if PRESETS[preset].templates.enabled else 0,
        recycles=recycles,
        uniform_recycling=False,
    )


def check_new_file(path: Path, overwrite: bool) -> None:
    """Raise UserError if `path` is a folder, or exists and may not be overwritten."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give --output the name of a file")
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists already; give another --output, or --overwrite")
