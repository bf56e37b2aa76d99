"""Complexes of a feature store: assemblies with their MSAs and template hits, parsed once by `evodsp data build`.

A record has each chain of the assembly with its own coordinates, and the MSAs and hits of each sequence once. Which rows are
paired depends on the pairing rule, so a store is of one rule, as it is of one assembly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evodsp.data.complexes.merging import ChainMsas
from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.complexes.source import RULES, PairingRule, ParsedComplex, RuleName, say_query_paired
from evodsp.data.index.metadata import ChainFacts, facts_of_chains
from evodsp.data.records import Assembly, ProteinSequence
from evodsp.data.sources.feature_store import COMPLEXES, DESCRIPTION, StoredRecords, entry_of
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.record_codec import (
    Arrays,
    chain_arrays,
    chain_of,
    hit_arrays,
    hits_of,
    packed,
    row_arrays,
    rows_of,
    unpacked,
)
from evodsp.errors import FileFormatError, UserError


def encode_complex(parsed: ParsedComplex) -> bytes:
    """The bytes of a complex; equal complexes give equal bytes. Their sequences' MSAs are those of the first chain of each."""
    arrays: Arrays = {}
    header: dict[str, Any] = {
        "pdb_id": parsed.assembly.pdb_id,
        "names": parsed.assembly.names,
        "chains": [],
        "msas": {},
    }
    for number, chain in enumerate(parsed.assembly.chains):
        of_chain, fields = chain_arrays(chain)
        header["chains"].append(fields)
        arrays |= _named(f"chain{number}", of_chain)
    for number, own in enumerate(_of_each_sequence(parsed)):
        name = f"sequence{number}"
        of_hits, hits = hit_arrays(parsed.hits.get(own.query.letters, ()))
        arrays |= _named(name, {**row_arrays(own.msa.msa, own.msa.deletions), "profile": own.msa.profile, **of_hits})
        if own.pairing is not None:
            arrays |= _named(f"{name}.pairing", row_arrays(own.pairing.msa, own.pairing.deletions))
        keys = None if own.pairing is None else own.pairing.keys
        header["msas"][own.query.letters] = {"name": name, "keys": keys, "hits": hits}
    return packed(arrays, header)


def decode_complex(data: bytes, with_hits: bool) -> ParsedComplex:
    """The complex of `encode_complex`, without its hits if they are not wanted. Raises ValueError for other bytes."""
    arrays, header = unpacked(data)
    try:
        assembly = _assembly(arrays, header)
        msas, hits = {}, {}
        for letters, fields in header["msas"].items():
            own, keys = _part(arrays, fields["name"]), fields["keys"]
            pairing = None
            if keys is not None:
                pairing = PairingMsa(*rows_of(_part(arrays, f"{fields['name']}.pairing")), tuple(map(str, keys)))
            msas[letters] = MsaFeatures(*rows_of(own), own["profile"]), pairing
            if with_hits:
                hits[letters] = hits_of(own, fields["hits"])
        chains = (
            ChainMsas(ProteinSequence(name, chain.sequence), *msas[chain.sequence])
            for name, chain in zip(assembly.names, assembly.chains, strict=True)
        )
        return ParsedComplex(assembly, tuple(chains), hits)
    except (KeyError, TypeError, IndexError, AttributeError, UserError) as error:
        raise ValueError(f"not the record of a complex ({error!r})") from error


def _of_each_sequence(parsed: ParsedComplex) -> list[ChainMsas]:
    """The first chain of each sequence."""
    first: dict[str, ChainMsas] = {}
    for own in parsed.chains:
        first.setdefault(own.query.letters, own)
    return list(first.values())


def _assembly(arrays: Arrays, header: dict[str, Any]) -> Assembly:
    chains = (chain_of(_part(arrays, f"chain{number}"), fields) for number, fields in enumerate(header["chains"]))
    return Assembly(header["pdb_id"], tuple(header["names"]), tuple(chains))


def _named(part: str, arrays: Arrays) -> Arrays:
    """The arrays of a part of a record, under names of their own."""
    return {f"{part}/{name}": values for name, values in arrays.items()}


def _part(arrays: Arrays, part: str) -> Arrays:
    """The arrays that `_named` gave names."""
    return {name.removeprefix(f"{part}/"): values for name, values in arrays.items() if name.startswith(f"{part}/")}


class ComplexStore(StoredRecords):
    """A feature store of complexes. `warn`: see `ComplexFiles`."""

    kind = COMPLEXES

    def __init__(self, address: str, warn: Callable[[str, str], None] | None = None) -> None:
        super().__init__(address)
        self._warn = say_query_paired if warn is None else warn
        named = entry_of(address, self.plan, "pairing", str)
        found = next((name for name in RULES if name == named), None)
        if found is None:
            raise FileFormatError(
                f"{address}/{DESCRIPTION}",
                f"rows are paired by '{named}', not by {' or '.join(RULES)}; use a newer evodsp",
            )
        self.pairing: RuleName = found
        """The name of the rule by which rows are paired."""
        self.assembly: str | None = self.plan.get("assembly")
        """The biological assembly of the complexes; None: the asymmetric unit."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self._warn)

    @property
    def rule(self) -> PairingRule:
        """The rule by which rows are paired."""
        return RULES[self.pairing]

    def parsed(self, entry: str, with_hits: bool = False) -> ParsedComplex:
        """The complex, with the hits of template searches if they are wanted. Raises UserError, with the nearest entry, if the
        store does not have it or if its record is damaged. Warns of chains without rows for pairing as `ComplexFiles` does."""
        parsed = self._decoded(entry, lambda data: decode_complex(data, with_hits))
        for own in parsed.chains:
            if own.pairing is None:
                self._warn(f"{self.address}: {entry} chain {own.query.name}", self.rule.names)
        return parsed

    def assembly_of(self, entry: str) -> Assembly:
        """The chains of the complex. Raises UserError as `parsed` does."""
        return self._decoded(entry, lambda data: decode_complex(data, with_hits=False)).assembly

    def facts(self, entry: str) -> ChainFacts:
        """See `Store`. Raises UserError as `parsed` does."""
        return facts_of_chains(self.assembly_of(entry).chains)


def check_complex_store(store: ComplexStore, assembly: str | None, pairing: str) -> None:
    """Raise UserError if the store was built with another assembly or pairing rule than a run has in its `data` block."""
    for name, built, wanted in (("assembly", store.assembly, assembly), ("pairing", store.pairing, pairing)):
        if built != wanted:
            shown, asked = ("null" if value is None else value for value in (built, wanted))
            raise UserError(
                f"data.store is {store.address}, built with --{name} {shown}, but data.{name} is {asked}; set it to {shown}, "
                f"or build a store with --{name} {asked}"
            )
