"""The models of a prediction: one checkpoint, or several whose predictions are ranked together; their names and feature sizes.

A model's name begins the names of its files. It is the checkpoint's file name, with the folders above it as far as they are
needed to tell models apart: runs/a/checkpoints/best.ckpt and runs/b/checkpoints/best.ckpt are a_best and b_best.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evodsp.config import ArrangementName, FeatureConfig
from evodsp.data.samples.raw_features import check_config
from evodsp.errors import UserError
from evodsp.inference.config import SizeSettings
from evodsp.inference.targets import Target, content_digest, fingerprint
from evodsp.weights.parameter_file import CONFIG, is_pretrained, located, parameter_file

SIZES = ("recycles", "msa_clusters", "extra_msa")
"""Options whose default is the value used in training."""

_SUFFIXES = (".ckpt", ".npz", ".pt")
_OF_DEEPSPEED = ("latest", "checkpoint", "*mp_rank_*")
_TELLS_NOTHING = "checkpoints"
"""The folder of checkpoints within the folder of every run."""


@dataclass(frozen=True)
class NamedModel:
    """A checkpoint."""

    path: Path
    name: str | None
    """None if the run has one model; file names then have no model prefix."""
    digest: str
    """The fingerprint of its file."""
    arrangement: ArrangementName = "monomer"
    """The arrangement of its parts (`ModelConfig.arrangement`)."""
    trained: FeatureConfig = field(default_factory=FeatureConfig)
    """The feature sizes of its checkpoint."""


def find_models(given: Sequence[Path]) -> list[NamedModel]:
    """The models of `--checkpoint` and `--weights`: files, or folders of them, or names of the Hugging Face hub.

    Of several files with the same content only the first is taken: a run's last.ckpt is often its best one too.
    Raises UserError if a file is missing or given twice.
    """
    paths = [path for place in given for path in _files(place)]
    if repeated := [path for path in paths if paths.count(path) > 1]:
        raise UserError(f"{repeated[0]} is given as --checkpoint more than once; give it once")
    different: dict[str, Path] = {}
    local = {path: located(path) for path in paths}
    for path, place in local.items():
        if not place.exists():
            raise UserError(f"{path}: no such checkpoint; check --checkpoint")
        different.setdefault(_content(place), path)
    names = _names(list(different.values()))
    return [
        NamedModel(
            local[path], name if len(names) > 1 else None, fingerprint((parameter_file(local[path]).name, content))
        )
        for (content, path), name in zip(different.items(), names, strict=True)
    ]


def _content(path: Path) -> str:
    """A fingerprint of a model's content: of its file, and where its sizes are in another one, of that too."""
    content = content_digest(parameter_file(path))
    return fingerprint((content, content_digest(path / CONFIG))) if is_pretrained(path) else content


def _files(path: Path) -> list[Path]:
    """The checkpoints in a folder; or `path` itself, if it is a file, or a folder that is one model."""
    if not path.is_dir() or is_pretrained(path) or any(any(path.glob(pattern)) for pattern in _OF_DEEPSPEED):
        return [path]
    if found := sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES):
        return found
    inside = path / _TELLS_NOTHING
    instead = f"give {inside}" if inside.is_dir() else "give a file, or a folder of such files"
    raise UserError(f"{path}: --checkpoint is a folder without a checkpoint ({', '.join(_SUFFIXES)}); {instead}")


def _names(paths: Sequence[Path]) -> list[str]:
    """Names that differ, each as short as possible with as many folders as all others."""
    parts = [[*(part for part in path.absolute().parts[1:-1] if part != _TELLS_NOTHING), path.stem] for path in paths]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = [re.sub(r"[^A-Za-z0-9.-]+", "_", "_".join(part[-length:])).strip("_.-") for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"--checkpoint: '{paths[0]}' and another one have names that files cannot tell apart; rename one")


def feature_config(sizes: SizeSettings, trained: FeatureConfig) -> FeatureConfig:
    """The checkpoint's feature sizes without cropping, with the options that the user gave in their place."""
    given = {name: value for name in SIZES if (value := getattr(sizes, name)) is not None}
    features = replace(trained, crop_size=None, uniform_recycling=False, **given)
    check_config(features)
    return features


def with_template_row(features: FeatureConfig, takes_templates: bool) -> FeatureConfig:
    """`features` with at least one template if the model reads templates: it needs the features' arrays, even if the sizes
    allow no template. The added one is always absent."""
    if features.max_templates or not takes_templates:
        return features
    return replace(features, max_templates=1, msa_clusters=features.msa_clusters + 1)


def check_target_fits_ranks(ranks: int, features: FeatureConfig, target: Target) -> None:
    """Raise UserError if there are more ranks than residues or MSA rows of `target`."""
    check_ranks(ranks, len(target.query), features.msa_clusters - features.max_templates, f"{target.query.name}: ")


def check_ranks(ranks: int, residues: int, rows: int, before: str = "") -> None:
    """Raise UserError if there are more ranks than residues or MSA rows: each rank needs one of both.

    `before`: the beginning of the message.
    """
    if ranks > min(rows, residues):
        raise UserError(
            f"{before}--parallel.sequence is {ranks}, but with {residues} residues and {rows} rows of the clustered MSA it "
            f"can be at most {min(rows, residues)}; lower it"
        )


def sizes_line(features: FeatureConfig, trained: FeatureConfig, ensembles: int) -> str:
    """The log's line of sizes, for example 'sizes: recycles 1 (default 3), msa_clusters 512, extra_msa 5120'."""
    sizes = []
    for name in SIZES:
        used, default = getattr(features, name), getattr(trained, name)
        sizes.append(f"{name} {used}" if used == default else f"{name} {used} (default {default})")
    if ensembles > 1:
        sizes.append(f"ensembles {ensembles}")
    return f"sizes: {', '.join(sizes)}"
