"""Alignments and structures on disk, in OpenFold's and OpenProteinSet's layouts, addressed by chain key.

A chain key is `<pdbid>_<chain>`, split at its last underscore; the chain id is the author's. The alignments of a chain are
the files of the folder `<alignment_dir>/<key>/` and those beside it, such as ColabFold's `<key>.a3m`
(`sources.layout`), or entries of OpenFold's alignment database (`alignment_db_*.db` files and one
`alignment_db.index`). Structures are `<structure_dir>/<pdbid>.cif` or `.pdb`, gzipped or not (`sources.layout`).

A `Store` answers what a run asks: which keys there are, what one lacks, and the facts that are known without a sample. A key
is a chain (`evodsp.data.sources.chain_files`, `evodsp.data.sources.feature_store`), or an entry that stands for the chains
of an assembly (`evodsp.data.sources.opening`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from evodsp.data.complexes.pairing import PairingRule
from evodsp.data.formats.mmcif import read_chain, read_confidence
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import ChainFacts, facts_of_file
from evodsp.data.records import CHAINS, Alignment, Assembly, Chain, Kind, ProteinSequence
from evodsp.data.sources.layout import (
    ALIGNMENTS,
    AlignmentDatabase,
    StructureListing,
    alignment_files,
    chain_folders,
    chain_id_in,
    entry_of,
    file_of_chain,
    first_record,
    has_files,
    is_alignment,
    is_for_pairing,
    is_search_result,
    may_hold,
    pairing_files,
    parse_alignments,
    parse_search_result,
    read_alignment_dir,
    read_databases,
    read_parts,
    read_template_hits,
    say_query_only,
)
from evodsp.data.sources.msa import matched_alignments
from evodsp.data.sources.parsed import Parsed, parse_chain
from evodsp.data.sources.structures import StructureFolder, sure_residues
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError, nearest
from evodsp.geometry.residues import decode

Lacking = Literal["alignments", "structure", "record"]
"""Missing part of a key; in a feature store, its record."""


@runtime_checkable
class Store(Protocol):
    """Samples' data by key."""

    @property
    def kind(self) -> Kind:
        """Kind of the keys."""

    @property
    def index(self) -> DataIndex | None:
        """The index of its files; None if it has none."""

    @property
    def structure_dir(self) -> Path | None:
        """The folder of structures; None if there is none."""

    @property
    def unknown(self) -> Lacking:
        """Missing part to report for an unknown key, one that is not among `keys`."""

    def keys(self) -> list[str]:
        """All keys, sorted. Whether files can be read is not checked."""

    def name_of(self, key: str) -> str:
        """The name that the store has a key by: the key, or that of its entry where the names of both meet."""

    def structure_lookup(self) -> Callable[[str], bool]:
        """A function that tells whether one of `keys` has a structure, in time that does not grow with their number."""

    def absence(self, key: str, lacking: Lacking) -> str:
        """The end of a message: that the store has not this part of the key, where it should be, and the fix."""

    def sequences_of(self, key: str) -> tuple[str, ...]:
        """The sequences of the key's chains, from its files. Raises UserError or OSError if they cannot be read."""

    def facts(self, key: str) -> ChainFacts:
        """Facts of the key's structure: sequence, resolution and release date. Raises UserError if it cannot be read."""

    def stale_sources(self) -> list[str]:
        """The sources of the index that have changed since it was made, as 'option path'; none without an index."""


def listed_chain(listing: StructureListing) -> Callable[[str], bool]:
    """A function that tells whether a chain has a structure in a folder that was listed."""

    def has(key: str) -> bool:
        try:
            return listing.has(key)
        except UserError:  # a folder whose name is no chain key
            return False

    return has


