"""The targets of a prediction: FASTA records paired with their alignments, checked before a model is loaded.

A record's alignments are a folder or a file of its name. A record without any is predicted from its sequence alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from evodsp.data.chain_folder import alignment_files, has_files, parse_alignments, read_alignment_dir
from evodsp.data.parsers import SUBSTITUTES, read_fasta
from evodsp.data.query_check import matched_alignments
from evodsp.data.records import Alignment, ProteinSequence
from evodsp.errors import FileFormatError, UserError, nearest
from evodsp.inference.failures import Failure


@dataclass(frozen=True)
class Target:
    """One FASTA record, and where its alignments are."""

    query: ProteinSequence
    alignments: Path | None
    """A folder, or a single file; None: predicted from the sequence alone."""
    notes: tuple[str, ...] = ()
    """What the user has to know of this record, lines for the log."""

    @property
    def folder(self) -> Path | None:
        """The folder of alignments and template searches; None if there is none."""
        return None if self.alignments is None or self.alignments.is_file() else self.alignments

    def files(self) -> list[Path]:
        """The alignments, sorted by name."""
        if self.folder is not None:
            return alignment_files(self.folder)
        return [] if self.alignments is None else [self.alignments]

    def read(self) -> list[Alignment]:
        """The alignments; empty if the target is predicted from its sequence alone. Raises UserError if one is broken."""
        if self.folder is not None:
            return read_alignment_dir(self.folder, self.query)
        return matched_alignments(parse_alignments((path, None) for path in self.files()), self.query)


def find_targets(fasta: Path, alignments: Path) -> tuple[list[Target], list[Failure]]:
    """Pair every record of `fasta` with its alignments; and the records that cannot be predicted.

    `alignments` is a folder with one sub-folder or one file (<name>.a3m, .sto) per record, named as the record; the files of a
    single record may also lie directly in it. Letters that are no amino acid are replaced (`SUBSTITUTES`).
    Raises UserError if a file or folder is missing or of another kind. (`read_fasta` checks that the names differ and are legal
    names of folders.)
    """
    if fasta.is_dir():
        raise UserError(f"{fasta}: is a folder, but --fasta takes a FASTA file; give the file")
    if not fasta.is_file():
        raise UserError(f"{fasta}: no such FASTA file; check --fasta")
    if alignments.is_file():
        raise UserError(f"{alignments}: is a file, but --alignments takes the folder of alignments; give the folder")
    if not alignments.is_dir():
        raise UserError(f"{alignments}: no such folder of alignments; check --alignments")
    targets: list[Target] = []
    failures: list[Failure] = []
    records = read_fasta(fasta, substitute=True)
    for (name, record), (_, strict) in zip(records, read_fasta(fasta), strict=True):
        try:
            if isinstance(record, UserError):
                raise record
            if not record.letters.strip("X"):
                raise UserError(
                    f"{name}: all {len(record)} residues are X, so there are no atoms to predict; leave it out"
                )
            target = _target(record, alignments, alone=len(records) == 1)
            targets.append(replace(target, notes=(*_substitutions(strict), *target.notes)))
        except UserError as error:
            failures.append(Failure(name, str(error)))
    return targets, failures


_SUFFIXES = (".a3m", ".a3m.gz", ".sto", ".sto.gz")


def _target(query: ProteinSequence, alignments: Path, alone: bool) -> Target:
    if has_files(folder := alignments / query.name):
        return Target(query, folder)
    for suffix in _SUFFIXES:
        if (file := alignments / f"{query.name}{suffix}").is_file():
            return Target(query, file)
    if alone and alignment_files(alignments):
        return Target(query, alignments)
    names = [path.name.split(".")[0] for path in alignments.iterdir()]
    note = f"no alignments for '{query.name}' in {alignments}: predicted from its sequence alone, which is much less accurate."
    return Target(query, None, (note + nearest(query.name, names),))


def _substitutions(strict: ProteinSequence | FileFormatError) -> tuple[str, ...]:
    """What to say of a record that is legal only with letters replaced. `strict`: what it is without that."""
    if isinstance(strict, ProteinSequence):
        return ()
    letters = ", ".join(f"{letter} as {read_as}" for letter, read_as in SUBSTITUTES.items())
    return (f"letters that are no amino acid: read {letters}; a '*' at the end is left out",)


def digest(*files: Path) -> str:
    """A fingerprint of the files' names and contents, to recognise the inputs of an earlier result."""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'blake2b').hexdigest()}\0".encode())
    return total.hexdigest()
