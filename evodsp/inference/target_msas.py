"""What the models of each arrangement take of the targets: of single chains one alignment after another, of complexes one
MSA of all chains, and their templates. `ModelConfig.arrangement` chooses.

Hits are read from search results beside the alignments, or found by alignment with chains that the user names. The chains of
a complex have templates of their own; chains with one sequence have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from evodsp.config import ArrangementName, FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge, side_by_side
from evodsp.data.complexes.pairing import PairingMsa, pairing_msa, split_alignment
from evodsp.data.formats import parse_complex_a3m
from evodsp.data.records import Alignment, ProteinSequence, columns_of
from evodsp.data.samples.sample_records import Sample
from evodsp.data.samples.selection import chain_list
from evodsp.data.similarity.sequences import sequences
from evodsp.data.sources.layout import SEARCH_RESULTS, search_result_files
from evodsp.data.sources.msa import MsaFeatures, holds_query_alone, msa_of
from evodsp.data.sources.parsed import ChainMsas
from evodsp.data.sources.structures import KeptStructures
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import TemplateChains, TemplateSource, listed_chains
from evodsp.errors import UserError
from evodsp.features.batch import complex_sample, prediction_sample
from evodsp.inference.config import TemplateSettings
from evodsp.inference.structure_files import chain_name
from evodsp.inference.targets import Target
from evodsp.printing import counted, quoted
from evodsp.search.searcher import TEMPLATES, listed_templates, origin_of

Templates = Mapping[str, TemplateFeatures]
"""The templates of each distinct sequence of a target, best first; of none without a source of templates."""

_STRUCTURES = (".cif", ".cif.gz", ".pdb", ".pdb.gz")


AnySource = TemplateSource | TemplateSettings
"""One source of templates for all chains; or the settings, where each chain has templates of its own beside its alignments."""


def template_source(settings: TemplateSettings) -> AnySource | None:
    """The source of templates; None without any. Raises UserError if the folder holds no structure, or a file is missing or
    broken."""
    folder = settings.folder
    if settings.of_server:
        return settings
    if folder is None:
        return None
    if folder.is_file():
        raise UserError(f"{folder}: is a file, but --templates takes the folder of structures; give the folder")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of template structures; check --templates")
    if not any(path.name.endswith(_STRUCTURES) for path in folder.iterdir()):
        raise UserError(
            f"{folder}: no structure (<pdbid>.cif or .pdb, gzipped or not) in this folder; check --templates"
        )
    if settings.chains is not None:
        return _template_chains(folder, settings.chains)
    return TemplateSource.open(folder, settings.latest, settings.obsolete)


def _template_chains(folder: Path, listed: Path) -> TemplateSource:
    """The source of templates that are the listed chains of a folder. Raises UserError if one of them is not in it."""
    structures = KeptStructures(folder)
    known = listed_chains(structures, chain_list(str(listed)))
    for name in known:
        structures.file_of(name)
    letters = sequences(structures, known, known, None, workers=1)
    if unknown := [name for name, sequence in letters.items() if not sequence]:
        structures.chain(unknown[0])  # says what is wrong with it
        raise UserError(f"{listed}: chain '{unknown[0]}' in {folder} has no residues; leave it out")
    return TemplateSource(structures, chains=TemplateChains(letters, max_identity=1.0))


def takes_no_templates(given: str, checkpoint: Path) -> UserError:
    """The error for templates with a model that was trained without. `given`: the option that asks for them, with its value."""
    return UserError(
        f"{checkpoint}: its model takes no templates, but {given} is given; "
        "leave it out, or use a model with templates (of the published models, model_1, model_2 and the multimers)"
    )


def find_templates(source: AnySource | None, target: Target, most: int) -> tuple[Templates, tuple[str, ...]]:
    """Up to `most` templates of each distinct sequence of the target, and lines for the log that account for every hit.

    Raises UserError, or FileFormatError with file and line, if a search result or a structure is broken or of another chain.
    """
    parts = target.distinct
    if source is None:
        return {}, ("templates: none",)
    found, lines = {}, []
    for letters, part in parts.items():
        found[letters], line = _of_chain(source, part, most)
        lines.append(f"templates{f' of {part.query.name}' if target.chains else ''}: {line}")
    return found, tuple(lines)


def _of_chain(source: AnySource, part: Target, most: int) -> tuple[TemplateFeatures, str]:
    """The templates of a chain, and what became of the hits."""
    folder, none, by = part.folder, TemplateFeatures.none(len(part.query)), ""
    if isinstance(source, TemplateSettings):
        listed = None if folder is None else listed_templates(folder)
        if folder is None or listed is None:
            return none, "none; no server's search has kept a list of template hits beside the alignments"
        if not (folder / TEMPLATES).is_dir():
            return none, f"none; structures of {counted(len(listed), 'hit')} have not been fetched"
        source = TemplateSource.of_search(folder / TEMPLATES, listed, source.latest)
        by = f"; hits and structures by {quoted(origin_of(folder).get('server'))}"
    if not source.reads_hits:
        found = source.find([], part.query)
    elif folder is None:
        return none, "none; no folder with search results of this record"
    elif not search_result_files(folder):
        return none, f"none; no search result ({SEARCH_RESULTS}) in {folder}"
    else:
        found = source.find(folder, part.query)
    used = found.features.select(slice(most))
    taken = f"the best {len(used)} are used: {', '.join(used.names)}" if len(used) else "none is used"
    return used, f"{found.log_line.removeprefix(f'{found.name}: ')}; {taken}{by}"


def template_names(target: Target, templates: Templates) -> list[str]:
    """The names of the templates, for the settings of a result; of a complex with the first chain that has them, A:1abc_B."""
    if not target.chains:
        return [name for own in templates.values() for name in own.names]
    sequences = [part.query.letters for part in target.parts]
    return [
        f"{chain_name(sequences.index(letters))}:{name}" for letters, own in templates.items() for name in own.names
    ]


def template_digest(templates: Templates) -> str:
    """A fingerprint of everything that the model reads of the templates; empty without templates."""
    if not any(map(len, templates.values())):
        return ""
    total = hashlib.blake2b(digest_size=16)
    for own in templates.values():
        total.update(repr(own.names).encode())
        for values in (own.aatype, own.positions, own.mask, own.sum_probs):
            total.update(values.tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class ChainMsa:
    """The alignments of a single chain."""

    query: ProteinSequence
    alignments: Sequence[Alignment]
    """Empty if the target is predicted from its sequence alone."""

    @staticmethod
    def check(target: Target, model: Path) -> None:
        """Raise UserError for a target that the model, of this file, does not take: one of several chains."""
        if target.chains:
            raise UserError(
                f"{target.query.name}: a complex of {len(target.chains)} chains, but {model} is a model of single chains; "
                "give a multimer model (--weights model_1_multimer_v3, or --checkpoint), or each chain as a record of its own"
            )

    @classmethod
    def read(cls, target: Target) -> ChainMsa:
        """The alignments of a target. Raises UserError if one is broken or of another sequence."""
        return cls(target.query, target.read())

    @property
    def rows(self) -> int:
        """The most rows that the MSA can have: those of all alignments, or the query alone."""
        return max(1, sum(map(len, self.alignments)))

    @property
    def line(self) -> str:
        """For the log: how many rows were read."""
        rows = counted(sum(map(len, self.alignments)), "sequence")
        alone = (
            ", the query alone: no related sequence" if self.alignments and holds_query_alone(self.alignments) else ""
        )
        return f"read {rows} in {counted(len(self.alignments), 'alignment')}{alone}"

    def sample(self, features: FeatureConfig, seed: int, templates: Templates, ensembles: int) -> Sample:
        """The features of a seed."""
        own = templates.get(self.query.letters)
        return prediction_sample(self.query, [*self.alignments], features, seed, own, ensembles)


@dataclass(frozen=True)
class ComplexMsa:
    """The MSA of all chains of a target."""

    name: str
    merged: MergedMsa

    @staticmethod
    def check(target: Target, model: Path) -> None:
        """Nothing to check: a single chain is a complex of one."""

    @classmethod
    def read(cls, target: Target) -> ComplexMsa:
        """The MSA of a target. Raises UserError if an alignment is broken or of another sequence."""
        own = _whole(target) if target.chains and target.alignments is not None else _of_chains(target)
        chains = [ChainMsas(part.query, *own[part.query.letters]) for part in target.parts]
        return cls(target.query.name, merge(chains))

    @cached_property
    def alignments(self) -> Sequence[Alignment]:
        """The rows, for the page, with the chains in the order in which they were given."""
        rows = len(self.merged.msa)
        if rows == 1:
            return []
        places = columns_of(self.merged.entities)
        names = (self.name, *(f"row {number}" for number in range(1, rows)))
        return [Alignment(self.name, names, self.merged.msa[:, places], self.merged.deletions[:, places])]

    @property
    def rows(self) -> int:
        """The rows of the MSA."""
        return len(self.merged.msa)

    @property
    def line(self) -> str:
        """For the log: how many rows there are."""
        return f"{counted(len(self.merged.msa), 'row')} in the MSA of all chains, {self.paired:,} of them paired"

    @property
    def paired(self) -> int:
        """The paired rows without the queries."""
        return max(0, int((self.merged.block == 0).sum()) - 1)

    def sample(self, features: FeatureConfig, seed: int, templates: Templates, ensembles: int) -> Sample:
        """The features of a seed."""
        own = side_by_side(self.merged.entities, templates) if templates else None
        return complex_sample(self.merged, features, seed, own, ensembles)


TargetMsa = ChainMsa | ComplexMsa
MSAS: Mapping[ArrangementName, type[TargetMsa]] = MappingProxyType({"monomer": ChainMsa, "multimer": ComplexMsa})
"""MSAs that the models of each arrangement take of a target."""
_Msas = Mapping[str, tuple[MsaFeatures, PairingMsa | None]]
"""The MSA of each distinct sequence, and its rows that are paired."""


def _of_chains(target: Target) -> _Msas:
    found: dict[str, tuple[MsaFeatures, PairingMsa | None]] = {}
    paired = {} if target.paired is None else _paired(target, target.paired)
    for letters, part in target.distinct.items():
        msa, place, rule = msa_of(part.read(), part.query), part.alignments, target.rule
        by_rule = None if place is None or rule is None else pairing_msa(place, part.query, rule)
        found[letters] = msa, paired.get(letters, by_rule)
    return found


def _paired(target: Target, file: Path) -> Mapping[str, PairingMsa | None]:
    """The rows of each sequence that a server has paired."""
    alignment, lengths = parse_complex_a3m(file)
    if [*lengths] != [*map(len, target.distinct)]:
        theirs, ours = (", ".join(map(str, own)) for own in (lengths, map(len, target.distinct)))
        raise UserError(
            f"{file}: paired rows of sequences of {theirs} residues, but those of {target.query.name} have {ours}; remove "
            f"{file.parent}, or rename the record"
        )
    parts = split_alignment(alignment, lengths)
    return {letters: pairing for letters, (_, pairing) in zip(target.distinct, parts, strict=True)}


def _whole(target: Target) -> _Msas:
    """The MSAs from ColabFold's alignment of the whole complex."""
    assert target.alignments is not None
    alignment, lengths = parse_complex_a3m(target.alignments, target.piped)
    return dict(zip(target.distinct, split_alignment(alignment, lengths), strict=True))
