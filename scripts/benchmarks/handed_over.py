"""What a worker hands over for a training sample: bytes, and CPU time, beside making all its features with NumPy.

    python -m scripts.benchmarks.handed_over [--alignments DIR] [--rounds 5] [--output FILE]

Sizes and the made-up alignment are those of `msa_features.py`, 20,000 sequences of as many residues as the crop has. With
`--alignments`, the largest one of that folder of chains is taken too. Four recycling iterations and templates; labels (0.9 MiB
at 384 residues) come on top. One thread, CPU time, median of the rounds, in which both ways take turns. The last column is what
the training process takes where its device is the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evodsp.data.crop import Crop
from evodsp.data.dataset import collate
from evodsp.data.features import Sizes, make_features, max_clusters
from evodsp.data.msa import MsaFeatures
from evodsp.data.raw_features import raw_features
from evodsp.data.templates.features import TemplateFeatures
from evodsp.features.batch import with_features
from evodsp.files import whole_file
from evodsp.rng import Draws

from .msa_features import CYCLES, RECIPES, Recipe, largest, made_up

MIB = 1 << 20


def timed(make: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its result."""
    start = time.process_time()
    result = make()
    return time.process_time() - start, result


def measure(msa: MsaFeatures, recipe: Recipe, rounds: int) -> tuple[list[float], list[float]]:
    """MiB of the features and of what is handed over; seconds with NumPy, of the worker, and of the device."""
    config, aatype = recipe.config, msa.msa[0].astype(np.int32)
    size = config.crop_size or len(aatype)
    crop, sizes = Crop(0, min(size, len(aatype))), Sizes(size, max_clusters(config), config.extra_msa)
    none, draws = TemplateFeatures.none(len(aatype)), Draws.root(0)
    times: list[list[float]] = []
    for _ in range(rounds):
        whole_s, whole = timed(lambda: make_features(aatype, msa, config, draws, CYCLES, crop, sizes, none))
        raw_s, raw = timed(lambda: raw_features(aatype, msa, config, draws, CYCLES, crop, none))
        batch = collate([{name: torch.from_numpy(values) for name, values in raw.items()}])
        device_s, _ = timed(partial(with_features, batch, config))
        times.append([whole_s, raw_s, device_s])
    mib = [sum(values.nbytes for values in arrays.values()) / MIB for arrays in (whole, raw)]
    return mib, [statistics.median(column) for column in zip(*times, strict=True)]


def table(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the report, as they are measured."""
    yield f"{CYCLES} recycling iterations, one thread, CPU time, median of {arguments.rounds} rounds"
    versions = f"NumPy {np.__version__}, torch {torch.__version__}"
    yield f"{datetime.date.today().isoformat()}, {platform.machine()}, {versions}: python -m scripts.benchmarks.handed_over"
    yield f"{'alignment':<26}{'sizes':<13}{'MiB':>7}{'before':>8}{'worker s':>10}{'before':>8}{'device s, a CPU':>17}"
    for phase, recipe in RECIPES.items():
        cases = {"made up": made_up(columns=recipe.config.crop_size or 0)}
        if arguments.alignments is not None:
            key, msa = largest(arguments.alignments)
            cases[key] = msa
        for name, msa in cases.items():
            (before, now), (whole_s, raw_s, device_s) = measure(msa, recipe, arguments.rounds)
            label = "{}, {} x {}".format(name, *msa.msa.shape)
            yield f"{label:<26}{phase:<13}{now:>7.2f}{before:>8.1f}{raw_s:>10.3f}{whole_s:>8.2f}{device_s:>17.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alignments", type=Path, help="a folder of chains, whose largest alignment is taken too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    lines = []
    for line in table(arguments):
        print(line, flush=True)
        lines.append(line)
    if arguments.output is not None:
        with whole_file(arguments.output) as unfinished:
            unfinished.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
