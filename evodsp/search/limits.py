"""How long a server may take and how much it may send. This module does not import torch, so the commands' help is quick."""

from __future__ import annotations

from dataclasses import dataclass

from evodsp.errors import POSITIVE, SIZE, check_numbers

PUBLIC = "https://api.colabfold.com"
"""ColabFold's own server. It is named in messages and the documentation only: nobody's sequences are sent there unasked."""


@dataclass(frozen=True)
class ServerLimits:
    """What a server of alignments may cost, whatever it answers. A search that reaches a limit of time ends, and what was found
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
