"""Self-distillation sets: predicted structures as training targets (supplement 1.3).

The prediction's confidence stands in the B-factors. Atoms of residues below a pLDDT are masked, so that nothing is learned
from parts of which the prediction was unsure. A predicted structure has no resolution, so losses that need an experiment's do
not count it (unless one is assumed), and no release date, so its templates need `data.max_template_date`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from evodsp.data.index.chain_index import ChainIndex
from evodsp.data.records import Alignment, Chain, ProteinSequence
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed_chain import ParsedChain, parse_chain
from evodsp.data.templates.hits import TemplateHit
from evodsp.data.templates.source import TemplateSource
from evodsp.errors import UserError
from evodsp.rng import Draws


@dataclass(frozen=True)
class PredictedStore:
    """The files of a self-distillation set, as a `ChainSource`. Picklable, for workers."""

    store: ChainFiles
    """Alignments, template searches, and predicted structures with the pLDDT, 0 to 100, as B-factors."""
    min_plddt: float
    """The pLDDT below which atoms of residues are masked."""

    def parsed(self, key: str, with_hits: bool) -> ParsedChain:
        """The chain; see `ChainSource`."""
        return parse_chain(self, key, with_hits)

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        """The alignments of the chain."""
        return self.store.alignments(key, query)

    def chain(self, key: str) -> Chain:
        """The predicted structure, in which residues below `min_plddt` are masked.

        Raises UserError if no residue is left.
        """
        chain = self.store.chain(key)
        sure = self.store.confidence(key) >= self.min_plddt
        if not sure.any():
            raise UserError(
                f"predicted chain {key} has no residue of a pLDDT of at least {self.min_plddt:g}; leave it out"
            )
        kept = sure[:, None].astype(np.float32)
        return replace(
            chain,
            positions=chain.positions * kept[..., None],
            mask=chain.mask * kept,
            resolution=None,
            release_date=None,
        )

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        """The hits of the chain's template searches."""
        return self.store.template_hits(key, query)


def open_predictions(
    alignment_dir: str | None, structure_dir: str | None, index: str | None, store: str | None, min_plddt: float
) -> PredictedStore | FeatureStore | None:
    """The chains of a self-distillation set, given its settings in `data.distillation`; None if they name none.

    Raises UserError that names the setting.
    """
    if store is not None:
        built = FeatureStore(store)
        _check_masking(built, store, min_plddt)
        return built
    if alignment_dir is None or structure_dir is None:
        return None
    for name, path in (("alignment_dir", alignment_dir), ("structure_dir", structure_dir)):
        if not Path(path).is_dir():
            raise UserError(
                f"data.distillation.{name} is {path}, which is not a folder; give the folder, or leave it out"
            )
    files = ChainFiles(alignment_dir, structure_dir, None if index is None else ChainIndex(index))
    return PredictedStore(files, min_plddt)


def _check_masking(store: FeatureStore, address: str, min_plddt: float) -> None:
    if store.min_plddt is None:
        raise UserError(
            f"data.distillation.store is {address}, which was built without --min_plddt, so nothing in it is masked; build it "
            f"with --min_plddt {min_plddt:g}"
        )
    if store.min_plddt != min_plddt:
        raise UserError(
            f"data.distillation.min_plddt is {min_plddt:g}, but {address} was built with --min_plddt "
            f"{store.min_plddt:g}; set it to that, or build the store again"
        )


@dataclass(frozen=True)
class DistillationSet:
    """A self-distillation set as samples are made of it. Picklable, for workers."""

    source: PredictedStore | FeatureStore
    """The source of its chains: their files, or a feature store that was built of them."""
    max_rows: int
    """Most rows of an MSA that are used; they are a random sample."""
    templates: TemplateSource | None = None
    """The source of templates for its chains; None if samples have none."""
    assumed_resolution: float | None = None
    """The resolution in Å that its chains, which have none, are given; with None the losses of the confidence heads do not
    count them."""

    @property
    def store(self) -> ChainFiles | FeatureStore:
        """The store of its chains by key."""
        return chains_of(self.source)


def chains_of(source: ChainFiles | FeatureStore | PredictedStore) -> ChainFiles | FeatureStore:
    """The store that has the chains of a source by key."""
    return source.store if isinstance(source, PredictedStore) else source


def sampled_rows(msa: MsaFeatures, most: int, draws: Draws) -> MsaFeatures:
    """The query and a random sample of the other rows, `most` in all. The profile stays that of all rows."""
    if msa.num_alignments <= most:
        return msa
    rows = np.concatenate([[0], 1 + np.sort(draws.permutation(msa.num_alignments - 1)[: most - 1])])
    return MsaFeatures(msa.msa[rows], msa.deletions[rows], msa.profile)
