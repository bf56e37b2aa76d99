"""From a query's template hits to its templates: dates, filters, structures, and one line for the log.

AF2 supplement, sections 1.2.3 (filters) and 1.2.9 (features). In training the answer must not leak: a template must have
been released before the query's structure, and the query's own entry is never used. If the query's release date is unknown,
a latest date must be set, or the query gets no templates.

Templates without a search program are chains that the user names, compared with the query by alignment. A family of a few
hundred structures is its own template database. Every query is aligned with all of them, the best alignments are its hits,
and no date limits them, because the user's list does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from evodsp.data.formats import parse_obsolete
from evodsp.data.formats.mmcif import read_header
from evodsp.data.records import ProteinSequence
from evodsp.data.similarity.sequences import MOST_CELLS, Words, identity, paired, plain, score
from evodsp.data.sources.layout import read_template_hits, split_key
from evodsp.data.sources.structures import KeptStructures, StructureFolder, TemplateStructures
from evodsp.data.templates.features import MAX_TEMPLATES, TemplateFeatures, TemplateRejection, template_features
from evodsp.data.templates.hits import HitLimits, Rejection, TemplateHit, select_hits
from evodsp.errors import UserError
from evodsp.printing import counted, logger, one_line, quoted

MOST_HITS = 20
"""Number of hits of a query, as many as AF2 keeps templates of a search."""
MOST_ALIGNED = 1000
"""Sequences that a query is aligned with: of a larger list those that share most words of four residues with it."""


@dataclass(frozen=True)
class TemplateChains:
    """Chains whose structures serve as templates.

    `sequences`: by chain key, in the user's order; '' of a chain that cannot be read. Of chains with equal sequences the first
    serves. `max_identity`: a query that is one of these chains gets no hit with a larger share of identical residues, 0 to 1,
    of the shorter of the two sequences. Otherwise near copies of training chains would teach a model to copy, and held-out
    chains have none. `are_ranked`: a search has found them for the query, so they are its hits, the first one is the best, and
    one may be of the query's entry.
    """

    sequences: Mapping[str, str]
    max_identity: float
    are_ranked: bool = False

    def hits(self, query: ProteinSequence) -> list[TemplateHit]:
        """The chains of other entries by falling alignment score, or as they are ranked, at most `MOST_HITS`, each with its
        alignment."""
        limit = self.max_identity if self.lists(query.name) else 1.0
        entry = None if self.are_ranked else _entry(query.name)
        letters = plain(query.letters)
        candidates = [
            (sequence, owner)
            for sequence in self._likeliest(letters)
            if (owner := next((key for key in self._owners[sequence] if _entry(key) != entry), None)) is not None
        ]
        ranked = candidates if self.are_ranked else sorted(candidates, key=lambda one: -score(letters, one[0]))
        found: list[TemplateHit] = []
        for sequence, owner in ranked:
            if len(found) == MOST_HITS:
                break
            if limit < 1.0 and identity(letters, sequence) > limit:
                continue
            if (hit := _hit(len(found) + 1, query, letters, owner, sequence)) is not None:
                found.append(hit)
        return found

    def lists(self, name: str) -> bool:
        """Whether a chain is one of these. An entry's name may be that of its only chain."""
        return name in self.sequences or name in self._entries

    def _likeliest(self, letters: str) -> list[str]:
        """The different sequences to align with, of those that are not too long for it."""
        sequences = [sequence for sequence in self._owners if len(sequence) * len(letters) <= MOST_CELLS]
        if len(self._owners) <= MOST_ALIGNED:
            return sequences
        shared = dict(zip(self._owners, self._words.shared_with(letters)[1].tolist(), strict=True))
        return sorted(sequences, key=lambda sequence: -shared[sequence])[:MOST_ALIGNED]

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """The chains without a sequence."""
        return tuple(key for key, sequence in self.sequences.items() if not sequence)

    @cached_property
    def _entries(self) -> frozenset[str]:
        return frozenset(split_key(key)[0] for key in self.sequences)

    @cached_property
    def _owners(self) -> dict[str, list[str]]:
        """The chains of each different sequence."""
        owners: dict[str, list[str]] = {}
        for key, sequence in self.sequences.items():
            if sequence:
                owners.setdefault(plain(sequence), []).append(key)
        return owners

    @cached_property
    def _words(self) -> Words:
        return Words(list(self._owners))

    def __getstate__(self) -> dict[str, object]:
        """Worker processes list sequences and words themselves: sending them takes longer."""
        return {name: getattr(self, name) for name in ("sequences", "max_identity", "are_ranked")}


