"""What the rows of a set of synthetic heterodimers tell about their interfaces: before a model is trained, what could it learn?

    python -m scripts.benchmarks.paired_rows FOLDER

FOLDER: as `python -m scripts.examples.synthetic --complexes N` writes it. A linear classifier (ridge regression) learns from
the training complexes which of the set's interfaces a complex has, and is asked for the held-out ones: from the query, from the
frequencies of letters in the rows of each chain, and from the covariation of the paired rows across the chains. A set is a fair
control of pairing if the last alone tells, and if nothing tells once the rows are shuffled (`--shuffled true`).

Shapes: N complexes, F features, K interfaces.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evodsp.data.complexes.merging import merge
from evodsp.data.records import Chain
from evodsp.data.sources.opening import ComplexFiles
from evodsp.geometry.residues import ATOM_ORDER
from scripts.examples.synthetic.sequences import CHARGE, HYDROPHOBICITY

SAME = 0.4
"""lDDT above which two complexes have one interface: members of a family agree better, other families worse."""
RIDGES = (1.0, 30.0, 1000.0)
"""Penalties of the classifier; the best result of them is printed, so that none is too strong or too weak for one kind."""


def main(folder: Path) -> None:
    files = ComplexFiles(folder / "alignments", folder / "mmcif_files")
    lists = [(folder / name).read_text().split() for name in ("train.txt", "validation.txt")]
    features: dict[str, list[np.ndarray]] = {"query": [], "frequencies": [], "covariation": []}
    maps: list[np.ndarray] = []  # of all complexes: a member may be far from the first of its family, but not from all
    kinds: list[int] = []
    trained: list[bool] = []
    for entry in lists[0] + lists[1]:
        parsed = files.parsed(entry)
        first, second = parsed.assembly.chains
        if first.sequence == second.sequence:
            continue  # the rows of a homodimer are not paired
        trained.append(entry in lists[0])
        distance = np.linalg.norm(_ca(first)[:, None] - _ca(second), axis=-1)
        alike = (kind for kind, known in zip(kinds, maps, strict=True) if _alike(distance, known))
        kinds.append(next(alike, len(set(kinds))))
        maps.append(distance)
        merged = merge(parsed.chains)
        rows, size = merged.msa[merged.block == 0], len(first)
        letters = np.eye(22)[rows]
        features["query"].append(letters[0].ravel())
        features["frequencies"].append(letters.mean(0).ravel())
        features["covariation"].append(_covariation(rows[1:], size).ravel())
    kind, is_trained = np.array(kinds), np.array(trained)
    held_out = kind[~is_trained]
    chance = np.bincount(held_out).max() / len(held_out)
    print(
        f"{len(set(kinds))} interfaces, {sum(trained)} training and {len(held_out)} held-out complexes, chance {chance:.2f}"
    )
    for name, values in features.items():
        right = _held_out_share(np.stack(values), kind, is_trained)
        print(f"{name:12s} tells {right:.2f} of the held-out interfaces")


def _ca(chain: Chain) -> Float64[np.ndarray, "R 3"]:
    return chain.positions[:, ATOM_ORDER["CA"]].astype(np.float64)


def _alike(one: Float64[np.ndarray, "R Q"], other: Float64[np.ndarray, "R Q"]) -> bool:
    """Whether two interfaces are one, by the lDDT of their distances below 15 Å."""
    error = np.abs(one - other)[other < 15]
    return float(np.mean([(error < bound).mean() for bound in (0.5, 1, 2, 4)])) > SAME


def _covariation(rows: np.ndarray, size: int) -> Float64[np.ndarray, "R Q"]:
    """Of hydrophobicity less that of charge, between each column of the first chain and each of the second. `size`: R."""
    found = np.zeros((size, rows.shape[1] - size))
    for scale, sign in ((HYDROPHOBICITY, 1), (CHARGE, -1)):
        values = np.append(scale, (0.0, 0.0))[rows]
        values = values - values.mean(0)
        found += sign * values[:, :size].T @ values[:, size:] / len(rows)
    return found


def _held_out_share(values: Float64[np.ndarray, "N F"], kind: np.ndarray, trained: np.ndarray) -> float:
    """The share of held-out complexes whose interface the classifier knows."""
    scaled = (values - values[trained].mean(0)) / (values[trained].std(0) + 1e-9)
    of_training, wanted = scaled[trained], np.eye(kind.max() + 1)[kind[trained]] * 2 - 1
    products = of_training @ of_training.T
    shares = []
    for ridge in RIDGES:
        weights = of_training.T @ np.linalg.solve(products + ridge * np.eye(len(products)), wanted)
        shares.append(float(((scaled[~trained] @ weights).argmax(1) == kind[~trained]).mean()))
    return max(shares)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
