"""Which training chains pass the filters, and how often each is drawn."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from evodsp.data.chain_table import ChainTable
from evodsp.data.index import ChainIndex
from evodsp.data.metadata import cached_table
from evodsp.data.sampling import left_out_by_filters, sampling_weights
from evodsp.errors import UserError
from evodsp.training.config import DataConfig
from evodsp.training.progress import report


def weighted_chains(keys: list[str], config: DataConfig) -> tuple[list[str], Float64[np.ndarray, " n"] | None]:
    """The training chains that pass the filters, and their weights; None for equal ones. Prints how many are left out, and why.

    Raises UserError if none is left.
    """
    known = _known_chains(config)
    if known is None:
        return keys, None
    table, source = known
    row_of = dict(zip(table.keys[:], range(len(table)), strict=True))
    reasons = left_out_by_filters(table, config.filters)
    kept, counts = [], dict.fromkeys([f"not in {source}", *reasons], 0)
    for key in keys:
        row = row_of.get(key)
        if row is None:
            counts[f"not in {source}"] += 1
        elif (why := next((reason for reason, rows in reasons.items() if rows[row]), None)) is not None:
            counts[why] += 1
        else:
            kept.append(key)
    said = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if not kept:
        raise UserError(
            f"data.filters leaves out all {len(keys)} training chains ({said}); change the filters or the chains"
        )
    if said:
        report(f"{len(kept)} of {len(keys)} training chains; left out: {said}")
    if config.sampling == "uniform":
        return kept, None
    return kept, sampling_weights(table)[[row_of[key] for key in kept]]


def _known_chains(config: DataConfig) -> tuple[ChainTable, str] | None:
    """What is known of the chains, and the file that says so; None if nothing is asked of it.

    An index alone filters nothing: it may be there only to make a run start quickly.
    """
    if config.chain_data_cache is not None:
        return cached_table(config.chain_data_cache), config.chain_data_cache
    if config.sampling == "uniform":
        return None
    if config.index is None:
        raise UserError(
            "data.sampling is alphafold2, but data.chain_data_cache and data.index are null; give OpenFold's "
            "chain_data_cache.json or an index (evodsp data index), which have the lengths and cluster sizes, "
            "or set data.sampling to uniform"
        )
    return ChainIndex(config.index).table, config.index
