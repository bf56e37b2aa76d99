"""`evodsp plan --predict`: memory and time of a structure on 1, 2, 4, … ranks, and the structures that all devices make in an
hour."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from typing import Any

from evodsp.config import computes_in_half
from evodsp.errors import UserError
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Device, Links, is_tight
from evodsp.planner.from_run import model_of
from evodsp.planner.prediction import (
    FEWEST_CHAINS,
    GIB,
    PlannedPrediction,
    PredictionNeeds,
    prediction_needs,
    working_memory_of,
)
from evodsp.planner.program import SampleSizes
from evodsp.planner.report import TIGHT, add_memory, aligned
from evodsp.planner.simulate import Times
from evodsp.printing import counted
from evodsp.report.charts import Series, lines
from evodsp.report.page import Page

MSA_ROWS, EXTRA_ROWS, TEMPLATES, RECYCLES = 512, 5120, 4, 3
"""SampleSizes with which AlphaFold2 predicts (supplement, table 5)."""
OF_TRAINING = ("global_batch", "samples", "parameters", "wire", "recomputation", "cuda_graphs")
"""Settings of training, which a prediction has not."""
_HEADINGS = (
    "ranks a structure", "GiB", "fits", "s a structure", "structures/h", "efficiency", "exposed", "collectives a pass",
)  # fmt: skip


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction on several numbers of ranks."""

    what: PlannedPrediction
    devices: int
    device: Device
    shares: list[PredictionNeeds]
    """The needs of each rank, by the number of ranks."""
    alone: PredictionNeeds
    """The needs of a single rank, whether it fits or not: efficiency is measured against it."""

    def fits(self, share: PredictionNeeds) -> bool:
        """Whether a device has the memory."""
        return share.memory.total <= self.device.usable

    def tight(self, share: PredictionNeeds) -> bool:
        """Whether it fits, but hardly."""
        return self.fits(share) and is_tight(share.memory.total, self.device.usable)

    def hourly(self, share: PredictionNeeds) -> float:
        """Structures that all devices make in an hour."""
        return 3600 / seconds(share) * (self.devices // share.what.ranks)

    @property
    def fitting(self) -> list[PredictionNeeds]:
        return [share for share in self.shares if self.fits(share)]

    @property
    def fastest(self) -> PredictionNeeds | None:
        """The share that gives one structure soonest; None if nothing fits."""
        return min(self.fitting, key=seconds, default=None)

    @property
    def most(self) -> PredictionNeeds | None:
        """The share that gives most structures an hour; None if nothing fits."""
        return max(self.fitting, key=self.hourly, default=None)


def one_pass(share: PredictionNeeds) -> Times:
    """The times of a pass."""
    assert share.one_pass is not None, "the rates of a planned device are known"
    return share.one_pass


def seconds(share: PredictionNeeds) -> float:
    """The time of a structure."""
    return share.what.passes * one_pass(share).total + share.recording


def prediction_of(settings: PlanConfig, device: Device) -> PlannedPrediction:
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
    return PlannedPrediction(
        model,
        SampleSizes(
            settings.residues,
            rows - templates,
            settings.extra_msa or EXTRA_ROWS,
            templates,
            FEWEST_CHAINS[model.arrangement],
        ),
        passes=1 + (RECYCLES if settings.recycles is None else settings.recycles),
        half=settings.precision is None or computes_in_half(settings.precision),
        on_gpu=device.on_gpu,
        memory=working_memory_of(device),
        graphs=True,
    )


def plan_prediction(
    what: PlannedPrediction, devices: int, device: Device, links: Links, sequence: int | None = None
) -> PredictionPlan:
    """Plan the prediction on `sequence` ranks, or on 1, 2, 4, … up to `devices`. Raises UserError if it takes fewer ranks."""
    most = min(devices, what.sizes.residues, what.sizes.clusters + what.sizes.templates)
    if sequence is not None and sequence > most:
        raise UserError(
            f"--sequence is {sequence}, but {what.sizes.residues} residues with {what.sizes.clusters + what.sizes.templates} "
            f"MSA rows on {counted(devices, 'device')} take at most {counted(most, 'rank')}"
        )
    numbers = [sequence] if sequence is not None else [2**k for k in range(most.bit_length()) if 2**k <= most]
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.freeze) as pool:
        begun = {n: pool.submit(prediction_needs, replace(what, ranks=n), device, links) for n in sorted({1, *numbers})}
        shares = {ranks: future.result() for ranks, future in begun.items()}
    return PredictionPlan(what, devices, device, [shares[ranks] for ranks in numbers], shares[1])


def text(found: PredictionPlan) -> list[str]:
    """Lines for a terminal."""
    return [_title(found), *aligned([_HEADINGS, *_rows(found)]), verdict(found)]


