"""Opening records: files in two folders, or a feature store, of single chains or of complexes.

A complex is an entry, such as `1ao7`: `<structure_dir>/1ao7.cif`. The alignments of its chains lie where those of single
chains do (`evodsp.data.sources.chain_files`), such as `<alignment_dir>/1ao7_A/`; chains with one sequence need them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

from evodsp.config import ArrangementName
from evodsp.data.complexes.pairing import BY_SPECIES, RULES, PairingRule, RuleName, say_query_paired
from evodsp.data.formats.mmcif import read_assembly, read_confidence
from evodsp.data.index.data_index import DataIndex, in_words
from evodsp.data.index.metadata import ChainFacts, facts_of_chains
from evodsp.data.records import CHAINS, COMPLEXES, Assembly, Kind
from evodsp.data.sources.chain_files import ChainFiles, Lacking
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.layout import StructureListing, split_key
from evodsp.data.sources.parsed import Parsed, Searched, joined_parts
from evodsp.data.sources.structures import StructureFolder, sure_residues
from evodsp.errors import UserError, nearest
from evodsp.printing import quoted


class ComplexFiles:
    """Complexes of a folder of alignments and a folder of structures. Construction reads no file.

    `assembly`: the biological assembly that is taken; None: the asymmetric unit. `index`: the index of both folders; with it no
    folder is listed, entries that have a chain without alignments are not among its keys, and a chain without alignments has
    those of an identical chain. `warn`: is told of chains without rows for pairing, and what such rows are. `min_plddt`: as for
    `ChainFiles`.
    Raises UserError if a folder does not exist, or if the index is of another assembly.
    """

    kind = COMPLEXES
    unknown: Lacking = "alignments"

    def __init__(
        self,
        alignment_dir: str | Path,
        structure_dir: str | Path,
        assembly: str | None = "1",
        rule: PairingRule = BY_SPECIES,
        index: DataIndex | None = None,
        warn: Callable[[str, str], None] = say_query_paired,
        min_plddt: float | None = None,
    ) -> None:
        self.alignment_dir, self.assembly, self.rule, self.index = Path(alignment_dir), assembly, rule, index
        self._chains = ChainFiles(alignment_dir, structure_dir, index)
        self._warn, self.min_plddt = warn, min_plddt
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
        now_at = {"alignment_dir": self.alignment_dir, "structure_dir": self.structure_dir}
        return [] if self.index is None else self.index.stale_sources(now_at)

    def name_of(self, key: str) -> str:
        """The entry itself: entries have one name."""
        return key

    def structure_lookup(self) -> Callable[[str], bool]:
        """Lookup for which the index is read, or the folder listed, once."""
        if self.index is not None:
            return frozenset(compress(self.index.keys[:], self.index.has_structure())).__contains__
        return StructureListing(self.structure_dir).has_entry

    def absence(self, key: str, lacking: Lacking) -> str:
        is_unknown = lacking == self.unknown
        what, where = ("alignments of a chain", self.alignment_dir) if is_unknown else ("structure", self.structure_dir)
        return (
            f"no {what} of the complex '{key}' in {where}; samples of a multimer are entries, such as 1abc, with "
            f"folders such as 1abc_A: add it or leave the complex out.{nearest(key, self.keys()) if is_unknown else ''}"
        )

    def sequences_of(self, entry: str) -> tuple[str, ...]:
        """Sequences of the entry's chains. Raises UserError as `assembly_of` does."""
        return tuple(chain.sequence for chain in self.assembly_of(entry).chains)

    def facts(self, entry: str) -> ChainFacts:
        """Facts of the entry's chains. Raises UserError as `assembly_of` does."""
        return facts_of_chains(self.assembly_of(entry).chains)

    def assembly_of(self, entry: str) -> Assembly:
        """The chains of the complex, from its structure.

        Raises UserError if its file is missing or has other chains than the index says, or if a chain is a prediction without a
        residue of `min_plddt`; FileFormatError for a broken file.
        """
        row = None if self.index is None else self.index.row(entry)
        listed = None if self.index is None or row is None else self.index.structure(row)
        path = self._structures.file_of_entry(entry) if listed is None else self.structure_dir / listed
        assembly = read_assembly(path, self.assembly)
        if self.index is not None and row is not None and listed is not None:
            self._check_listed(path, assembly, self.index, row)
        if self.min_plddt is None:
            return assembly
        plddt = {chain.chain_id: read_confidence(path, chain.chain_id) for chain in assembly.chains}
        chains = (sure_residues(chain, plddt[chain.chain_id], self.min_plddt) for chain in assembly.chains)
        return replace(assembly, chains=tuple(chains))

    @staticmethod
    def _check_listed(path: Path, assembly: Assembly, index: DataIndex, row: int) -> None:
        """Raise UserError if a file has other chains than the index says."""
        listed = index.chains(row)
        read = dict(zip(assembly.names, (chain.sequence for chain in assembly.chains), strict=True))
        said = dict(zip(listed.names, listed.sequences, strict=True))
        if said and read != said:
            name = next((name for name in (*read, *said) if read.get(name) != said.get(name)), assembly.names[0])
            found, known = (f"is {quoted(one[name])}" if name in one else "is not there" for one in (read, said))
            raise UserError(
                f"{path}: chain {name} {found}, but in {index.path} it {known}; make it again: {index.command}"
            )

    def parsed(self, entry: str, with_hits: bool = False) -> Parsed:
        """The complex, with the hits of template searches if they are wanted. Raises UserError if its file is missing, if a
        sequence has no alignments, or if an alignment's first row is another sequence, and as `assembly_of` does;
        FileFormatError for a broken file.
        """
        assembly = self.assembly_of(entry)
        keys, letters = zip(*((f"{entry}_{chain.chain_id}", chain.sequence) for chain in assembly.chains), strict=True)
        owners = () if self.index is None else self.index.chains(self.index.row(entry)).owners
        if not owners:
            owners = owners_of(keys, letters, lambda key: key if self._chains.has_alignments(key) else "")
        searched: dict[str, Searched] = {}
        for chain, key, owner in zip(assembly.chains, keys, owners, strict=True):
            if not owner:
                names = ", ".join(dict.fromkeys(compress(keys, (one == chain.sequence for one in letters))))
                raise UserError(
                    f"{self.alignment_dir}: no alignments of {names}; run the search for one of these chains, or leave the "
                    "complex out"
                )
            if key == owner or chain.sequence not in searched:
                searched[chain.sequence] = Searched(chain.query(key), owner)
        return joined_parts(self._chains, assembly, list(searched.values()), with_hits, self.rule, self._warned)

    def _warned(self, owner: str, names: str) -> None:
        self._warn(str(self.alignment_dir / owner), names)


