"""Sequences of complexes: residues that touch across an interface co-vary.

What fits is the chemistry of touching residues: opposite charges, hydrophobic beside hydrophobic. In a heterodimer the rows of
one chain are given partners among those of the other. So the rows of one chain alone do not tell where the other binds. The
query tells some of it, because its residues without room beside the partner are replaced, unless it must fit in all interfaces
(`twins` in `config`). Couplings in the model of the sequences would tell it: even if each leaves two positions their
frequencies, those of their neighbours change, and a linear classifier knew the interface of 96 % of held-out complexes by 48
rows of each chain alone. In a homodimer, whose copies have one sequence, residues that touch are coupled in the model.

Shapes: R and Q residues of the two chains, S sequences, 20 amino acids in AF2's order.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from evodsp.rng import Draws
from scripts.examples.synthetic.sequences import CHARGE, HYDROPHOBICITY, PottsModel

TOUCHING = 9.0
"""CB atoms of residues that touch across an interface are nearer than this, in Å."""
STRENGTH = 3.0
"""Factor of the chemistry of touching residues; it must compete with the couplings inside of chains."""
_SAMPLES = 256
_FITTING_STEPS = 50


def touching(first_cb: Float64[np.ndarray, "R 3"], second_cb: Float64[np.ndarray, "Q 3"]) -> Int64[np.ndarray, "K 2"]:
    """The pairs of residues that are coupled across an interface, nearest first. A residue is in one pair at most: with more,
    each coupling would be blurred by the others."""
    distance = np.linalg.norm(first_cb[:, None] - second_cb[None], axis=-1)
    order = np.stack(np.unravel_index(np.argsort(distance, axis=None, kind="stable"), distance.shape), -1)
    pairs: list[tuple[int, int]] = []
    for i, j in order[: (distance < TOUCHING).sum()]:
        if not any(i == a or j == b for a, b in pairs):
            pairs.append((i, j))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def partners(
    first: Int64[np.ndarray, "S R"], second: Int64[np.ndarray, "S Q"], pairs: Int64[np.ndarray, "K 2"]
) -> Int64[np.ndarray, " S"]:
    """For each row of the first chain the row of the second that is its partner, each once, so that touching residues fit:
    pairs of rows exchange their partners as long as that helps. `pairs`: as of `touching`."""
    fit = np.zeros((len(first), len(second)))
    for scale, sign in ((HYDROPHOBICITY, 1), (CHARGE, -1)):
        one, other = (scale[rows[:, column]] for rows, column in zip((first, second), pairs.T, strict=True))
        fit += sign * (one - one.mean(0)) @ (other - other.mean(0)).T
    partner, now = np.arange(len(first)), fit  # of each row with each partner
    gain = now + now.T - np.add.outer(now.diagonal(), now.diagonal())
    while True:
        i, j = np.unravel_index(gain.argmax(), gain.shape)
        if gain[i, j] < 1e-9:
            return partner
        both = [i, j]
        partner[both] = partner[[j, i]]
        now[:, both] = now[:, [j, i]]
        gain[both] = now[both] + now[:, both].T - np.add.outer(now.diagonal()[both], now.diagonal())
        gain[:, both] = gain[both].T


def couple_copies(model: PottsModel, pairs: Int64[np.ndarray, "K 2"], draws: Draws) -> PottsModel:
    """The model of a chain whose copies touch. `pairs`: a residue and one of the other copy, whose sequence is the same."""
    ordered = np.unique(np.sort(pairs, axis=1), axis=0)
    return _with_pairs(model, ordered[ordered[:, 0] != ordered[:, 1]], draws)


def _with_pairs(model: PottsModel, pairs: Int64[np.ndarray, "K 2"], draws: Draws) -> PottsModel:
    """The model with couplings between these positions as well."""
    rows = model.sample(np.zeros((_SAMPLES, len(model.fields)), dtype=np.int64), 10, draws)
    frequencies = (np.eye(20)[rows].sum(0) + 0.05) / (_SAMPLES + 1.0)
    couplings, contacts = model.couplings.copy(), model.contacts.copy()
    attraction = STRENGTH * (np.outer(HYDROPHOBICITY, HYDROPHOBICITY) - np.outer(CHARGE, CHARGE))
    for i, j in pairs:
        couplings[i, j] += keeping_frequencies(attraction, frequencies[i], frequencies[j])
        couplings[j, i] = couplings[i, j].T
        contacts[i, j] = contacts[j, i] = True
    return PottsModel(model.fields, couplings, contacts)


def keeping_frequencies(
    attraction: Float64[np.ndarray, "20 20"], first: Float64[np.ndarray, " 20"], second: Float64[np.ndarray, " 20"]
) -> Float64[np.ndarray, "20 20"]:
    """The coupling that differs from `attraction` by a term of each letter alone, and leaves two positions with frequencies
    `first` and `second` these frequencies (iterative proportional fitting)."""
    left, right = np.zeros(20), np.zeros(20)
    for _ in range(_FITTING_STEPS):
        left = -np.log(np.exp(attraction + right) @ second)
        right = -np.log(first @ np.exp(attraction + left[:, None]))
    return attraction + left[:, None] + right
