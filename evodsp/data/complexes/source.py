"""Complexes from files: the chains of an assembly, their MSAs, and the MSAs whose rows are paired.

A complex is an entry, such as `1ao7`: `<structure_dir>/1ao7.cif`. The alignments of its chains lie where those of single chains
do (`evodsp.data.sources.chain_files`), such as `<alignment_dir>/1ao7_A/`; chains with one sequence need them once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Literal

import numpy as np

from evodsp.data.complexes.keys import RowKey, entry_of_row, uniprot_species
from evodsp.data.complexes.merging import ChainMsas
from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.index.complex_index import ComplexIndex, in_words
from evodsp.data.index.metadata import ChainFacts, facts_of_chains
from evodsp.data.records import Alignment, Assembly, ProteinSequence, RowNames
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.chain_folder import is_alignment, is_for_pairing, may_hold, pairing_files, parse_alignments
from evodsp.data.sources.layout import StructureListing, split_key
from evodsp.data.sources.msa import MsaFeatures, merge_alignments, query_only
from evodsp.data.sources.query_check import matched_alignments, matched_hits
from evodsp.data.sources.store import Lacking
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError, nearest
from evodsp.geometry.alphabet import encode
from evodsp.printing import logger
from evodsp.reading.quoting import quoted

_NAMED = 10
"""Chains without rows for pairing that a process names in warnings."""


@dataclass(frozen=True)
class PairingRule:
    """Which rows of different chains belong together."""

    key: RowKey
    """The key of a row; rows with equal keys are paired."""
    reads: Callable[[str], bool]
    """Whether the rows of a file of that name are paired."""
    names: str
    """The files and the names of their rows, for messages."""


BY_SPECIES = PairingRule(
    uniprot_species, is_for_pairing, "uniprot_hits.sto or .a3m, with names such as tr|A0A024R161|A0A024R161_HUMAN"
)
"""AlphaFold-Multimer's: rows of `uniprot_hits`, by the species of their UniProt names."""
BY_ENTRY = PairingRule(entry_of_row, is_alignment, "any alignment, with names such as 1ao7_A")
"""Rows of all alignments, by the entry that their names begin with: `1ao7_A` is paired with `1ao7_B`. For families whose
complexes are known and whose rows have the names of chains."""
RuleName = Literal["species", "entry"]
RULES: dict[RuleName, PairingRule] = {"species": BY_SPECIES, "entry": BY_ENTRY}
"""The rules by the names that settings have for them."""


@dataclass(frozen=True)
class ParsedComplex:
    """An assembly and the MSAs of its chains, in the same order.

    `hits`: by sequence, the hits of its template searches; empty if they were not asked for.
    """

    assembly: Assembly
    chains: tuple[ChainMsas, ...]
    hits: Mapping[str, tuple[TemplateHit, ...]] = field(default_factory=dict)


