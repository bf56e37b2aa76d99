"""Which of the names to score have predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def predicted(
    predictions: Path, splits: Mapping[str, Sequence[str]], exists: Callable[[str], bool], what: str
) -> tuple[Mapping[str, Sequence[str]], list[str]]:
    """The names of each set whose prediction `exists`, all if none does; and a line for each set of which some lack it.

    `what`: what the names are, such as "chains".
    """
    found = {split: [name for name in names if exists(name)] for split, names in splits.items()}
    if not any(found.values()):
        return splits, []
    lines = []
    for split, names in splits.items():
        if lacking := [name for name in names if name not in found[split]]:
            lines.append(
                f"{split}: {len(lacking)} of {len(names)} {what} have no finished prediction in {predictions} and are left "
                f"out, such as {lacking[0]}; predict them, or take them from the list"
            )
    return found, lines
