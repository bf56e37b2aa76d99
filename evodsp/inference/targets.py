"""The targets of a prediction: the records of the inputs, paired with their alignments before a model is loaded.

A record's alignments are a folder, and files beside it, of its name, as for training; a complex has those of its chains. A
record without any is predicted from its sequence alone.

Inputs are FASTA, A3M and CSV files, folders of the first two, and standard input. A file is A3M if its name says so (.a3m,
.a3m.gz): its first sequence is the query, its name the record's, and the file is the record's alignment. It is a table of
sequences if its name says so (.csv, .tsv). Everything else is FASTA. Of a folder, files are read whose names say that they
are FASTA or A3M. Standard input is A3M if its rows are aligned (`name_if_a3m`); then the record has the name of its first
sequence.

A record is a complex if there is ':' between its chains, if its A3M file is ColabFold's alignment of a complex, or if all
records of a file are to be one complex, which has the file's name.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from evodsp.data.complexes.pairing import BY_ENTRY, BY_SPECIES, PairingRule, file_of_pairs, files_for_pairing
from evodsp.data.formats import SUBSTITUTES, check_name, query_of_complex, read_fasta, read_sequence_table
from evodsp.data.formats.alignments import name_if_a3m, query_of_a3m
from evodsp.data.formats.fasta import FastaRecord
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
from evodsp.inference.config import Pairing
from evodsp.inference.results import RecordFailure
from evodsp.inference.structure_files import MOST_CHAINS, chain_name
from evodsp.packaged import where_packaged
from evodsp.reading.text_files import text_blocks

STANDARD_INPUT = Path("-")
_FASTA = (".fasta", ".fa", ".faa", ".fas")
_A3M = (".a3m",)
_TABLE = (".csv", ".tsv")
_ALONE = "predicted from its sequence alone, which is much less accurate."
_UNIPROT = ("sp", "tr")
_PDB = re.compile(r"[0-9][A-Za-z0-9]{3}_[0-9]+")
_SHORTEST_OF_BASES = 16
"""Shorter sequences of these letters may well be peptides."""


@dataclass(frozen=True)
class InputRecord:
    """A sequence or a complex to predict, as it was given."""

    query: ProteinSequence
    """Of a complex: the sequences of all chains, joined."""
    alignment: Path | None
    """The A3M file that it is the first row of; None for FASTA and tables."""
    notes: tuple[str, ...]
    """Lines for the log: the user has to know them about this record."""
    piped: bytes | None = None
    """The content of `alignment` if it is no file, but standard input."""
    chains: tuple[ProteinSequence, ...] = ()
    """The chains of a complex; () for a single chain. Chain A of the record x is x_A; one that was a record keeps its name."""


def read_inputs(inputs: Sequence[Path], one_complex: bool = False) -> tuple[list[InputRecord], list[RecordFailure]]:
    """The records of all inputs, in the order in which they are given (files of a folder by name); and a failure for each
    broken one. `one_complex`: whether the records of each FASTA file or table are the chains of one complex.

    A file that cannot be read is a RecordFailure under its path. Raises UserError if an input does not exist, is given twice,
    or is a folder without a file to read.
    """
    records: list[InputRecord] = []
    failures: list[RecordFailure] = []
    places: dict[str, str] = {}
    for path in _files(inputs):
        try:
            found = list(_records(path, one_complex))
        except UserError as error:
            failures.append(RecordFailure(str(path), str(error)))
            continue
        for name, place, record in found:
            reason = str(record) if isinstance(record, UserError) else None
            if reason is None and name in places:
                reason = f"{place}: the name '{name}' is that of the record at {places[name]}; rename one of the two"
            if reason is not None:
                failures.append(RecordFailure(name or place, reason))
            elif isinstance(record, InputRecord):
                places[name] = place
                records.append(record)
    return records, failures


@contextmanager
def as_files(inputs: Sequence[Path], words: Sequence[str]) -> Iterator[tuple[tuple[Path, ...], list[str]]]:
    """The inputs and the command line for processes that have no standard input: a file holds what this one's had.

    Raises UserError if the command line does not name standard input by the word '-'.
    """
    if STANDARD_INPUT not in inputs:
        yield tuple(inputs), list(words)
        return
    if "-" not in words:
        raise UserError(
            "several ranks read standard input only if the command line says '-'; give it there, or give a file"
        )
    with tempfile.TemporaryDirectory() as folder:
        data = _standard_input()
        file = Path(folder) / (_piped_a3m(data) or Path("standard_input.fasta")).name
        file.write_bytes(data)
        yield (
            tuple(file if path == STANDARD_INPUT else path for path in inputs),
            [str(file) if word == "-" else word for word in words],
        )


def _files(inputs: Sequence[Path]) -> list[Path]:
    """The files to read. Raises UserError as `read_inputs` does."""
    files = [file for path in inputs for file in ([path] if path == STANDARD_INPUT else _files_of(path))]
    file, times = Counter(file.resolve() if file != STANDARD_INPUT else file for file in files).most_common(1)[0]
    if times > 1:
        raise UserError(f"{'standard input (-)' if file == STANDARD_INPUT else file} is given twice; give it once")
    return files


def is_sequence(given: object) -> bool:
    """Whether a value is the letters of a sequence, and not a path: upper-case letters, blanks, '*', ':' between chains; and no
    such file."""
    if not isinstance(given, str):
        return False
    letters = "".join(given.split()).removesuffix("*").replace(":", "")
    return letters.isalpha() and letters.isascii() and letters.isupper() and not exists(given)


def exists(path: str) -> bool:
    """Whether there is a file or folder of this name."""
    try:
        return Path(path).exists()
    except OSError:  # too long for a file's name: a sequence
        return False


def _files_of(path: Path) -> list[Path]:
    if is_sequence(str(path)):
        raise UserError(
            f"{str(path)[:40]}: no such file or folder; if it is a sequence, write it into a FASTA file: a line '>name', then "
            "the sequence"
        )
    if not path.is_dir():
        if not path.exists():
            fix = where_packaged(path) or "; give FASTA, A3M or CSV files, or '-' for standard input"
            raise UserError(f"{path}: no such file or folder{fix}")
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if _kind(file, _FASTA + _A3M) and _is_file_or_broken(file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not files:
        names = ", ".join((*_FASTA, *_A3M))
        raise UserError(
            f"{path}: no file of this folder is FASTA or A3M ({names}); its sub-folders are not searched, "
            "give the one that holds them"
        )
    return files


def _is_file_or_broken(path: Path) -> bool:
    """Whether this is a file, or a link to nothing, which has to be named."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _kind(file: Path, suffixes: Sequence[str]) -> bool:
    name = file.name.lower().removesuffix(".gz")
    return name.endswith(tuple(suffixes)) and not name.startswith(".")


