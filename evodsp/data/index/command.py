"""`evodsp data index`: scan a data set and write its index."""

from __future__ import annotations

import numpy as np

from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.index.config import IndexConfig, check_index_config
from evodsp.data.index.scan import make_index
from evodsp.lock import lock
from evodsp.printing import tell


def run(settings: IndexConfig, words: list[str]) -> int:
    """Write the index, report what it lists, and return the exit code. `words`: the command line (not needed here)."""
    check_index_config(settings)
    output = settings.output
    with lock(output.with_name(f".{output.name}.lock"), output, "makes an index there"):
        make_index(settings)
    tell(summary(ChainIndex(output)))
    return 0


def summary(index: ChainIndex) -> str:
    """A line with the number of chains that can be used, and what the others lack."""
    aligned, resolved = index.has_alignments(), index.has_structure()
    borrowed = int((aligned & (index.table.representatives != np.arange(len(index)))).sum())
    unreadable = int((index.content.problems.lengths() > 0).sum())
    counts = {
        "without alignments": int((~aligned).sum()),
        "without a structure": int((~resolved).sum()),
        "with alignments of an identical chain": borrowed,
        "with an empty folder of alignments": int(index.are_query_only().sum()),
        "that cannot be read": unreadable,
    }
    usable = f"{index.path}: {len(index):,} chains, {int((aligned & resolved).sum()):,} with alignments and structure"
    return ", ".join([usable, *(f"{count:,} {what}" for what, count in counts.items() if count)])
