"""A feature store: records that were parsed once (`evodsp data build`), read as training needs them.

    <store>/store.json     version, what a record is of, checksums of the indices, obsolete entries
    <store>/chains/        a table (`evodsp.data.sources.shards`) of records of single chains
    <store>/complexes/     in its place, one of records of assemblies
    <store>/templates/     a table of structures, of the entries that the hits name; absent without templates

`<store>` is a path, or any address that fsspec knows (`s3://…`, `gs://…`, `https://…`), if its package is installed.
Samples are the same, bit by bit, as those that are made from the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from evodsp.data.complexes.pairing import RULES, PairingRule, say_query_paired
from evodsp.data.index.metadata import ChainFacts, facts_of_chains
from evodsp.data.records import CHAINS, COMPLEXES, KINDS, ONE_OF, Assembly, Chain, Kind, Structure
from evodsp.data.sources.parsed import Parsed
from evodsp.data.sources.record_codec import decode_chain, decode_record
from evodsp.data.sources.shards import Table
from evodsp.data.sources.store import Lacking
from evodsp.data.templates.filters import HitLimits
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import FileFormatError, UserError, nearest

FORMAT_VERSION = 2
DESCRIPTION = "store.json"
TEMPLATES = "templates"
_BUILT_WITH: dict[Kind, str] = {CHAINS: "without --complexes", COMPLEXES: "with --complexes true"}
_MOST_COMPARED = 10_000
"""The nearest name of a misspelt chain is looked for among at most this many."""

R = TypeVar("R")


class FeatureStore:
    """A feature store opened for reading. Pickling transfers its address, and opens it there.

    `kind`: what its records have to be of. `warn`: is told of chains without rows for pairing, and what such rows are.
    Raises UserError if there is none, if another version of evodsp made it, if its records are of another kind, or if its
    indices are damaged.
    """

    unknown: Lacking = "record"
    index = structure_dir = None
    """A store is its own index, and has the structures in its records."""

    def __init__(self, address: str, kind: Kind = CHAINS, warn: Callable[[str, str], None] = say_query_paired) -> None:
        self.address, self.kind, self._warn = address, kind, warn
        try:
            system, folder = url_to_fs(address)
            description = json.loads(system.cat_file(f"{folder}/{DESCRIPTION}"))
        except ImportError as error:
            # fsspec's words name a package, but no command; its cause is the import that failed.
            package = getattr(error.__cause__, "name", None) or error.name
            fix = f"; run: pip install {package}" if package else ""
            raise UserError(f"{address}: {' '.join(str(error).split())}{fix}") from error
        except OSError as error:
            raise UserError(
                f"{address}: no feature store there ({DESCRIPTION}: {getattr(error, 'strerror', None) or error}); check the "
                "address, or make the store with 'evodsp data build'"
            ) from error
        except (ValueError, RecursionError) as error:
            message = "not the description of a feature store; check the address, or copy the store again"
            raise FileFormatError(f"{address}/{DESCRIPTION}", message) from error
        if (version := entry_of(address, description, "format_version", int)) != FORMAT_VERSION:
            fix = "use a newer evodsp" if version > FORMAT_VERSION else "build the store again with 'evodsp data build'"
            raise UserError(f"{address}: has format version {version}, this evodsp reads {FORMAT_VERSION}; {fix}")
        tables = entry_of(address, description, "tables", dict)
        for other in KINDS:
            if other in tables and other != self.kind:
                raise UserError(
                    f"{address}: a feature store of {other}, but samples are made of {self.kind} here; give another store, or "
                    f"build one {_BUILT_WITH[self.kind]}"
                )
        self.obsolete: dict[str, str | None] = entry_of(address, description, "obsolete", dict)
        """Withdrawn entries among the templates, with their successors."""
        self.plan: dict[str, Any] = entry_of(address, description, "plan", dict)
        """What the store was made of."""
        self._records = Table(system, f"{folder}/{self.kind}", entry_of(address, tables, self.kind, str))
        self.structures = None
        """The templates' structures; None if the store was built without them."""
        if TEMPLATES in tables:
            self.structures = StoredStructures(
                address, Table(system, f"{folder}/{TEMPLATES}", entry_of(address, tables, TEMPLATES, str)), self.kind
            )
        self.rule: PairingRule | None = None
        """The rule by which rows of different chains are paired; None for single chains."""
        if kind == COMPLEXES:
            self.rule = RULES.get(named := entry_of(address, self.plan, "pairing", str))
            if self.rule is None:
                message = f"rows are paired by '{named}', not by {' or '.join(RULES)}; use a newer evodsp"
                raise FileFormatError(f"{address}/{DESCRIPTION}", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.kind, self._warn)

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.address}')"

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object, /) -> bool:
        return key in self._records

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return self._records.keys()

    def parsed(self, key: str, with_hits: bool = False) -> Parsed:
        """The record, with the hits of template searches if they are wanted. Raises UserError, with the nearest key, if the
        store does not have it or if it is damaged. Warns of chains without rows for pairing, as files do."""
        parsed = self._decoded(key, lambda data: decode_record(data, with_hits))
        for own in parsed.chains:
            if self.rule is not None and own.pairing is None:
                self._warn(f"{self.address}: {key} chain {own.query.name}", self.rule.names)
        return parsed

    def assembly_of(self, key: str) -> Assembly:
        """The chains of the record. Raises UserError as `parsed` does."""
        return self._decoded(key, lambda data: decode_record(data, with_hits=False)).assembly

    def chain(self, key: str) -> Chain:
        """The first chain of the record. Raises UserError as `parsed` does."""
        return self.assembly_of(key).chains[0]

    def sequences_of(self, key: str) -> tuple[str, ...]:
        return tuple(chain.sequence for chain in self.assembly_of(key).chains)

    def facts(self, key: str) -> ChainFacts:
        return facts_of_chains(self.assembly_of(key).chains)

    @property
    def min_plddt(self) -> float | None:
        """The pLDDT below which atoms of predicted structures are masked; None for experiments."""
        return self.plan.get("min_plddt")

    @property
    def assembly(self) -> str | None:
        """The biological assembly of complexes; None: the asymmetric unit."""
        return self.plan.get("assembly")

    def _decoded(self, key: str, decode: Callable[[bytes], R]) -> R:
        """The record of a key. Raises UserError, with the nearest key, if there is none, or if it is damaged."""
        data = self._records.read(key)
        if data is None:
            names = self.keys() if len(self) <= _MOST_COMPARED else []
            raise UserError(
                f"{self.address}: no {ONE_OF[self.kind]} '{key}' in the feature store; leave it out or build the store with it."
                f"{nearest(key, names)}"
            )
        return decoded(self.address, key, decode, data)

    def stale_sources(self) -> list[str]:
        """None: a store is checked against its checksums when it is opened."""
        return []

    def name_of(self, key: str) -> str:
        return key  # as it was built

    def structure_lookup(self) -> Callable[[str], bool]:
        return frozenset(self.keys()).__contains__  # every record has a structure

    def absence(self, key: str, lacking: Lacking) -> str:
        fix = "leave it out or build the store with it"
        return f"no {ONE_OF[self.kind]} '{key}' in {self.address}; {fix}.{nearest(key, self.keys())}"

    def template_source(self, max_date: date | None = None) -> TemplateSource | None:
        """The source of templates; None if the store was built without them. `max_date`: latest release date."""
        if self.structures is None:
            return None
        return TemplateSource(self.structures, HitLimits(max_date=max_date), self.obsolete)


