"""The PDB's obsolete.dat: which entries were withdrawn, and which entry replaced each."""

from __future__ import annotations

from pathlib import Path

from evodsp.errors import FileFormatError
from evodsp.reading.text_files import lines_of


def parse_obsolete(path: str | Path) -> dict[str, str | None]:
    """The PDB's obsolete.dat: withdrawn entry -> the entry that replaces it, or None; in lower case.

    Chains of replacements are followed to their end. Columns 20:24 hold the withdrawn entry, 29:33 its first successor.
    Raises FileFormatError for a file without 'OBSLTE' records, a record cut short, and successors that form a cycle.
    """
    lines = lines_of(path)
    direct: dict[str, str | None] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("OBSLTE"):
            old, new = line[20:24].strip().lower(), line[29:33].strip().lower()
            if len(old) != 4 or len(new) not in (0, 4):
                raise FileFormatError(
                    path, "an OBSLTE record without a PDB id in columns 21-24; download it again", number
                )
            direct[old], line_of[old] = new or None, number
    if not direct:
        raise FileFormatError(path, "no 'OBSLTE' records; download obsolete.dat again")
    final: dict[str, str | None] = {}
    for old, successor in direct.items():
        seen = {old}
        while successor is not None and successor in direct:
            if successor in seen:
                message = f"the successors of '{old}' lead back to '{successor}'; correct the record"
                raise FileFormatError(path, message, line_of[old])
            seen.add(successor)
            successor = direct[successor]
        final[old] = successor
    return final
