"""The targets of a prediction: the records of the inputs, paired with their alignments before a model is loaded.

A record's alignments are a folder, and files beside it, of its name, as for training; a complex has those of its chains. A
record without any is predicted from its sequence alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from evodsp.data.complexes.pairing import BY_ENTRY, BY_SPECIES, PairingRule, files_for_pairing
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.data.sources.layout import (
    ALIGNMENTS,
    alignment_files,
    chain_folders,
    has_files,
    parse_alignments,
    read_alignment_dir,
)
from evodsp.data.sources.msa import matched_alignments
from evodsp.errors import UserError, nearest
from evodsp.inference.chains import chain_name
from evodsp.inference.config import Pairing
from evodsp.inference.failures import RecordFailure
from evodsp.inference.inputs import InputRecord, clean_name, read_inputs
from evodsp.packaged import where_packaged

RULES: Mapping[Pairing, PairingRule | None] = MappingProxyType({"species": BY_SPECIES, "entry": BY_ENTRY, "none": None})
"""Which rows of different chains are paired, by the option --pairing."""


@dataclass(frozen=True)
class Target:
    """One record, and where its alignments are."""

    query: ProteinSequence
    """Of a complex: the sequences of all chains, joined."""
    alignments: Path | None
    """The place of the record's folder (its files may lie beside it), or a single file; None: predicted from the sequence
    alone. Of a complex: ColabFold's alignment of all of it."""
    notes: tuple[str, ...] = ()
    """Lines for the log: the user has to know them about this record."""
    piped: bytes | None = None
    """The content of `alignments` if it is no file, but standard input."""
    chains: tuple[Target, ...] = ()
    """The chains of a complex, in their order, each with its own alignments; () for a single chain."""
    pairing: Pairing = "species"
    """Which rows of different chains are paired."""

    @property
    def parts(self) -> tuple[Target, ...]:
        """The chains: of a single chain this target itself."""
        return self.chains or (self,)

    @property
    def sequence(self) -> str:
        """The letters of all chains, with ':' between them."""
        return ":".join(part.query.letters for part in self.parts)

    @property
    def distinct(self) -> dict[str, Target]:
        """For each sequence of the chains the first of those that have it, or the first of these with alignments."""
        found: dict[str, Target] = {}
        for part in self.parts:
            known = found.setdefault(part.query.letters, part)
            if known.alignments is None and part.alignments is not None:
                found[part.query.letters] = part
        return found

    @property
    def pairs(self) -> bool:
        """Whether there are rows of different chains that can be paired: chains of one sequence are not paired, and ColabFold's
        alignment of a complex says itself what is."""
        return bool(self.chains) and len(self.distinct) > 1 and self.alignments is None

    @property
    def rule(self) -> PairingRule | None:
        """The rule for pairing; None where nothing is paired."""
        return RULES[self.pairing] if self.pairs else None

    @property
    def folder(self) -> Path | None:
        """The folder of alignments and template searches; None if there is none."""
        single = self.alignments is None or self.piped is not None or self.alignments.is_file()
        return None if single else self.alignments

    @property
    def digest(self) -> str:
        """A fingerprint of the alignments' names and contents, to recognise the inputs of an earlier result."""
        if self.piped is not None and self.alignments is not None:
            return fingerprint((self.alignments.name, hashlib.blake2b(self.piped).hexdigest()))
        if self.chains and self.alignments is None:
            files = [
                (number, path) for number, one in enumerate(self.distinct.values()) for path in one._read_by(self.rule)
            ]
            return fingerprint(*((f"{number}/{path.name}", content_digest(path)) for number, path in files))
        return fingerprint(*((path.name, content_digest(path)) for path in self.files()))

    def _read_by(self, rule: PairingRule | None) -> list[Path]:
        """The alignments of a chain, and the files of it whose rows are paired."""
        paired = [] if rule is None or self.alignments is None else files_for_pairing(self.alignments, rule)
        return list(dict.fromkeys((*self.files(), *paired)))

    def files(self) -> list[Path]:
        """The alignments, in the order in which they are joined."""
        if self.folder is not None:
            return alignment_files(self.folder)
        return [] if self.alignments is None else [self.alignments]

    def read(self) -> list[Alignment]:
        """The alignments; empty if the target is predicted from its sequence alone. Raises UserError if one is broken."""
        if self.folder is not None:
            return read_alignment_dir(self.folder, self.query)
        return matched_alignments(parse_alignments((path, self.piped) for path in self.files()), self.query)


