"""Places of the files of chains: names of chains and places of structure files, the files of one chain in a folder of
alignments, and OpenFold's alignment databases.

A chain key is `<entry>_<chain>`, split at its last underscore; the chain is the author's id. A key without an underscore,
such as a UniClust30 cluster of OpenProteinSet, is an entry with a single chain.

In a folder of structures an entry's file has one of these names, gzipped or not, in the folder itself or in the divided
layout of the PDB's mirrors, where entry 1abc lies in `ab/`:

    1abc.cif  1abc.mmcif  1abc.pdb  pdb1abc.ent  pdb_00001abc.cif

Letters may be in either case. In a folder of chain folders, a chain's structure may lie in `<key>/pdb/` or `<key>/cif/`.

Names of chains and of records meet where there is one chain: the structure of the key `my_protein` may be the only chain of
`my_protein.pdb`, and what belongs to the chain `hbC_A` may be called `hbC` where the structure `hbC` has this chain only.

Files lie in the chain's folder (OpenFold), in its sub-folders a3m/, sto/ and hhr/ (OpenProteinSet), or beside the place of
the folder, with the chain's name and a suffix: ColabFold's `<key>.a3m`, OpenFold3's archive `<key>.npz`. All of these are
read. Text files may be gzipped. The alignment database (`evodsp.data.sources.chain_files`) decides by the same file names.

The order of a chain's alignments, and the rows that are taken of each, are those of DeepMind's pipeline
(`parse_alignments`): a complex keeps the first rows of a chain alone.

An index is JSON: `{chain: {"db": file, "files": [[name, offset, length], …]}}`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from evodsp.data.formats import PARSERS, parse_hhr, parse_hmmsearch, parse_preparsed
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.msa import all_monomers, matched_alignments
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.printing import logger, shown
from evodsp.reading.text_files import read_json, unpack

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


_ARCHIVE = ".npz"
BESIDE = (*(f"{suffix}{packed}" for suffix in PARSERS for packed in ("", ".gz")), _ARCHIVE)
"""The names, relative to a chain's folder, of the alignments beside it: the part that follows the chain's key."""
ALIGNMENTS = f"{', '.join(PARSERS)} or {_ARCHIVE}"
"""Suffixes of all alignments, for messages."""
_SUFFIX_OF_A_MEMBER = ".a3m"
"""An archive's alignments have the names of files without suffixes. Their roles are those of such files."""
_SUBFOLDERS = (*(suffix.removeprefix(".") for suffix in PARSERS), "hhr")
_HMMSEARCH = ("hmm_output", "hmmsearch_output", "pdb_hits")
"""Names of hmmsearch's results: OpenFold's, OpenFold3's, AlphaFold-Multimer's."""
SEARCH_RESULTS = f".hhr, {', '.join(f'{name}.sto' for name in _HMMSEARCH[:-1])} or {_HMMSEARCH[-1]}.sto"
"""The names of template searches, for messages."""
_LARGEST_EMPTY = 4096
"""Most bytes that a file without text may have: blank lines, the header of a gzip archive."""
_SEARCHED = (
    "all",
    "env",
    "nofilter",
    "env-nofilter",
    "pairgreedy",
    "pairgreedy-env",
    "paircomplete",
    "paircomplete-env",
)
"""Ends of the names of the folders `<key>_env` in which ColabFold keeps a server's answer, beside the `<key>.a3m` of it."""
_PAIRED = "uniprot_hits"
_NOT_FOR_THE_MSA = (_PAIRED, *_HMMSEARCH)  # for pairing chains of a complex; for templates
_MOST_ROWS = {"uniref90_hits": 10_000, "bfd_": None, "small_bfd_": None, "mgnify_hits": 501}
"""Prefixes of the names of AlphaFold's alignments, in the order of its code, and the most rows that it takes of each,
the query included. Other alignments follow."""
_FIRST_BYTES = 1 << 16
"""Number of first bytes in which an A3M file's first record is looked for before the whole file is parsed."""


def is_alignment(name: str) -> bool:
    """Whether a file of that name is an alignment for the chain's MSA: one of `ALIGNMENTS`, but not hmmsearch's."""
    known = _format(name) in (*PARSERS, _ARCHIVE)
    return name in BESIDE or (known and not name.startswith((".", *_NOT_FOR_THE_MSA)))


