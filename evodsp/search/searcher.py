"""Searches for alignments, and keeps them: <folder>/<name>/ holds .a3m or .sto files, and search.json their origin."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_folder import has_files, parse_alignments
from evodsp.data.sources.query_check import check_alignments
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.reading.answers import BadAnswerError
from evodsp.version import __version__

ORIGIN = "search.json"
_MOST_BAD = 5
"""Sequences one after another of which the answer cannot be used, before nobody is asked any more."""

Say = Callable[[str], None]


class NoAnswerError(UserError):
    """Whoever is asked does not answer at all: further sequences need not be tried."""


@dataclass(frozen=True)
class Found:
    """The alignments of one sequence."""

    files: Mapping[str, bytes]
    """Content of each file by its name, whose suffix says the format."""


class Searcher(ABC):
    """Finds alignments of sequences."""

    most: int = 1
    """How many sequences it takes at a time."""

    @abstractmethod
    def announcement(self, sequences: int) -> str:
        """A line that says, before it happens, what will be asked of whom."""

    @property
    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """The origin of the alignments, for search.json."""

    @abstractmethod
    def search(self, sequences: Sequence[str], say: Say) -> list[Found]:
        """The alignments of sequences (at most `most`), in their order. `say` is told what is waited for.

        Raises UserError if one of them cannot be searched.
        """


def search(
    records: Sequence[ProteinSequence], folder: Path, searcher: Searcher, say: Say
) -> Iterator[tuple[str, UserError | None]]:
    """Search alignments for the records that have none in `folder`; yields each one's name, and why it has none now.

    Records of one sequence are searched once. A record's folder appears when it is complete, so a search that was stopped is
    continued by another call. An answer that cannot be used costs the record that it is for. Raises NoAnswerError if nobody
    answers, or all answers cannot be used.
    """
    same: dict[str, list[str]] = {}
    for record in records:
        if has_files(folder / record.name):
            yield record.name, None
        else:
            same.setdefault(record.letters, []).append(record.name)
    if same:
        say(searcher.announcement(len(same)))
    sequences, bad = list(same), 0
    for start in range(0, len(sequences), searcher.most):
        for letters, found in _search(sequences[start : start + searcher.most], searcher, say):
            bad = bad + 1 if isinstance(found, BadAnswerError) else 0
            for name in same[letters]:
                if isinstance(found, UserError):
                    yield name, UserError(f"{name}: {found}")
                    continue
                _keep(folder / name, found, searcher.origin)
                yield name, None
            if bad == _MOST_BAD:
                raise NoAnswerError(f"{found}. So it was {bad} times in a row; nothing more is asked")


def _search(sequences: Sequence[str], searcher: Searcher, say: Say) -> Iterator[tuple[str, Found | UserError]]:
    """Each sequence with its alignments, or why there are none. Where one of several fails, each is searched alone."""
    try:
        for letters, found in zip(sequences, searcher.search(sequences, say), strict=True):
            yield letters, _checked(letters, found)
    except NoAnswerError:  # the next sequence would wait in vain, too
        raise
    except UserError as error:
        if len(sequences) == 1:
            yield sequences[0], error
            return
        for letters in sequences:
            yield from _search([letters], searcher, say)


def _checked(letters: str, found: Found) -> Found | UserError:
    """`found`, unless its alignments cannot be read or were made with another sequence."""
    try:
        if not found.files:
            raise UserError("no alignment in the answer")
        alignments = parse_alignments(list(found.files.items()))
        check_alignments(alignments, ProteinSequence("query", letters))
    except UserError as error:
        return error
    return found


def _keep(folder: Path, found: Found, origin: Mapping[str, Any]) -> None:
    with whole_folder(folder) as new:
        for name, content in found.files.items():
            (new / name).write_bytes(content)
        text = json.dumps({"evodsp_version": __version__, **origin}, indent=2)
        (new / ORIGIN).write_text(f"{text}\n", encoding="utf-8")
