"""The index of the complexes of a data set: for each entry the chains of its assembly, and where the alignments of each lie.

`evodsp data index --complexes true` makes it (`evodsp.data.index.scan_complexes`). It is a folder of columns (`column_folder`),
a row for each entry. In its table the length is that of all chains, the shares of residue types are those of all chains
together, and the cluster size is the smallest of its chains. How often an entry is drawn depends on the clusters of all
chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from evodsp.data.index.chain_table import ChainTable, PackedTexts
from evodsp.data.index.column_folder import Format, Index, Source, fitting_parts, within, write_columns
from evodsp.data.index.metadata import frequencies_of_entries
from evodsp.errors import UserError

FORMAT = Format(
    "complexes",
    " --complexes true",
    ("keys", "structures", "methods", "problems", "chain_names", "chain_sequences", "chain_alignments"),
    ("are_aligned", "first_chains", "chain_clusters"),
    version=2,
)


@dataclass(frozen=True)
class ListedComplex:
    """The chains of an entry's assembly, in its order."""

    names: tuple[str, ...]
    """As in `Assembly`."""
    sequences: tuple[str, ...]
    alignments: tuple[str, ...]
    """The key of the chain whose alignments each chain has; '' if there are none."""

    @property
    def entities(self) -> dict[str, int]:
        """The copies of each sequence."""
        return {letters: self.sequences.count(letters) for letters in self.sequences}

    @property
    def lenders(self) -> dict[str, str]:
        """For each sequence the key of the chain whose alignments it has."""
        return dict(zip(self.sequences, self.alignments, strict=True))


@dataclass(frozen=True)
class ComplexColumns:
    """The columns of an index of n complexes with m chains, besides its table."""

    structures: PackedTexts
    """Structure file of each entry, relative to the structure folder; '' if there is none."""
    methods: PackedTexts
    """The experiment, as the file names it."""
    problems: PackedTexts
    """The reason why an entry's structure could not be read, or which of its chains have no alignments; '' if all is well."""
    chain_names: PackedTexts
    """The name of each chain, as in `Assembly`."""
    chain_sequences: PackedTexts
    chain_alignments: PackedTexts
    """The key of the chain whose alignments each chain has; '' if there are none."""
    are_aligned: Int64[np.ndarray, " n"]
    """1 where every chain has alignments; of an entry that could not be read, where any chain of it has."""
    chain_clusters: Int64[np.ndarray, " m"]
    """The number of chains in each chain's sequence cluster, itself included; `UNKNOWN_CLUSTER` if unknown."""
    first_chains: Int64[np.ndarray, " n_plus_1"]
    """The chains of row i are those from first_chains[i] to first_chains[i + 1]."""


def in_words(assembly: str | None) -> str:
    """An assembly in words that settings have, too."""
    return "the asymmetric unit (null)" if assembly is None else f"assembly {assembly}"


class ComplexIndex(Index):
    """An open index of complexes."""

    FORMAT = FORMAT
    content: ComplexColumns

    def _take(self, header: Mapping[str, Any], columns: dict[str, Any]) -> None:
        self.assembly: str | None = header["assembly"]
        """The biological assembly that was read; None: the asymmetric unit."""
        if not isinstance(self.assembly, str | None):
            raise TypeError("an assembly that is no text")
        self.content = ComplexColumns(**columns)

    def check_assembly(self, wanted: str | None) -> None:
        """Raise UserError if the index is of another assembly than the run's."""
        if self.assembly != wanted:
            option = "null" if wanted is None else wanted
            raise UserError(
                f"{self.path}: an index of {in_words(self.assembly)}, but data.assembly is {in_words(wanted)}; make the index "
                f"of that with 'evodsp data index --complexes true --assembly {option}', or change data.assembly"
            )

    @property
    def _options(self) -> str:
        unit = "" if self.assembly == "1" else f" --assembly {'null' if self.assembly is None else self.assembly}"
        return FORMAT.options + unit

    def frequencies(self) -> Float64[np.ndarray, " n"]:
        """See `Index` and `frequencies_of_entries`."""
        content = self.content
        return frequencies_of_entries(content.chain_sequences[:], content.chain_clusters, content.first_chains)

    def complex(self, row: int) -> ListedComplex:
        """The chains of an entry; none if its structure could not be read."""
        chains = slice(int(self.content.first_chains[row]), int(self.content.first_chains[row + 1]))
        columns = self.content.chain_names, self.content.chain_sequences, self.content.chain_alignments
        rows = range(len(self.content.chain_names))[chains]
        return ListedComplex(*(tuple(column[chain] for chain in rows) for column in columns))

    def sequences_of(self, row: int) -> tuple[str, ...]:
        """See `Index`."""
        return self.complex(row).sequences

    def has_alignments(self) -> Bool[np.ndarray, " n"]:
        """Whether each entry has alignments, as far as the scan could tell."""
        return np.asarray(self.content.are_aligned) > 0

    def _fitting(self) -> Iterator[tuple[str, bool]]:
        content, chains = self.content, len(self.content.chain_names)
        for name in ("methods", "are_aligned"):
            yield name, len(getattr(content, name)) == len(self)
        for name in ("chain_sequences", "chain_alignments", "chain_clusters"):
            yield name, len(getattr(content, name)) == chains
        yield "are_aligned", within(content.are_aligned, 0, 2)
        yield "first_chains", fitting_parts(content.first_chains, len(self), chains)


def write_complexes(
    path: Path, table: ChainTable, content: ComplexColumns, sources: list[Source], assembly: str | None
) -> None:
    """Write an index, replacing an earlier one in one step. `assembly`: the one that was read."""
    write_columns(path, FORMAT, table, content, sources, {"assembly": assembly})
