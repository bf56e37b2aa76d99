"""Lists of chains, as settings and files name them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from evodsp.errors import UserError
from evodsp.reading.text_files import lines_of


def chain_list(chains: str | list[str]) -> list[str]:
    """The names in a list of chains: the list itself, or a text file with one name per line ('#' begins a comment).

    Raises UserError if the file is missing, empty or no UTF-8 text, or if a name is listed twice.
    """
    source, names = "the list of chains", chains
    if isinstance(chains, str):
        source, path = chains, Path(chains)
        if path.is_dir():
            raise UserError(
                f"{chains}: is a folder, but a list of chains is a file with one name per line; give the file, "
                "or a list [102m_A, ...]"
            )
        if not path.is_file():
            raise UserError(
                f"{chains}: no such file of chain names; write one name per line, or give a list [102m_A, ...]"
            )
        names = [name for line in lines_of(path) if (name := line.partition("#")[0].strip())]
    if not names:
        raise UserError(f"{source}: no chain names in it; write one per line")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{source}: '{twice[0]}' is listed more than once; remove the repetition")
    return list(names)
