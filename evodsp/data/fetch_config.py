"""Settings of `evodsp data fetch`. Importing this costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from evodsp.errors import SIZE, UserError, check_numbers, nearest

What = Literal["alignments", "structures", "lists"]


@dataclass(frozen=True)
class DataFetchConfig:
    """The public data to fetch, and the folder that keeps them."""

    what: Sequence[str]
    """Kinds of data, one or more: alignments (OpenProteinSet), structures (the PDB), lists (identical chains, clusters,
    obsolete entries)."""
    output: Path
    """Folder to fill: alignments/, mmcif_files/, and the lists. missing.txt lists the files that could not be fetched."""
    chains: str | None = None
    """Text file with one chain per line, which alignments and structures need."""
    base: str | None = None
    """Address of a mirror, or a local folder with the same files, in place of the public addresses."""
    jobs: int = 8
    """Number of files that are fetched at a time."""

    def __post_init__(self) -> None:
        check_numbers(self, {"jobs": SIZE}, "--")
        for name in self.what:
            if name not in get_args(What):
                raise UserError(
                    f"nothing public is called '{name}'.{nearest(name, get_args(What))} There are {', '.join(get_args(What))}"
                )
        if self.chains is None and set(self.what) != {"lists"}:
            raise UserError(
                "alignments and structures need a list of chains; name them with --chains FILE, one per line"
            )
