"""`evodsp data fetch`: public training data for a list of chains: alignments, structures, and the lists that go with them.

Whole files are kept, and half of a file is completed. Sizes and MD5 sums are compared where the server lists them, and gzip
archives are read to their end. `evodsp.reading.answers` fetches: fsspec's http needs a server that lists folders, and s3fs
brings the whole of botocore.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from evodsp.data.config import DataFetchConfig
from evodsp.data.samples.selection import chain_list, chains_and_lines
from evodsp.data.sources.layout import split_key
from evodsp.errors import FileFormatError, UserError
from evodsp.files import digest_of_file
from evodsp.printing import progress, shown, tell
from evodsp.reading import answers
from evodsp.reading.answers import BLOCK, PASSING, BadAnswerError, ask, content_of, fetch_file

OPENPROTEINSET = "https://openfold.s3.amazonaws.com"
STRUCTURES = "https://files.rcsb.org/pub/pdb/data/structures/divided/mmCIF"
LISTS = {
    "duplicate_pdb_chains.txt": OPENPROTEINSET,
    "clusters-by-entity-40.txt": "https://cdn.rcsb.org/resources/sequence/clusters",
    "obsolete.dat": "https://files.wwpdb.org/pub/pdb/data/status",
}
_LISTING_S, _LISTING_BYTES = 300.0, 1 << 26
"""The most seconds and bytes that a page of a listing, of 1,000 files, may take."""
_MOST_PAGES = 100
"""The most pages, of 1,000 files, that the listing of one chain may have; OpenProteinSet has fewer than ten files a chain."""
_NAME = re.compile(r"\w[\w.-]*")
"""A name in a list of chains, which becomes the name of a folder. A list is often somebody else's."""
_S3 = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True)
class Wanted:
    """A file to fetch. `name`: its path relative to the base. `size`, `md5`: its bytes and MD5 sum, if the server lists
    them."""

    base: str
    name: str
    target: Path
    size: int | None = None
    md5: str | None = None


def is_address(base: str) -> bool:
    """Whether the base is an address, not a local folder."""
    return base.startswith(("http://", "https://"))


def opened(wanted: Wanted, start: int) -> tuple[BufferedIOBase, int]:
    """The file, and the position from which it is read: `start`, or 0 if the server sends whole files only."""
    if not is_address(wanted.base):
        file = (Path(wanted.base) / wanted.name).open("rb")
        return file, file.seek(start)
    return answers.opened(f"{wanted.base}/{quote(wanted.name)}", start)


def listed(base: str, folder: str, output: Path) -> list[Wanted]:
    """The files below `folder`, with sizes and, of single-part objects of S3, MD5 sums. `output`: the local folder that keeps
    them."""
    if not is_address(base):
        root = Path(base) / folder
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return [
            Wanted(base, str(path.relative_to(base)), output / path.relative_to(root), path.stat().st_size)
            for path in paths
        ]
    found: list[Wanted] = []
    token = ""
    tokens = {token}
    while True:
        query = {"list-type": "2", "prefix": f"{folder}/", **({"continuation-token": token} if token else {})}
        address = f"{base}/?{urlencode(query)}"
        page = ElementTree.fromstring(content_of(base, ask(address, _LISTING_S, _LISTING_BYTES), _LISTING_BYTES))
        for entry in page.iter(f"{_S3}Contents"):
            name, tag = entry.findtext(f"{_S3}Key", ""), entry.findtext(f"{_S3}ETag", "").strip('"')
            size = entry.findtext(f"{_S3}Size", "0")
            if not name.startswith(f"{folder}/") or ".." in Path(name).parts:
                raise BadAnswerError(f"it lists {shown(name)}, which is not below {folder}/")
            if not re.fullmatch(r"[0-9]{1,15}", size):
                raise BadAnswerError(f"it lists {shown(size)} as the size of {shown(name)}")
            if not name.endswith("/"):
                relative = name.removeprefix(f"{folder}/").lstrip("/")
                found.append(Wanted(base, name, output / relative, int(size), None if "-" in tag else tag))
        token = page.findtext(f"{_S3}NextContinuationToken", "")
        if not token:
            return found
        if token in tokens or len(tokens) >= _MOST_PAGES:
            raise BadAnswerError(f"its listing does not end (page {len(tokens):,}, {len(found):,} files)")
        tokens.add(token)


