"""From a chain's template search to its templates: files, hits, dates, filters, structures, and one line on what was dropped.

AF2 supplement, sections 1.2.3 (search and filters) and 1.2.9 (features). In training nothing may leak: templates must have been
released before the query, its own entry is none, and where the query's date is unknown there is a latest date or no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Protocol, runtime_checkable

from evodsp.data.records import ProteinSequence
from evodsp.data.structures import StructureFolder
from evodsp.data.template_hits import (
    HitLimits,
    Rejection,
    TemplateHit,
    is_search_result,
    parse_obsolete,
    parse_search_result,
    select_hits,
)
from evodsp.data.templates import (
    MAX_TEMPLATES,
    ChainSource,
    TemplateFeatures,
    TemplateRejection,
    template_features,
)
from evodsp.errors import UserError

_FOLDERS = ("hhr", "sto")
_MOST_NAMED = 10
"""So many hits are named in the log for each reason; the others are counted."""


@runtime_checkable
class TemplateStructures(ChainSource, Protocol):
    """Where template structures come from; `evodsp.data.structures.StructureFolder` is one."""

    def release_date(self, pdb_id: str) -> date | None:
        """When the entry was released, None if that is not known."""


@dataclass(frozen=True)
class FoundTemplates:
    """The templates of one query, best first, and how they came about.

    `hits`: number of hits of the search. `rejected`: chain keys of the hits that were not used, by reason, among those that
    were looked at before the limit was reached.
    """

    name: str
    features: TemplateFeatures
    hits: int
    rejected: dict[Rejection | TemplateRejection, tuple[str, ...]]
    note: str = ""

    @property
    def log_line(self) -> str:
        """Such as 'query73_A: 7 templates of 10 hits; 1 hit: no structure (1hf9_B)'."""
        parts = [f"{self.name}: {_count(len(self.features), 'template')} of {_count(self.hits, 'hit')}"]
        for reason, keys in self.rejected.items():
            named = ", ".join(keys[:_MOST_NAMED])
            more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
            parts.append(f"{_count(len(keys), 'hit')}: {reason.value} ({named}{more})")
        return "; ".join([*parts, self.note] if self.note else parts)


@dataclass(frozen=True)
class TemplateSource:
    """What turns template searches into features. Picklable, for workers.

    `structures`: where the templates' atoms are. `limits`: see `HitLimits`. `obsolete`: withdrawn entries (`parse_obsolete`).
    `limit`: keep at most so many templates of a query.
    """

    structures: TemplateStructures
    limits: HitLimits = field(default_factory=HitLimits)
    obsolete: Mapping[str, str | None] = field(default_factory=dict)
    limit: int = MAX_TEMPLATES

    @classmethod
    def open(
        cls, structure_dir: str | Path, max_date: date | None = None, obsolete: str | Path | None = None
    ) -> TemplateSource:
        """From a folder of structures, the last release date allowed and the path of the PDB's obsolete.dat.

        Raises UserError if the folder or the file does not exist, FileFormatError if the file is not obsolete.dat.
        """
        replaced = {} if obsolete is None else parse_obsolete(obsolete)
        return cls(StructureFolder(structure_dir), HitLimits(max_date=max_date), replaced)

    def find(
        self,
        hits: str | Path | list[TemplateHit],
        query: ProteinSequence,
        release_date: date | None = None,
        pdb_id: str | None = None,
    ) -> FoundTemplates:
        """The templates of `query`: at most `limit`, by falling `sum_probs`.

        `hits`: a chain's alignment folder (`read_template_hits`), or the hits read from it. `pdb_id` and `release_date`:
        entry of a query of known structure (training) and its date; its templates must be `limits.days_before_query` days
        older. If that date is unknown and `limits` has no latest date either, there are none.
        Raises UserError if the search was made with another query, FileFormatError for a broken search result or structure.
        """
        if not isinstance(hits, list):
            hits = read_template_hits(hits, query)
        if pdb_id is not None and release_date is None and self.limits.max_date is None:
            note = "the query's release date is unknown and no latest date of templates is set"
            return FoundTemplates(query.name, TemplateFeatures.none(len(query)), len(hits), {}, note if hits else "")
        selection = select_hits(
            hits,
            query.letters,
            _ReleaseDates(self.structures),
            self.limits,
            query_release_date=release_date,
            query_pdb_id=pdb_id,
            obsolete=self.obsolete,
        )
        rejected: dict[Rejection | TemplateRejection, tuple[str, ...]] = {}
        for hit, reason in selection.rejected:
            # Without its file an entry has no date: what the user can mend is the file.
            absent = reason is Rejection.UNKNOWN_DATE and not self.structures.has_structure(hit.key)
            name = TemplateRejection.NO_STRUCTURE if absent else reason
            rejected[name] = (*rejected.get(name, ()), hit.key)
        features, unusable = template_features(query, selection.kept, self.structures, self.limit)
        for unused, keys in unusable.items():
            rejected[unused] = (*rejected.get(unused, ()), *keys)
        return FoundTemplates(query.name, features, len(hits), rejected)


def template_files(directory: str | Path) -> list[Path]:
    """Search results of a chain's folder and of its hhr/ and sto/ folders (OpenProteinSet): .hhr and hmm_output.sto, gzipped
    or not, sorted by name."""
    directory = Path(directory)
    folders = [directory, *(directory / name for name in _FOLDERS)]
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted((p for p in found if p.is_file() and is_search_result(p.name)), key=lambda path: path.name)


def read_template_hits(directory: str | Path, query: ProteinSequence) -> list[TemplateHit]:
    """The hits of all search results of a chain's folder, in the order of the files; empty where there are none.

    Raises UserError if there is no such folder, FileFormatError for a broken file.
    """
    if not Path(directory).is_dir():
        raise UserError(f"{directory}: no such folder of template searches; check the path")
    return [hit for path in template_files(directory) for hit in parse_search_result(path, query.letters)]


@dataclass(frozen=True)
class _ReleaseDates:
    """Release dates of the entries that have a structure, each looked up when it is asked for."""

    structures: TemplateStructures

    def __contains__(self, pdb_id: object, /) -> bool:
        return self.structures.has_structure(f"{pdb_id}_A")  # any chain: it is not looked for

    def get(self, pdb_id: str, /) -> date | None:
        return self.structures.release_date(pdb_id) if pdb_id in self else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
