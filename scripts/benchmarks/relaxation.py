"""Relaxes structures whose atoms were moved at random, and says what became of their violations and how long it took.

    OMP_NUM_THREADS=1 python -m scripts.benchmarks.relaxation STRUCTURE... --output scripts/benchmarks/results/relaxation.csv

Of each mmCIF file the longest stretch of the first chain without missing atoms is taken. Times are of the wall clock.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evodsp.data.mmcif import read_structure
from evodsp.geometry.alphabet import RESTYPES_WITH_X
from evodsp.geometry.residues import ATOM_ORDER, RESTYPE_ATOM37_MASK
from evodsp.inference.relaxation import relax
from evodsp.inference.writers import PredictedStructure

from .tables import write_csv


def moved_structure(path: Path, noise: float) -> PredictedStructure:
    """The longest complete stretch of the first chain, with each coordinate moved by a normal error of `noise` Å."""
    chain = next(iter(read_structure(path).chains.values()))
    aatype = np.array([RESTYPES_WITH_X.index(letter) for letter in chain.sequence])
    wanted = RESTYPE_ATOM37_MASK[aatype].astype(np.float32)
    wanted[:, ATOM_ORDER["OXT"]] = 0
    complete = (chain.mask >= wanted).all(-1) & (aatype < 20)
    stretches = [list(run) for whole, run in groupby(range(len(aatype)), lambda n: bool(complete[n])) if whole]
    part = max(stretches, key=len)
    positions = chain.positions[part] + noise * np.random.default_rng(0).normal(size=(len(part), 37, 3))
    return PredictedStructure(
        name=path.stem,
        aatype=aatype[part],
        positions=(positions * wanted[part][..., None]).astype(np.float32),
        mask=wanted[part],
        plddt=np.full(len(part), 80, np.float32),
    )


def row(path: Path, noise: float) -> dict[str, Any]:
    found = relax(one := moved_structure(path, noise), torch.device("cpu"))
    return {
        "date": date.today(), "threads": torch.get_num_threads(), "structure": one.name, "residues": len(one.aatype),
        "noise": noise, "violations_before": found.violations_before["any"], "violations_after": found.violations_after["any"],
        "moved": round(found.rmsd, 2), "rounds": found.rounds, "seconds": round(found.seconds, 1),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Relax structures whose atoms were moved at random.")
    parser.add_argument("structures", type=Path, nargs="+", help="mmCIF files")
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation of each coordinate's error, in Å")
    parser.add_argument("--output", type=Path, help="CSV file")
    given = parser.parse_args(arguments)
    rows = []
    for path in given.structures:
        rows.append(row(path, given.noise))
        print(rows[-1], flush=True)
    if given.output is not None:
        write_csv(given.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