def _records(path: Path, one_complex: bool) -> Iterator[tuple[str, str, InputRecord | UserError]]:
    """The name of each record, its place for messages, and the record. Raises UserError for a file that cannot be read."""
    piped = _standard_input() if path == STANDARD_INPUT else None
    source = path if piped is None else Path("standard input")
    if piped is not None:
        path = _piped_a3m(piped) or path
    if _kind(path, _A3M):
        name = path.name.removesuffix(".gz")[: -len(".a3m")]
        check_name(path, name)
        yield name, str(path), _record_of_a3m(path, name, piped)
        return
    if _kind(path, _TABLE):
        read = read_sequence_table(path)
    else:
        read = list(read_fasta(source, substitute=True, data=piped, several=True))
    if one_complex:
        yield _joined(source if piped is None else Path("standard_input"), read)
        return
    for record in read:
        place, name = f"{source}:{record.line}", clean_name(record.name)
        if isinstance(record.sequence, UserError):
            yield name, place, record.sequence
        else:
            notes = _substitutions() if record.substituted else ()
            notes = (*notes, *_maybe_nucleotides(name, record.sequence.letters))
            if piped is not None and record is read[0]:
                notes = (*notes, *_maybe_an_alignment([other.sequence for other in read]))
            try:
                check_name(source, name, record.line)  # a part of a name that was in order
                chains = _named(name, record.chains)
            except UserError as error:
                yield name, place, error
                continue
            query = ProteinSequence(name, record.sequence.letters)
            yield name, place, InputRecord(query, None, notes, chains=chains)


