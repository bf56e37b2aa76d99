"""Homologous sequences with gaps, deletions and insertions, as A3M and Stockholm text.

Shapes: S sequences, R columns (residues of the query, which is row 0, without gaps), I inserted residues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from evodsp.geometry.residues import RESTYPES
from evodsp.rng import Draws
from scripts.examples.synthetic.sequences import PottsModel

LONGEST_INSERTION = 4
SWEEPS = 3
_LETTERS = np.array(list(RESTYPES))


@dataclass(frozen=True)
class Homologs:
    """Aligned sequences. `residues`: amino acids 0..19. `present`: False where the sequence has a gap. `inserted`: number of
    residues between a column and the next one. `insertions`: these residues (the first `inserted` of each column)."""

    names: tuple[str, ...]
    residues: Int64[np.ndarray, "S R"]
    present: Bool[np.ndarray, "S R"]
    inserted: Int64[np.ndarray, "S R"]
    insertions: Int64[np.ndarray, "S R I"]


def draw_homologs(
    model: PottsModel,
    query: Int64[np.ndarray, " R"],
    loop: Bool[np.ndarray, " R"],
    name: str,
    prefix: str,
    count: int,
    draws: Draws,
) -> Homologs:
    """`count` sequences: the query, called `name`, then its relatives `prefix`1, `prefix`2, …, close and distant ones.

    `loop`: where insertions and deletions occur. The ends of the relatives are ragged too.
    """
    residues = draw_relatives(model, query, count, draws)
    return with_gaps(residues, loop, (name, *(f"{prefix}{n}" for n in range(1, count))), draws)


def draw_relatives(
    model: PottsModel, query: Int64[np.ndarray, " R"], count: int, draws: Draws, sweeps: int = SWEEPS
) -> Int64[np.ndarray, "S R"]:
    """`count` sequences without gaps: the query and its relatives, close and distant ones, more distant with more `sweeps`."""
    rate = 0.1 + 0.9 * draws.at("distance").uniform(count)
    rate[0] = 0.0
    return model.sample(np.repeat(query[None], count, 0), sweeps, draws.at("letters"), rate)


def with_gaps(
    residues: Int64[np.ndarray, "S R"], loop: Bool[np.ndarray, " R"], names: tuple[str, ...], draws: Draws
) -> Homologs:
    """The sequences with ragged ends, and with insertions and deletions in loops; the first one has none."""
    count, length = residues.shape
    column = np.arange(length)
    ragged = (draws.at("ends").uniform(count, 2) ** 3 * 0.25 * length).astype(int)
    present = (column >= ragged[:, :1]) & (column < length - ragged[:, 1:])
    # A third of the sequences have one run of deleted columns, centred in a loop.
    centre = np.nonzero(loop)[0][(draws.at("deletion").uniform(count) * loop.sum()).astype(int)]
    half = draws.at("deleted").uniform(count) * 2.5 - 1.6
    present &= np.abs(column - centre[:, None]) > half[:, None]
    # Insertions: mostly within loops, and never before the first or after the last residue of a sequence.
    chance = np.where(loop, 0.06, 0.002)
    inserted = (draws.at("insertion").uniform(count, length) < chance) * (
        1 + (draws.at("inserted").uniform(count, length) * LONGEST_INSERTION).astype(int)
    )
    inside = (column >= ragged[:, :1]) & (column < length - ragged[:, 1:] - 1)
    inserted *= inside
    present[0], inserted[0] = True, 0
    letters = (draws.at("inserted letters").uniform(count, length, LONGEST_INSERTION) * 20).astype(int)
    return Homologs(names, residues, present, inserted, letters)


def to_a3m(homologs: Homologs) -> str:
    """A3M text: columns in upper case or '-', insertions in lower case after their column."""
    return "".join(f">{name}\n{''.join(row)}\n" for name, row in zip(homologs.names, _cells(homologs, ""), strict=True))


def to_stockholm(homologs: Homologs) -> str:
    """Stockholm text as jackhmmer writes it: insertions have their own columns, with '.' in sequences without them."""
    widest = homologs.inserted.max(0)
    rows = _cells(homologs, ".")
    width = max(map(len, [*homologs.names, "#=GC RF"])) + 2
    kept = "".join("x" + "." * n for n in widest)
    lines = [f"{name:<{width}}{''.join(row)}" for name, row in zip(homologs.names, rows, strict=True)]
    return "\n".join(["# STOCKHOLM 1.0", "", *lines, f"{'#=GC RF':<{width}}{kept}", "//", ""])


def _cells(homologs: Homologs, filler: str) -> np.ndarray:
    """[S, R] strings: the column's letter and the residues inserted after it, padded with `filler` to equal width."""
    letters = np.where(homologs.present, _LETTERS[homologs.residues], "-").astype(object)
    slots = np.arange(homologs.insertions.shape[-1])
    shown = slots < homologs.inserted[..., None]
    padded = slots < homologs.inserted.max(0)[:, None]
    lower = np.char.lower(_LETTERS)[homologs.insertions]
    cells = np.where(shown, lower, np.where(padded, filler, "")).astype(object)
    return letters + cells.sum(-1)
