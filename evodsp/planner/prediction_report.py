"""Memory and time of a structure on 1, 2, 4, … ranks, and the structures that all devices make in an hour (`evodsp estimate
--gpus N`)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from evodsp.errors import UserError
from evodsp.planner.device import is_tight
from evodsp.planner.prediction import GIB, Machine, PlannedPrediction, PredictionNeeds, prediction_needs
from evodsp.planner.report import TIGHT, add_memory, add_parts, aligned, by_ranks
from evodsp.planner.simulate import Times
from evodsp.printing import counted
from evodsp.report.page import Page, Series, lines

_HEADINGS = (
    "ranks a structure", "GiB", "fits", "s a structure", "structures/h", "efficiency", "exposed", "collectives a pass",
)  # fmt: skip


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction on several numbers of ranks."""

    devices: int
    machine: Machine
    shares: list[PredictionNeeds]
    """The needs of each rank, by the number of ranks. Efficiency is measured against the first."""

    def fits(self, share: PredictionNeeds) -> bool:
        """Whether a device has the memory."""
        return self.machine.fits(share.memory.total, share.what.ranks)

    def tight(self, share: PredictionNeeds) -> bool:
        """Whether it fits, but hardly."""
        return self.fits(share) and is_tight(share.memory.total, self.machine.free_for(share.what.ranks))

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
    assert share.seconds is not None, "the rates of a planned device are known"
    return share.seconds


def plan_prediction(what: PlannedPrediction, devices: int, machine: Machine) -> PredictionPlan | None:
    """Plan the prediction on 1, 2, 4, … ranks, up to one a device, but for those whose pair representation alone does not fit;
    None if no number of ranks holds it. Raises UserError if the device's rates are not known.
    """
    if machine.device is None:
        raise UserError(
            f"--gpus compares times, but those of {machine.name} are not known; name a kind of device (--device)"
        )
    most = min(devices, what.sizes.residues, what.sizes.clusters + what.sizes.templates)
    planned = [replace(what, ranks=2**k) for k in range(most.bit_length())]
    planned = [one for one in planned if machine.fits(one.pair_share, one.ranks)]
    if not planned:
        return None
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.freeze) as pool:
        begun = [pool.submit(prediction_needs, one, machine.device, machine.links) for one in planned]
        return PredictionPlan(devices, machine, [future.result() for future in begun])


def text(found: PredictionPlan) -> list[str]:
    """Lines for a terminal."""
    return [*aligned([_HEADINGS, *_rows(found)]), verdict(found)]


def verdict(found: PredictionPlan) -> str:
    """A sentence that names the number of ranks to take, or what is missing."""
    fastest, most = found.fastest, found.most
    if fastest is None or most is None:
        least = min(found.shares, key=lambda share: share.memory.total)
        need = "ranks need" if least.what.ranks > 1 else "rank needs"
        return (
            f"nothing fits: {least.what.ranks} {need} {least.memory.total / GIB:.1f} GiB each, "
            f"{(least.memory.total - found.machine.free_for(least.what.ranks)) / GIB:.1f} more than there are. Take more or "
            "larger devices, or fewer rows"
        )
    hardly = TIGHT * (found.tight(fastest) or found.tight(most))
    return (
        f"one structure soonest: --parallel.sequence {fastest.what.ranks}, {seconds(fastest):.3g} s; "
        f"many structures: --parallel.sequence {most.what.ranks}, {found.hourly(most):,.0f} an hour on "
        f"{counted(found.devices, 'device')}{hardly}"
    )


def add_plan(made: Page, found: PredictionPlan) -> None:
    """Add tables and charts to a page."""
    taken = [share for share in (found.fastest, found.most) if share is not None]
    made.verdict(verdict(found), bool(taken) and not any(map(found.tight, taken)))
    made.heading("Ranks that share a structure")
    made.table(_HEADINGS, _rows(found), set(_HEADINGS) - {"fits"})
    labels = [str(share.what.ranks) for share in found.shares]
    memory = {part: [share.memory.parts[part] / GIB for share in found.shares] for part in found.shares[0].memory.parts}
    add_memory(made, labels, memory, found.machine.free_for(1) / GIB)
    if len(found.shares) > 1:
        x = [share.what.ranks for share in found.shares]
        hourly = [found.hourly(share) for share in found.shares]
        made.charts(
            {
                "Seconds of a structure": by_ranks(
                    x, "ranks of a structure", [seconds(share) for share in found.shares], "seconds"
                ),
                "Structures an hour on all devices": lines(
                    [Series("structures", x, hourly)], "ranks of a structure", "structures an hour", "zero"
                ),
            }
        )
    shown = found.fastest or found.shares[-1]
    add_parts(made, f"Where a pass goes on {shown.what.ranks} ranks", one_pass(shown))


def _rows(found: PredictionPlan) -> Sequence[tuple[str, ...]]:
    first = seconds(found.shares[0]) * found.shares[0].what.ranks
    return [
        (
            str(share.what.ranks),
            f"{share.memory.total / GIB:.1f}",
            "tight" if found.tight(share) else "yes" if found.fits(share) else "NO",
            f"{seconds(share):.3g}",
            f"{found.hourly(share):,.0f}",
            f"{first / (seconds(share) * share.what.ranks):.0%}",
            f"{one_pass(share).exposed / one_pass(share).total:.0%}",
            f"{one_pass(share).calls:,}",
        )
        for share in found.shares
    ]