def _record_of_a3m(path: Path, name: str, piped: bytes | None) -> InputRecord:
    """The record of an A3M file. Raises UserError if the file cannot be read."""
    several = query_of_complex(path, piped)
    chains: tuple[ProteinSequence, ...] = ()
    if several is None:
        letters, alternatives = query_of_a3m(path, text_blocks(path, piped))
    else:
        _check_number(name, sum(several.copies))
        copied = zip(several.sequences, several.copies, strict=True)
        chains = _named(name, [sequence for sequence, copies in copied for _ in range(copies)])
        letters, alternatives = "".join(chain.letters for chain in chains), several.substituted
    notes = (*(_substitutions() if alternatives else ()), *_maybe_nucleotides(name, letters))
    if piped is not None:
        notes = (*notes, f"standard input is A3M: '{name}' and its alignment")
    return InputRecord(ProteinSequence(name, letters), path, notes, piped, chains)


def _joined(path: Path, read: Sequence[FastaRecord]) -> tuple[str, str, InputRecord | UserError]:
    """The complex whose chains are the records of a file: its name, the file, and its record or what is wrong with it."""
    name = path.name.removesuffix(".gz").partition(".")[0]
    chains: list[ProteinSequence] = []
    try:
        check_name(path, name)
        for record in read:
            if isinstance(record.sequence, UserError):
                raise record.sequence
            name_of_chain = clean_name(record.name)
            check_name(path, name_of_chain, record.line)
            one = ProteinSequence(name_of_chain, record.sequence.letters)
            chains += _named(name_of_chain, record.chains) or [one]
        _check_number(name, len(chains))
    except UserError as error:
        return name, str(path), error
    letters = "".join(chain.letters for chain in chains)
    notes = (
        *(_substitutions() if any(record.substituted for record in read) else ()),
        *_maybe_nucleotides(name, letters),
    )
    several = tuple(chains) if len(chains) > 1 else ()
    return name, str(path), InputRecord(ProteinSequence(name, letters), None, notes, chains=several)


def clean_name(name: str) -> str:
    """The name of a record for folders and files, from a database's header with '|' between its parts.

    UniProt's `sp|P61823|RNAS1_BOVIN` is P61823, the PDB's `1ABC_1|Chain` 1ABC_1; of others the parts are joined by '_'.
    """
    parts = [part for part in name.split("|") if part]
    if len(parts) > 1 and parts[0] in _UNIPROT:
        return parts[1]
    if len(parts) > 1 and _PDB.fullmatch(parts[0]):
        return parts[0]
    return "_".join(parts) if parts else name


def _named(name: str, chains: Sequence[str]) -> tuple[ProteinSequence, ...]:
    """The chains of the record `name`. Raises UserError if there are too many."""
    _check_number(name, len(chains))
    return tuple(ProteinSequence(f"{name}_{chain_name(k)}", letters) for k, letters in enumerate(chains))


def _check_number(name: str, chains: int) -> None:
    if chains > MOST_CHAINS:
        raise UserError(f"{name}: {chains:,} chains, but a complex has at most {MOST_CHAINS}; give fewer of them")


