"""Names of chains, and where the structure files of an entry may lie.

A chain key is `<entry>_<chain>`, split at its last underscore; the chain is the author's id. A key without an underscore, such
as a UniClust30 cluster of OpenProteinSet, is an entry with a single chain.

In a folder of structures an entry's file has one of these names, gzipped or not, in the folder itself or in the divided layout
of the PDB's mirrors, where entry 1abc lies in `ab/`:

    1abc.cif  1abc.mmcif  1abc.pdb  pdb1abc.ent

Letters may be in either case. In a folder of chain folders, a chain's structure may lie in `<key>/pdb/` or `<key>/cif/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from evodsp.errors import UserError

_SUFFIXES = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz", ".pdb", ".pdb.gz")
_LEGACY_SUFFIXES = (".ent", ".ent.gz")
_ALL_SUFFIXES = (*_SUFFIXES, *_LEGACY_SUFFIXES)
_DIVIDED_NAME = 2
"""Letters in the name of a folder of a divided mirror."""


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
    return next((path for name in _candidates(entry) if (path := directory / name).is_file()), None)


def structure_files(directory: Path) -> frozenset[str]:
    """The names, relative to a folder, of the files where `listed_structure` looks for structures. Reads each folder once."""
    names: set[str] = set()
    for item in os.scandir(directory):
        if item.name.endswith(_ALL_SUFFIXES):
            names.add(item.name)
        elif len(item.name) == _DIVIDED_NAME and item.is_dir():
            names.update(f"{item.name}/{below}" for below in os.listdir(item.path) if below.endswith(_ALL_SUFFIXES))
    return frozenset(names)


def listed_structure(names: frozenset[str], entry: str) -> str | None:
    """`structure_file` among the `structure_files` of a folder, for many entries."""
    return next((name for name in _candidates(entry) if name in names), None)


def nested_structure(directory: Path, key: str) -> Path | None:
    """The structure file in a chain's folder, as OpenProteinSet nests it: `<key>/pdb/*.pdb` or `<key>/cif/*.cif`; None if there
    is none. Raises UserError if there are several."""
    folders = (directory / key / name for name in ("cif", "pdb"))
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    structures = [path for path in found if path.name.lower().endswith(_SUFFIXES) and not path.name.startswith(".")]
    if len(structures) > 1:
        names = ", ".join(path.name for path in structures[:5])
        raise UserError(f"{directory / key}: several structures of the chain ({names}); keep one")
    return structures[0] if structures else None


def names_of(entry: str) -> str:
    """The names that an entry's file may have, for messages."""
    return f"{entry}.cif, .mmcif or .pdb, or pdb{entry.lower()}.ent, gzipped or not"


def entry_of(path: Path) -> str:
    """The entry that a structure file's name stands for: `pdb1abc.ent.gz` -> `1abc`."""
    name = Path(path.name.removesuffix(".gz"))
    return name.stem[3:] if name.suffix.lower() == ".ent" and name.stem.lower().startswith("pdb") else name.stem


def _candidates(entry: str) -> Iterator[str]:
    """The names that an entry's file may have, relative to the folder."""
    lower = entry.lower()
    names = [f"{name}{suffix}" for name in dict.fromkeys((entry, lower, entry.upper())) for suffix in _SUFFIXES]
    names += [f"pdb{lower}{suffix}" for suffix in _LEGACY_SUFFIXES]
    yield from names
    # Ids of 4 letters, and extended ones such as pdb_00001abc: the two letters before the last.
    if len(entry) >= 4:
        yield from (f"{lower[-3:-1]}/{name}" for name in names)
