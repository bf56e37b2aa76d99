"""`evodsp plan --predict`: memory and time of a structure on 1, 2, 4, … ranks, and how many all devices make in an hour.

`evodsp estimate` says the same for one number of ranks, and for the lengths of a FASTA file.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from typing import Any

from evodsp.errors import UserError
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Device, Links
from evodsp.planner.from_run import model_of
from evodsp.planner.prediction import (
    WORKING_SHARE,
    Prediction,
    PredictionMemory,
    prediction_memory,
    prediction_times,
)
from evodsp.planner.program import SampleSizes
from evodsp.planner.simulate import Times
from evodsp.report.charts import Series, lines, stacked
from evodsp.report.page import Page

GIB = 2**30
MSA_ROWS, EXTRA_ROWS, TEMPLATES, RECYCLES = 512, 5120, 4, 3
"""With which AlphaFold2 predicts (supplement, table 5)."""
OF_TRAINING = ("global_batch", "samples", "parameters", "wire", "recomputation", "cuda_graphs")
"""Settings that say nothing of a prediction."""
PARTS = [field.name for field in fields(PredictionMemory) if field.name != "at"]
_HEADINGS = (
    "ranks a structure", "GiB", "fits", "s a structure", "structures/h", "efficiency", "exposed", "collectives a pass",
)  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A structure on so many ranks."""

    ranks: int
    memory: PredictionMemory
    usable: int
    """Bytes that a device has for it."""
    seconds: float
    """Of all passes of a structure."""
    one: Times
    """A pass."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable

    def hourly(self, devices: int) -> float:
        """Structures that so many devices make in an hour, each of them on `ranks`."""
        return 3600 / self.seconds * (devices // self.ranks)


@dataclass(frozen=True)
class Predicted:
    """A prediction on each number of ranks."""

    what: Prediction
    devices: int
    device: Device
    shares: list[Share]
    alone: Share
    """One rank, whether it fits or not: what efficiency is measured against."""

    @property
    def fitting(self) -> list[Share]:
        return [share for share in self.shares if share.fits]

    @property
    def fastest(self) -> Share | None:
        """What gives one structure soonest; None if nothing fits."""
        return min(self.fitting, key=lambda share: share.seconds, default=None)

    @property
    def most(self) -> Share | None:
        """What gives most structures an hour; None if nothing fits."""
        return max(self.fitting, key=lambda share: share.hourly(self.devices), default=None)


def prediction_of(settings: PlanConfig, device: Device) -> Prediction:
    """What is predicted, on one rank.

    Raises UserError if no length is given, if the rows do not go together, or for a setting of training.
    """
    for field in fields(PlanConfig):
        if field.name in OF_TRAINING and (value := getattr(settings, field.name)) != field.default:
            raise UserError(f"--{field.name} is {value}, but says nothing of a prediction; leave it or --predict out")
    if settings.residues is None:
        raise UserError("--predict needs --residues, the length of the chain")
    model = model_of(settings)
    most = TEMPLATES if settings.templates is None else settings.templates
    templates = most if model.templates.enabled else 0
    rows = settings.msa or MSA_ROWS
    if rows <= templates:
        raise UserError(f"--msa is {rows}, but includes the rows of {templates} templates; give more")
    return Prediction(
        model,
        SampleSizes(settings.residues, rows - templates, settings.extra_msa or EXTRA_ROWS, templates),
        passes=1 + (RECYCLES if settings.recycles is None else settings.recycles),
        half=settings.precision != "32-true",
        on_gpu=device.on_gpu,
        memory=int(device.memory_gib * GIB) // WORKING_SHARE,
    )


def predicted(what: Prediction, devices: int, device: Device, links: Links, sequence: int | None = None) -> Predicted:
    """The prediction on `sequence` ranks, or on 1, 2, 4, … up to `devices`. Raises UserError if it takes fewer ranks."""
    most = min(devices, what.sizes.residues, what.sizes.clusters + what.sizes.templates)
    if sequence is not None and sequence > most:
        raise UserError(
            f"--sequence is {sequence}, but {what.sizes.residues} residues with {what.sizes.clusters + what.sizes.templates} "
            f"MSA rows on {devices} devices take at most {most} ranks"
        )
    numbers = [sequence] if sequence is not None else [2**k for k in range(most.bit_length()) if 2**k <= most]
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.freeze) as pool:
        begun = {n: pool.submit(_share, replace(what, ranks=n), device, links) for n in sorted({1, *numbers})}
        shares = {ranks: future.result() for ranks, future in begun.items()}
    return Predicted(what, devices, device, [shares[ranks] for ranks in numbers], shares[1])


def _share(what: Prediction, device: Device, links: Links) -> Share:
    one = prediction_times(what, device, links)
    return Share(what.ranks, prediction_memory(what), device.usable, what.passes * one.total, one)


def text(found: Predicted) -> list[str]:
    """Lines for a terminal."""
    rows = [_HEADINGS, *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return [
        _title(found),
        *("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows),
        verdict(found),
    ]


def verdict(found: Predicted) -> str:
    """Which number of ranks to take, or what is missing."""
    fastest, most = found.fastest, found.most
    if fastest is None or most is None:
        least = min(found.shares, key=lambda share: share.memory.total)
        need = "ranks need" if least.ranks > 1 else "rank needs"
        return (
            f"nothing fits: {least.ranks} {need} {least.memory.total / GIB:.1f} GiB each, "
            f"{(least.memory.total - least.usable) / GIB:.1f} more than there are. Take more or larger devices, or fewer rows"
        )
    precision = "bf16" if found.what.half else "fp32"
    soonest = f"one structure soonest: --parallel.sequence {fastest.ranks}, {fastest.seconds:.3g} s"
    return (
        f"with --precision {precision} of evodsp predict, "
        f"{soonest}; many structures: --parallel.sequence {most.ranks}, {most.hourly(found.devices):,.0f} an hour on "
        f"{found.devices} devices"
    )


def as_json(found: Predicted) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "model": "times are calculated, not measured",
        "device": found.device.name,
        "residues": found.what.sizes.residues,
        "fastest": found.fastest and found.fastest.ranks,
        "most_structures": found.most and found.most.ranks,
        "shares": [
            {
                "ranks": share.ranks,
                "fits": share.fits,
                "memory": {
                    **{part: getattr(share.memory, part) for part in PARTS},
                    "total": share.memory.total, "usable": share.usable, "largest_in": share.memory.at,
                },
                "structure_seconds": share.seconds,
                "structures_per_hour": share.hourly(found.devices),
                "pass": {
                    "seconds": share.one.total, "device_seconds": share.one.device, "launch_seconds": share.one.host,
                    "launches": share.one.launches, "flops": share.one.flops, "collectives": share.one.calls,
                    "communication_seconds": share.one.communication, "exposed_seconds": share.one.exposed,
                    "bytes_by_kind": share.one.by_kind, "seconds_by_part": share.one.by_part,
                },
            }
            for share in found.shares
        ],
    }  # fmt: skip


def page(found: Predicted) -> Page:
    """The page."""
    made = Page(f"Prediction on {found.devices} x {found.device.name}", _title(found))
    made.verdict(verdict(found), bool(found.fitting))
    made.heading("Ranks that share a structure")
    made.table(_HEADINGS, _rows(found), set(_HEADINGS) - {"fits"})
    labels = [str(share.ranks) for share in found.shares]
    memory = {part: [getattr(share.memory, part) / GIB for share in found.shares] for part in PARTS}
    made.charts({"Memory of a device, GiB": stacked(labels, memory, limit=found.shares[0].usable / GIB)})
    made.legend(PARTS)
    if len(found.shares) > 1:
        x = [share.ranks for share in found.shares]
        hourly = [share.hourly(found.devices) for share in found.shares]
        made.charts(
            {
                "Seconds of a structure": lines(
                    [Series("seconds", x, [share.seconds for share in found.shares])], "ranks of a structure", "seconds"
                ),
                "Structures an hour on all devices": lines(
                    [Series("structures", x, hourly)], "ranks of a structure", "structures an hour"
                ),
            }
        )
    shown = found.fastest or found.shares[-1]
    made.heading(f"Where a pass goes on {shown.ranks} ranks")
    parts = sorted(shown.one.by_part.items(), key=lambda item: -item[1])
    made.table(
        ["part", "milliseconds, with waits", "share"],
        [[part, f"{took * 1e3:.1f}", f"{took / shown.one.total:.0%}"] for part, took in parts if took > 0],
    )
    return made


def _rows(found: Predicted) -> Sequence[tuple[str, ...]]:
    return [
        (
            str(share.ranks),
            f"{share.memory.total / GIB:.1f}",
            "yes" if share.fits else "NO",
            f"{share.seconds:.3g}",
            f"{share.hourly(found.devices):,.0f}",
            f"{found.alone.seconds / (share.seconds * share.ranks):.0%}",
            f"{share.one.exposed / share.one.total:.0%}",
            f"{share.one.calls:,}",
        )
        for share in found.shares
    ]


def _title(found: Predicted) -> str:
    what, n = found.what, found.what.sizes
    rows = f"{n.clusters + n.templates} MSA rows, extra MSA {n.extra}, {n.templates} templates"
    return (
        f"{found.devices} x {found.device.name}, {n.residues:,} residues, {rows}, {what.passes} passes, "
        f"{'bf16' if what.half else 'fp32'}. Times are a model's, not measured."
    )
