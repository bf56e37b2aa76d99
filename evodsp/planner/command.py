"""`evodsp plan`: says, before GPUs are booked, which mesh fits, what it moves and how long a step or a prediction takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from evodsp.files import write_text
from evodsp.planner import prediction_report
from evodsp.planner.choose import compare
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.from_run import training_of
from evodsp.planner.report import as_json, page, text
from evodsp.printing import show
from evodsp.report.page import Page


def run(settings: PlanConfig, words: list[str]) -> int:
    """Print the plan, write the page and the JSON file, and return the exit code, 1 if nothing fits. Or measure."""
    if settings.gpus is None or settings.measure:
        from evodsp.planner.measure import write_measured

        for path in write_measured(settings.output, settings.gpus):
            show(f"{path}: written")
        return 0
    device = load_device(settings.device)
    inside, across = (load_link(name) for name in (settings.inside or device.inside, settings.across or device.across))
    links = Links(inside, across, settings.gpus_per_node or device.gpus_per_node)
    return (_predict if settings.predict else _train)(settings, settings.gpus, device, links)


def _train(settings: PlanConfig, gpus: int, device: Device, links: Links) -> int:
    training = training_of(settings, device.on_gpu)
    if settings.recomputation == "none":
        training = replace(
            training,
            model=replace(training.model, evoformer=replace(training.model.evoformer, checkpoint=False)),
        )
    compared = compare(training, gpus, device, links, settings.sequence, auto=settings.recomputation == "auto")
    _write(settings, text(compared, gpus), page(compared, gpus), as_json(compared))
    return 0 if compared.best is not None else 1


def _predict(settings: PlanConfig, gpus: int, device: Device, links: Links) -> int:
    what = prediction_report.prediction_of(settings, device)
    found = prediction_report.plan_prediction(what, gpus, device, links, settings.sequence)
    _write(settings, prediction_report.text(found), prediction_report.page(found), prediction_report.as_json(found))
    return 0 if found.fitting else 1


def _write(settings: PlanConfig, printed: list[str], made: Page, numbers: dict[str, Any]) -> None:
    show("\n".join(printed))
    write_text(settings.output, made.html())
    write_text(settings.output.with_suffix(".json"), json.dumps(numbers, indent=1) + "\n")
    show(f"page: {settings.output}, numbers: {settings.output.with_suffix('.json')}")