def verdict(found: PredictionPlan) -> str:
    """A sentence that names the number of ranks to take, or what is missing."""
    fastest, most = found.fastest, found.most
    if fastest is None or most is None:
        least = min(found.shares, key=lambda share: share.memory.total)
        need = "ranks need" if least.what.ranks > 1 else "rank needs"
        return (
            f"nothing fits: {least.what.ranks} {need} {least.memory.total / GIB:.1f} GiB each, "
            f"{(least.memory.total - found.device.usable) / GIB:.1f} more than there are. Take more or larger devices, or "
            "fewer rows"
        )
    hardly = TIGHT * (found.tight(fastest) or found.tight(most))
    precision = "bf16" if found.what.half else "fp32"
    soonest = f"one structure soonest: --parallel.sequence {fastest.what.ranks}, {seconds(fastest):.3g} s"
    return (
        f"with --precision {precision} of evodsp predict, "
        f"{soonest}; many structures: --parallel.sequence {most.what.ranks}, {found.hourly(most):,.0f} an hour on "
        f"{counted(found.devices, 'device')}{hardly}"
    )


def as_json(found: PredictionPlan) -> dict[str, Any]:
    """All numbers, in bytes and seconds."""
    return {
        "model": "times are calculated, not measured",
        "device": found.device.name,
        "residues": found.what.sizes.residues,
        "fastest": found.fastest and found.fastest.what.ranks,
        "most_structures": found.most and found.most.what.ranks,
        "shares": [
            {
                "ranks": share.what.ranks,
                "fits": found.fits(share),
                "tight": found.tight(share),
                "memory": {
                    **share.memory.parts,
                    "total": share.memory.total, "usable": found.device.usable, "largest_in": share.memory.at,
                },
                "structure_seconds": seconds(share),
                "structures_per_hour": found.hourly(share),
                "pass": _pass(one_pass(share)),
            }
            for share in found.shares
        ],
    }  # fmt: skip


def _pass(times: Times) -> dict[str, Any]:
    return {
        "seconds": times.total, "device_seconds": times.device, "launch_seconds": times.host,
        "launches": times.launches, "flops": times.flops, "collectives": times.calls,
        "communication_seconds": times.communication, "exposed_seconds": times.exposed,
        "bytes_by_kind": times.by_kind, "seconds_by_part": times.by_part,
    }  # fmt: skip


def page(found: PredictionPlan) -> Page:
    """The page."""
    made = Page(f"Prediction on {found.devices} x {found.device.name}", _title(found))
    taken = [share for share in (found.fastest, found.most) if share is not None]
    made.verdict(verdict(found), bool(taken) and not any(map(found.tight, taken)))
    made.heading("Ranks that share a structure")
    made.table(_HEADINGS, _rows(found), set(_HEADINGS) - {"fits"})
    labels = [str(share.what.ranks) for share in found.shares]
    memory = {part: [share.memory.parts[part] / GIB for share in found.shares] for part in found.alone.memory.parts}
    add_memory(made, labels, memory, found.device.usable / GIB)
    if len(found.shares) > 1:
        x = [share.what.ranks for share in found.shares]
        hourly = [found.hourly(share) for share in found.shares]
        made.charts(
            {
                "Seconds of a structure": lines(
                    [Series("seconds", x, [seconds(share) for share in found.shares])],
                    "ranks of a structure",
                    "seconds",
                    "zero",
                ),
                "Structures an hour on all devices": lines(
                    [Series("structures", x, hourly)], "ranks of a structure", "structures an hour", "zero"
                ),
            }
        )
    shown = found.fastest or found.shares[-1]
    made.heading(f"Where a pass goes on {shown.what.ranks} ranks")
    times = one_pass(shown)
    places = sorted(times.by_part.items(), key=lambda item: -item[1])
    made.table(
        ["part", "milliseconds, with waits", "share"],
        [[part, f"{took * 1e3:.1f}", f"{took / times.total:.0%}"] for part, took in places if took > 0],
        numbers=("milliseconds, with waits", "share"),
    )
    return made


def _rows(found: PredictionPlan) -> Sequence[tuple[str, ...]]:
    return [
        (
            str(share.what.ranks),
            f"{share.memory.total / GIB:.1f}",
            "tight" if found.tight(share) else "yes" if found.fits(share) else "NO",
            f"{seconds(share):.3g}",
            f"{found.hourly(share):,.0f}",
            f"{seconds(found.alone) / (seconds(share) * share.what.ranks):.0%}",
            f"{one_pass(share).exposed / one_pass(share).total:.0%}",
            f"{one_pass(share).calls:,}",
        )
        for share in found.shares
    ]


def _title(found: PredictionPlan) -> str:
    what, n = found.what, found.what.sizes
    rows = f"{n.clusters + n.templates} MSA rows, extra MSA {n.extra}, {counted(n.templates, 'template')}"
    return (
        f"{found.devices} x {found.device.name}, {n.length}, {rows}, {counted(what.passes, 'pass')}, "
        f"{'bf16' if what.half else 'fp32'}. Times are a model's, not measured."
    )
