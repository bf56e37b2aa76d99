"""The targets of a prediction: FASTA records paired with their alignments, checked before a model is loaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from evodsp.data.chain_folder import alignment_files, has_files
from evodsp.data.parsers import read_fasta
from evodsp.data.records import ProteinSequence
from evodsp.errors import UserError, nearest
from evodsp.inference.failures import Failure


@dataclass(frozen=True)
class Target:
    """One FASTA record and the folder of its alignments."""

    query: ProteinSequence
    alignments: Path


def find_targets(fasta: Path, alignments: Path) -> tuple[list[Target], list[Failure]]:
    """Pair every record of `fasta` with its alignments; and the records that cannot be predicted.

    `alignments` is a folder with one sub-folder per record, of the record's name; the files of a single record may also lie
    directly in it. Raises UserError if a file or folder is missing or of another kind. (`read_fasta` checks that the names
    differ and are legal names of folders.)
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
    records = read_fasta(fasta)
    for name, record in records:
        try:
            if isinstance(record, UserError):
                raise record
            if not record.letters.strip("X"):
                raise UserError(
                    f"{name}: all {len(record)} residues are X, so there are no atoms to predict; leave it out"
                )
            targets.append(Target(record, _folder_of(record, alignments, alone=len(records) == 1)))
        except UserError as error:
            failures.append(Failure(name, str(error)))
    return targets, failures


def _folder_of(query: ProteinSequence, alignments: Path, alone: bool) -> Path:
    if has_files(folder := alignments / query.name):
        return folder
    if alone and alignment_files(alignments):
        return alignments
    folders = [p.name for p in alignments.iterdir() if p.is_dir()]
    raise UserError(
        f"{alignments}: no alignments for '{query.name}'.{nearest(query.name, folders)} "
        f"Put its .a3m and .sto files into {folder}"
    )


def digest(*files: Path) -> str:
    """A fingerprint of the files' names and contents, to recognise the inputs of an earlier result."""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'blake2b').hexdigest()}\0".encode())
    return total.hexdigest()
