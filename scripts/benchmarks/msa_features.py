"""Time the MSA features of a training sample, four recycling iterations, on one thread.

    python -m scripts.benchmarks.msa_features [--alignments DIR] [--rounds 5] [--clock wall]
        [--openfold PYTHON --openfold-source DIR] [--output FILE]

Sizes are those of initial training (128 clusters of which 4 are templates, 1,024 extra sequences, crop 256) and of fine-tuning
(512, 5,120, 384). One alignment is made up: 20,000 sequences of 300 residues. With `--alignments`, the largest one of that
folder of chains is taken too. The time is that of `make_features`: from a merged MSA, in memory, to padded features. OpenFold's
transforms take part in the same rounds where an environment and a clone are given; their padding and cropping is left out.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evodsp.config import FeatureConfig
from evodsp.data.crop import Crop
from evodsp.data.features import Sizes, make_features, max_clusters
from evodsp.data.msa import MsaFeatures, letter_profile, merge_alignments
from evodsp.data.store import FeatureStore
from evodsp.files import whole_file
from evodsp.rng import Draws

from . import peers

CYCLES = 4


@dataclass(frozen=True)
class Recipe:
    """The sizes of a phase of training."""

    config: FeatureConfig
    limit: float
    """Seconds that evodsp aims at."""


RECIPES = {
    "initial": Recipe(FeatureConfig(crop_size=256, msa_clusters=128, extra_msa=1024, max_templates=4), 0.8),
    "fine-tuning": Recipe(FeatureConfig(crop_size=384, msa_clusters=512, extra_msa=5120, max_templates=4), 2.0),
}


def made_up(rows: int = 20_000, columns: int = 300) -> MsaFeatures:
    """An alignment whose rows cover parts of the query, agree with it in 20 to 80 % of their columns, and have deletions."""
    rng = np.random.default_rng(0)
    query = rng.integers(0, 20, columns)
    changed = rng.random((rows, columns)) < rng.uniform(0.2, 0.8, (rows, 1))
    msa = np.where(changed, rng.integers(0, 20, (rows, columns)), query)
    start, column = rng.integers(0, columns // 2, (rows, 1)), np.arange(columns)
    covered = (column >= start) & (column < start + rng.integers(columns // 3, columns, (rows, 1)))
    msa = np.where(covered, msa, 21).astype(np.int8)
    msa[0] = query
    deletions = rng.integers(1, 30, msa.shape) * (rng.random(msa.shape) < 0.01)
    return MsaFeatures(msa, deletions.astype(np.int32), letter_profile(msa))


def largest(folder: Path) -> tuple[str, MsaFeatures]:
    """The chain with the most aligned residues, and its MSA."""
    store = FeatureStore(folder)
    merged = {key: merge_alignments(store.alignments(key)) for key in store.keys()}  # noqa: SIM118  (not a dictionary)
    key = max(merged, key=lambda name: merged[name].msa.size)
    return key, merged[key]


def seconds(msa: MsaFeatures, config: FeatureConfig, clock: str) -> float:
    """One sample's features."""
    aatype = msa.msa[0].astype(np.int32)
    size = config.crop_size or len(aatype)
    crop = Crop(0, min(size, len(aatype)))
    now = time.perf_counter if clock == "wall" else time.process_time
    start = now()
    make_features(aatype, msa, config, Draws.root(0), CYCLES, crop, Sizes(size, max_clusters(config), config.extra_msa))
    return now() - start


def table(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the report, as they are measured."""
    date, cores = datetime.date.today().isoformat(), platform.machine()
    yield f"{CYCLES} recycling iterations, one thread, {arguments.clock} time, median of {arguments.rounds} rounds"
    command = f"python -m scripts.benchmarks.msa_features --rounds {arguments.rounds} --clock {arguments.clock}"
    yield f"{date}, {cores}, NumPy {np.__version__}: {command}"
    yield f"{'alignment':<24}{'sizes':<14}{'evodsp s':>9}{'low':>7}{'high':>7}{'aim':>6}{'OpenFold s':>12}{'ratio':>8}"
    cases = {"made up": made_up()}
    if arguments.alignments is not None:
        key, msa = largest(arguments.alignments)
        cases[key] = msa
    for name, msa in cases.items():
        for phase, recipe in RECIPES.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "msa.npz"
                np.savez(path, msa=msa.msa, deletions=msa.deletions)
                case = str(path), max_clusters(recipe.config), recipe.config.extra_msa
                module = "scripts.benchmarks.peer_openfold_features"
                with peers.openfold(arguments.openfold, arguments.openfold_source, 1, case, module) as openfold:
                    times, others = [], []
                    for _ in range(arguments.rounds):
                        times.append(seconds(msa, recipe.config, arguments.clock))
                        others.append(openfold.seconds(arguments.clock))
            median, size = statistics.median(times), "{} x {}".format(*msa.msa.shape)
            theirs = [other for other in others if other is not None]
            beside = f"{statistics.median(theirs):>12.2f}{median / statistics.median(theirs):>8.3f}" if theirs else ""
            own = f"{median:>9.2f}{min(times):>7.2f}{max(times):>7.2f}{recipe.limit:>6.1f}"
            yield f"{f'{name}, {size}':<24}{phase:<14}{own}{beside}"
            if openfold.absent:
                yield f"    {openfold.absent}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alignments", type=Path, help="a folder of chains, whose largest alignment is taken too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what is measured (default: wall)")
    parser.add_argument("--openfold", type=Path, help="python of an environment with OpenFold's requirements")
    parser.add_argument("--openfold-source", type=Path, help="a clone of OpenFold")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    lines = []
    for line in table(arguments):
        print(line, flush=True)
        lines.append(line)
    if arguments.output is not None:
        with whole_file(arguments.output) as partial:
            partial.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
