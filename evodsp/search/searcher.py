"""Searches for alignments, and keeps them: <folder>/<name>/ holds .a3m or .sto files, and search.json their origin. Where a
server has looked for templates, templates.txt there names chains of the PDB, best first, and templates/ holds their structures.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.layout import alignment_files, has_files, parse_alignments, read_alignment_dir
from evodsp.data.sources.msa import check_alignments, holds_query_alone
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.printing import counted
from evodsp.reading.answers import BadAnswerError
from evodsp.reading.text_files import read_json, text_of
from evodsp.version import __version__

ORIGIN = "search.json"
TEMPLATES = "templates"
"""Folder of the structures of templates, and with .txt the list of their chains."""
TEMPLATE = re.compile(r"[A-Za-z0-9]{4}_[A-Za-z0-9.]{1,8}", re.ASCII)
"""The name of a chain of the PDB, as servers write it."""
_MOST_BAD = 5
"""Sequences one after another of which the answer cannot be used, before nobody is asked any more."""
ASKED_AGAIN_S = 86_400.0
"""Seconds for which a server's answer without any related sequence stands."""
_LARGEST_ALONE = 1 << 20
"""Bytes of alignments that may be a query alone; larger ones are not read to find that out."""
_NAMED = 3

Say = Callable[[str], None]


class NoAnswerError(UserError):
    """Whoever is asked does not answer at all: further sequences need not be tried."""


@dataclass(frozen=True)
class Found:
    """The alignments of one sequence."""

    files: Mapping[str, bytes]
    """Content of each file by its name, whose suffix says the format."""
    is_alone: bool = False
    """Whether all rows are the sequence itself."""
    templates: Sequence[str] | None = None
    """Chains of the PDB that are like it, best first; None: these were not looked for."""


class Searcher(ABC):
    """Finds alignments of sequences."""

    most: int = 1
    """Largest number of sequences at a time."""
    about_none: str = ""
    """Message where it finds no related sequence."""

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


def is_kept(place: Path, retry: bool) -> bool:
    """Whether a record has alignments at `place` that stand. A server's answer that holds the query alone does not if it is a
    day old, or with `retry`: servers give such answers now and then, and full ones when they are asked again."""
    said = place / ORIGIN
    if not has_files(place) or not said.is_file():
        return has_files(place)
    if not (retry or time.time() - said.stat().st_mtime > ASKED_AGAIN_S):
        return True
    with suppress(UserError):  # what is wrong with its files is said when they are read
        is_small = sum(path.stat().st_size for path in alignment_files(place)) <= _LARGEST_ALONE
        return not ("server" in origin_of(place) and is_small and holds_query_alone(read_alignment_dir(place)))
    return True


def origin_of(place: Path) -> Mapping[str, Any]:
    """The note of `keep` on the alignments at `place`; empty if they are others, or if the file is broken."""
    with suppress(UserError, OSError):
        origin = read_json(place / ORIGIN, "remove the folder")
        return origin if isinstance(origin, dict) else {}
    return {}


def listed_templates(place: Path) -> list[str] | None:
    """The chains of the PDB that a server has found for the record at `place`, best first; None if it looked for none."""
    file = place / f"{TEMPLATES}.txt"
    listed = text_of(file).decode("utf-8", "replace").split() if file.is_file() else None
    return None if listed is None else [name for name in listed if TEMPLATE.fullmatch(name)]


def search(
    records: Sequence[ProteinSequence], folder: Path, searcher: Searcher, say: Say, retry: bool = False
) -> Iterator[tuple[str, UserError | None]]:
    """Search alignments for the records that have none in `folder`; yields each one's name, and why it has none now.

    Records of one sequence are searched once. A record's folder appears when it is complete, so a search that was stopped is
    continued by another call. An answer that cannot be used costs the record that it is for, unless it has an earlier one.
    `retry`: see `is_kept`. Raises NoAnswerError if nobody answers, or all answers cannot be used.
    """
    same: dict[str, list[str]] = {}
    for record in records:
        if is_kept(folder / record.name, retry):
            yield record.name, None
        else:
            same.setdefault(record.letters, []).append(record.name)
    if same:
        say(searcher.announcement(len(same)))
    sequences, bad = list(same), 0
    for start in range(0, len(sequences), searcher.most):
        alone: list[str] = []
        for letters, found in _search(sequences[start : start + searcher.most], searcher, say):
            bad = bad + 1 if isinstance(found, BadAnswerError) else 0
            for name in same[letters]:
                if isinstance(found, UserError) and has_files(folder / name):
                    say(f"{name}: {found}; its earlier alignment stays")
                elif isinstance(found, UserError):
                    yield name, UserError(f"{name}: {found}")
                    continue
                else:
                    keep(folder / name, found, searcher.origin)
                    alone += [name] if found.is_alone else []
                yield name, None
            if bad == _MOST_BAD:
                raise NoAnswerError(f"{found}. So it was {bad} times in a row; nothing more is asked")
        if alone:
            such = ", ".join(alone[:_NAMED]) + (", …" if alone[_NAMED:] else "")
            say(f"no related sequence was found for {counted(len(alone), 'record')} ({such}){searcher.about_none}")


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
    return replace(found, is_alone=holds_query_alone(alignments))


def keep(folder: Path, found: Found, origin: Mapping[str, Any]) -> None:
    """Write alignments into `folder`, which appears when it is complete, and their origin."""
    with whole_folder(folder) as new:
        for name, content in found.files.items():
            (new / name).write_bytes(content)
        if found.templates is not None:
            (new / f"{TEMPLATES}.txt").write_text("".join(f"{chain}\n" for chain in found.templates), encoding="utf-8")
        text = json.dumps({"evodsp_version": __version__, **origin}, indent=2)
        (new / ORIGIN).write_text(f"{text}\n", encoding="utf-8")