def owners_of(keys: Sequence[str], sequences: Sequence[str], owner_of: Callable[[str], str]) -> tuple[str, ...]:
    """For each chain of a record the chain whose alignments it has, '' if there is none. `owner_of`: the same for a key.

    It is the first chain of its sequence that has alignments of its own, else one that lends them to a chain of its sequence.
    """
    found: dict[str, str] = {}
    distinct = dict.fromkeys(zip(keys, sequences, strict=True))
    for is_lent in (False, True):
        for key, letters in distinct:
            if letters not in found and (owner := owner_of(key)) and (is_lent or owner == key):
                found[letters] = owner
    return tuple(found.get(letters, "") for letters in sequences)


KIND_OF: dict[ArrangementName, Kind] = {"monomer": CHAINS, "multimer": COMPLEXES}
"""Kind of the keys in the data of each arrangement of the model."""
Records = ChainFiles | ComplexFiles | FeatureStore


@dataclass(frozen=True)
class Unit:
    """Kind of the keys, and of complexes the assembly that is read and the rule that pairs rows."""

    kind: Kind = CHAINS
    assembly: str | None = "1"
    pairing: RuleName = "species"


def open_files(
    alignment_dir: str | Path,
    structure_dir: str | Path,
    index: str | Path | None = None,
    unit: Unit = Unit(),
    min_plddt: float | None = None,
    warn: Callable[[str, str], None] = say_query_paired,
) -> ChainFiles | ComplexFiles:
    """The records in two folders. `index`: of both. Other arguments: see `ChainFiles` and `ComplexFiles`.

    Raises UserError if a folder or the index is missing, or if the index is of another unit.
    """
    opened = None if index is None else DataIndex(index, unit.kind)
    if unit.kind == CHAINS:
        return ChainFiles(alignment_dir, structure_dir, opened, min_plddt)
    rule = RULES[unit.pairing]
    return ComplexFiles(alignment_dir, structure_dir, unit.assembly, rule, opened, warn, min_plddt)


def open_store(
    address: str,
    unit: Unit = Unit(),
    warn: Callable[[str, str], None] = say_query_paired,
    setting: str = "data.store",
) -> FeatureStore:
    """The feature store at an address, which `setting` names. Raises UserError if there is none, or if it was built of another
    unit than the run's."""
    store = FeatureStore(address, unit.kind, warn)
    if unit.kind == COMPLEXES:
        names = (("assembly", store.assembly, unit.assembly), ("pairing", store.plan["pairing"], unit.pairing))
        for name, built, wanted in names:
            if built != wanted:
                shown, asked = ("null" if value is None else value for value in (built, wanted))
                raise UserError(
                    f"{setting} is {address}, built with --{name} {shown}, but data.{name} is {asked}; set it to {shown}, "
                    f"or build a store with --{name} {asked}"
                )
    return store
