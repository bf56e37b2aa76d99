"""Which of the names to score have predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evodsp.errors import UserError
from evodsp.printing import counted


def predicted(
    predictions: Path,
    splits: Mapping[str, Sequence[str]],
    exists: Callable[[str], bool],
    looked_for: Callable[[str], str],
    what: str,
) -> tuple[Mapping[str, Sequence[str]], list[str]]:
    """The names of each set whose prediction `exists`, and a line for each set of which some lack it.

    `looked_for`: the files of a name that say so, for messages. `what`: what a name is, such as "chain". Raises UserError if no
    name has a prediction.
    """
    found = {split: [name for name in names if exists(name)] for split, names in splits.items()}
    if not any(found.values()) and (first := next((name for names in splits.values() for name in names), None)):
        raise UserError(
            f"{predictions}: no finished prediction of '{first}' or another {what}; looked for {looked_for(first)}; run evodsp "
            "predict, with --overwrite where files are missing"
        )
    lines = []
    for split, names in splits.items():
        if lacking := [name for name in names if name not in found[split]]:
            lines.append(
                f"{split}: {len(lacking)} of {counted(len(names), what)} left out for want of a finished prediction in "
                f"{predictions}, such as {lacking[0]} (looked for {looked_for(lacking[0])}); predict them, or take them from "
                "the list"
            )
    return found, lines
