"""`evodsp data index`: scan a data set and write its index."""

from __future__ import annotations

import numpy as np

from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.index.complex_index import ComplexIndex
from evodsp.data.index.config import IndexConfig, check_index_config
from evodsp.data.index.scan import make_index
from evodsp.data.index.scan_complexes import make_complex_index
from evodsp.lock import lock
from evodsp.printing import counted, tell


def run(settings: IndexConfig, words: list[str]) -> int:
    """Write the index, report what it lists, and return the exit code. `words`: the command line (not needed here)."""
    check_index_config(settings)
    output = settings.output
    with lock(output.with_name(f".{output.name}.lock"), output, "makes an index there"):
        (make_complex_index if settings.complexes else make_index)(settings)
    tell(summary_of_complexes(ComplexIndex(output)) if settings.complexes else summary(ChainIndex(output)))
    return 0


def summary(index: ChainIndex) -> str:
    """A line with the number of chains that can be used, and what the others lack."""
    borrowed = index.has_alignments() & (index.table.representatives != np.arange(len(index)))
    more = {
        "with alignments of an identical chain": int(borrowed.sum()),
        "with an empty folder of alignments": int(index.are_query_only().sum()),
    }
    return _line(index, more, "that cannot be read")


def summary_of_complexes(index: ComplexIndex) -> str:
    """The same line about complexes, with the numbers of their chains and residues, and the reason of the first problem."""
    alone = np.diff(index.content.first_chains) == 1
    line = _line(index, {"of one chain only": int(alone.sum())}, "with a problem")
    problem = next((text for text in index.problems if text), None)
    more = "" if problem is None else f", such as {problem}"
    chains, residues = len(index.content.chain_names), int(index.table.lengths.sum())
    return f"{line}{more}; {counted(chains, 'chain')}, {residues:,} residues"


def _line(index: ChainIndex | ComplexIndex, more: dict[str, int], unreadable: str) -> str:
    aligned, resolved = index.has_alignments(), index.has_structure()
    counts = {
        "without alignments": int((~aligned).sum()),
        "without a structure": int((~resolved).sum()),
        **more,
        unreadable: int((index.problems.lengths() > 0).sum()),
    }
    rows = f"{len(index):,} {index.FORMAT.rows}, {int((aligned & resolved).sum()):,} with alignments and structure"
    return ", ".join([f"{index.path}: {rows}", *(f"{count:,} {what}" for what, count in counts.items() if count)])