class ChainFiles:
    """Alignments and structures by chain key. Construction reads no file; pickling transfers only the paths.

    `alignment_dir`: the folder of chain folders, or of the alignment database. `structure_dir`: the folder of structure
    files; None if there are none (prediction). `index`: the index of both folders; with it no folder is listed and no index
    of a database is parsed, and a chain without alignments has those of an identical chain. `min_plddt`: the structures are
    predictions, with the pLDDT (0 to 100) as B-factors, and atoms of residues below this are masked; None: experiments.
    Raises UserError if a directory does not exist.
    """

    kind = CHAINS
    rule: PairingRule | None = None
    unknown: Lacking = "alignments"

    def __init__(
        self,
        alignment_dir: str | Path,
        structure_dir: str | Path | None = None,
        index: DataIndex | None = None,
        min_plddt: float | None = None,
    ) -> None:
        self.min_plddt = min_plddt
        self.alignment_dir = Path(alignment_dir)
        self.structure_dir = None if structure_dir is None else Path(structure_dir)
        if not self.alignment_dir.is_dir():
            raise UserError(f"{self.alignment_dir}: no such alignment directory; check the path")
        self.index = index
        self._structures = None if self.structure_dir is None else StructureFolder(self.structure_dir)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.alignment_dir, self.structure_dir, self.index, self.min_plddt)

    def __repr__(self) -> str:
        return f"ChainFiles('{self.alignment_dir}', '{self.structure_dir}')"

    def keys(self) -> list[str]:
        """Keys of all chains with alignments, sorted."""
        if self.index is not None:
            return list(compress(self.index.keys[:], self.index.has_alignments()))
        if self._databases:
            return sorted(key for database in self._databases for key in database.entries)
        return chain_folders(self.alignment_dir)

    def name_of(self, key: str) -> str:
        """Name of the chain's files: its entry's, if the chain has no alignments and is alone in the entry's structure."""
        entry, separator, _ = key.rpartition("_")
        if not separator or self._structures is None or self._has_own(key) or not self._has_own(entry):
            return key
        with suppress(UserError):  # said when the chain is read
            return entry if self._structures.is_only_chain(key) else key
        return key

    def has_structure(self, key: str) -> bool:
        """Whether there is a structure file for the chain (whether it has the chain is not checked)."""
        if self.index is not None:
            row = self.index.keys.find(self.name_of(key))
            return row is not None and self.index.structure(row) is not None
        return self._structures is not None and self._structures.has_structure(key)

    def structure_lookup(self) -> Callable[[str], bool]:
        """Lookup for which the index is read, or the folder listed, once."""
        if self.index is not None:
            return frozenset(compress(self.index.keys[:], self.index.has_structure())).__contains__
        if self.structure_dir is not None:
            return listed_chain(StructureListing(self.structure_dir))
        return self.has_structure

    def absence(self, key: str, lacking: Lacking) -> str:
        if lacking == "structure":
            there = [] if self.structure_dir is None else map(entry_of, self.structure_dir.iterdir())
            return f"no structure of chain '{key}' in {self.structure_dir}; add it or leave the chain out.{nearest(key, there)}"
        return (
            f"no alignments of chain '{key}' in {self.alignment_dir}; add its folder or {key}.a3m, or leave the chain out."
            f"{nearest(key, self.keys())}"
        )

    def sequences_of(self, key: str) -> tuple[str, ...]:
        """Sequence of the chain: the first row of its first alignment, otherwise its `query`. Nothing else is read."""
        for path in alignment_files(self.alignment_dir / self.name_of(key)):
            for alignment in parse_alignments([(path, first_record(path))]):
                return (decode(alignment.residues[0]),)
        return (self.query(key).letters,)

    def facts(self, key: str) -> ChainFacts:
        """Facts in the header of the chain's structure. Raises UserError as `chain` does."""
        return facts_of_file(self._structure_file(key), key)[0]

    def chain(self, key: str) -> Chain:
        """The chain's structure. Raises UserError, with the nearest name, if the file or the chain is missing, or if it is a
        prediction without a residue of `min_plddt`."""
        chain = self._whole_chain(key)
        if self.min_plddt is None:
            return chain
        path = self._structure_file(key)
        return sure_residues(chain, read_confidence(path, chain_id_in(path, key)), self.min_plddt)

    def assembly_of(self, key: str) -> Assembly:
        """The chain alone. Raises UserError as `chain` does."""
        return Assembly.of_chain(key, self.chain(key))

    def _whole_chain(self, key: str) -> Chain:
        """The chain with the residues of which a prediction is unsure."""
        path = self._structure_file(key)
        return read_chain(path, chain_id_in(path, key))

    def _structure_file(self, key: str) -> Path:
        folder = self._folder(key)
        if self.index is not None and (name := self.index.structure(self.index.row(self.name_of(key)))) is not None:
            return folder.directory / name
        return folder.file_of(key)

    def _folder(self, key: str) -> StructureFolder:
        if self._structures is None:
            raise UserError(f"chain {key}: no structure directory was given; set it to the folder of .cif files")
        return self._structures

    def parsed(self, key: str, with_hits: bool = False) -> Parsed:
        """The chain, read from its files (`parse_chain`)."""
        return parse_chain(self, key, self.chain(key), with_hits)

    def query(self, key: str) -> ProteinSequence:
        """The chain's sequence: from its structure (SEQRES) if there is one, else the first row of its first alignment."""
        if self.has_structure(key):
            return self._whole_chain(key).query(key)
        alignments = self._read_alignments(key, None)
        if not alignments:
            raise UserError(
                f"chain {key}: its alignments are empty and it has no structure, so its sequence is unknown"
            )
        return ProteinSequence(name=key, letters=decode(alignments[0].residues[0]))

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        """The chain's alignments, in the order of its MSA. The first row of each is checked to be the query.

        `query`: the chain's sequence, if it is known already; otherwise it is read from the structure, if there is one.
        Raises UserError as `read_alignment_dir` does, with the nearest key if the chain has no alignments.
        """
        if query is None and self.has_structure(key):
            query = self.query(key)
        return self._read_alignments(key, query)

    def has_alignments(self, key: str) -> bool:
        """Whether the chain has files of alignments, or an entry of a database or of the index."""
        return self._has_own(self.name_of(key))

    def _has_own(self, key: str) -> bool:
        """Whether there are alignments of this name."""
        if self.index is not None:
            return self.index.alignments_of(key) is not None
        if self._databases:
            return any(key in database.entries for database in self._databases)
        return has_files(self.alignment_dir / key)

    def alignments_for_pairing(
        self, key: str, query: ProteinSequence, reads: Callable[[str], bool] = is_for_pairing
    ) -> list[Alignment]:
        """The chain's alignments whose rows are paired with those of other chains, sorted by file name; none if there are none.

        `query`: the chain's sequence. `reads`: the function that tells from the name of a file whether its rows are paired.
        Raises UserError if a first row is not the query, and as `alignments` does.
        """
        name = self.name_of(key)
        if self.index is not None or self._databases:
            found = parse_alignments(self._files(name, lambda file: may_hold(file, reads)), reads)
        else:
            paths = pairing_files(self.alignment_dir / name, reads)
            found = parse_alignments(((path, None) for path in paths), reads)
        return matched_alignments(found, query)

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        """Hits of the chain's template searches (`SEARCH_RESULTS`), in the order of the files; empty if there are none.

        `query`: the chain's sequence. Raises UserError if the chain is unknown, FileFormatError for a broken file.
        """
        if self.index is None and not self._databases:
            return read_template_hits(self.alignment_dir / self.name_of(key), query)
        return [
            hit
            for source, data in self._files(self.name_of(key), is_search_result)
            for hit in parse_search_result(source, query, data)
        ]

    def stale_sources(self) -> list[str]:
        """The sources of the index that have changed since it was made, as 'option path'; none without an index."""
        if self.index is None:
            return []
        now_at = {"alignment_dir": self.alignment_dir}
        return self.index.stale_sources(
            now_at if self.structure_dir is None else {**now_at, "structure_dir": self.structure_dir}
        )

    def _read_alignments(self, key: str, query: ProteinSequence | None) -> list[Alignment]:
        name = self.name_of(key)
        if self.index is not None or self._databases:
            return self._from_files(name, query)
        directory = self.alignment_dir / name
        if not has_files(directory):
            raise UserError(
                f"{self.alignment_dir}: no alignments of chain '{key}'; add its folder or {key}.a3m, or drop the chain."
                f"{nearest(key, self.keys())}"
            )
        return read_alignment_dir(directory, query)

    @cached_property
    def _databases(self) -> list[AlignmentDatabase]:
        return read_databases(self.alignment_dir)

    def _from_files(self, key: str, query: ProteinSequence | None) -> list[Alignment]:
        files = list(self._files(key, is_alignment))
        listed = None if self.index is None else self.index.alignments_of(key)
        is_empty = listed is not None and listed.is_empty
        if not files and not is_empty:
            where = f"{self.alignment_dir}: no alignment ({ALIGNMENTS}) of chain '{key}' in"
            raise UserError(
                f"{where} the {'database' if self.index is None else 'index'}; make it again or drop the chain"
            )
        alignments = parse_alignments(files)
        if not alignments:
            say_query_only(str(self.alignment_dir / key), "is empty" if is_empty else "empty alignments")
        return matched_alignments(alignments, query)

    def _files(self, key: str, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes | None]]:
        """(source for messages, content or None if it is a file) of a chain's files, sorted by name, from the index or the
        database. `is_wanted`: tells by the name of a file whether it is one of them."""
        if self.index is not None:
            listed, listed_in = self.index.alignments_of(key), self.index.path.name
            if listed is None:
                self.index.row(key)  # it may be unknown
                return
            owner, database, files, _ = listed
        else:
            found = next((database for database in self._databases if key in database.entries), None)
            if found is None:
                indices = ", ".join(database.index.name for database in self._databases)
                raise UserError(
                    f"{self.alignment_dir}: no alignments of chain '{key}' in {indices}; make the index again or drop the "
                    f"chain.{nearest(key, self.keys())}"
                )
            owner, listed_in = key, found.index.name
            database, files = found.files(key)
        wanted = [file for file in files if is_wanted(file_of_chain(owner, file.name).name)]
        if database:
            for source, _, data in read_parts(self.alignment_dir / database, owner, wanted, listed_in):
                yield source, data
        else:
            yield from ((str(file_of_chain(self.alignment_dir / owner, file.name)), None) for file in wanted)
