"""Random sequences, and relatives of them."""

from __future__ import annotations

import numpy as np

from evodsp.geometry.residues import RESTYPES


def random_sequences(number: int, length: int) -> list[str]:
    codes = np.random.default_rng(number).integers(len(RESTYPES), size=(number, length))
    return ["".join(RESTYPES[code] for code in row) for row in codes]


def changed(sequence: str, every: int) -> str:
    """Each `every`-th residue is another one."""
    after = dict(zip(RESTYPES, (*RESTYPES[1:], RESTYPES[0]), strict=True))
    return "".join(after[letter] if at % every == 0 else letter for at, letter in enumerate(sequence))
