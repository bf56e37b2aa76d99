"""The chain of sample number i: AlphaFold2's filters and weights, written out (supplement 1.2.5).

AlphaFold2 takes a random chain and accepts it with a probability; OpenFold repeats that for a whole epoch. Here a chain is
drawn with its share of the sum of these probabilities, which gives the same distribution. docs/data.md lists every difference
from the supplement and from OpenFold.

The draws are addressed. Sample i has a sequence of candidates, attempts 0, 1, 2, …, each drawn from (seed, i, attempt) and from
nothing else. Its chain is the first candidate that is not left out (`evodsp.training.loader`). So

- a sample is a function of (seed, i, the chains left out at i), whatever happened at other samples, on other ranks or before a
  resume: no draw consumes the state of a generator;
- leaving out one more chain c changes exactly the samples whose chain was c: any other sample's accepted candidate comes
  before or without c, and stays the first that is not left out;
- with weights w, the accepted chain has the distribution of the remaining weights. Attempts are independent, each is rejected
  with probability q = the share of the chains left out, so chain c is taken with probability w_c (1 + q + q^2 + …) = w_c / (1
  - q).

A draw takes one binary search in the cumulative weights, whatever the number of chains.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from datetime import date

import numpy as np
from jaxtyping import Bool, Float64

from evodsp.config import FilterConfig
from evodsp.data.index.chain_table import UNKNOWN_DAY, ChainTable
from evodsp.data.templates.dates import parse_latest_date
from evodsp.errors import UserError
from evodsp.rng import Draws


def left_out_by_filters(
    table: ChainTable, filters: FilterConfig, where: str = "data.filters"
) -> dict[str, Bool[np.ndarray, " n"]]:
    """Whether each filter leaves each chain out, by the filter's reason. A chain may be left out for several reasons.
    `where`: the name of the filters in messages.
    """
    reasons: dict[str, Bool[np.ndarray, " n"]] = {}
    if filters.max_resolution is not None:
        unknown = np.isnan(table.resolutions)
        reasons["unknown resolution"] = unknown
        # A resolution of 0 stands for a method that has none.
        reasons[f"resolution above {filters.max_resolution:g} Å"] = ~unknown & (
            table.resolutions > filters.max_resolution
        )
    if filters.max_residue_share is not None:
        unknown = np.isnan(table.largest_fractions)
        reasons["unknown sequence"] = unknown
        # Rounded as the table is, or 4 of 5 residues would be more than 0.8.
        most = np.float32(filters.max_residue_share)
        reasons[f"more than {filters.max_residue_share:.0%} of one residue type"] = ~unknown & (
            table.largest_fractions > most
        )
    if (latest := parse_latest_date(f"{where}.max_release_date", filters.max_release_date)) is not None:
        unknown = table.release_days == UNKNOWN_DAY
        reasons["unknown release date"] = unknown
        reasons[f"released after {latest}"] = ~unknown & (table.release_days > (latest - date(1970, 1, 1)).days)
    return reasons


class ChainDraws:
    """Draws chains. Without `weights` each epoch of n samples is a permutation of the n keys, so that all are seen equally
    often; with them each sample is drawn independently in proportion to its chain's weight.

    A permutation is attempt 0 only: the places of chains that are left out are filled by equally likely draws of the others.
    """

    def __init__(self, draws: Draws, keys: Sequence[str], weights: Float64[np.ndarray, " n"] | None = None) -> None:
        """`draws`: a stream of this object's own. Raises ValueError unless weights are above zero and finite, one per key."""
        if weights is not None and not (
            len(weights) == len(keys) and (weights > 0).all() and np.isfinite(weights).all()
        ):
            raise ValueError(f"{len(keys)} keys need as many finite weights above 0, not {weights}")
        self.keys = keys
        self._draws = draws
        self._cumulative = None if weights is None else np.cumsum(weights, dtype=np.float64)
        self._epoch: tuple[int, np.ndarray] | None = None

    def candidate(self, sample: int, attempt: int) -> str:
        """The chain that attempt number `attempt` draws for `sample`."""
        if self._cumulative is None and attempt == 0:
            return self.keys[self._in_permutation(sample)]
        uniform = precise_uniform(self._draws.at("chain", sample), attempt)
        if self._cumulative is None:
            return self.keys[int(uniform * len(self.keys))]
        at = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        return self.keys[min(int(at), len(self.keys) - 1)]  # rounding may reach the very end

    def choose(self, sample: int, left_out: Container[str]) -> str:
        """The chain of `sample`, none of `left_out`. Raises UserError if all chains are left out."""
        attempt = 0
        while (key := self.candidate(sample, attempt)) in left_out:
            attempt += 1
            if attempt % _ATTEMPTS_UNTIL_COUNTED == 0 and all(key in left_out for key in self.keys):
                raise UserError(f"all {len(self.keys)} chains to train on are left out; correct their files")
        return key

    def _in_permutation(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.keys))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._draws.at("epoch", epoch).permutation(len(self.keys))
        return int(self._epoch[1][place])


DISTILLED = "distillation/"
"""The prefix of names of a self-distillation set's chains, here and in the quarantine."""


class MixedDraws:
    """Draws a sample from a self-distillation set with probability `fraction`, otherwise from the other chains.

    Leaving a chain out does not change which of the two a sample is from: its replacement comes from the same set.
    """

    def __init__(self, draws: Draws, chains: ChainChoice, distilled: ChainChoice, fraction: float) -> None:
        self._draws, self._chains, self._distilled, self._fraction = draws, chains, distilled, fraction

    def choose(self, sample: int, left_out: Container[str]) -> str:
        """As `ChainDraws.choose`."""
        is_distilled = precise_uniform(self._draws.at("source", sample), 0) < self._fraction
        return (self._distilled if is_distilled else self._chains).choose(sample, left_out)


ChainChoice = ChainDraws | MixedDraws
"""Decides which chain a sample is made of."""
_ATTEMPTS_UNTIL_COUNTED = 64
"""Number of left-out candidates after which it is checked that there are others."""


def precise_uniform(draws: Draws, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits: `Draws.uniform` has 24, too few to choose among a million weights."""
    high, low, _, _ = draws.words(position)
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)