def listed_chains(structures: StructureFolder, names: Iterable[str]) -> dict[str, str]:
    """The chains of a list in which an entry stands for all of its chains, and their sequences.

    The sequence of a name that is a chain's, or an entry's that cannot be read, is ''.
    """
    found: dict[str, str] = {}
    for name in names:
        chain_id = split_key(name)[1]
        own = {} if chain_id else _sequences_of(structures, name)
        found |= {f"{name}_{one}": letters for one, letters in own.items()} if own else {name: ""}
    return found


def _sequences_of(structures: StructureFolder, entry: str) -> dict[str, str]:
    """The sequence of each chain of an entry; none if its file is missing or broken."""
    try:
        return read_header(structures.file_of(entry)).sequences
    except (UserError, OSError):
        return {}


def _entry(key: str) -> str:
    """The entry in a chain key, or in the name of a query, which may be any text."""
    return (key.rpartition("_")[0] or key).lower()


def _hit(rank: int, query: ProteinSequence, letters: str, owner: str, sequence: str) -> TemplateHit | None:
    """The chain's alignment with the query as a hit; None if it pairs no residues."""
    pairs = paired(letters, sequence)
    if not len(pairs):
        return None
    indices = np.full(len(letters), -1, np.int32)
    indices[pairs[:, 0]] = pairs[:, 1]
    entry, chain_id = split_key(owner)
    return TemplateHit(
        index=rank,
        name=owner,
        pdb_id=entry,
        chain_id=chain_id,
        aligned_columns=len(pairs),
        sum_probs=None,
        query=query.letters,
        hit_sequence=sequence[pairs[0, 1] : pairs[-1, 1] + 1],
        indices_query=np.arange(len(letters), dtype=np.int32),
        indices_hit=indices,
    )


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

    @classmethod
    def of_search(cls, structure_dir: Path, chains: Iterable[str], max_date: date | None) -> TemplateSource:
        """A source whose templates are `chains`, which a search has found for the query, best first; they are aligned with it
        here. A warning names one whose structure cannot be read."""
        structures = KeptStructures(structure_dir)
        present = {key: structures.has_structure(key) and _is_readable(structures, key) for key in chains}
        letters = {key: structures.chain(key).sequence if is_there else "" for key, is_there in present.items()}
        return cls(structures, HitLimits(max_date=max_date), chains=TemplateChains(letters, 1.0, are_ranked=True))

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
        `limits.days_before_query` days older. If its date is unknown and `limits` has no latest date either, it gets none. The
        query's date does not limit the templates of `chains`.
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
        lost = () if self.chains is None else self.chains.unreadable
        rejected: dict[Rejection | TemplateRejection, tuple[str, ...]]
        rejected = {TemplateRejection.NO_STRUCTURE: lost} if lost else {}
        for hit, reason in selection.rejected:
            # Without its file an entry has no date; the user can add the file, so that is the reason to show.
            lacks_file = reason is Rejection.UNKNOWN_DATE and not self.structures.has_structure(hit.key)
            shown = TemplateRejection.NO_STRUCTURE if lacks_file else reason
            rejected[shown] = (*rejected.get(shown, ()), hit.key)
        kept = selection.kept
        if not self.reads_hits:  # a broken structure among the user's chains must not cost all chains that are like it
            kept = tuple(hit for hit in selection.kept if _is_readable(self.structures, hit.key))
            if broken := tuple(hit.key for hit in selection.kept if hit not in kept):
                rejected[TemplateRejection.NO_STRUCTURE] = (*rejected.get(TemplateRejection.NO_STRUCTURE, ()), *broken)
        features, unusable = template_features(query, kept, self.structures, self.limit)
        for unused, keys in unusable.items():
            rejected[unused] = (*rejected.get(unused, ()), *keys)
        return FoundTemplates(query.name, features, len(hits) + len(lost), rejected)

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
