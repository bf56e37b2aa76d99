"""Names of chains, and the places where the structure file of an entry may lie.

A chain key is `<entry>_<chain>`, split at its last underscore; the chain is the author's id. A key without an underscore, such
as a UniClust30 cluster of OpenProteinSet, is an entry with a single chain.

In a folder of structures an entry's file has one of these names, gzipped or not, in the folder itself or in the divided layout
of the PDB's mirrors, where entry 1abc lies in `ab/`:

    1abc.cif  1abc.mmcif  1abc.pdb  pdb1abc.ent  pdb_00001abc.cif

Letters may be in either case. In a folder of chain folders, a chain's structure may lie in `<key>/pdb/` or `<key>/cif/`.

Names of chains and of records meet where there is one chain: the structure of the key `my_protein` may be the only chain of
`my_protein.pdb`, and what belongs to the chain `hbC_A` may be called `hbC` where the structure `hbC` has this chain only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from evodsp.errors import UserError
from evodsp.printing import logger

_SUFFIXES = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz", ".pdb", ".pdb.gz")
_LEGACY_SUFFIXES = (".ent", ".ent.gz")
_ALL_SUFFIXES = (*_SUFFIXES, *_LEGACY_SUFFIXES)
_ID = 4
"""Number of letters of a PDB id. An extended id is pdb_0000 and these letters."""
_DIVIDED_NAME = 2
"""Number of letters in the name of a divided mirror's folder."""


def split_key(key: str) -> tuple[str, str]:
    """(entry, author's chain id) of a chain key; the id is '' (the only chain) if the key has no underscore.

    Raises UserError if nothing stands before or after the underscore.
    """
    entry, separator, chain_id = key.rpartition("_")
    if not separator and key:
        return key, ""
    if not entry or not chain_id:
        raise UserError(f"'{key}' is not a chain key; write '<entry>_<chain>', for example '1abc_A'")
    return entry, chain_id


def structure_file(directory: Path, entry: str) -> Path | None:
    """The structure file of an entry in a folder, None if there is none."""
    divided = directory / _divided(entry)
    folders = [directory, divided] if divided != directory and divided.is_dir() else [directory]
    return next((path for folder in folders for name in _names(entry) if (path := folder / name).is_file()), None)


def structure_of_chain(directory: Path, key: str) -> Path | None:
    """The structure file of a chain in a folder: its entry's, else that of the whole key, else the one in its own folder; None
    if there is none. Raises UserError for a name that is no key, or if its own folder has several."""
    entry, chain_id = split_key(key)
    of_key = structure_file(directory, entry) or (structure_file(directory, key) if chain_id else None)
    return of_key or nested_structure(directory, key)


def chain_id_in(path: Path, key: str) -> str:
    """The author's id of the chain `key` in its structure file; '' (the only chain) if the file has the name of the whole key.

    Raises UserError for a name that is no key.
    """
    chain_id = split_key(key)[1]
    is_nested = path.parent.parent.name == key
    return "" if entry_of(path).lower() == key.lower() and not is_nested else chain_id


def nested_structure(directory: Path, key: str) -> Path | None:
    """The structure file in a chain's folder, as OpenProteinSet nests it: `<key>/pdb/*.pdb` or `<key>/cif/*.cif`; None if there
    is none. Raises UserError if there are several."""
    structures = _nested(directory, key)
    if len(structures) > 1:
        names = ", ".join(path.name for path in structures[:5])
        raise UserError(f"{directory / key}: several structures of the chain ({names}); keep one")
    return structures[0] if structures else None


