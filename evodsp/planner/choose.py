"""Which meshes of a number of devices are possible, what each costs, and which to take."""

from __future__ import annotations

import bisect
import gc
import importlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from evodsp.errors import UserError
from evodsp.model.recomputation import Recomputed
from evodsp.planner.device import Device, Links, is_tight
from evodsp.planner.mesh import Estimate, TracedPass, Training, estimate, memory, traced
from evodsp.planner.program import LEAST_FIRST, LEAST_LAST, Program, recomputed_of
from evodsp.printing import counted

MOST_RANKS = 64
"""Sequence groups larger than this are only planned if they are asked for."""


@dataclass(frozen=True)
class Comparison:
    """All meshes that were planned."""

    training: Training
    device: Device
    links: Links
    estimates: list[Estimate]
    best: Estimate | None
    """The fastest one that fits; None if none does."""
    alone: Estimate
    """One device, whether it fits or not: what efficiency is measured against."""
    fewer: Estimate | None = None
    """A mesh of fewer devices that is no slower than the best one; None if there is none."""

    def efficiency(self, one: Estimate) -> float:
        """Samples a second of a device, relative to one device alone."""
        return (one.samples_per_s / one.devices) / self.alone.samples_per_s

    def hours(self, one: Estimate) -> float:
        """Hours that the whole training takes on a mesh."""
        return self.training.samples / one.samples_per_s / 3600