def is_for_pairing(name: str) -> bool:
    """Whether a file of that name holds the rows that are paired with those of other chains: uniprot_hits.sto."""
    return name.startswith(_PAIRED) and _format(name) in PARSERS


def may_hold(name: str, reads: Callable[[str], bool]) -> bool:
    """Whether a file of that name holds alignments of a role, or may: an archive has alignments of all roles. `reads`: the
    function that tells from the name of a file whether its alignment has the role."""
    return reads(name) or (is_alignment(name) and _format(name) == _ARCHIVE)


def is_search_result(name: str) -> bool:
    """Whether a file of that name holds template hits: any .hhr (HHsearch), and hmm_output.sto,
    hmmsearch_output.sto and pdb_hits.sto (hmmsearch)."""
    name = name.removesuffix(".gz")
    return not name.startswith(".") and (name.endswith(".hhr") or name.removesuffix(".sto") in _HMMSEARCH)


def is_of_a_chain(name: str) -> bool:
    """Whether a file of that name has one of these roles: only such files are listed and read."""
    return is_alignment(name) or is_for_pairing(name) or is_search_result(name)


def chain_folders(alignment_dir: Path) -> list[str]:
    """The chains that have a folder, or alignments beside the place of one, in a folder of alignments, sorted."""
    found = [item for item in os.scandir(alignment_dir) if not item.name.startswith(".")]
    folders = {item.name for item in found if item.is_dir()}
    files = {chain_of_file(item.name) for item in found if item.name not in folders} - {""}
    searched = {folder for folder in folders if (parts := folder.rpartition("_"))[0] in files and parts[2] in _SEARCHED}
    return sorted(files | (folders - searched))


def chain_of_file(name: str) -> str:
    """The chain whose alignment a file in a folder of alignments is, by its name; '' if it is no alignment."""
    suffix = next((suffix for suffix in BESIDE if name.endswith(suffix)), None)
    return "" if suffix is None or not is_alignment(name) else name.removesuffix(suffix)


def has_files(directory: Path) -> bool:
    """Whether there is a chain's folder, or an alignment beside the place of one."""
    return directory.is_dir() or bool(_beside(directory))


def is_empty_folder(directory: Path) -> bool:
    """Whether a chain's folder is there without any file for alignments or templates: a search found nothing."""
    return directory.is_dir() and not _files(directory)


def file_of_chain(directory: str | Path, name: str) -> Path:
    """The file of a chain's folder with that name relative to it."""
    return Path(f"{directory}{name}") if name in BESIDE else Path(directory) / name


def alignment_files(directory: str | Path) -> list[Path]:
    """The alignments of a chain's folder, in the order of its MSA (`order_in_msa`)."""
    found = [path for path in _files(Path(directory)) if is_alignment(path.name)]
    return sorted(found, key=lambda path: order_in_msa(path.name))


def order_in_msa(name: str) -> int:
    """The place of an alignment among those of a chain, by its file name: DeepMind's order. Others than AlphaFold's share the
    last place, and stay sorted by name."""
    return next((place for place, start in enumerate(_MOST_ROWS) if name.startswith(start)), len(_MOST_ROWS))


def pairing_files(directory: str | Path, reads: Callable[[str], bool] = is_for_pairing) -> list[Path]:
    """The files of a chain's folder with alignments whose rows are paired with those of other chains, and archives, which may
    have some, sorted by file name. `reads`: as for `may_hold`."""
    return [path for path in _files(Path(directory)) if may_hold(path.name, reads)]


def search_result_files(directory: str | Path) -> list[Path]:
    """The template searches of a chain's folder, sorted by file name."""
    return [path for path in _files(Path(directory)) if is_search_result(path.name)]


def files_of_chain(directory: Path) -> dict[str, int]:
    """The alignments (for the MSA and for pairing) and template searches of a chain's folder, sorted by file name: each name,
    relative to the folder, and bytes."""
    found = [path for path in _files(directory) if is_of_a_chain(path.name)]
    beside = _beside(directory)
    return {beside.get(path) or str(path.relative_to(directory)): path.stat().st_size for path in found}


