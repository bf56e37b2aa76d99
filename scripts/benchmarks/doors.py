"""Count the doors of a block: the files of evodsp that execute a line in one forward pass on a CPU, without gradients.

    python -m scripts.benchmarks.doors

A reader who follows the pass opens each of these files. Three passes are counted: what lies above and below triangle attention
around the starting node on one device, a whole Evoformer block on one device, and a block of one rank of two (the other rank
does not exist: collectives return at once, and are the same lines).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import evodsp
from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.pair_ops import TriangleAttention
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from scripts.benchmarks.fake_ranks import fake_group

PACKAGE = Path(evodsp.__file__).parent
SEQUENCES, RESIDUES = 6, 8


def doors(run: Callable[[], Any], inside: CodeType | None = None) -> list[str]:
    """Files of evodsp whose functions are called while `run` runs. `inside`: only in calls of this function, and those around
    them. A module that is imported meanwhile counts for what is called in it."""
    files: set[str] = set()
    depth = 0

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        if event == "return":
            depth -= frame.f_code is inside
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        if frame.f_code is inside:
            depth += 1
            files.update(around.f_code.co_filename for around in _outwards(frame))
        if inside is None or depth:
            files.add(frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    paths = (Path(file) for file in files)
    return sorted(str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def block(exchange: Exchange) -> Callable[[], Any]:
    """The forward pass of an Evoformer block."""
    config = ModelConfig.preset("test")
    c_m, c_z = config.channels.msa, config.channels.pair
    made = EvoformerBlock(c_m, c_z, config.evoformer).eval()
    use_exchange(made, exchange)
    m, z = torch.randn(1, SEQUENCES, RESIDUES, c_m), torch.randn(1, RESIDUES, RESIDUES, c_z)
    masks = torch.ones(1, SEQUENCES, RESIDUES), torch.ones(1, RESIDUES, RESIDUES)

    def run() -> None:
        with torch.no_grad():
            made(exchange.shard(m, "seq"), exchange.shard(z, "j"), *masks)

    run()  # what is made at the first call only is no part of a pass
    return run


@contextmanager
def _two_ranks() -> Iterator[Exchange]:
    with fake_group(2) as group:
        yield ShardedExchange(group)


def main() -> None:
    one = block(LocalExchange())
    with _two_ranks() as exchange:
        found = {
            "triangle attention, one device": doors(one, TriangleAttention.forward.__code__),
            "an Evoformer block, one device": doors(one),
            "an Evoformer block, one rank of two": doors(block(exchange)),
        }
    for name, files in found.items():
        print(f"{len(files):3}  {name}: {' '.join(files)}")


if __name__ == "__main__":
    main()