class StoredStructures:
    """Template structures of a feature store. Pickling transfers only its address."""

    def __init__(self, address: str, table: Table, kind: Kind) -> None:
        self._address, self._table, self._kind = address, table, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened_structures, (self._address, self._kind)

    def has_structure(self, key: str) -> bool:
        """Whether the store has the chain's entry (whether the entry has the chain is not checked)."""
        return bool(self._table.chains_of(key.rpartition("_")[0]))

    def chain(self, key: str) -> Chain:
        """The chain. Raises UserError if its entry does not have it, or is not in the store."""
        data = self._table.read(key)
        if data is None:
            raise UserError(
                f"{self._address}: no chain '{key}' among the templates of the feature store; build it again"
            )
        return decoded(self._address, key, decode_chain, data)

    def structure(self, pdb_id: str) -> Structure:
        """All protein chains of the entry. Raises UserError if it is not in the store."""
        chains = [self.chain(key) for key in self._table.chains_of(pdb_id)]
        if not chains:
            raise UserError(
                f"{self._address}: no entry '{pdb_id}' among the templates of the feature store; build it again"
            )
        first = chains[0]
        by_id = {chain.chain_id: chain for chain in chains}
        return Structure(first.pdb_id, first.method, first.resolution, first.release_date, by_id)

    def release_date(self, pdb_id: str) -> date | None:
        """The release date of the entry, None if it is not known."""
        return next((self._table.released(key) for key in self._table.chains_of(pdb_id)), None)


def _reopened_structures(address: str, kind: Kind) -> StoredStructures:
    structures = FeatureStore(address, kind).structures
    assert structures is not None  # the store had them when this was pickled
    return structures


def decoded(address: str, key: str, decode: Callable[[bytes], R], data: bytes) -> R:
    """The record `data` of a key. Raises FileFormatError where `decode` raises ValueError."""
    try:
        return decode(data)
    except ValueError as error:
        raise FileFormatError(address, f"the record of '{key}' is {error}; build the store again") from error


def entry_of(address: str, description: Any, name: str, kind: type) -> Any:
    value = description.get(name) if isinstance(description, dict) else None
    if not isinstance(value, kind):
        message = f"'{name}' is missing or has another type; copy the feature store again"
        raise FileFormatError(f"{address}/{DESCRIPTION}", message)
    return value
