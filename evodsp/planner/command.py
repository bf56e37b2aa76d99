"""`evodsp plan`: says, before GPUs are booked, which mesh fits, what it moves and how long a step takes; and what it
takes from the config file of a run.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any, Literal, get_args

from evodsp.config import (
    PRESETS,
    FeatureConfig,
    LossConfig,
    ModelConfig,
    computes_in_half,
    field_names,
    from_dict,
    import_layers,
)
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.model.schedule import CommunicationPlan
from evodsp.packaged import read_run_config
from evodsp.parallel.config import ParallelConfig
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Links, load_device, load_link
from evodsp.planner.mesh import Training, compare
from evodsp.planner.program import SampleSizes
from evodsp.planner.report import as_json, page, text
from evodsp.printing import show

Precision = Literal["bf16-mixed", "32-true"]
_FEATURES = ("crop_size", "msa_clusters", "extra_msa", "max_templates", "recycles")


def training_of(settings: PlanConfig, on_gpu: bool = True) -> Training:
    """The training that is planned. Raises UserError if the config file cannot be read, or its sizes do not go together."""
    try:
        return _training_of(settings, on_gpu)
    except (TypeError, ValueError) as error:  # of a text in place of a number
        raise UserError(
            f"--config {settings.config}: a value has the wrong type ({error}); 'evodsp fit --config {settings.config} "
            "--print_config' names it"
        ) from error


def _training_of(settings: PlanConfig, on_gpu: bool) -> Training:
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
    parallel = from_dict(ParallelConfig, _group(content, "parallel"), "parallel")
    training = Training(
        model=_without_auto(model),
        loss=_losses(block, model),
        sizes=SampleSizes(residues, rows - templates, settings.extra_msa or features.extra_msa, templates),
        recycles=features.recycles if settings.recycles is None else settings.recycles,
        uniform_recycling=features.uniform_recycling,
        global_batch=settings.global_batch or content.get("global_batch") or 128,
        samples=settings.samples or content.get("max_samples") or Training.samples,
        clip=clip,
        ema=block.get("ema_decay", 0.999) is not None,
        half=_precision(settings, content) == "bf16-mixed",
        tf32=content.get("matmul_precision") == "high",
        wire=settings.wire or parallel.wire,
        parameters=settings.parameters or parallel.parameters,
        plan=from_dict(CommunicationPlan, _group(content, "plan"), "plan"),
        graphs=_graphs(settings, content),
        on_gpu=on_gpu,
        config=settings.config,
    )
    return dataclasses.replace(training, options=_options(training, settings.preset, content))


def _graphs(settings: PlanConfig, content: dict[str, Any]) -> bool | None:
    """`Training.graphs`: by the option, or else as the config says, where `auto` leaves it open. Compiled blocks are not
    recorded."""
    if settings.cuda_graphs is not None or content.get("compile", "none") != "none":
        return bool(settings.cuda_graphs)
    asked = content.get("cuda_graphs", "auto")
    return None if asked == "auto" else bool(asked)


def _precision(settings: PlanConfig, content: dict[str, Any]) -> str:
    """`bf16-mixed` or `32-true`. Raises UserError for a precision of the config that cannot be trained or planned."""
    if settings.precision is not None:
        return "bf16-mixed" if computes_in_half(settings.precision) else "32-true"
    if not content:
        return "bf16-mixed"
    written = _group(content, "trainer").get("precision")
    found = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed"}.get(str(written), str(written))
    if found not in get_args(Precision):
        raise UserError(
            f"--config: trainer.precision is {written}, which is not planned; give --precision bf16-mixed or 32-true"
        )
    return found


def _without_auto(model: ModelConfig) -> ModelConfig:
    """The model with numbers of recomputed blocks: all where a run would measure how many (of the Evoformer's, a plan finds
    them)."""
    extra, templates = model.extra_msa, model.templates
    return dataclasses.replace(
        model,
        extra_msa=dataclasses.replace(extra, checkpoint=True) if extra.checkpoint == "auto" else extra,
        templates=dataclasses.replace(templates, checkpoint=True) if templates.checkpoint == "auto" else templates,
    )


def _options(training: Training, preset: str | None, content: dict[str, Any]) -> dict[str, str]:
    """`Training.options`."""
    n = training.sizes
    planned = {
        "global_batch": training.global_batch,
        "max_samples": training.samples,
        "model.preset": preset,
        "model.templates.enabled": training.model.templates.enabled,
        "parallel.parameters": training.parameters,
        "parallel.wire": training.wire,
        "data.train.crop_size": n.residues,
        "data.train.msa_clusters": n.clusters + n.templates,
        "data.train.extra_msa": n.extra,
        "data.train.max_templates": n.templates,
        "data.train.recycles": training.recycles,
    }
    model = _model(preset or _group(content, "model").get("preset"), _group(content, "model"))
    features = FeatureConfig()
    defaults = {
        "max_samples": Training.samples,
        "model.preset": preset and "model_1",
        "model.templates.enabled": model.templates.enabled,
        "parallel.parameters": "replicate",
        "parallel.wire": "same",
        **{f"data.train.{name}": getattr(features, name) for name in _FEATURES},
    }
    differing = {
        name: str(value).lower()
        for name, value in planned.items()
        if value is not None and value != _written(content, name, defaults.get(name))
    }
    if (_group(content, "trainer").get("accelerator") == "cpu") == training.on_gpu:
        differing["trainer.accelerator"] = "gpu" if training.on_gpu else "cpu"
    return {"trainer.precision": "bf16-mixed" if training.half else "32-true", **differing}


def _written(content: dict[str, Any], name: str, default: object) -> object:
    """The value that a config gives the option `a.b.c`."""
    *groups, last = name.split(".")
    for group in groups:
        content = _group(content, group)
    return content.get(last, default)


def _model(preset: str | None, block: dict[str, Any]) -> ModelConfig:
    """The preset's sizes, changed by those of the file."""
    name = preset or "model_1"
    if name not in PRESETS:
        return ModelConfig.preset(name)  # which says what is wrong
    own = {key: value for key, value in block.items() if key in field_names(ModelConfig)}
    return import_layers(ModelConfig.from_dict(_merged(ModelConfig.preset(name).to_dict(), own)))


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


def run(settings: PlanConfig, words: list[str]) -> int:
    """Print the plan, write the page and the JSON file, and return the exit code, 1 if nothing fits. Or measure."""
    if settings.gpus is None or settings.measure:
        assert settings.output is not None, "PlanConfig refuses it"
        from evodsp.planner.measure import write_measured

        for path in write_measured(settings.output, settings.gpus):
            show(f"{path}: written")
        return 0
    device = load_device(settings.device)
    inside, across = (load_link(name) for name in (settings.inside or device.inside, settings.across or device.across))
    links = Links(inside, across, settings.gpus_per_node or device.gpus_per_node)
    training = training_of(settings, device.on_gpu)
    if settings.recomputation == "none":
        kept = replace(training.model.evoformer, checkpoint=False, checkpoint_projections=False)
        training = replace(training, model=replace(training.model, evoformer=kept))
    compared = compare(training, settings.gpus, device, links, settings.sequence, auto=settings.recomputation == "auto")
    show("\n".join(text(compared, settings.gpus)))
    if (output := settings.output) is not None:
        write_text(output, page(compared, settings.gpus).html())
        write_text(output.with_suffix(".json"), json.dumps(as_json(compared), indent=1) + "\n")
        show(f"page: {output}, numbers: {output.with_suffix('.json')}")
    return 0 if compared.best is not None else 1
