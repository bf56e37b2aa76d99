"""The files of one chain in a folder of alignments: its alignments and its template searches are told apart and read.

Files lie in the chain's folder (OpenFold), in its sub-folders a3m/, sto/ and hhr/ (OpenProteinSet), or beside the place of the
folder, with the chain's name and a suffix: ColabFold's `<key>.a3m`, OpenFold3's archive `<key>.npz`. All of these are read.
Text files may be gzipped. The alignment database (`evodsp.data.sources.chain_files`) decides by the same file names.

The order of a chain's alignments, and the rows that are taken of each, are those of DeepMind's pipeline (`parse_alignments`): a
complex keeps the first rows of a chain alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from evodsp.data.formats import PARSERS, parse_hhr, parse_hmmsearch, parse_preparsed
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.query_check import all_monomers, matched_alignments
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError
from evodsp.printing import logger
from evodsp.reading.text_files import unpack

_ARCHIVE = ".npz"
BESIDE = (*(f"{suffix}{packed}" for suffix in PARSERS for packed in ("", ".gz")), _ARCHIVE)
"""The names, relative to a chain's folder, of the alignments beside it: the part that follows the chain's key."""
ALIGNMENTS = f"{', '.join(PARSERS)} or {_ARCHIVE}"
"""Suffixes of all alignments, for messages."""
_SUFFIX_OF_A_MEMBER = ".a3m"
"""An archive's alignments have the names of files without suffixes. Their roles are those of such files."""
_SUBFOLDERS = ("a3m", "sto", "hhr")
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
"""How the names of AlphaFold's alignments begin, in the order in which its code joins them, and the most rows that it takes of
each, the query included. Other alignments follow."""
_FIRST_BYTES = 1 << 16
"""Number of first bytes in which an A3M file's first record is looked for before the whole file is parsed."""


def is_alignment(name: str) -> bool:
    """Whether a file of that name is an alignment for the chain's MSA: one of `ALIGNMENTS`, but not hmmsearch's."""
    known = _format(name) in (*PARSERS, _ARCHIVE)
    return name in BESIDE or (known and not name.startswith((".", *_NOT_FOR_THE_MSA)))


def is_for_pairing(name: str) -> bool:
    """Whether a file of that name holds the rows that are paired with those of other chains: uniprot_hits.sto or .a3m."""
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
