"""The scores of a predicted complex beside those of a single chain, and the entries that they have in its files.

Chains are in the order in which they were given, C of them. Of a pair of chains, `A-B` is the key, as in ColabFold's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from evodsp.inference.interfaces import Interface
from evodsp.inference.result_checks import FIX, is_number, wrong
from evodsp.reading.text_files import read_json

_DECIMALS = 4


@dataclass(frozen=True)
class ComplexScores:
    """TM-scores that a model predicts for the parts of a complex, 0 to 1. They are described in `evodsp.model.confidence`."""

    iptm: float
    actifptm: float
    chain_ptm: Float32[np.ndarray, " C"]
    pair_iptm: Float32[np.ndarray, "C C"]
    pair_actifptm: Float32[np.ndarray, "C C"]


@dataclass(frozen=True)
class PairScores:
    """The scores of two chains, of both directions the higher one."""

    chains: str
    """Their names, such as A-B."""
    iptm: float
    ipsae: float
    pdockq: float
    pdockq2: float
    contacts: int


def score_entries(scores: ComplexScores, interfaces: Sequence[Interface], names: Sequence[str]) -> dict[str, Any]:
    """The entries of the scores' file: ColabFold's keys, and `contacts`. `names`: of the chains, which `interfaces` number from
    1.

    Values of a pair that depend on the direction have both keys, A-B with the errors seen from the frames of A, and B-A.
    """
    places = list(combinations(range(len(names)), 2))

    def of_pairs(values: Float32[np.ndarray, "C C"]) -> dict[str, float]:
        return {f"{names[a]}-{names[b]}": _rounded(float(values[a, b])) for a, b in places}

    directed = {f"{names[one.chain - 1]}-{names[one.partner - 1]}": one for one in interfaces}
    both = {key: one for key, one in directed.items() if one.chain < one.partner}
    return {
        "iptm": _rounded(scores.iptm, 3),
        "actifptm": _rounded(scores.actifptm),
        "per_chain_ptm": {name: _rounded(value) for name, value in zip(names, scores.chain_ptm.tolist(), strict=True)},
        "pairwise_iptm": of_pairs(scores.pair_iptm),
        "pairwise_actifptm": of_pairs(scores.pair_actifptm),
        "ipsae": {key: _rounded(one.ipsae) for key, one in directed.items()},
        "pdockq": {key: _rounded(one.pdockq) for key, one in both.items()},
        "pdockq2": {key: _rounded(one.pdockq2) for key, one in directed.items()},
        "contacts": {key: one.contacts for key, one in both.items()},
    }


def _rounded(value: float, decimals: int = _DECIMALS) -> float:
    return round(value, decimals)


def read_pair_scores(scores: Path, names: Sequence[str]) -> list[PairScores]:
    """The scores of each pair of the chains `names`, in the file of a complex's scores.

    Raises FileFormatError unless predict has written it.
    """
    content = read_json(scores, FIX)
    return list(_pairs(scores, content if isinstance(content, dict) else {}, names))


def _pairs(path: Path, content: Mapping[str, Any], names: Sequence[str]) -> Iterator[PairScores]:
    for first, second in combinations(names, 2):
        key, back = f"{first}-{second}", f"{second}-{first}"
        yield PairScores(
            key,
            _highest(path, content, "pairwise_iptm", [key], 1.0),
            _highest(path, content, "ipsae", [key, back], 1.0),
            _highest(path, content, "pdockq", [key], 1.0),
            _highest(path, content, "pdockq2", [key, back], 1.4),
            int(_highest(path, content, "contacts", [key], 1e12)),
        )


def _highest(path: Path, content: Mapping[str, Any], score: str, keys: Sequence[str], most: float) -> float:
    """The highest of the values of `keys`; each must be at most `most`, a bound of what is believed."""
    entries = content.get(score)
    found: list[Any] = [entries.get(key) if isinstance(entries, dict) else None for key in keys]
    if bad := [one for one in found if not is_number(one, 0.0, most)]:
        raise wrong(path, f"{score} of {keys[0]}", bad[0], f"a number from 0 to {most:g}")
    return float(max(found))
