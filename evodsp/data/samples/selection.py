"""Which chains of a set a run draws, and how often, by what an index or OpenFold's cache says of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64

from evodsp.config import FilterConfig, Sampling
from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.index.chain_table import ChainTable
from evodsp.data.index.metadata import cached_table
from evodsp.data.samples.sampling import left_out_by_filters, sampling_weights
from evodsp.errors import UserError


@dataclass(frozen=True)
class Selection:
    """The settings that filter and weight the chains of a set."""

    where: str
    """What the names of these settings begin with: data, or data.distillation."""
    chain_data_cache: str | None
    index: str | None
    filters: FilterConfig
    sampling: Sampling

    @property
    def is_applied(self) -> bool:
        """Whether the filters leave chains out."""
        return self.chain_data_cache is not None or self.sampling == "alphafold2"

    @cached_property
    def known(self) -> tuple[ChainTable, str] | None:
        """What is known of the chains, and the file that says so; None if nothing is asked of it.

        An index alone filters nothing: it may be there only to make a run start quickly.
        """
        if self.chain_data_cache is not None:
            return cached_table(self.chain_data_cache), self.chain_data_cache
        if not self.is_applied:
            return None
        if self.index is None:
            raise UserError(
                f"{self.where}.sampling is alphafold2, but {self.where}.chain_data_cache and {self.where}.index are null; give "
                "OpenFold's chain_data_cache.json or an index (evodsp data index), which have the lengths and cluster sizes, "
                f"or set {self.where}.sampling to uniform"
            )
        return ChainIndex(self.index).table, self.index


@dataclass(frozen=True)
class Selected:
    """The chains that pass the filters."""

    keys: list[str]
    weights: Float64[np.ndarray, " n"] | None
    """How often each is drawn, in any unit; None: equally often."""
    left_out: dict[str, int]
    """Numbers of chains by the reason, without reasons that leave none out."""

    def line(self, kind: str) -> str:
        """How many are left, and why others are not; '' if none is left out."""
        total = len(self.keys) + sum(self.left_out.values())
        said = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{len(self.keys)} of {total} {kind} chains; left out: {said}" if said else ""


def select(keys: list[str], selection: Selection) -> Selected:
    """Filter and weight the chains `keys`. A chain that several filters leave out is counted with the first."""
    if (known := selection.known) is None:
        return Selected(keys, None, {})
    table, source = known
    row_of = dict(zip(table.keys[:], range(len(table)), strict=True))
    reasons = left_out_by_filters(table, selection.filters, f"{selection.where}.filters")
    kept, counts = [], dict.fromkeys([f"not in {source}", *reasons], 0)
    for key in keys:
        row = row_of.get(key)
        if row is None:
            counts[f"not in {source}"] += 1
        elif (why := next((reason for reason, rows in reasons.items() if rows[row]), None)) is not None:
            counts[why] += 1
        else:
            kept.append(key)
    weights = None if selection.sampling == "uniform" else sampling_weights(table)[[row_of[key] for key in kept]]
    return Selected(kept, weights, {reason: count for reason, count in counts.items() if count})
