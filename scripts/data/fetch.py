"""Fetch public training data for a list of chains: alignments, structures, and the lists that go with them.

    python scripts/data/fetch.py alignments --chains FILE --output DIR     OpenProteinSet (AWS' registry of open data)
    python scripts/data/fetch.py structures --chains FILE --output DIR     a divided mirror of the PDB
    python scripts/data/fetch.py lists --output DIR                        identical chains, clusters, obsolete entries

`--base` replaces the public address by a mirror, or by a local folder with the same files. A fetch that was stopped is
continued by the same command: whole files are kept, and half of a file is completed. Sizes and MD5 sums are compared where the
server lists them, and gzip archives are read to their end. What is missing is listed in `missing.txt`; the exit code is then 1.

`evodsp.download` fetches: fsspec's http needs a server that lists folders, and s3fs brings the whole of botocore.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from evodsp import download
from evodsp.data.chain_list import chain_list
from evodsp.data.layout import split_key
from evodsp.download import BLOCK, fetch_file
from evodsp.errors import UserError
from evodsp.output import output_errors
from evodsp.progress import progress
from evodsp.reading.answers import PASSING, BadAnswerError, ask, content_of

OPENPROTEINSET = "https://openfold.s3.amazonaws.com"
STRUCTURES = "https://files.rcsb.org/pub/pdb/data/structures/divided/mmCIF"
LISTS = {
    "duplicate_pdb_chains.txt": OPENPROTEINSET,
    "clusters-by-entity-40.txt": "https://cdn.rcsb.org/resources/sequence/clusters",
    "obsolete.dat": "https://files.wwpdb.org/pub/pdb/data/status",
}
_LISTING_S, _LISTING_BYTES = 300.0, 1 << 26
"""What a page of a listing, of 1,000 files, may take."""
_S3 = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True)
class Wanted:
    """A file to fetch. `name`: relative to the base. `size`, `md5`: if the server lists them."""

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
    return download.opened(f"{wanted.base}/{quote(wanted.name)}", start)


def listed(base: str, folder: str, output: Path) -> list[Wanted]:
    """The files below `folder`, with sizes and, of single-part objects of S3, MD5 sums. `output`: where the folder is kept."""
    if not is_address(base):
        root = Path(base) / folder
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return [
            Wanted(base, str(path.relative_to(base)), output / path.relative_to(root), path.stat().st_size)
            for path in paths
        ]
    found: list[Wanted] = []
    token = ""
    while True:
        query = {"list-type": "2", "prefix": f"{folder}/", **({"continuation-token": token} if token else {})}
        address = f"{base}/?{urlencode(query)}"
        page = ElementTree.fromstring(content_of(base, ask(address, _LISTING_S, _LISTING_BYTES), _LISTING_BYTES))
        for entry in page.iter(f"{_S3}Contents"):
            name, tag = entry.findtext(f"{_S3}Key", ""), entry.findtext(f"{_S3}ETag", "").strip('"')
            relative = Path(name).relative_to(folder)
            if not name.endswith("/") and ".." not in relative.parts:
                size = int(entry.findtext(f"{_S3}Size", "0"))
                found.append(Wanted(base, name, output / relative, size, None if "-" in tag else tag))
        token = page.findtext(f"{_S3}NextContinuationToken", "")
        if not token:
            return found


def fetch(wanted: Wanted) -> str | None:
    """Fetch one file, unless it is there. Returns why it is missing, or None."""
    if wanted.target.is_file() and wanted.size in (None, wanted.target.stat().st_size):
        return None
    return fetch_file(partial(opened, wanted), wanted.target, wanted.size, partial(_damage, wanted))


def _damage(wanted: Wanted, path: Path) -> str | None:
    """What is wrong with a fetched file, or None."""
    if wanted.md5 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "md5").hexdigest() != wanted.md5:
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
    """OpenProteinSet's files of each chain, of the PDB or of its UniClust30 clusters; or why there are none."""
    for key in chains:
        folder = "pdb" if "_" in key else "uniclust30"
        try:
            yield (
                listed(base, f"{folder}/{key}", output / "alignments" / key)
                or f"{key}: no alignments in {base}/{folder}"
            )
        except (*PASSING, BadAnswerError, ElementTree.ParseError) as error:
            yield f"{key}: {base} does not list it ({error})"


def structures(base: str, chains: Sequence[str], output: Path) -> list[Wanted]:
    """The mmCIF files of the chains' entries."""
    entries = sorted({split_key(key)[0].lower() for key in chains})
    folder = output / "mmcif_files"
    return [Wanted(base, f"{entry[1:3]}/{entry}.cif.gz", folder / f"{entry}.cif.gz") for entry in entries]


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("alignments", "structures", "lists"))
    parser.add_argument("--chains", help="text file with one chain per line; not for lists")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to fill: alignments/, mmcif_files/, or the lists"
    )
    parser.add_argument("--base", help="address of a mirror, or a local folder, in place of the public address")
    parser.add_argument("--jobs", type=int, default=8, help="files that are fetched at a time (8)")
    chosen = parser.parse_args(words)
    if (chosen.chains is None) != (chosen.what == "lists"):
        parser.error("--chains is needed for alignments and structures, and for nothing else")
    if chosen.jobs < 1:
        parser.error(f"--jobs is {chosen.jobs}, but must be at least 1")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    chosen = options(words)
    try:
        with output_errors(chosen.output):
            return run(chosen)
    except UserError as error:
        print(f"fetch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fetch: interrupted; the same command continues", file=sys.stderr)
        return 130


def run(chosen: argparse.Namespace) -> int:
    """Fetch what was chosen. Returns 1 if something is missing."""
    base = None if chosen.base is None else chosen.base.rstrip("/")
    if base is not None and not is_address(base) and not Path(base).is_dir():
        raise UserError(f"--base {base}: no such folder; give a folder, or an address that begins with https://")
    missing: list[str] = []
    wanted: list[Wanted] = []
    if chosen.what == "lists":
        wanted = [Wanted(base or public, name, chosen.output / name) for name, public in LISTS.items()]
    elif chosen.what == "structures":
        wanted = structures(base or STRUCTURES, chain_list(chosen.chains), chosen.output)
    else:
        chains = chain_list(chosen.chains)
        with progress("listing chains", len(chains)) as advance:
            for found in alignments(base or OPENPROTEINSET, chains, chosen.output):
                if isinstance(found, str):
                    missing.append(found)
                else:
                    wanted += found
                advance(1)
    chosen.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(chosen.jobs) as threads, progress("files", len(wanted)) as advance:
        file_of = {threads.submit(fetch, file): file for file in wanted}
        for done in as_completed(file_of):
            if (reason := done.result()) is not None:
                missing.append(f"{file_of[done].base}/{file_of[done].name}: {reason}")
            advance(1)
    listing = chosen.output / "missing.txt"
    listing.unlink(missing_ok=True)
    if missing:
        listing.write_text("".join(f"{line}\n" for line in sorted(missing)))
        print(f"{len(missing)} missing, listed in {listing}; the first: {min(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
