"""The job of one worker: it makes one shard of a feature store, and the account of it.

The account (`building/<table>_<number>.json`) is written after the shard, so a shard with an account is complete. A chain that
cannot be read is named in it with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from evodsp.data.complexes.pairing import RuleName
from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.formats import parse_obsolete
from evodsp.data.index.chain_table import day_of
from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import TEMPLATES
from evodsp.data.sources.opening import Unit, open_files
from evodsp.data.sources.record_codec import encode_chain, encode_record
from evodsp.data.sources.shards import LONGEST_KEY, ShardEntry, shard_name, write_shard
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import FileFormatError, UserError
from evodsp.files import write_text
from evodsp.printing import one_line

BUILDING = "building"
"""Sub-folder of an unfinished store, which holds the plan and the accounts."""

_Record = tuple[str, bytes, int, int]


@dataclass(frozen=True)
class BuildInputs:
    """The folders and files that a store is made of; all paths are absolute, for workers in other folders."""

    alignment_dir: str
    structure_dir: str
    template_structure_dir: str | None
    obsolete: str | None
    min_plddt: float | None = None
    pairing: RuleName | None = None
    """The rule by which rows of complexes are paired; None: the store is of single chains."""
    assembly: str | None = None
    """The biological assembly of complexes; None: the asymmetric unit."""

    @property
    def kind(self) -> Kind:
        """What the records are of."""
        return CHAINS if self.pairing is None else COMPLEXES


@dataclass(frozen=True)
class Part:
    """A shard to make. `names`: the keys of its chains or complexes, or the entries of its template structures."""

    store: Path
    table: str
    number: int
    names: tuple[str, ...]
    inputs: BuildInputs

    @property
    def shard(self) -> Path:
        return self.store / self.table / shard_name(self.number)

    @property
    def account(self) -> Path:
        return self.store / BUILDING / f"{self.table}_{self.number:05}.json"

    @property
    def current(self) -> Path:
        """The file that holds the name which a worker is reading."""
        return self.account.with_suffix(".current")


@dataclass(frozen=True)
class Account:
    """The outcome of a part. `failed`: the names that could not be read, with reasons. `entries`: the entries that template
    hits of its records name."""

    records: list[ShardEntry]
    failed: list[tuple[str, str]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Account:
        """The account in a file. Raises FileFormatError for a file that is no account."""
        try:
            content = json.loads(path.read_text())
            records = [ShardEntry(**entry) for entry in content["records"]]
            return cls(records, [(name, reason) for name, reason in content["failed"]], content["entries"])
        except (ValueError, TypeError, KeyError) as error:
            raise FileFormatError(path, "not the account of a shard; remove it, and its shard is made again") from error


def build_part(part: Part, deadly: Mapping[str, str] = MappingProxyType({})) -> int:
    """Make the shard and its account. Returns the number of its names.

    `deadly`: the names to leave out because reading them ended a worker before, with reasons. Raises OSError if the shard
    cannot be written.
    """
    failed: dict[str, str] = {}
    entries: set[str] = set()
    read = _read_templates if part.table == TEMPLATES else _read_record

    def records() -> Iterator[_Record]:
        for name in part.names:
            part.current.write_bytes(name.encode("utf-8", "surrogateescape"))  # a folder's name may be any bytes
            if name in deadly:
                failed[name] = deadly[name]
                continue
            try:
                yield from read(name, part.inputs, entries)
            except (UserError, ValueError, MemoryError) as error:
                failed[name] = one_line(str(error)) or "not enough memory"

    written = write_shard(part.shard, records())
    account = Account(written, list(failed.items()), sorted(entries))
    write_text(part.account, json.dumps(asdict(account)))
    part.current.unlink(missing_ok=True)
    return len(part.names)


def _read_record(key: str, inputs: BuildInputs, entries: set[str]) -> list[_Record]:
    _check_key(key)
    parsed = opened(inputs).parsed(key, with_hits=inputs.template_structure_dir is not None)
    entries |= _entries_of([hit for hits in parsed.hits.values() for hit in hits], inputs)
    released = day_of(parsed.assembly.chains[0].release_date)
    return [(key, encode_record(parsed), len(parsed.assembly), released)]


def _read_templates(pdb_id: str, inputs: BuildInputs, _: set[str]) -> list[_Record]:
    assert inputs.template_structure_dir is not None
    folder = _structures(inputs.template_structure_dir)
    released = day_of(folder.release_date(pdb_id))
    chains = folder.structure(pdb_id).chains.values()
    records = [(f"{pdb_id}_{chain.chain_id}", encode_chain(chain), len(chain), released) for chain in chains]
    for key, *_rest in records:
        _check_key(key)
    return records


def _entries_of(hits: Collection[TemplateHit], inputs: BuildInputs) -> set[str]:
    """The entries with a structure that stand for those of `hits`: these entries themselves, or their successors
    (`select_hits`)."""
    if not hits:
        return set()
    assert inputs.template_structure_dir is not None
    folder, obsolete = _structures(inputs.template_structure_dir), obsolete_entries(inputs.obsolete)
    found = {
        pdb_id if _has(folder, pdb_id) else obsolete.get(pdb_id, pdb_id) for pdb_id in {hit.pdb_id for hit in hits}
    }
    return {pdb_id for pdb_id in found if pdb_id is not None and _has(folder, pdb_id)}


def _has(folder: StructureFolder, pdb_id: str) -> bool:
    return folder.has_structure(f"{pdb_id}_A")


def _check_key(key: str) -> None:
    if len(key.encode()) > LONGEST_KEY or "/" in key or "\0" in key:
        raise UserError(f"'{key[:LONGEST_KEY]}' cannot be stored: a key has at most {LONGEST_KEY} bytes, and no slash")


# A worker process builds many parts, so the folders that it opened stay open.


@lru_cache(maxsize=1)
def opened(inputs: BuildInputs) -> ChainFiles | ComplexFiles:
    """The files that the records of a store are made of."""
    unit = Unit() if inputs.pairing is None else Unit(COMPLEXES, inputs.assembly, inputs.pairing)
    return open_files(inputs.alignment_dir, inputs.structure_dir, unit=unit, min_plddt=inputs.min_plddt)


@lru_cache(maxsize=1)
def _structures(directory: str) -> StructureFolder:
    return StructureFolder(directory)


@lru_cache(maxsize=1)
def obsolete_entries(path: str | None) -> dict[str, str | None]:
    """The withdrawn entries of obsolete.dat with their successors; none without a file."""
    return {} if path is None else parse_obsolete(path)
