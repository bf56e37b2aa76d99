"""Which collectives of an Evoformer block a device waits for, and how long: calculated by the planner, not measured.

    python -m scripts.benchmarks.exposed_calls [--output scripts/benchmarks/results/exposed_calls.txt]

The model is followed as in `evodsp plan`, with dropout and without recomputation (at these sizes nothing needs it on several
ranks). Of an inner block every collective is listed: its own time, and how long the device stands still for it. `launches cost
nothing`: as with CUDA graphs, when latency decides; otherwise the host launches operators one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from evodsp.config import LossConfig, ModelConfig
from evodsp.files import whole_file
from evodsp.parallel.ledger import Kind
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.program import Sizes, Step, program
from evodsp.planner.simulate import Interval, simulate
from evodsp.planner.trace import Phase, Work
from evodsp.planner.walk import items_of

SIZES = {
    "initial training, 128 x 256": Sizes(residues=256, clusters=128, extra=1024, templates=4),
    "fine-tuning, 512 x 384": Sizes(residues=384, clusters=512, extra=5120, templates=4),
}
RANKS = (2, 4, 8)
INNER = ("evoformer", 1)
"""The pair stack of one block and the MSA stack of the next."""


@dataclass(frozen=True)
class Call:
    """A collective of an inner block."""

    kind: str
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Block:
    """An inner block, in one direction."""

    computing: float
    calls: Sequence[Call]

    @property
    def exposed(self) -> float:
        """Seconds that the device stands still."""
        return sum(call.exposed for call in self.calls)


def blocks(intervals: Sequence[Interval], phase: Phase) -> Block:
    """The inner block in a phase. A wait belongs to the collective that ends when it ends."""
    mine = [one for one in intervals if one.place == INNER and one.phase == phase]
    waits = {one.end: one.end - one.begin for one in intervals if one.what == "wait"}
    calls = [
        Call(one.what, one.end - one.begin, waits.get(one.end, 0.0))
        for one in mine
        if one.what not in ("compute", "wait")
    ]
    return Block(sum(one.end - one.begin for one in mine if one.what == "compute"), calls)


def report(device: Device, links: Links) -> str:
    """All cases as text."""
    model = ModelConfig.preset("model_1_ptm")
    kept = dataclasses.replace(model, evoformer=dataclasses.replace(model.evoformer, checkpoint=False))
    lines = []
    for title, sizes in SIZES.items():
        for ranks in RANKS:
            followed = program(Step(kept, sizes, LossConfig(), ranks=ranks))

            def seconds(work: Work) -> float:
                return device.seconds(work.name, work.flops, work.bytes, work.launches, work.half)

            def link(kind: Kind, counted: int, ranks: int = ranks) -> float:
                return links.seconds(kind, counted, ranks)

            items = items_of(followed, seconds)
            for launch_s, how in ((0.0, "launches cost nothing"), (device.launch_us * 1e-6, "eager launches")):
                times = simulate(items, launch_s, link, True, True)
                lines.append(
                    f"\n{title}, N = {ranks}, {how}: pass with gradients {1000 * times.total:.1f} ms, "
                    f"{1000 * times.exposed:.1f} ms of it exposed"
                )
                for phase in ("forward", "backward"):
                    block = blocks(times.intervals, phase)
                    lines.append(
                        f"  {phase}: {1e6 * block.computing:.0f} us computing, {1e6 * block.exposed:.0f} us exposed, "
                        "of collectives (own time, exposed):"
                    )
                    shown = [f"{c.kind} {1e6 * c.seconds:.0f} {1e6 * c.exposed:.0f}" for c in block.calls]
                    lines += ["    " + "; ".join(shown[at : at + 6]) for at in range(0, len(shown), 6)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Exposed collectives of an Evoformer block, calculated.")
    parser.add_argument("--device", default="h100", help="name or file of a device (default: h100)")
    parser.add_argument("--output", type=Path, help="text file; otherwise standard output")
    given = parser.parse_args(arguments)
    device = load_device(given.device)
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    text = f"{date.today()}, {device.name}, {links.inside.name}: calculated, not measured.\n{report(device, links)}"
    if given.output is None:
        print(text, end="")
        return 0
    with whole_file(given.output) as partial:
        partial.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
