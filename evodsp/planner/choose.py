"""Which meshes of a number of devices are possible, what each costs, and which to take."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from evodsp.errors import UserError
from evodsp.planner.device import Device, Links
from evodsp.planner.mesh import Estimate, Training, estimate, traced
from evodsp.planner.program import Program

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

    def efficiency(self, one: Estimate) -> float:
        """Samples a second of a device, relative to one device alone."""
        return (one.samples_per_s / one.devices) / self.alone.samples_per_s


def possible(training: Training, devices: int, sequence: int | None = None) -> list[int]:
    """Sizes of sequence groups: divisors of `devices` whose data ranks divide the batch. Raises UserError if there is none."""
    n, batch = training.sizes, training.global_batch
    most = min(n.residues, n.clusters + n.templates, devices)
    wanted = [sequence] if sequence is not None else list(range(1, min(most, MOST_RANKS) + 1))
    if sequence is not None and sequence > most:
        raise UserError(
            f"--sequence is {sequence}, but one sample of {n.residues} residues and {n.clusters + n.templates} MSA rows on "
            f"{devices} devices takes at most {most} ranks"
        )
    if sequence is not None and devices % sequence:
        raise UserError(f"--gpus is {devices}, which is not a multiple of --sequence, {sequence}; change one of them")
    found = [k for k in wanted if devices % k == 0 and batch % (devices // k) == 0]
    if not found:
        least = -(-devices // batch)
        raise UserError(
            f"no mesh of {devices} devices divides a global batch of {batch} samples; a sequence group takes at most {most} "
            f"ranks and must take at least {least}: change --gpus or --global_batch"
        )
    return found


def compare(
    training: Training, devices: int, device: Device, links: Links, sequence: int | None = None, auto: bool = True
) -> Comparison:
    """Plan the possible meshes, from small sequence groups to large ones.

    It ends where larger groups only cost time: after one that fits came two that are slower. `auto`: the two fastest meshes
    that fit recompute only as many Evoformer blocks as their memory demands; all others recompute all.
    """
    groups = possible(training, devices, sequence)
    blocks, setting = training.model.evoformer.blocks, training.model.evoformer.checkpoint
    recomputed = True if auto or setting == "auto" else setting
    kept = 0 if recomputed is True else blocks if recomputed is False else max(0, blocks - int(recomputed))
    estimates: list[Estimate] = []
    with _pool(len(groups) + 1) as pool:
        of_one = pool.submit(traced, training, 1, recomputed)
        todo = list(groups)
        while todo and not _slower_twice(estimates):
            now, todo = todo[:2], todo[2:]
            programs = [of_one if group == 1 else pool.submit(traced, training, group, recomputed) for group in now]
            estimates += [
                estimate(training, program.result(), kept, devices // group, group, device, links)
                for group, program in zip(now, programs, strict=True)
            ]
        alone = estimate(training, of_one.result(), kept, 1, 1, device, links)
        if auto:
            fastest = sorted((one for one in estimates if one.fits), key=lambda one: one.step_s)[:2]
            mixed = [pool.submit(traced, training, one.sequence, MIXED) for one in fastest if blocks >= 2 * MIXED]
            for one, program in zip(fastest, mixed, strict=False):
                better = _with_kept_blocks(one, training, program.result(), device, links)
                estimates[estimates.index(one)] = better
    best = min((one for one in estimates if one.fits), key=lambda one: (one.step_s, one.sequence), default=None)
    return Comparison(training, device, links, estimates, best, alone)


def _slower_twice(estimates: Sequence[Estimate]) -> bool:
    """Whether the last two meshes are slower than one before them that fits."""
    times = [one.step_s for one in estimates]
    return len(times) > 2 and any(one.fits for one in estimates[:-2]) and min(times[:-2]) < times[-2] < times[-1]


def _with_kept_blocks(one: Estimate, training: Training, mixed: Program, device: Device, links: Links) -> Estimate:
    """The same mesh with as many blocks kept as fit. `mixed`: a pass that recomputes `MIXED` blocks."""

    def keeping(kept: int) -> Estimate:
        program = kept_in(mixed, training.model.evoformer.blocks, kept)
        return estimate(training, program, kept, one.data, one.sequence, device, links)

    least, most = MIXED, training.model.evoformer.blocks - MIXED
    if not keeping(least).fits:
        return one
    while least < most:  # memory grows with the number of blocks that are kept
        middle = (least + most + 1) // 2
        least, most = (middle, most) if keeping(middle).fits else (least, middle - 1)
    return keeping(least)


MIXED = 3
"""Blocks that are recomputed where some are and others are not: `evodsp.planner.program.reduced` tells their segments apart."""


def kept_in(mixed: Program, blocks: int, kept: int) -> Program:
    """The program of a stack that keeps so many of its blocks, from that of one that recomputes `MIXED` of them."""
    recomputing, keeping = (repeat for repeat in mixed.repeats if repeat.part == "evoformer")
    others = [repeat for repeat in mixed.repeats if repeat.part != "evoformer"]
    changed = [replace(recomputing, times=blocks - kept - 2), replace(keeping, times=kept - 2)]
    return replace(mixed, repeats=[*others, *changed])


def _pool(tasks: int) -> ProcessPoolExecutor:
    """Two processes: following a pass takes about a second of Python."""
    return ProcessPoolExecutor(min(2, tasks), mp_context=get_context("fork"))