def parse_alignment_file(
    path: str | Path, data: bytes | None = None, reads: Callable[[str], bool] = is_alignment
) -> list[Alignment]:
    """The alignments of a file, parsed by its suffix; an archive holds several. `data`: the file's bytes, if they were read.
    `reads`: as for `may_hold`; of an archive it takes the alignments that it would take as files."""
    kind = _format(Path(path).name)
    if kind == _ARCHIVE:
        return parse_preparsed(path, data, is_wanted=lambda name: reads(f"{name}{_SUFFIX_OF_A_MEMBER}"))
    parse: Callable[[str | Path, bytes | None], Alignment] = PARSERS[kind]
    return [parse(path, data)]


def parse_search_result(path: str | Path, query: ProteinSequence, data: bytes | None = None) -> list[TemplateHit]:
    """The hits of a template search, parsed by its name. `data`: the file's bytes.

    An empty hmm_output.sto has no hits: hmmsearch leaves it if it finds nothing.
    """
    if Path(path).name.removesuffix(".gz").endswith(".hhr"):
        return parse_hhr(path, data)
    is_empty = data == b"" if data is not None else Path(path).is_file() and Path(path).stat().st_size == 0
    return [] if is_empty else parse_hmmsearch(path, data, query=query.letters, listed=all_monomers(query))


def first_record(path: Path) -> bytes:
    """The first record of an A3M file if it is short and not packed, otherwise the whole file."""
    with path.open("rb") as file:
        data = file.read(_FIRST_BYTES)
        second = data.find(b"\n>", data.find(b">") + 1)
        if path.suffix == ".a3m" and data.lstrip().startswith((b">", b"#")) and second > 0:
            return data[: second + 1]
        return data + file.read()


def parse_alignments(
    files: Iterable[tuple[str | Path, bytes | None]], reads: Callable[[str], bool] = is_alignment
) -> list[Alignment]:
    """The alignments of a chain's files (path, and bytes if they were read already), as DeepMind's code joins them:
    uniref90_hits (its first 10,000 rows), bfd_* or small_bfd_*, mgnify_hits (its first 501 rows), then others in the order of
    `files`. `reads`: as for `parse_alignment_file`.

    Empty files are left out: a search without a result leaves them.
    """
    found = [
        alignment
        for path, data in files
        if not _is_empty(path, data)
        for alignment in parse_alignment_file(path, data, reads)
    ]
    return [_without_surplus(one) for one in sorted(found, key=lambda one: order_in_msa(_file_name(one)))]


def _file_name(alignment: Alignment) -> str:
    """The name of the file, or of the member of an archive, that an alignment was read from."""
    return Path(alignment.source.rpartition(":")[2]).name


def _without_surplus(alignment: Alignment) -> Alignment:
    """The rows of an alignment that DeepMind's code takes."""
    rows = next((rows for start, rows in _MOST_ROWS.items() if _file_name(alignment).startswith(start)), None)
    if rows is None or len(alignment) <= rows:
        return alignment
    arrays = alignment.residues[:rows].copy(), alignment.deletions[:rows].copy()  # the others are not kept in memory
    return Alignment(alignment.source, alignment.names[:rows], *arrays)


def read_alignment_dir(directory: str | Path, query: ProteinSequence | None = None) -> list[Alignment]:
    """All alignments of a chain's folder, as `parse_alignments` joins them; none, and a warning, if the folder or all of them
    are empty.

    The first row of each must be the query: `query` if given, else the first file's first row. X matches any letter.

    Raises UserError if the folder is missing or holds other files only, or if a first row is not the query.
    """
    directory = Path(directory)
    if not has_files(directory):
        raise UserError(f"{directory}: no such alignment directory; check the path or run the search for this chain")
    files = alignment_files(directory)
    if not files and (others := _files(directory)):
        found = ", ".join(path.name for path in others[:5])
        raise UserError(
            f"{directory}: no alignment ({ALIGNMENTS}) of the chain here ({found}); run the search for this chain"
        )
    alignments = parse_alignments((path, None) for path in files)
    if not alignments:
        say_query_only(str(directory), "empty alignments" if files else "is empty")
    return matched_alignments(alignments, query)


def read_template_hits(directory: str | Path, query: ProteinSequence) -> list[TemplateHit]:
    """The hits of all template searches of a chain's folder, in the order of the files; empty if there are none.

    Raises UserError if the folder is missing, FileFormatError for a broken file.
    """
    if not has_files(Path(directory)):
        raise UserError(f"{directory}: no such folder of template searches; check the path")
    return [hit for path in search_result_files(directory) for hit in parse_search_result(path, query)]


