"""What a plan takes from the config file of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from evodsp.config import PRESETS, FeatureConfig, LossConfig, ModelConfig, field_names, from_dict
from evodsp.errors import UserError
from evodsp.planner.config import PlanConfig
from evodsp.planner.mesh import Training
from evodsp.planner.program import Sizes
from evodsp.run_config_file import read_run_config


def training_of(settings: PlanConfig) -> Training:
    """What is trained. Raises UserError if the config file cannot be read, or if its sizes do not go together."""
    with _wrong_types(settings):
        return _training_of(settings)


def model_of(settings: PlanConfig) -> ModelConfig:
    """The model alone. Raises UserError if the config file cannot be read."""
    with _wrong_types(settings):
        block = _group(read_run_config(settings.config), "model")
        return _model(settings.preset or block.get("preset"), block)


@contextmanager
def _wrong_types(settings: PlanConfig) -> Iterator[None]:
    """Turn what a text in place of a number raises into a UserError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--config {settings.config}: a value has the wrong type ({error}); 'evodsp fit --config {settings.config} "
            "--print_config' names it"
        ) from error


def _training_of(settings: PlanConfig) -> Training:
    content = read_run_config(settings.config)
    block = _group(content, "model")
    sizes = _group(_group(content, "data"), "train")
    optimizer = _group(block, "optimizer")
    model = _model(settings.preset or block.get("preset"), block)
    features = from_dict(FeatureConfig, sizes, "data.train") if sizes else FeatureConfig()
    templates = settings.templates
    if templates is None:
        templates = features.max_templates if sizes else 4 if model.templates.enabled else 0
    if not model.templates.enabled:
        if settings.templates:
            raise UserError(
                f"--templates is {templates}, but the model has none; use --preset model_1 or --templates 0"
            )
        templates = 0
    elif templates == 0:
        model = dataclasses.replace(model, templates=dataclasses.replace(model.templates, enabled=False))
    rows = settings.msa or features.msa_clusters
    if rows <= templates:
        raise UserError(f"--msa is {rows}, but includes the rows of {templates} templates; give more")
    residues = settings.residues or features.crop_size
    if residues is None:
        raise UserError("data.train.crop_size of the config is null; give --residues, the longest chain")
    clip = optimizer.get("clip", "sample") if _group(content, "trainer").get("gradient_clip_val", 0.1) else "none"
    return Training(
        model=model,
        loss=_losses(block, model),
        sizes=Sizes(residues, rows - templates, settings.extra_msa or features.extra_msa, templates),
        recycles=features.recycles if settings.recycles is None else settings.recycles,
        uniform_recycling=features.uniform_recycling,
        global_batch=settings.global_batch or content.get("global_batch") or 128,
        samples=settings.samples or content.get("max_samples") or Training.samples,
        clip=clip,
        ema=block.get("ema_decay", 0.999) is not None,
        half=settings.precision == "bf16-mixed",
        wire=settings.wire,
        parameters=settings.parameters,
        graphs=settings.cuda_graphs,
    )


def _model(preset: str | None, block: dict[str, Any]) -> ModelConfig:
    """The preset's sizes, changed by those of the file."""
    name = preset or "model_1"
    if name not in PRESETS:
        return ModelConfig.preset(name)  # which says what is wrong
    own = {key: value for key, value in block.items() if key in field_names(ModelConfig)}
    return ModelConfig.from_dict(_merged(ModelConfig.preset(name).to_dict(), own))


def _losses(block: dict[str, Any], model: ModelConfig) -> LossConfig:
    """The weights of the file, without terms whose heads the model lacks."""
    loss = from_dict(LossConfig, _group(block, "loss"), "model.loss")
    absent = {} if model.heads.predicted_aligned_error else {"pae": 0.0}
    absent |= {} if model.heads.experimentally_resolved else {"experimentally_resolved": 0.0}
    return dataclasses.replace(loss, **absent)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _group(content: dict[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(
            f"--config: '{name}' is {value!r}, but must be a group of options; give a config of 'evodsp fit'"
        )
    return value
