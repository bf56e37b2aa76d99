"""From a query's template hits to its templates: dates, filters, structures, and one line for the log.

AF2 supplement, sections 1.2.3 (filters) and 1.2.9 (features). In training the answer must not leak: a template must have been
released before the query's structure, and the query's own entry is never used. If the query's release date is unknown, a
latest date must be set, or the query gets no templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path

from evodsp.data.formats import parse_obsolete
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_folder import read_template_hits
from evodsp.data.sources.structures import StructureFolder, TemplateStructures
from evodsp.data.templates.build import MAX_TEMPLATES, template_features
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.filters import HitLimits, Rejection, select_hits
from evodsp.data.templates.hits import TemplateHit
from evodsp.data.templates.matching import TemplateRejection
from evodsp.data.templates.template_chains import TemplateChains
from evodsp.errors import UserError
from evodsp.printing import counted, logger, one_line, quoted

_MOST_NAMED = 10
"""At most this many hits are named in the log for each reason; the others are counted."""


@dataclass(frozen=True)
class FoundTemplates:
    """The templates of one query, best first, and the reasons why other hits were not used.

    `hits`: number of hits of the search. `rejected`: chain keys of the hits that were not used, by reason, up to the point
    where the limit of templates was reached.
    """

    name: str
    features: TemplateFeatures
    hits: int
    rejected: dict[Rejection | TemplateRejection, tuple[str, ...]]
    note: str = ""

    @property
    def log_line(self) -> str:
        """A line for the log, such as 'query73_A: 7 templates of 10 hits; 1 hit: no structure (1hf9_B)'."""
        parts = [f"{self.name}: {counted(len(self.features), 'template')} of {counted(self.hits, 'hit')}"]
        for reason, keys in self.rejected.items():
            named = ", ".join(keys[:_MOST_NAMED])
            more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
            parts.append(f"{counted(len(keys), 'hit')}: {reason.value} ({named}{more})")
        return "; ".join([*parts, self.note] if self.note else parts)


@dataclass(frozen=True)
class TemplateSource:
    """Finds the templates of queries. Picklable, for data-loading workers.

    `structures`: the source of the templates' atoms. `limits`: the limits of the filters. `obsolete`: withdrawn entries
    (`parse_obsolete`). `limit`: largest number of templates of a query. `chains`: the chains that serve as templates; None:
    those that search programs have found.
    """

    structures: TemplateStructures
    limits: HitLimits = field(default_factory=HitLimits)
    obsolete: Mapping[str, str | None] = field(default_factory=dict)
    limit: int = MAX_TEMPLATES
    chains: TemplateChains | None = None

    @property
    def reads_hits(self) -> bool:
        """Whether hits are read from the files of search programs."""
        return self.chains is None

    def lists(self, name: str) -> bool:
        """Whether the chain of this name is one of those that serve as templates."""
        return self.chains is not None and self.chains.lists(name)

    @classmethod
    def open(
        cls, structure_dir: str | Path, max_date: date | None = None, obsolete: str | Path | None = None
    ) -> TemplateSource:
        """A source made of a folder of structures, the last release date allowed and the path of the PDB's obsolete.dat.

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

        `hits`: a chain's folder (`read_template_hits`), or the hits read from it; not used unless `reads_hits`. `pdb_id`,
        `release_date`: the entry and the release date of a query of known structure (training); its templates must be
        `limits.days_before_query` days older. If its date is unknown and `limits` has no latest date either, it gets none. No
        date limits the templates of `chains`.
        Raises UserError if the search was made with another query, FileFormatError for a broken search result or structure.
        """
        if self.chains is not None:
            hits, release_date = self.chains.hits(query), None
        elif not isinstance(hits, list):
            hits = read_template_hits(hits, query)
        if self.reads_hits and pdb_id is not None and release_date is None and self.limits.max_date is None:
            note = "the query's release date is unknown and no latest date of templates is set"
            return FoundTemplates(query.name, TemplateFeatures.none(len(query)), len(hits), {}, note if hits else "")
        selection = select_hits(
            hits,
            query.letters,
            self._is_known,
            lambda entry: self.structures.release_date(entry) if self._is_known(entry) else None,
            self.limits,
            query_release_date=release_date,
            query_pdb_id=pdb_id,
            obsolete=self.obsolete,
        )
        rejected: dict[Rejection | TemplateRejection, tuple[str, ...]] = {}
        for hit, reason in selection.rejected:
            # Without its file an entry has no date; the user can add the file, so that is the reason to show.
            lacks_file = reason is Rejection.UNKNOWN_DATE and not self.structures.has_structure(hit.key)
            shown = TemplateRejection.NO_STRUCTURE if lacks_file else reason
            rejected[shown] = (*rejected.get(shown, ()), hit.key)
        kept = selection.kept
        if not self.reads_hits:  # a broken structure among the user's chains must not cost all chains that are like it
            kept = tuple(hit for hit in selection.kept if _is_readable(self.structures, hit.key))
            if lost := tuple(hit.key for hit in selection.kept if hit not in kept):
                rejected[TemplateRejection.NO_STRUCTURE] = (*rejected.get(TemplateRejection.NO_STRUCTURE, ()), *lost)
        features, unusable = template_features(query, kept, self.structures, self.limit)
        for unused, keys in unusable.items():
            rejected[unused] = (*rejected.get(unused, ()), *keys)
        return FoundTemplates(query.name, features, len(hits), rejected)

    def _is_known(self, pdb_id: str) -> bool:
        return self.structures.has_structure(f"{pdb_id}_A")  # any chain id will do: only the entry's file is looked for


def _is_readable(structures: TemplateStructures, key: str) -> bool:
    """Whether a structure can be read. A warning names one that cannot, once."""
    try:
        structures.chain(key)
    except (UserError, OSError) as error:
        _say_unreadable(key, one_line(str(error)))
        return False
    return True


@cache
def _say_unreadable(key: str, reason: str) -> None:
    logger(__name__).warning(
        f"'{quoted(key, 30)}' is no template of other chains, because it cannot be read ({reason})"
    )