def _is_empty(path: str | Path, data: bytes | None) -> bool:
    """Whether a file, gzipped or not, has no text. `data`: its bytes, if they were read already."""
    if data is None and Path(path).stat().st_size > _LARGEST_EMPTY:
        return False
    content = Path(path).read_bytes() if data is None else data
    return len(content) <= _LARGEST_EMPTY and not unpack(path, content).strip(b"\0 \t\r\n")


@cache
def say_query_only(where: str, why: str) -> None:
    """Warn, once in a process, that a chain has no alignment."""
    logger(__name__).warning(f"{where}: {why}; the MSA of the chain is its sequence alone")


def _files(directory: Path) -> list[Path]:
    folders = [directory, *(directory / name for name in _SUBFOLDERS)]
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()]
    return sorted([*found, *_beside(directory)], key=lambda path: path.name)


def _beside(directory: str | Path) -> dict[Path, str]:
    """The alignments beside the place of the chain's folder, each with its name relative to that."""
    found = {Path(f"{directory}{suffix}"): suffix for suffix in BESIDE}
    return {path: suffix for path, suffix in found.items() if path.is_file()}


def _format(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


UNIFIED_INDEX_NAME = "super.index"
"""OpenFold's index of all databases of a folder."""
_LARGEST_FILE = 1 << 62


class StoredFile(NamedTuple):
    """A file of a chain, as a part of a database: its name, and its first byte and number of bytes there."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class AlignmentDatabase:
    """One index file and its entries."""

    index: Path
    entries: dict[str, Any]

    def files(self, key: str) -> tuple[str, list[StoredFile]]:
        """(name of the database, alignments and template searches sorted by name) of a chain that the index lists.

        Raises FileFormatError for an entry that is not in OpenFold's format.
        """
        entry = self.entries[key]
        try:
            database = Path(entry["db"]).name
            files = [StoredFile(str(name), int(offset), int(length)) for name, offset, length in entry["files"]]
            if any(not 0 <= number < _LARGEST_FILE for _, *numbers in files for number in numbers):
                raise ValueError("an offset or a length outside of any file")
            if not all(text.isprintable() for text in (key, database, *(file.name for file in files))):
                raise ValueError("no name")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            expected = '{"db": file, "files": [[name, offset, length], …]}'
            message = f"the entry of chain {shown(key)} is not {expected}; make it again"
            raise FileFormatError(self.index, message) from error
        return database, sorted(file for file in files if is_of_a_chain(file.name))


def read_databases(folder: Path) -> list[AlignmentDatabase]:
    """The databases of a folder, none if it holds no index. `super.index` lists the chains of all of them; with it the other
    indices are not read. Raises FileFormatError for a broken index, and for a chain that two of them list."""
    paths = [folder / UNIFIED_INDEX_NAME]
    if not paths[0].is_file():
        paths = sorted(folder.glob("*.index"))
    databases = [AlignmentDatabase(path, _read_entries(path)) for path in paths]
    for first, second in combinations(databases, 2):
        if twice := first.entries.keys() & second.entries.keys():
            message = f"chain {shown(min(twice))} is in {first.index.name} too; remove it from one of the two"
            raise FileFormatError(second.index, message)
    return databases


def read_parts(database: Path, key: str, files: list[StoredFile], index: str) -> Iterator[tuple[str, str, bytes]]:
    """(source for messages, name, content) of files of a database. `index`: the name of the index that lists them, for
    messages."""
    try:
        with database.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for name, offset, length in files:
                if offset + length > size:
                    raise FileFormatError(database, f"ends before '{name}' of chain '{key}' does; copy it again")
                file.seek(offset)
                data = file.read(length)
                yield f"{database}:{key}/{name}", name, data
    except OSError as error:
        raise UserError(f"{database}: cannot be read ({error.strerror}); {index} names it for '{key}'") from error


def _read_entries(path: Path) -> dict[str, Any]:
    entries = read_json(path, "make the index again")
    if not isinstance(entries, dict):
        raise FileFormatError(path, 'expected {chain: {"db": …, "files": …}}; make the index again')
    return entries
