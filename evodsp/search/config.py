"""Settings of `evodsp search`, and how long a server may take and how much it may send. This module does not import
torch, so the commands' help is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from evodsp.errors import POSITIVE, SIZE, UserError, check_numbers
from evodsp.reading.answers import check_address

PUBLIC = "https://api.colabfold.com"
"""ColabFold's own server. It is named in messages and the documentation only: nobody's sequences are sent there unasked."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server of alignments. A search that reaches a limit of time ends, and what was found
    is kept. An answer that is too large costs the record that it is of."""

    search_s: float = 7200.0
    """Seconds for the search of up to 20 sequences that are sent together, with all that belongs to it: the server's refusals,
    its queue, attempts after errors, pauses that it asks for, the download."""
    answer_s: float = 900.0
    """Seconds for one answer, from the connection to its last byte."""
    answer_mib: int = 1024
    """MiB of one answer, both as it arrives and unpacked."""

    def __post_init__(self) -> None:
        check_numbers(self, {"search_s": POSITIVE, "answer_s": POSITIVE, "answer_mib": SIZE}, "--msa_server_limits.")


ServerPairing = Literal["greedy", "complete"]
"""Which species give a paired row: those that at least two of the sequences have, or those that all have."""
Program = Literal["jackhmmer", "hhblits", "mmseqs"]


def check_server(address: str | None, pairing: str, templates: bool) -> None:
    """Raise UserError if the options that are about a server are wrong. `templates`: whether it is to be asked for some."""
    if address is not None:
        check_address("--msa_server", address, PUBLIC)
    if pairing not in get_args(ServerPairing):
        raise UserError(f"--msa_server_pairing is '{pairing}', but must be 'greedy' or 'complete'")
    if address is None and (templates or pairing != "greedy"):
        option = "--msa_server_templates" if templates else "--msa_server_pairing"
        raise UserError(f"{option} is given without --msa_server; add the server's address")


@dataclass(frozen=True)
class SearchConfig:
    """Sequences to search, the server or program, and the folder of the alignments."""

    inputs: Sequence[Path]
    """FASTA or CSV files, folders of FASTA files, or - for standard input."""
    output: Path
    """Folder for the alignments, one sub-folder per record: what `evodsp predict --alignments` takes. Records that it holds
    already are not searched again."""
    msa_server: str | None = None
    """Address of a server with ColabFold's protocol. The sequences are sent there. A name and a password may stand before the
    host (https://name:password@host); they are shown nowhere. null: search with a local program."""
    msa_server_limits: ServerLimits = field(default_factory=ServerLimits)
    """Limits of the time and of the bytes that the server may take."""
    msa_server_pairing: ServerPairing = "greedy"
    """How the server pairs rows of a complex's chains: rows of a species that at least two of the sequences have (greedy), or
    that all of them have (complete)."""
    msa_server_templates: bool = False
    """Also fetch the structures of chains of the PDB that the server finds like the sequences, for `evodsp predict` with this
    option."""
    retry: bool = False
    """Ask the server again for records of which it found no related sequence, not only after a day."""
    program: Program | None = None
    """Program of this machine to search with, in place of a server."""
    database: Path | None = None
    """The program's database: a FASTA file for jackhmmer, the path before _cs219 for hhblits, the path before .dbtype for
    mmseqs."""
    threads: int = 4
    """Threads of the program."""

    def __post_init__(self) -> None:
        check_numbers(self, {"threads": SIZE}, "--")
        check_server(self.msa_server, self.msa_server_pairing, self.msa_server_templates)
        if (self.msa_server is None) == (self.program is None):
            given = "neither is given" if self.program is None else "both are given"
            raise UserError(
                f"evodsp search takes --msa_server URL or --program jackhmmer, hhblits or mmseqs, but {given}; give one"
            )
        if (self.program is None) != (self.database is None):
            missing = "--database" if self.database is None else "--program"
            raise UserError(f"--program and --database go together, but {missing} is missing; add it")
