"""A plan as text, as JSON and as a page. Every time is a model's, and says so."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from evodsp.planner.device import MARGIN
from evodsp.planner.mesh import Comparison, Estimate
from evodsp.planner.simulate import Times
from evodsp.printing import counted
from evodsp.report.page import Level, Page, Series, lines, stacked, timeline

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "average", "features", "activations")
_HEADINGS = (
    "data x sequence", "GiB", "fits", "blocks kept", "without projections", "graphs", "step, s", "samples/s", "efficiency",
    "exposed", "launch-bound", "days", "GPU-hours",
)  # fmt: skip
_NUMBERS = set(_HEADINGS) - {"data x sequence", "fits", "graphs", "launch-bound"}
_LESS = {"blocks kept", "without projections", "graphs", "launch-bound"}
"""Columns that the page lacks where they are the same for all meshes: the table is as wide as the page without them."""
TIGHT = f"; less than {MARGIN:.0%} of the memory is free, and a run may need more"
LAUNCH_BOUND = 0.9
"""A pass is launch-bound where launching takes at least this share of its time."""


def text(compared: Comparison, gpus: int) -> list[str]:
    """Lines for a terminal."""
    return [
        f"{gpus} x {compared.device.name}, {_what(compared)}. Times are a model's, not measured.",
        *aligned([_HEADINGS, *(_row(one, compared) for one in compared.estimates)]),
        verdict(compared),
        *([] if compared.best is None else [command(compared.best, compared)]),
        *advice(compared),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of a table, with its cells to the right of columns as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def verdict(compared: Comparison) -> str:
    """Recommendation of a mesh, or what is missing."""
    best = compared.best
    if best is not None:
        return (
            f"take {best.data} x {best.sequence}{' with CUDA graphs' * best.graphs}: {best.step_s:.2f} s a step, "
            f"{best.memory.total / GIB:.1f} of {best.usable / GIB:.1f} GiB{TIGHT * best.tight}"
        )
    least = min(compared.estimates, key=lambda one: one.memory.total)
    missing = (least.memory.total - least.usable) / GIB
    return (
        f"nothing fits: {least.data} x {least.sequence} needs {least.memory.total / GIB:.1f} GiB a device, {missing:.1f} more "
        "than there are. Take more devices a sample, fewer rows or residues, or --parameters fsdp2"
    )


def advice(compared: Comparison) -> list[str]:
    """Lines of advice that follow from the numbers of the chosen mesh."""
    best = compared.best
    if best is None:
        return []
    found = []
    if (fewer := compared.fewer) is not None:
        found.append(
            f"{counted(fewer.devices, 'device')} {'are' if fewer.devices > 1 else 'is'} faster and cheaper: "
            f"{fewer.data} x {fewer.sequence}{' with CUDA graphs' * fewer.graphs} takes {fewer.step_s:.2f} s a step and "
            f"{_gpu_hours(fewer, compared)} GPU-hours in place of {_gpu_hours(best, compared)}; plan --gpus {fewer.devices}"
        )
    if _launch_bound(best):
        found.append(
            f"launching the operators takes {best.one.host:.2f} of {best.one.total:.2f} s of a pass: the host is the limit, "
            "not the GPU"
        )
    if compared.training.on_gpu and not compared.training.half:
        found.append(
            "products are in 32-true: --precision bf16-mixed plans the same run with --trainer.precision bf16-mixed"
        )
    alone = next((one for one in compared.estimates if one.sequence == 1), None)
    if alone is not None and alone.fits and best.sequence == 1:
        found.append(
            "sharding a sample does not pay here: it fits on one device, and data-parallel ranks need less communication"
        )
    return found


def as_json(compared: Comparison) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "model": "times are calculated, not measured",
        "device": compared.device.name,
        "links": {
            "inside": compared.links.inside.name,
            "across": compared.links.across.name,
            "gpus_per_node": compared.links.per_node,
        },
        "best": None if compared.best is None else [compared.best.data, compared.best.sequence],
        "options": None if compared.best is None else options(compared.best, compared),
        "command": None if compared.best is None else command(compared.best, compared),
        "fewer_devices": None if compared.fewer is None else _numbers(compared.fewer, compared),
        "meshes": [_numbers(one, compared) for one in compared.estimates],
    }


def _numbers(one: Estimate, compared: Comparison) -> dict[str, Any]:
    return {
        "data": one.data,
        "sequence": one.sequence,
        "fits": one.fits,
        "tight": one.tight,
        "cuda_graphs": one.graphs,
        "memory": {
            **{part: getattr(one.memory, part) for part in PARTS},
            "total": one.memory.total, "usable": one.usable, "largest_in": one.memory.at,
        },
        "evoformer_blocks_kept": compared.training.model.evoformer.blocks - one.recomputed.blocks,
        "evoformer_blocks_without_projections": one.recomputed.projections,
        "step_seconds": one.step_s,
        "samples_per_second": one.samples_per_s,
        "efficiency": compared.efficiency(one),
        "samples": compared.training.samples,
        "days": compared.hours(one) / 24,
        "gpu_hours": compared.hours(one) * one.devices,
        "pass_with_gradients": {
            "seconds": one.one.total, "device_seconds": one.one.device, "launch_seconds": one.one.host,
            "launches": one.one.launches, "flops": one.one.flops, "collectives": one.one.calls,
            "communication_seconds": one.one.communication, "exposed_seconds": one.one.exposed,
            "bytes_by_kind": one.one.by_kind, "seconds_by_part": one.one.by_part,
        },
        "pass_without_gradients_seconds": one.free_pass_s,
        "gradients_seconds": one.gradients_s,
        "data_reduction_seconds": one.reduction_s,
        "update_seconds": one.update_s,
    }  # fmt: skip


def page(compared: Comparison, gpus: int) -> Page:
    """The page."""
    made = Page(f"Plan for {gpus} x {compared.device.name}", f"{_what(compared)}. Times are a model's, not measured.")
    best = compared.best
    found, *others = (line[:1].upper() + line[1:] for line in (verdict(compared), *advice(compared)))
    made.verdict(found, best is not None and not best.tight)
    for line in [*([] if best is None else [command(best, compared)]), *others]:
        made.note(line)
    shown = best or min(compared.estimates, key=lambda one: one.memory.total)
    made.figures(
        {
            "seconds a step": f"{shown.step_s:.2f}",
            "samples a second": f"{shown.samples_per_s:.1f}",
            f"days for {compared.training.samples:,} samples": _days(shown, compared),
            "GPU-hours": _gpu_hours(shown, compared),
            "GiB a device": f"{shown.memory.total / GIB:.1f}",
            "of a pass waits for communication": f"{shown.one.exposed / shown.one.total:.0%}",
        }
    )
    made.heading("Meshes")
    columns = zip(_HEADINGS, *(_row(one, compared) for one in compared.estimates), strict=True)
    headings, *rows = zip(*(one for one in columns if one[0] not in _LESS or len(set(one[1:])) > 1), strict=True)
    made.table(headings, rows, _NUMBERS)
    memory = {part: [getattr(one.memory, part) / GIB for one in compared.estimates] for part in PARTS}
    add_memory(made, [f"{one.data} x {one.sequence}" for one in compared.estimates], memory, shown.usable / GIB)
    if len(compared.estimates) > 2:  # two points are no curve; the table has them
        ranks = [one.sequence for one in compared.estimates]
        numbers = {
            "Efficiency of a device": [compared.efficiency(one) for one in compared.estimates],
            "Seconds of a sample": [one.sample_s for one in compared.estimates],
        }
        label = "ranks of a sample"
        made.charts({name: by_ranks(ranks, label, y, name.split()[0].lower()) for name, y in numbers.items()})
    add_parts(made, f"Where a pass goes, {shown.data} x {shown.sequence}", shown.one)
    computed = [one for one in shown.block.intervals if one[2] == "compute"]
    lanes = {"device": computed, "link": [one for one in shown.block.intervals if one[2] != "compute"]}
    if lanes["link"]:  # a device that never waits is one bar
        made.heading("One Evoformer block, forward pass")
        made.note("Above: what the device computes; where it waits there is a gap. Below: what the link carries.")
        made.wide_chart("Time line, microseconds", timeline(lanes, "time line of an Evoformer block"))
    return made


def by_ranks(ranks: Sequence[int], x_label: str, values: Sequence[float], y_label: str) -> Markup:
    """A chart of one number of each mesh."""
    return lines([Series(y_label, ranks, values)], x_label, y_label, "zero")


def add_parts(made: Page, heading: str, times: Times) -> None:
    """The time that passes in each part of the model, the longest first; all that take less than 1 % are one row."""
    made.heading(heading)
    small = {part: s for part, s in times.by_part.items() if part == "other" or s < 0.01 * times.total}
    shown = {part.replace("_", " ").replace("msa", "MSA"): s for part, s in times.by_part.items() if part not in small}
    shown |= {"other": sum(small.values())} if small else {}
    rows = sorted(shown.items(), key=lambda item: -item[1])
    headings = ["part", "milliseconds, with waits", "share"]
    made.table(headings, [[part, f"{s * 1e3:.1f}", f"{s / times.total:.0%}"] for part, s in rows], headings[1:])


def add_memory(made: Page, labels: Sequence[str], memory: Mapping[str, Sequence[float]], limit: float) -> None:
    """The parts of a device's memory, in GiB: a bar for each label, or a table if there is one label only."""
    title = "Memory of a device, GiB"
    if len(labels) == 1:
        made.heading(title)
        made.table(["part", "GiB"], [[part, f"{values[0]:.2f}"] for part, values in memory.items()], numbers=("GiB",))
    else:
        made.charts({title: stacked(labels, memory, Level("usable", limit))})
        made.legend(list(memory))