def find_targets(
    inputs: Sequence[Path], alignments: Path | None, one_complex: bool = False, pairing: Pairing = "species"
) -> tuple[list[Target], list[RecordFailure]]:
    """Pair every record of the inputs with its alignments; a record that cannot be predicted becomes a failure.

    `inputs`: the files that `read_inputs` takes; A3M files are alignments themselves. `alignments`: None, or a folder with
    a sub-folder or files beside its place (<name>.a3m, .sto) per record, named as the record or as the header that the name is
    a part of (sp|P61823|RNAS1_BOVIN); the files of a single record may also lie directly in it. The chains of a complex have
    folders or files <name>_<chain>, or those of the chain's name (A, B, …) in the folder <name>; those of a single record may
    also lie directly in `alignments`. `one_complex`: see `read_inputs`. `pairing`: which rows of different chains are paired.
    Raises UserError if a file or folder is missing or of another kind.
    """
    if alignments is not None and alignments.is_file():
        raise UserError(f"{alignments}: is a file, but --alignments takes the folder of alignments; give the folder")
    if alignments is not None and not alignments.is_dir():
        fix = where_packaged(alignments) or "; check --alignments"
        raise UserError(f"{alignments}: no such folder of alignments{fix}")
    records, failures = read_inputs(inputs, one_complex)
    targets: list[Target] = []
    alone = len(records) + len(failures) == 1
    place = None if alignments is None else AlignmentFolder(alignments)
    for record in records:
        query = record.query
        try:
            for chain in record.chains or [query]:
                if not chain.letters.strip("X"):
                    raise UserError(
                        f"{chain.name}: all {len(chain)} residues are X, so there are no atoms to predict; leave it out"
                    )
            target = (_complex if record.chains else _target)(record, place, alone)
            targets.append(replace(target, notes=(*record.notes, *target.notes), pairing=pairing))
        except UserError as error:
            failures.append(RecordFailure(query.name, str(error)))
    return targets, failures


class AlignmentFolder:
    """A folder of alignments, in which records are looked up by name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, name: str, alone: bool = False) -> Path | None:
        """The place of the alignments of the record `name`; None if there are none. `alone`: whether they may lie directly in
        the folder. Raises UserError if two headers of databases have the record's name."""
        if has_files(self.path / name):
            return self.path / name
        headers = self._headers.get(name, ())
        if len(headers) > 1:
            raise UserError(
                f"{self.path}: the alignments {headers[0]} and {headers[1]} may both be those of '{name}'; rename one to {name}"
            )
        if headers:
            return self.path / headers[0]
        return self.path if alone and alignment_files(self.path) else None

    @cached_property
    def _headers(self) -> dict[str, list[str]]:
        """For each clean name the database headers that alignments of earlier searches are called by."""
        found: dict[str, list[str]] = {}
        for name in chain_folders(self.path) if self.path.is_dir() else ():
            if (clean := clean_name(name)) != name:
                found.setdefault(clean, []).append(name)
        return found


def _target(record: InputRecord, alignments: AlignmentFolder | None, alone: bool) -> Target:
    query = record.query
    found = None if alignments is None else alignments.of(query.name, alone)
    if record.alignment is not None:
        others = [] if found is None else [path for path in alignment_files(found) if path != record.alignment]
        notes = (f"{others[0]} is not read: {record.alignment} is the alignment of '{query.name}'",) if others else ()
        return Target(query, record.alignment, notes, record.piped)
    if found is not None:
        # Files of a single record that lie directly in the folder are not called by its name at all.
        by_header = alignments is not None and found not in (alignments.path, alignments.path / query.name)
        return Target(query, found, (f"'{query.name}' has the alignments called {found.name}",) if by_header else ())
    where, close = "", ""
    if alignments is not None:
        stems = {path.name.split(".")[0]: path for path in sorted(alignments.path.iterdir())}
        where, close = f" in {alignments.path}", nearest(query.name, list(stems))
        if query.name in stems:  # an empty folder, or a file of another kind
            close = f" {stems[query.name].name} there holds none: alignments are {ALIGNMENTS} files"
    note = f"no alignments for '{query.name}'{where}: predicted from its sequence alone, which is much less accurate."
    return Target(query, None, (note + close,))


def _complex(record: InputRecord, alignments: AlignmentFolder | None, alone: bool) -> Target:
    """The target of a complex. `alone`: whether there is no other record."""
    name = record.query.name
    if record.alignment is not None:
        chains = tuple(Target(chain, None) for chain in record.chains)
        return Target(record.query, record.alignment, (), record.piped, chains)

    folders = [] if alignments is None else [AlignmentFolder(alignments.path / name), *([alignments] if alone else [])]

    def found(chain: ProteinSequence, letter: str) -> Path | None:
        if alignments is None:
            return None
        named = [alignments.of(one) for one in (chain.name, f"{name}_{letter}")]
        within = [folder.of(letter) for folder in folders]
        # The folder with the name of both the complex and a chain of it may be that of the complex.
        places = (*within, *named) if chain.name == name else (*named, *within)
        return next((path for path in places if path is not None), None)

    chains = tuple(Target(chain, found(chain, chain_name(k))) for k, chain in enumerate(record.chains))
    target = Target(record.query, None, chains=chains)
    lacking = [one.query.name for one in target.distinct.values() if one.alignments is None]
    notes: tuple[str, ...] = ()
    if lacking:
        where = "" if alignments is None else f" in {alignments.path}"
        alone_only = (
            "predicted from its sequence alone" if len(lacking) == 1 else "each is predicted from its sequence alone"
        )
        notes = (f"no alignments for {', '.join(lacking)}{where}: {alone_only}, which is much less accurate.",)
    return replace(target, notes=notes)


def content_digest(path: Path) -> str:
    """A fingerprint of a file's content alone."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def fingerprint(*files: tuple[str, str]) -> str:
    """The fingerprint of files of which names and `content_digest`s are known."""
    total = hashlib.blake2b(digest_size=16)
    for name, content in files:
        total.update(f"{name}\0{content}\0".encode())
    return total.hexdigest()
