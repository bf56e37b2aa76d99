"""The feature sizes of a prediction, and all settings that decide whether an earlier result is still valid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evodsp.config import FeatureConfig
from evodsp.data.samples.feature_axes import check_config
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.target_templates import template_digest
from evodsp.inference.targets import Target

SIZES = ("recycles", "msa_clusters", "extra_msa")
"""Options whose default is the value used in training."""


NUMERICS = 1
"""Raised when a version of evodsp computes other numbers from the same inputs, beyond rounding: its results do not mix."""


def feature_config(config: PredictConfig, trained: FeatureConfig) -> FeatureConfig:
    """The checkpoint's feature sizes without cropping, with the options that the user gave in their place."""
    given = {name: value for name in SIZES if (value := getattr(config, name)) is not None}
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
    """Raise UserError if there are more ranks than residues or MSA rows of `target`: each rank needs one of both."""
    rows, residues = features.msa_clusters - features.max_templates, len(target.query)
    if ranks > min(rows, residues):
        raise UserError(
            f"{target.query.name}: --parallel.sequence is {ranks}, but with {residues} residues and {rows} rows of the "
            f"clustered MSA it can be at most {min(rows, residues)}; lower it"
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


def result_settings(
    config: PredictConfig, features: FeatureConfig, target: Target, checkpoint: str, templates: TemplateFeatures
) -> dict[str, Any]:
    """Everything that the numbers of a seed depend on. An earlier result is kept only if every entry is equal.

    `checkpoint`: the fingerprint of its file. `templates`: the templates in use, best first.
    """
    return {
        "numerics": NUMERICS,
        "sequence": target.query.letters,
        "alignments": target.digest,
        "checkpoint": checkpoint,
        "raw": config.raw,
        **{name: getattr(features, name) for name in SIZES},
        "ensembles": config.ensembles,
        "stop_tolerance": config.stop_tolerance or None,
        "templates": list(templates.names),
        "templates_digest": template_digest(templates),
        # None for the default: earlier versions, which had no other, wrote no entry.
        "precision": None if config.precision == "fp32" else config.precision,
        "matmul_precision": None if config.matmul_precision == "highest" else config.matmul_precision,
    }


def seeds(config: PredictConfig) -> list[int]:
    """The seeds of the predictions."""
    return list(range(config.first_seed, config.first_seed + config.seeds))