def fetch(wanted: Wanted) -> str | None:
    """Fetch one file, unless it is there. Returns the reason why it is missing, or None."""
    if wanted.target.is_file() and wanted.size in (None, wanted.target.stat().st_size):
        return None
    return fetch_file(partial(opened, wanted), wanted.target, wanted.size, partial(_damage, wanted))


def _damage(wanted: Wanted, path: Path) -> str | None:
    """The fault of a fetched file, or None."""
    if wanted.md5 is not None and digest_of_file(path, "md5") != wanted.md5:
        return "has another MD5 sum"
    if wanted.name.endswith(".gz"):
        try:
            with gzip.open(path) as archive:
                while archive.read(BLOCK):
                    pass
        except (OSError, EOFError, zlib.error) as error:
            return f"is a broken gzip archive ({error})"
    return None


def alignments(base: str, chains: Sequence[str], output: Path) -> Iterable[list[Wanted] | str]:
    """OpenProteinSet's files of each chain (of the PDB, or a UniClust30 cluster), or the reason why there are none."""
    for key in chains:
        folder = "pdb" if "_" in key else "uniclust30"
        try:
            yield (
                listed(base, f"{folder}/{key}", output / "alignments" / key)
                or f"{key}: no alignments in {base}/{folder}"
            )
        # LookupError: an encoding that Python does not know
        except (*PASSING, BadAnswerError, ElementTree.ParseError, LookupError) as error:
            yield f"{key}: {base} does not list it ({error})"


def structures(base: str, chains: Sequence[str], output: Path) -> list[Wanted]:
    """The mmCIF files of the chains' entries."""
    entries = sorted({split_key(key)[0].lower() for key in chains})
    folder = output / "mmcif_files"
    return [Wanted(base, f"{entry[1:3]}/{entry}.cif.gz", folder / f"{entry}.cif.gz") for entry in entries]


def run(settings: DataFetchConfig, words: list[str]) -> int:
    """Fetch the files and return the exit code, 1 if something is missing. `words`: the command line (not needed here)."""
    base = None if settings.base is None else settings.base.rstrip("/")
    if base is not None and not is_address(base) and not Path(base).is_dir():
        raise UserError(f"--base {base}: no such folder; give a folder, or an address that begins with https://")
    try:
        missing = _fetch_all(settings, base)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues") from None
    listing = settings.output / "missing.txt"
    listing.unlink(missing_ok=True)
    if missing:
        listing.write_text("".join(f"{line}\n" for line in sorted(missing)))
        tell(f"{len(missing)} missing, listed in {listing}; the first: {min(missing)}")
    return 1 if missing else 0


def _chains(path: str) -> list[str]:
    """The names in a list. Raises FileFormatError for one that could be no folder's."""
    for key, line in chains_and_lines(path):
        if not _NAME.fullmatch(key):
            message = f"{shown(key)} is no name of a chain, such as 1abc_A, or of a cluster; correct the list"
            raise FileFormatError(path, message, line)
    return chain_list(path)


def _fetch_all(settings: DataFetchConfig, base: str | None) -> list[str]:
    """Fetch the files that `settings` name. Returns a line for each missing file."""
    missing: list[str] = []
    wanted: list[Wanted] = []
    chains = _chains(settings.chains) if settings.chains is not None else []
    if "lists" in settings.what:
        wanted += [Wanted(base or public, name, settings.output / name) for name, public in LISTS.items()]
    if "structures" in settings.what:
        wanted += structures(base or STRUCTURES, chains, settings.output)
    if "alignments" in settings.what:
        with progress("listing chains", len(chains)) as advance:
            for found in alignments(base or OPENPROTEINSET, chains, settings.output):
                if isinstance(found, str):
                    missing.append(found)
                else:
                    wanted += found
                advance(1)
    settings.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(settings.jobs) as threads, progress("files", len(wanted)) as advance:
        file_of = {threads.submit(fetch, file): file for file in wanted}
        for done in as_completed(file_of):
            if (reason := done.result()) is not None:
                missing.append(f"{file_of[done].base}/{file_of[done].name}: {reason}")
            advance(1)
    return missing
