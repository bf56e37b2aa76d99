"""Opening an index whose kind is not known: of chains, or of complexes."""

from __future__ import annotations

from pathlib import Path

from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.index.column_folder import Index, rows_of_index
from evodsp.data.index.complex_index import FORMAT, ComplexIndex


def open_index(path: str | Path) -> Index:
    """The index in a folder. Raises UserError if there is none, or if it is damaged."""
    return ComplexIndex(path) if rows_of_index(Path(path)) == FORMAT.rows else ChainIndex(path)