def _maybe_nucleotides(name: str, letters: str) -> tuple[str, ...]:
    """A note on a sequence of bases. U has become C by now; some repeats of real proteins have two of the letters."""
    found = set(letters)
    if len(letters) < _SHORTEST_OF_BASES or not found <= set("ACGTNX") or len(found & set("ACGT")) < 3:
        return ()
    return (
        f"'{name}' looks like DNA or RNA: all of its {len(letters)} letters stand for bases (A, C, G, T, U, N). It is "
        "predicted as a protein; if it is a gene, translate it first",
    )


def _maybe_an_alignment(sequences: Sequence[ProteinSequence | UserError]) -> tuple[str, ...]:
    """A note on standard input that has no gaps, but could be an alignment for all that."""
    lengths = {len(sequence) if isinstance(sequence, ProteinSequence) else None for sequence in sequences}
    if len(sequences) < 2 or len(lengths) > 1:
        return ()
    return (
        f"standard input has no gaps, so it is FASTA: its {len(sequences):,} sequences of equal length are predicted one by "
        "one; if they are an alignment, save them as NAME.a3m and give that file",
    )


def _piped_a3m(data: bytes) -> Path | None:
    """The name of a file for standard input that is A3M; None for FASTA. Raises UserError if no file can have the name."""
    name = name_if_a3m(data)
    if name is None:
        return None
    check_name("standard input", name)
    return Path("standard input") / f"{name}.a3m"


def _substitutions() -> tuple[str, ...]:
    letters = ", ".join(f"{letter} as {read_as}" for letter, read_as in SUBSTITUTES.items())
    return (f"letters that are no amino acid: read {letters}; a '*' at the end is left out",)


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise UserError("standard input is closed, but '-' reads it; give a file")
    return sys.stdin.buffer.read()


RULES: Mapping[Pairing, PairingRule | None] = MappingProxyType({"species": BY_SPECIES, "entry": BY_ENTRY, "none": None})
"""Rules that pair rows of different chains, by the option --pairing."""


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
    """Rule that pairs rows of different chains."""
    paired: Path | None = None
    """The rows that a server has paired (`file_of_pairs`), in place of the rule's."""

    @property
    def parts(self) -> tuple[Target, ...]:
        """The chains: of a single chain this target itself."""
        return self.chains or (self,)

    @property
    def is_alone(self) -> bool:
        """Whether there are no alignments at all. The last note says so."""
        return all(one.alignments is None for one in (self, *self.chains))

    @property
    def notes_of_many(self) -> tuple[str, ...]:
        """The notes for a log of many records, where one line says which are alone: of that note what may help, such as the
        name that was meant."""
        *others, last = self.notes or ("",)
        last = last.partition(_ALONE)[2].strip() if self.is_alone else last
        return (*others, last) if last else tuple(others)

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
        """The rule for pairing; None where nothing is paired, or a server has done it."""
        return RULES[self.pairing] if self.pairs and self.paired is None else None

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
            together = [] if self.paired is None else [("paired", content_digest(self.paired))]
            return fingerprint(*((f"{number}/{path.name}", content_digest(path)) for number, path in files), *together)
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
    a sub-folder or files beside its place (<name>.a3m) per record, named as the record or as the header that the name is
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
            paired = target.paired if pairing == "species" else None
            targets.append(replace(target, notes=(*record.notes, *target.notes), pairing=pairing, paired=paired))
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
    note = f"no alignments for '{query.name}'{where}: {_ALONE}"
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
    if alignments is not None and target.pairs and (paired := file_of_pairs(alignments.path, name)).is_file():
        target = replace(target, paired=paired)
    lacking = [one.query.name for one in target.distinct.values() if one.alignments is None]
    notes: tuple[str, ...] = ()
    if lacking:
        where = "" if alignments is None else f" in {alignments.path}"
        each = "" if len(lacking) == 1 else "each is "
        notes = (f"no alignments for {', '.join(lacking)}{where}: {each}{_ALONE}",)
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
