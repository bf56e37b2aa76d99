"""What a prediction is made with: feature sizes, and everything else that decides whether an earlier result still holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from evodsp.config import FeatureConfig
from evodsp.data.chain_folder import alignment_files
from evodsp.data.features import check_config
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.target_templates import template_digest
from evodsp.inference.targets import Target, digest

SIZES = ("recycles", "msa_clusters", "extra_msa")
"""Options that, where not given, are as in training."""


def feature_config(config: PredictConfig, trained: FeatureConfig) -> FeatureConfig:
    """The checkpoint's features of the whole chain, with the sizes that the user gave in place of its own."""
    given = {name: value for name in SIZES if (value := getattr(config, name)) is not None}
    features = replace(trained, crop_size=None, uniform_recycling=False, **given)
    check_config(features)
    return features


def check_degree(ranks: int, features: FeatureConfig, target: Target) -> None:
    """Raise UserError if `target` cannot be spread over so many ranks: each needs a row and a column of the MSA."""
    rows, residues = features.msa_clusters - features.max_templates, len(target.query)
    if ranks > min(rows, residues):
        raise UserError(
            f"{target.query.name}: --parallel.sequence is {ranks}, but with {residues} residues and {rows} rows of the "
            f"clustered MSA it can be at most {min(rows, residues)}; lower it"
        )


def sizes_line(features: FeatureConfig, trained: FeatureConfig, ensembles: int) -> str:
    """The sizes in use, and beside those that the user changed the checkpoint's own."""
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
    """All that a target's files depend on: an earlier result is kept only if every item agrees.

    `checkpoint`: the fingerprint of its file. `templates`: those that are used, best first.
    """
    return {
        "sequence": target.query.letters,
        "alignments": digest(*alignment_files(target.alignments)),
        "checkpoint": checkpoint,
        "raw": config.raw,
        "seeds": seeds(config),
        **{name: getattr(features, name) for name in SIZES},
        "ensembles": config.ensembles,
        "stop_tolerance": config.stop_tolerance or None,
        "templates": list(templates.names),
        "templates_digest": template_digest(templates),
        "format": config.format,
    }


def seeds(config: PredictConfig) -> list[int]:
    """The seeds to predict with."""
    return list(range(config.first_seed, config.first_seed + config.seeds))