class ComplexFiles:
    """Complexes of a folder of alignments and a folder of structures. Construction reads no file.

    `assembly`: the biological assembly that is taken; None: the asymmetric unit. `index`: the index of both folders; with it no
    folder is listed, entries that have a chain without alignments are not among its keys, and a chain without alignments has
    those of an identical chain. `warn`: is told of chains without rows for pairing, and what such rows are; None: the user is.
    Raises UserError if a folder does not exist, or if the index is of another assembly.
    """

    unknown: Lacking = "alignments"

    def __init__(
        self,
        alignment_dir: str | Path,
        structure_dir: str | Path,
        assembly: str | None = "1",
        rule: PairingRule = BY_SPECIES,
        index: ComplexIndex | None = None,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self.alignment_dir, self.assembly, self.rule, self.index = Path(alignment_dir), assembly, rule, index
        self._chains = ChainFiles(alignment_dir, structure_dir)
        self._warn = say_query_paired if warn is None else warn
        self._structures = StructureFolder(structure_dir)
        if index is not None:
            index.check_assembly(assembly)

    @property
    def assembly_name(self) -> str:
        """The assembly that is read, for messages."""
        return in_words(self.assembly)

    @property
    def structure_dir(self) -> Path:
        """The folder of structures."""
        return self._structures.directory

    def keys(self) -> list[str]:
        """The entries that have alignments of a chain, sorted. Whether all of their chains have some is not checked."""
        if self.index is not None:
            return list(compress(self.index.keys[:], self.index.has_alignments()))
        chains = self._chains.keys()
        return sorted({split_key(key)[0] for key in chains if key.strip("_") == key})

    def stale_sources(self) -> list[str]:
        """See `Store`."""
        now_at = {"alignment_dir": self.alignment_dir, "structure_dir": self.structure_dir}
        return [] if self.index is None else self.index.stale_sources(now_at)

    def name_of(self, key: str) -> str:
        """See `Store`: entries have one name."""
        return key

    def structure_lookup(self) -> Callable[[str], bool]:
        """See `Store`: the index is read, or the folder listed, once."""
        if self.index is not None:
            return frozenset(compress(self.index.keys[:], self.index.has_structure())).__contains__
        listing = StructureListing(self.structure_dir)
        return lambda entry: listing.of_entry(entry) is not None

    def absence(self, key: str, lacking: Lacking) -> str:
        """See `Store`."""
        is_unknown = lacking == self.unknown
        what, where = ("alignments of a chain", self.alignment_dir) if is_unknown else ("structure", self.structure_dir)
        return (
            f"no {what} of the complex '{key}' in {where}; samples of a multimer are entries, such as 1abc, with "
            f"folders such as 1abc_A: add it or leave the complex out.{nearest(key, self.keys()) if is_unknown else ''}"
        )

    def facts(self, entry: str) -> ChainFacts:
        """See `Store`. Raises UserError as `assembly_of` does."""
        return facts_of_chains(self.assembly_of(entry).chains)

    def assembly_of(self, entry: str) -> Assembly:
        """The chains of the complex, from its structure.

        Raises UserError if its file is missing or has other chains than the index says; FileFormatError for a broken file.
        """
        file = None if self.index is None else self.index.structure(self.index.row(entry))
        if self.index is None or file is None:
            return self._structures.assembly(entry, self.assembly)
        assembly, listed = (
            read_assembly(self.structure_dir / file, self.assembly),
            self.index.complex(self.index.row(entry)),
        )
        read = dict(zip(assembly.names, (chain.sequence for chain in assembly.chains), strict=True))
        said = dict(zip(listed.names, listed.sequences, strict=True))
        if said and read != said:
            name = next((name for name in (*read, *said) if read.get(name) != said.get(name)), assembly.names[0])
            found, known = (f"is {quoted(one[name])}" if name in one else "is not there" for one in (read, said))
            raise UserError(
                f"{self.structure_dir / file}: chain {name} {found}, but in {self.index.path} it {known}; make it again: "
                f"{self.index.command}"
            )
        return assembly

    def parsed(self, entry: str, with_hits: bool = False) -> ParsedComplex:
        """The complex, with the hits of template searches if they are wanted. Raises UserError if its file is missing, if a
        sequence has no alignments, or if an alignment's first row is another sequence, and as `assembly_of` does;
        FileFormatError for a broken file.
        """
        assembly = self.assembly_of(entry)
        lent = {} if self.index is None else self.index.complex(self.index.row(entry)).lenders
        of_sequence: dict[str, list[ProteinSequence]] = {}
        queries = []
        for name, chain in zip(assembly.names, assembly.chains, strict=True):
            query = ProteinSequence(chain.key, chain.sequence, alternatives=chain.alternatives)
            of_sequence.setdefault(chain.sequence, []).append(query)
            queries.append(ProteinSequence(name, chain.sequence))
        searched = {letters: self._searched(chains, lent.get(letters)) for letters, chains in of_sequence.items()}
        msas = {letters: self._msas(*found) for letters, found in searched.items()}
        hits = {letters: self._hits(*found) for letters, found in searched.items()} if with_hits else {}
        return ParsedComplex(assembly, tuple(ChainMsas(query, *msas[query.letters]) for query in queries), hits)

    def _searched(self, chains: Sequence[ProteinSequence], lender: str | None) -> tuple[ProteinSequence, str]:
        """Of chains with one sequence the first that has alignments, and the name of their folder. `lender`: the chain that has
        them by the index."""
        owners = [(chain, lender or chain.name) for chain in chains]
        query, owner = next((one for one in owners if self._chains.has_alignments(one[1])), (None, ""))
        if query is None:
            names = ", ".join(dict.fromkeys(chain.name for chain in chains))
            raise UserError(
                f"{self.alignment_dir}: no alignments of {names}; run the search for one of these chains, or leave the "
                "complex out"
            )
        return query, owner

    def _hits(self, query: ProteinSequence, owner: str) -> tuple[TemplateHit, ...]:
        """The hits of the template searches beside the alignments of a chain."""
        return matched_hits(self._chains.template_hits(owner, query), query)

    def _msas(self, query: ProteinSequence, owner: str) -> tuple[MsaFeatures, PairingMsa | None]:
        """The MSA of a chain, and the one for pairing."""
        alignments = self._chains.alignments(owner, query)
        paired = self._chains.alignments_for_pairing(owner, query, self.rule.reads)
        return msa_of(alignments, query), _pairing_of(paired, self.rule, str(self.alignment_dir / owner), self._warn)


def msa_of(alignments: Sequence[Alignment], query: ProteinSequence) -> MsaFeatures:
    """The MSA of a chain; without alignments the query alone."""
    return merge_alignments(alignments) if alignments else query_only(encode(query.letters))


def files_for_pairing(place: Path, rule: PairingRule) -> list[Path]:
    """The files of a chain whose rows are paired. `place`: the folder of its alignments, or its only alignment."""
    if place.is_file():
        return [place] if may_hold(place.name, rule.reads) else []
    return pairing_files(place, rule.reads)


def pairing_msa(place: Path, query: ProteinSequence, rule: PairingRule) -> PairingMsa | None:
    """The rows of a chain that are paired with those of others; None, and a warning, if there are none.

    `place`: as for `files_for_pairing`. Raises UserError if a first row is not the query.
    """
    files = files_for_pairing(place, rule)
    paired = matched_alignments(parse_alignments(((path, None) for path in files), rule.reads), query)
    return _pairing_of(paired, rule, str(place), say_query_paired)


def _pairing_of(
    alignments: Sequence[Alignment], rule: PairingRule, place: str, warn: Callable[[str, str], None]
) -> PairingMsa | None:
    """The rows for pairing of the alignments of one chain, which lie in `place`.

    None, and a warning, if there are no rows, or none whose name has a key.
    """
    pairing = PairingMsa.of(joined(alignments), rule.key) if alignments else None
    if pairing is None or not any(pairing.keys[1:]):
        warn(place, rule.names)
        return None
    # Queries are paired in any case; with keys of their own they would be paired twice.
    return dataclasses.replace(pairing, keys=("", *pairing.keys[1:]))


@cache
def say_query_paired(folder: str, names: str) -> None:
    """Warn, once in a process, that a chain has no rows for pairing. After some chains further ones are not named."""
    said = say_query_paired.cache_info().currsize
    if said < _NAMED:
        logger(__name__).warning(f"{folder}: no rows to pair with other chains ({names}); its query alone is paired")
    elif said == _NAMED:
        logger(__name__).warning(
            f"{folder}: no rows to pair with other chains either; further chains like it are not named here ('evodsp data "
            "doctor' names all)"
        )


def joined(alignments: Sequence[Alignment]) -> Alignment:
    """One alignment with the rows of several that have the same query."""
    return Alignment(
        alignments[0].source,
        RowNames(name for alignment in alignments for name in alignment.names),
        np.concatenate([alignment.residues for alignment in alignments]),
        np.concatenate([alignment.deletions for alignment in alignments]),
    )
