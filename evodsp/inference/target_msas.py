"""What the alignments of a target hold for a model: of single chains one alignment after another, of complexes one MSA of all
chains. Each makes the samples of its model's arrangement."""

from __future__ import annotations

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
from evodsp.data.sources.msa import MsaFeatures, holds_query_alone, msa_of
from evodsp.data.sources.parsed import ChainMsas
from evodsp.errors import UserError
from evodsp.features.batch import complex_sample, prediction_sample
from evodsp.inference.target_templates import Templates
from evodsp.inference.targets import Target
from evodsp.printing import counted


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
        own = templates[self.query.letters]
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
        paired = max(0, int((self.merged.block == 0).sum()) - 1)  # without the queries
        return f"{counted(len(self.merged.msa), 'row')} in the MSA of all chains, {paired:,} of them paired"

    def sample(self, features: FeatureConfig, seed: int, templates: Templates, ensembles: int) -> Sample:
        """The features of a seed."""
        own = side_by_side(self.merged.entities, templates)
        return complex_sample(self.merged, features, seed, own, ensembles)


TargetMsa = ChainMsa | ComplexMsa
MSAS: Mapping[ArrangementName, type[TargetMsa]] = MappingProxyType({"monomer": ChainMsa, "multimer": ComplexMsa})
"""What the models of each arrangement take of a target."""
_Msas = Mapping[str, tuple[MsaFeatures, PairingMsa | None]]
"""The MSA of each distinct sequence, and its rows that are paired."""


def _of_chains(target: Target) -> _Msas:
    found: dict[str, tuple[MsaFeatures, PairingMsa | None]] = {}
    for letters, part in target.distinct.items():
        msa, place, rule = msa_of(part.read(), part.query), part.alignments, target.rule
        found[letters] = msa, None if place is None or rule is None else pairing_msa(place, part.query, rule)
    return found


def _whole(target: Target) -> _Msas:
    """The MSAs from ColabFold's alignment of the whole complex."""
    assert target.alignments is not None
    alignment, lengths = parse_complex_a3m(target.alignments, target.piped)
    return dict(zip(target.distinct, split_alignment(alignment, lengths), strict=True))