class StructureListing:
    """The structures of a folder, for lookups of many chains: lists the folder once, and a chain's own folder when asked."""

    def __init__(self, directory: Path) -> None:
        files: set[str] = set()
        folders: set[str] = set()
        for item in os.scandir(directory):
            if _is_structure(item.name):
                files.add(item.name)
            elif item.is_dir():
                folders.add(item.name)
                if len(item.name) == _DIVIDED_NAME:
                    files.update(f"{item.name}/{below}" for below in os.listdir(item.path) if _is_structure(below))
        self._directory, self._files, self._warned = directory, frozenset(files), False
        self._entries = frozenset(_entry_of_name(name.rpartition("/")[2]).lower() for name in files)
        self.folders = frozenset(folders)
        """The sub-folders. Some may be folders of chains, with a structure in them (`nested_structure`)."""

    def of_entry(self, entry: str) -> str | None:
        """`structure_file`, relative to the folder."""
        if entry.lower() not in self._entries:  # most of a large data set may lie in chain folders
            return None
        folders = ("", f"{divided}/") if (divided := _divided(entry)) else ("",)
        return next(
            (path for folder in folders for name in _names(entry) if (path := folder + name) in self._files), None
        )

    def has_entry(self, entry: str) -> bool:
        """Whether an entry has a structure file, of its own or in a folder of its name (an entry of one chain)."""
        return self.of_entry(entry) is not None or self._has_nested(entry)

    def of_chain(self, key: str) -> str | None:
        """`structure_of_chain`, relative to the folder, without a look into the chain's own folder. Of the first chain that two
        files may have the structure of, a warning names both.

        Raises UserError for a name that is no key.
        """
        entry, chain_id = split_key(key)
        found, of_key = self.of_entry(entry), self.of_entry(key) if chain_id else None
        if found and of_key and not self._warned:
            self._warned = True
            logger(__name__).warning(
                f"{self._directory}: {found} and {of_key} may both be the structure of '{key}'; {found} is read, remove or "
                "rename the other"
            )
        return found or of_key

    def has(self, key: str) -> bool:
        """Whether a chain has a structure file: of its entry, in its own folder, or of the whole key.

        Raises UserError for a name that is no key.
        """
        return self.of_chain(key) is not None or self._has_nested(key)

    def entries_without(self, keys: Iterable[str]) -> list[str]:
        """The entries with a structure to which none of the chains `keys` belongs, in lower case and sorted."""
        known = set(keys)
        nested = (key for key in self.folders - known if self._has_nested(key))
        found = self._entries.union(_entry_of_key(key) for key in nested)
        return sorted(found.difference(name for key in known for name in (_entry_of_key(key), key.lower())))

    def _has_nested(self, key: str) -> bool:
        return key in self.folders and bool(_nested(self._directory, key))


def names_of(entry: str, key: str = "") -> str:
    """The names that an entry's file may have, for messages. `key`: the chain that is wanted of it, whose name the file of a
    single chain may have."""
    whole = f" (or {key}.cif, .mmcif or .pdb with one chain)" if key not in ("", entry) else ""
    return f"{entry}.cif, .mmcif or .pdb, or pdb{entry.lower()}.ent, gzipped or not{whole}"


def entry_of(path: Path) -> str:
    """The entry that a structure file's name stands for: `pdb1abc.ent.gz` -> `1abc`."""
    return _entry_of_name(path.name)


def _entry_of_name(name: str) -> str:
    name = name[:-3] if name.lower().endswith(".gz") else name
    stem, _, suffix = name.rpartition(".")
    return stem[3:] if suffix.lower() == "ent" and stem.lower().startswith("pdb") else stem or name


def _entry_of_key(key: str) -> str:
    return (key.rpartition("_")[0] or key).lower()


def _is_structure(name: str) -> bool:
    return name.lower().endswith(_ALL_SUFFIXES) and not name.startswith(".")


def _nested(directory: Path, key: str) -> list[Path]:
    folders = (directory / key / name for name in ("cif", "pdb"))
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    return [path for path in found if path.name.lower().endswith(_SUFFIXES) and not path.name.startswith(".")]


def _divided(entry: str) -> str:
    """The folder of an entry in a divided mirror, '' if its name is too short. Ids have 4 letters, extended ones more, such as
    pdb_00001abc: the folder is the two letters before the last."""
    return entry.lower()[-3:-1] if len(entry) >= 4 else ""


def _names(entry: str) -> Iterator[str]:
    """The names that an entry's file may have: as it is written, in lower and in upper case, the usual extensions first."""
    stems = tuple(dict.fromkeys((entry, entry.lower(), entry.upper())))
    legacy = (f"pdb{entry.lower()}", f"PDB{entry.upper()}")
    yield from (stem + suffix for stem in stems for suffix in _SUFFIXES)
    yield from (stem + suffix for stem in legacy for suffix in _LEGACY_SUFFIXES)
    if len(entry) == _ID:
        yield from (f"pdb_0000{entry.lower()}{suffix}" for suffix in _SUFFIXES)
    yield from (stem + suffix for stem in stems for suffix in _in_upper_case(_SUFFIXES))
    yield from (stem + suffix for stem in legacy for suffix in _in_upper_case(_LEGACY_SUFFIXES))


@cache
def _in_upper_case(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """`.CIF`, `.CIF.GZ` and, of a file that was packed later, `.CIF.gz`."""
    upper = [suffix.upper() for suffix in suffixes]
    return tuple(dict.fromkeys([*upper, *(suffix.replace(".GZ", ".gz") for suffix in upper)]))
