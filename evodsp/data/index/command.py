"""`evodsp data index`: scan a data set and write its index."""

from __future__ import annotations

import numpy as np

from evodsp.data.index.config import IndexConfig, check_index_config
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.scan import make_index
from evodsp.data.records import COMPLEXES
from evodsp.files import lock
from evodsp.printing import counted, tell


def run(settings: IndexConfig, words: list[str]) -> int:
    """Write the index, report what it lists, and return the exit code. `words`: the command line (not needed here)."""
    check_index_config(settings)
    output = settings.output
    with lock(output.with_name(f".{output.name}.lock"), output, "makes an index there"):
        make_index(settings)
    tell(summary(DataIndex(output, kind=None)))
    return 0


def summary(index: DataIndex) -> str:
    """A line with the number of keys that can be used, and what the others lack; of complexes also the numbers of their chains
    and residues, and the reason of the first problem."""
    content, of_complexes = index.content, index.kind == COMPLEXES
    aligned, resolved = index.has_alignments(), index.has_structure()
    keys, owners = index.keys[:], [*content.owners[:], ""]  # the last stands for NO_OWNER
    of_chain = np.repeat(np.arange(len(index)), np.diff(content.first_chains)).tolist()
    owned = ((row, owners[owner]) for row, owner in zip(of_chain, content.chain_owners.tolist(), strict=True))
    borrowed = {row for row, owner in owned if owner and keys[row] not in (owner, owner.rpartition("_")[0])}
    counts = {
        "without alignments": int((~aligned).sum()),
        "without a structure": int((~resolved).sum()),
        "with alignments of an identical chain": len(borrowed),
        "with an empty folder of alignments": int(index.are_query_only().sum()),
        "of one chain only": int((np.diff(content.first_chains) == 1).sum()) if of_complexes else 0,
        "with a problem" if of_complexes else "that cannot be read": int((content.problems.lengths() > 0).sum()),
    }
    rows = f"{len(index):,} {index.kind}, {int((aligned & resolved).sum()):,} with alignments and structure"
    line = ", ".join([f"{index.path}: {rows}", *(f"{count:,} {what}" for what, count in counts.items() if count)])
    if not of_complexes:
        return line
    problem = next((text for text in content.problems if text), None)
    more = "" if problem is None else f", such as {problem}"
    residues = int(index.table.lengths.sum())
    return f"{line}{more}; {counted(len(content.chain_names), 'chain')}, {residues:,} residues"
