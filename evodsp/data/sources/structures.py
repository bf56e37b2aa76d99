"""A folder of structure files (`evodsp.data.sources.layout`), and the release dates of its entries."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from evodsp.data.formats.mmcif import read_assembly, read_chain, read_header, read_release_date, read_structure
from evodsp.data.records import CHAINS, COMPLEXES, Assembly, Chain, Kind, Structure
from evodsp.data.sources.layout import (
    chain_id_in,
    entry_of,
    names_of,
    nested_structure,
    split_key,
    structure_file,
    structure_of_chain,
)
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.reading.text_files import read_json

CACHE_NAMES = ("mmcif_cache.json", "chain_data_cache.json")
"""OpenFold's caches, `{pdbid: {"release_date": …}}` and `{chain: {"release_date": …}}`: in the folder, beside it, or
in `data_caches/` beside it."""

MOST_KEPT = 500
"""Chains that `KeptStructures` keeps: 90 MB of chains of 300 residues."""


@runtime_checkable
class TemplateStructures(Protocol):
    """A source of the structures of templates; `StructureFolder` implements it."""

    def has_structure(self, key: str) -> bool:
        """Whether there is a structure file for the chain's entry."""

    def chain(self, key: str) -> Chain:
        """The chain. Raises UserError if the entry does not have it, FileFormatError if the file is broken."""

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of the entry. Raises FileFormatError if the file is broken."""

    def release_date(self, pdb_id: str) -> date | None:
        """The release date of the entry, None if it is not known."""


class StructureFolder:
    """Structures by entry or by chain key. Construction reads no file; pickling transfers only the path.

    Raises UserError if the folder does not exist.
    """

    kind: Kind = CHAINS

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"{self.directory}: no such structure directory; check the path")
        self._dates: dict[str, date | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.directory,)

    def __repr__(self) -> str:
        return f"StructureFolder('{self.directory}')"

    def has_structure(self, key: str) -> bool:
        """Whether there is a structure file for the chain (whether it has the chain is not checked)."""
        return structure_of_chain(self.directory, key) is not None

    def chain(self, key: str) -> Chain:
        """The chain's structure. Raises UserError, with the nearest name, if the file or the chain is missing."""
        path = self.file_of(key)
        return read_chain(path, chain_id_in(path, key))

    def assembly_of(self, key: str) -> Assembly:
        """The chain alone. Raises UserError as `chain` does."""
        return Assembly.of_chain(key, self.chain(key))

    def file_of(self, key: str) -> Path:
        """The chain's structure file. Raises UserError, with the nearest name, if there is none."""
        return structure_of_chain(self.directory, key) or self._existing(split_key(key)[0], key)

    def is_only_chain(self, key: str) -> bool:
        """Whether the chain is the only one of its entry, which has a structure. Raises UserError for a name that is no key,
        and as `read_header` does."""
        entry, chain_id = split_key(key)
        path = structure_file(self.directory, entry)
        return path is not None and set(read_header(path).sequences) == {chain_id}

    def sequences_of(self, key: str) -> tuple[str, ...]:
        """The chain's sequence. Its coordinates are not read if the header lists it. Raises UserError as `chain` does."""
        known = read_header(self.file_of(key)).sequences
        return (known.get(split_key(key)[1]) or self.chain(key).sequence,)

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of an entry. Raises UserError, with the nearest name, if its file is missing."""
        return read_structure(self._existing(pdb_id, pdb_id))

    def file_of_entry(self, pdb_id: str) -> Path:
        """The structure file of an entry, or that in a folder of its name (an entry of one chain). Raises UserError, with the
        nearest name, if there is none."""
        found = structure_file(self.directory, pdb_id) or nested_structure(self.directory, pdb_id)
        return found or self._existing(pdb_id, pdb_id)

    def release_date(self, pdb_id: str) -> date | None:
        """The release date of the entry: from the caches (`CACHE_NAMES`) if they list it, else from its file; None if neither
        has the date. Raises FileFormatError for a broken cache or file."""
        if pdb_id not in self._dates:
            cached = self._cached_dates.get(pdb_id.lower())
            path = structure_file(self.directory, pdb_id) if cached is None else None
            self._dates[pdb_id] = cached if path is None else read_release_date(path)
        return self._dates[pdb_id]

    @cached_property
    def _cached_dates(self) -> dict[str, date]:
        """Release dates in the caches, by lower-case entry."""
        dates: dict[str, date] = {}
        for name in CACHE_NAMES:
            parent = self.directory.parent
            for path in (self.directory / name, parent / name, parent / "data_caches" / name):
                if path.is_file():
                    dates = _read_dates(path, by_chain=name == CACHE_NAMES[1]) | dates
                    break
        return dates

    def _existing(self, pdb_id: str, wanted: str) -> Path:
        if (path := structure_file(self.directory, pdb_id)) is not None:
            return path
        names = {entry_of(path) for path in self.directory.iterdir()}
        raise UserError(
            f"{self.directory}: no {names_of(pdb_id, wanted)} of '{wanted}'; add the file or drop the chain."
            f"{nearest(pdb_id, names)}"
        )


class KeptStructures(StructureFolder):
    """A folder whose chains are read again and again: the last `MOST_KEPT` stay in memory."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._kept = lru_cache(MOST_KEPT)(super().chain)

    def chain(self, key: str) -> Chain:
        return self._kept(key)


class AssemblyFolder(StructureFolder):
    """A folder of structures whose keys are entries: each stands for the chains of an assembly (None: the asymmetric unit)."""

    kind = COMPLEXES

    def __init__(self, directory: str | Path, assembly: str | None) -> None:
        super().__init__(directory)
        self._assembly = assembly

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.directory, self._assembly)

    def assembly_of(self, key: str) -> Assembly:
        """The chains of the entry's assembly. Raises UserError, with the nearest name, if its file is missing."""
        return read_assembly(self.file_of_entry(key), self._assembly)

    def sequences_of(self, key: str) -> tuple[str, ...]:
        """Their sequences. Raises UserError as `assembly_of` does."""
        return tuple(chain.sequence for chain in self.assembly_of(key).chains)


def sure_residues(chain: Chain, plddt: Float32[np.ndarray, " L"], least: float) -> Chain:
    """A predicted chain whose atoms are masked in residues of a lower pLDDT. A prediction has no resolution and no date.

    Raises UserError if no residue is left.
    """
    if not (sure := plddt >= least).any():
        raise UserError(f"predicted chain {chain.key} has no residue of a pLDDT of at least {least:g}; leave it out")
    kept = sure[:, None].astype(np.float32)
    positions, mask = chain.positions * kept[..., None], chain.mask * kept
    return replace(chain, positions=positions, mask=mask, resolution=None, release_date=None)


def _read_dates(path: Path, by_chain: bool) -> dict[str, date]:
    """Release dates by lower-case entry; entries without one are left out."""
    fix = "make the cache again, or remove it"
    cache = read_json(path, fix)
    if not isinstance(cache, dict):
        raise FileFormatError(path, f'expected {{name: {{"release_date": …}}}}; {fix}')
    dates: dict[str, date] = {}
    for key, entry in cache.items():
        text = entry.get("release_date") if isinstance(entry, dict) else None
        if text is None:
            continue
        try:
            released = date.fromisoformat(str(text)[:10])
        except ValueError as error:
            message = f"the release_date of '{key}' is {text!r}, not a date such as 2020-05-14; {fix}"
            raise FileFormatError(path, message) from error
        dates[(key.rpartition("_")[0] if by_chain else key).lower()] = released
    return dates
