"""Names of chains, and where the structure files of an entry may lie.

A chain key is `<entry>_<chain>`, split at its last underscore; the chain is the author's id. A key without an underscore, such
as a UniClust30 cluster of OpenProteinSet, is an entry with a single chain.

In a folder of structures an entry's file has one of these names, gzipped or not, in the folder itself or in the divided layout
of the PDB's mirrors, where entry 1abc lies in `ab/`:

    1abc.cif  1abc.mmcif  1abc.pdb  pdb1abc.ent

Letters may be in either case. In a folder of chain folders, a chain's structure may lie in `<key>/pdb/` or `<key>/cif/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evodsp.errors import UserError

_SUFFIXES = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz", ".pdb", ".pdb.gz")
_LEGACY_SUFFIXES = (".ent", ".ent.gz")


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
    return next((path for path in _candidates(directory, entry) if path.is_file()), None)


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


def _candidates(directory: Path, entry: str) -> Iterator[Path]:
    lower = entry.lower()
    names = [f"{name}{suffix}" for name in dict.fromkeys((entry, lower, entry.upper())) for suffix in _SUFFIXES]
    names += [f"pdb{lower}{suffix}" for suffix in _LEGACY_SUFFIXES]
    yield from (directory / name for name in names)
    # Ids of 4 letters, and extended ones such as pdb_00001abc: the two letters before the last.
    divided = directory / lower[-3:-1]
    if len(entry) >= 4 and divided.is_dir():
        yield from (divided / name for name in names)