def possible(training: Training, devices: int, sequence: int | None = None) -> list[int]:
    """Sizes of sequence groups: divisors of `devices` whose data ranks divide the batch. Raises UserError if there is none."""
    n, batch = training.sizes, training.global_batch
    most = min(n.residues, n.clusters + n.templates, devices)
    wanted = [sequence] if sequence is not None else list(range(1, min(most, MOST_RANKS) + 1))
    if sequence is not None and sequence > most:
        raise UserError(
            f"--sequence is {sequence}, but one sample of {n.residues} residues and {n.clusters + n.templates} MSA rows on "
            f"{counted(devices, 'device')} takes at most {counted(most, 'rank')}"
        )
    if sequence is not None and devices % sequence:
        raise UserError(f"--gpus is {devices}, which is not a multiple of --sequence, {sequence}; change one of them")
    found = [k for k in wanted if devices % k == 0 and batch % (devices // k) == 0]
    if not found:
        least = -(-devices // batch)
        raise UserError(
            f"no mesh of {counted(devices, 'device')} divides a global batch of {counted(batch, 'sample')}; a sequence "
            f"group takes at most {counted(min(most, MOST_RANKS), 'rank')} and must take at least {least}: change --gpus or "
            "--global_batch"
        )
    return found


def compare(
    training: Training, devices: int, device: Device, links: Links, sequence: int | None = None, auto: bool = True
) -> Comparison:
    """Plan the possible meshes, from small sequence groups to large ones, up to the first that is slower than an earlier one
    which fits, because larger ones only communicate more. Smaller groups, with which devices have nothing to do, are planned
    likewise, on fewer devices.

    `auto`: each mesh recomputes only as much of the Evoformer as its memory demands. Otherwise as the model's config says.
    """
    groups = possible(training, devices, sequence)
    smaller = [2**k for k in range(groups[0].bit_length()) if 2**k < groups[0]] if sequence is None else []
    # No search for unreachable objects: this import makes half a million that stay, and the search takes a third of its time.
    collects = gc.isenabled()
    gc.disable()
    # PyTorch needs its compiler's module for shapes. Imported before the fork: each process would take a second for it.
    importlib.import_module("torch._dynamo")
    if collects:
        gc.enable()
    # The processes live for seconds: what they could collect is little.
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.disable) as pool:
        planned = Planned(training, device, links, auto, pool)
        of_one = planned.start(1)

        def follow(groups: list[int]) -> list[Estimate]:
            found: list[Estimate] = []
            while groups and not _slower(found):
                now, groups = groups[:2], groups[2:]
                programs = [of_one if group == 1 else planned.start(group) for group in now]
                found += [
                    planned.estimate(program.result(), _data_ranks(training.global_batch, devices // group), group)
                    for group, program in zip(now, programs, strict=True)
                ]
            return found

        estimates = follow(groups)
        best, fewer = _fastest(estimates), _fastest(follow(smaller))
        alone = planned.estimate(of_one.result(), 1, 1)
    if best is None or fewer is None or fewer.step_s > best.step_s:
        fewer = None
    return Comparison(training, device, links, estimates, best, alone, fewer)


def _data_ranks(batch: int, most: int) -> int:
    """The largest divisor of a batch that is at most `most`."""
    return next(ranks for ranks in range(most, 0, -1) if batch % ranks == 0)


def _fastest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest mesh that fits, of equally fast ones that of the smallest groups."""
    return min((one for one in estimates if one.fits), key=lambda one: (one.step_s, one.sequence), default=None)


def _slower(estimates: Sequence[Estimate]) -> bool:
    """Whether the last mesh is slower than one before it that fits."""
    return any(one.fits and one.step_s < estimates[-1].step_s for one in estimates[:-1])


class Planned:
    """Follows passes in other processes, and chooses what each mesh recomputes: what takes least time for its bytes first."""

    def __init__(self, training: Training, device: Device, links: Links, auto: bool, pool: Executor) -> None:
        self._training, self._device, self._links, self._pool = training, device, links, pool
        evoformer = training.model.evoformer
        self._blocks = evoformer.blocks
        self._searches = auto and self._blocks >= LEAST_FIRST + LEAST_LAST
        self._unsearched = Recomputed(self._blocks) if auto else recomputed_of(evoformer)
        """What is recomputed where nothing is searched for."""

    def start(self, sequence: int) -> Future[Program]:
        """Begin to follow the pass of a group of `sequence` ranks."""
        first = Recomputed(0, LEAST_FIRST) if self._searches else self._unsearched
        return self._pool.submit(traced, self._training, sequence, first)

    def estimate(self, program: Program, data: int, sequence: int) -> Estimate:
        """A mesh. `program`: what `start` made for its groups."""
        traced_pass = TracedPass.of(program, self._training, self._device, data * sequence)
        recomputed = self._unsearched
        if self._searches:
            recomputed, traced_pass = self._cheapest(traced_pass, data, sequence)
        planned = (
            estimate(training, traced_pass, recomputed, data, sequence, self._device, self._links)
            for training in self._training.recorded()
        )
        return min(planned, key=lambda one: one.step_s)

    def _cheapest(self, projecting: TracedPass, data: int, sequence: int) -> tuple[Recomputed, TracedPass]:
        """What to recompute so that the step fits: the projections of some blocks; if these do not suffice, some blocks whole
        and the projections of the others; at last everything. `projecting`: a pass that recomputes some projections.
        """
        blocks = self._blocks
        if (kept := self._most_kept(projecting, data, sequence)) is not None:
            return Recomputed(0, blocks - kept), _keeping(projecting, blocks, kept)
        mixed = self._traced(Recomputed(LEAST_FIRST, blocks - LEAST_FIRST), data, sequence)
        if (kept := self._most_kept(mixed, data, sequence)) is not None:
            return Recomputed(blocks - kept, kept), _keeping(mixed, blocks, kept)
        return Recomputed(blocks), self._traced(Recomputed(blocks), data, sequence)

    def _most_kept(self, traced_pass: TracedPass, data: int, sequence: int) -> int | None:
        """The largest number of last blocks, which keep more, that fits with `MARGIN`, from `LEAST_LAST` to all but
        `LEAST_FIRST`; None if none does."""
        ranks, batches = data * sequence, self._training.global_batch // data

        def fits(kept: int) -> bool:
            changed = _keeping(traced_pass, self._blocks, kept)
            found = memory(self._training, changed.program, changed.items, ranks, batches)
            return not is_tight(found.total, self._device.usable)

        least, most = LEAST_LAST, self._blocks - LEAST_FIRST
        if fits(most):  # as a rule
            return most
        # Memory grows with the number of blocks that are kept.
        fitting = bisect.bisect_left(range(least, most), True, key=lambda kept: not fits(kept))
        return least + fitting - 1 if fitting else None

    def _traced(self, recomputed: Recomputed, data: int, sequence: int) -> TracedPass:
        program = self._pool.submit(traced, self._training, sequence, recomputed).result()
        return TracedPass.of(program, self._training, self._device, data * sequence)


def _keeping(mixed: TracedPass, blocks: int, kept: int) -> TracedPass:
    """The pass with `kept` last blocks, which keep more, from one that was traced with another number."""
    repeats = mixed.program.repeats
    first, last = (repeat for repeat in repeats if repeat.part == "evoformer")
    others = [repeat for repeat in repeats if repeat.part != "evoformer"]
    changed = [*others, replace(first, times=blocks - kept - 3), replace(last, times=kept - 2)]
    return replace(mixed, program=replace(mixed.program, repeats=changed))
