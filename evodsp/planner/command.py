"""`evodsp plan`: says, before GPUs are booked, which mesh fits, what it moves and how long a step takes."""

from __future__ import annotations

import json
from dataclasses import replace

from evodsp.files import write_text
from evodsp.planner.choose import compare
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Links, load_device, load_link
from evodsp.planner.from_run import training_of
from evodsp.planner.report import as_json, page, text
from evodsp.printing import show


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
    training = training_of(settings, device.on_gpu)
    if settings.recomputation == "none":
        kept = replace(training.model.evoformer, checkpoint=False, checkpoint_projections=False)
        training = replace(training, model=replace(training.model, evoformer=kept))
    compared = compare(training, settings.gpus, device, links, settings.sequence, auto=settings.recomputation == "auto")
    show("\n".join(text(compared, settings.gpus)))
    write_text(settings.output, page(compared, settings.gpus).html())
    write_text(settings.output.with_suffix(".json"), json.dumps(as_json(compared), indent=1) + "\n")
    show(f"page: {settings.output}, numbers: {settings.output.with_suffix('.json')}")
    return 0 if compared.best is not None else 1
