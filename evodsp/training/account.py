"""The account of a run before its first step: which weights it trains, how long that takes, and the memory that it needs.

Numbers of weights are the model's. Memory of activations and times are the planner's (`evodsp.planner`): a plan, not a
measurement. The planner follows a backward pass through all weights, so a run that trains a part of them takes less time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import nn

from evodsp.model.adapters import is_adapter
from evodsp.planner.device import Device, Links, load_device, load_link, this_cpu
from evodsp.planner.mesh import Estimate, TracedPass, Training, estimate, traced
from evodsp.planner.program import SampleSizes, recomputed_of
from evodsp.printing import duration
from evodsp.training.checks import CheckedRun, on_gpu
from evodsp.training.logs import device_file

GIB = 2**30


def parts(model: nn.Module) -> list[str]:
    """A table of the parts of the model: their weights, and how many of these are trained, as such or as adapters."""
    weights, trained, adapters = Counter[str](), Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        part, numbers = name.partition(".")[0], parameter.numel()
        (adapters if is_adapter(name) else weights)[part] += numbers
        if parameter.requires_grad and not is_adapter(name):
            trained[part] += numbers
    rows: list[tuple[str, ...]] = [("part", "weights", "trained", "adapters")]
    columns = (weights, trained, adapters)
    rows += [(part, *(f"{column[part]:,}" for column in columns)) for part in weights]
    rows.append(("all", *(f"{column.total():,}" for column in columns)))
    return [f"{part:<26}{first:>14}{second:>14}{third:>12}" for part, first, second, third in rows]


def _planned(run: CheckedRun) -> tuple[Estimate, Device] | None:
    """The planner's estimate of a step on this machine's devices, and the device; None where it cannot tell: samples without
    a crop differ in size, and there are GPUs of which it knows nothing."""
    settings, features = run.settings, run.settings.data.train
    model, gpu = settings.model, on_gpu(settings.trainer)
    file = device_file(torch.cuda.get_device_name()) if gpu else None
    if features.crop_size is None or (gpu and file is None):
        return None
    device = load_device(file) if file is not None else this_cpu()
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    sizes = {
        stack: dataclasses.replace(part, checkpoint=True)
        for stack in ("evoformer", "extra_msa", "templates")
        if (part := getattr(model, stack)).checkpoint == "auto"
    }
    templates = features.max_templates if model.templates.enabled else 0
    training = Training(
        dataclasses.replace(model.model_config(), **sizes),
        model.loss,
        SampleSizes(features.crop_size, features.msa_clusters - templates, features.extra_msa, templates),
        features.recycles,
        features.uniform_recycling,
        run.batching.samples,
        model.optimizer.clip if settings.trainer["gradient_clip_val"] else "none",
        ema=model.ema_decay is not None,
        half="16" in str(settings.trainer["precision"]),
        tf32=settings.run.matmul_precision == "high",
        wire=settings.parallel.wire,
        parameters=settings.parallel.parameters,
        plan=settings.plan,
        graphs=run.records_stacks,
        on_gpu=gpu,
    )
    recomputed = recomputed_of(training.model.evoformer)
    sequence = settings.parallel.sequence
    followed = TracedPass.of(traced(training, sequence, recomputed), training, device, run.ranks)
    return estimate(training, followed, recomputed, run.batching.data_ranks, sequence, device, links), device


def account(run: CheckedRun, model: nn.Module) -> list[str]:
    """The account: the table of `parts`, the length of the run, memory and time."""
    settings, steps = run.settings, run.last_step
    length = "until it is stopped" if steps < 0 else f"{steps * run.batching.samples:,} samples in {steps:,} steps"
    told = [*parts(model), f"length: {length}, {run.batching}"]
    if not (
        settings.run.dry_run or on_gpu(settings.trainer)
    ):  # it takes seconds, in which a small model makes many steps
        return [*told, "memory and time: --dry_run true plans them"]
    if (found := _planned(run)) is None:
        no_crop = settings.data.train.crop_size is None
        why = "data.train.crop_size is null" if no_crop else "the planner does not know this GPU"
        return [*told, f"memory and time are not planned: {why}"]
    one, device = found
    memory, share = one.memory, _share(model)
    # Frozen weights have no gradient, no optimizer state and no average.
    states = [("gradients", memory.gradients), ("optimizer", memory.optimizer), ("moving average", memory.average)]
    sizes = [("weights", memory.weights), *((name, share * size) for name, size in states)]
    sizes.append(("activations", memory.activations + memory.features))
    total = sum(size for _, size in sizes)
    each = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes)
    told.append(f"memory of each device, planned: {total / GIB:.2f} of {one.usable / GIB:.1f} GiB ({each})")
    if total > one.usable:
        told.append("that is more than there is: take a smaller data.train.crop_size, or more parallel.sequence")
    hours = f", {duration(steps * one.step_s)} in all" if steps > 0 else ""
    most = "at most " if share < 1 else ""
    return [*told, f"time, planned for {device.name}: {most}{one.step_s:.3g} s a step{hours}, without validations"]


def _share(model: nn.Module) -> float:
    """Trained numbers, for each weight of the model."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trained / sum(parameter.numel() for name, parameter in model.named_parameters() if not is_adapter(name))