def _row(one: Estimate, compared: Comparison) -> list[str]:
    blocks = compared.training.model.evoformer.blocks
    return [
        f"{one.data} x {one.sequence}",
        f"{one.memory.total / GIB:.1f}",
        "tight" if one.tight else "yes" if one.fits else "NO",
        f"{blocks - one.recomputed.blocks}/{blocks}",
        str(one.recomputed.projections),
        "yes" if one.graphs else "no",
        f"{one.step_s:.2f}",
        f"{one.samples_per_s:.1f}",
        f"{compared.efficiency(one):.0%}",
        f"{one.one.exposed / one.one.total:.0%}",
        "yes" if _launch_bound(one) else "no",
        _days(one, compared),
        _gpu_hours(one, compared),
    ]


def _gpu_hours(one: Estimate, compared: Comparison) -> str:
    return f"{compared.hours(one) * one.devices:,.0f}"


def _days(one: Estimate, compared: Comparison) -> str:
    days = compared.hours(one) / 24
    return f"{days:.2f}" if days < 1 else f"{days:.1f}"


def _launch_bound(one: Estimate) -> bool:
    return one.one.host >= LAUNCH_BOUND * one.one.total


def options(one: Estimate, compared: Comparison) -> dict[str, str]:
    """Options of `evodsp fit` with which a run of the config is the one that was planned."""
    evoformer, (whole, projections) = compared.training.model.evoformer, one.recomputed
    of_projections = {evoformer.blocks - whole: "true", 0: "false"}.get(projections, str(projections))
    return {
        # On one machine evodsp takes all GPUs by itself; on several the launcher says how many there are.
        **({"trainer.devices": str(one.devices)} if one.devices <= compared.links.per_node else {}),
        "parallel.sequence": str(one.sequence),
        "cuda_graphs": str(one.graphs).lower(),
        **compared.training.options,
        "model.evoformer.checkpoint": {evoformer.blocks: "true", 0: "false"}.get(whole, str(whole)),
        **(
            {"model.evoformer.checkpoint_projections": of_projections}
            if projections or evoformer.checkpoint_projections
            else {}
        ),
    }


def command(one: Estimate, compared: Comparison) -> str:
    """The command line that trains what was planned."""
    config = compared.training.config
    words = ["evodsp", "fit", *([] if config is None else ["--config", str(config)])]
    return shlex.join(
        [*words, *(word for name, value in options(one, compared).items() for word in (f"--{name}", value))]
    )


def _what(compared: Comparison) -> str:
    training, n = compared.training, compared.training.sizes
    rows = f"{n.clusters + n.templates} rows x {n.residues} residues, extra MSA {n.extra}, {counted(n.templates, 'template')}"
    precision = "bf16-mixed" if training.half else "32-true, TF32 products" if training.tf32 else "32-true"
    passes = f"{training.passes:g} pass{'es' * (training.passes != 1)}"  # a mean, no count
    return f"{rows}, {training.samples:,} samples in batches of {training.global_batch}, {passes} a sample, {precision}"
