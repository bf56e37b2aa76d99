"""A predicted structure beside the true one: its scores, those of its interfaces, and what does not correspond."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from evodsp import metrics
from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.records import Assembly
from evodsp.data.sources.parsed import with_missing_residues
from evodsp.errors import UserError
from evodsp.geometry.residues import CA, encode
from evodsp.inference.interfaces import clash_line, clashes_of
from evodsp.inference.pages.figures import Figure, distance_figure
from evodsp.inference.results import plddt_of, read_with_ranking
from evodsp.inference.score.chain_mapping import Chosen, ComplexComparison
from evodsp.inference.score.table import StructureScores
from evodsp.inference.structure_files import ChainSpan, spans_of
from evodsp.model.heads import complex_ranking

_MOST_DRAWN = 5000
"""Residues of a structure that is drawn, at most: the distances between them take 0.6 GB."""
Confidence = tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]
"""pLDDT and lDDT-CA of n residues, both 0..100."""


@dataclass(frozen=True)
class InterfaceRow:
    """Scores of one interface of the true complex."""

    complex: str
    split: str
    first: str
    """A true chain."""
    second: str
    predicted_first: str
    """The predicted chain that it is compared with; '' if it is missing."""
    predicted_second: str
    contacts: int
    """True contacts: pairs of residues with heavy atoms within 5 Å."""
    recovered: int
    """Number of true contacts that the prediction has, too."""
    fnat: float
    """Share of the true contacts that the prediction has, 0..1."""
    interface_rmsd: float | None
    """Å; None if a chain is missing."""
    ligand_rmsd: float | None
    """Å; None if a chain is missing."""
    dockq: float
    """0..1."""
    clashes: int
    """Pairs of heavy atoms of the two predicted chains that are closer than 2 Å."""
    lddt_ca: float | None
    """lDDT-CA over the distances between the two chains, 0..1; None if none is below 15 Å."""


@dataclass(frozen=True)
class Predicted:
    """A predicted structure of N residues, and its confidence where its files have it."""

    assembly: Assembly
    plddt: Float32[np.ndarray, " N"] | None = None
    """0..100."""
    mean_plddt: float | None = None
    """Mean pLDDT as ranking.json has it, with three decimals."""
    iptm: float | None = None
    confidence: float | None = None

    @classmethod
    def read(cls, place: Path) -> Predicted:
        """The best prediction in a folder of `evodsp predict`, or a structure file, without confidence.

        Raises UserError if the folder is not that of a finished prediction.
        """
        if not place.is_dir():
            return cls(read_assembly(place, None))
        result, ranking = read_with_ranking(place)
        best: Mapping[str, Any] = ranking["ranking"][0]
        iptm = float(best["iptm"]) if "iptm" in best else None
        confidence = None if iptm is None or "ptm" not in best else complex_ranking(iptm, float(best["ptm"]))
        return replace(
            cls.of_seed(result.structure()), mean_plddt=float(best["mean_plddt"]), iptm=iptm, confidence=confidence
        )

    @classmethod
    def of_seed(cls, file: Path) -> Predicted:
        """A structure that predict has written, and the pLDDT in `<name>_scores.json` beside it."""
        assembly = read_assembly(file, None)
        scores = file.with_name(f"{file.stem}_scores.json")
        if not scores.is_file():
            raise UserError(f"{scores}: missing beside {file.name}; predict again with --overwrite")
        plddt = plddt_of(scores)
        if len(plddt) != len(assembly):
            raise UserError(
                f"{scores}: {len(plddt)} values of pLDDT for {len(assembly)} residues; predict again with --overwrite"
            )
        return cls(assembly, plddt)


@dataclass(frozen=True)
class ScoredStructure:
    """The scores of a structure, and what else is known of it beside its prediction."""

    scores: StructureScores
    comparison: ComplexComparison
    chosen: Chosen
    """The predicted chain of each true one."""
    clashes: Mapping[tuple[int, int], int]
    """Pairs of heavy atoms that clash, of two predicted chains."""
    plddt: Float32[np.ndarray, " N"] | None
    """Mean pLDDT of the predicted residues, 0..100."""

    def interfaces(self) -> Iterator[InterfaceRow]:
        """Interfaces of the true structure."""
        truth, predicted = self.comparison.truth, self.comparison.predicted
        for pair in self.comparison.interfaces:
            score, ours = self.comparison.score(pair, self.chosen), [self.chosen[n] for n in pair]
            there = sorted(chain for chain in ours if chain is not None)
            names = ["" if chain is None else predicted.names[chain] for chain in ours]
            yield InterfaceRow(
                complex=self.scores.name,
                split=self.scores.split,
                first=truth.names[pair[0]],
                second=truth.names[pair[1]],
                predicted_first=names[0],
                predicted_second=names[1],
                contacts=score.contacts,
                recovered=score.recovered,
                fnat=score.fnat,
                interface_rmsd=score.interface_rmsd if math.isfinite(score.interface_rmsd) else None,
                ligand_rmsd=score.ligand_rmsd if math.isfinite(score.ligand_rmsd) else None,
                dockq=score.dockq,
                clashes=self.clashes.get((there[0], there[-1]), 0) if there else 0,
                lddt_ca=self.comparison.interface_lddt_ca(self.chosen, pair),
            )

    def remarks(self) -> Iterator[str]:
        """Lines on chains that are missing, of another sequence, or not compared, and on clashes."""
        truth, predicted = self.comparison.truth, self.comparison.predicted
        for true_name, chosen in zip(truth.names, self.chosen, strict=True):
            if chosen is None:
                yield f"chain {true_name} is missing in the prediction, and counts as wrong"
        true_of = {chain: n for n, chain in enumerate(self.chosen) if chain is not None}
        for chain, (name, copies) in enumerate(zip(predicted.names, self.comparison.copies_of, strict=True)):
            if copies is None:
                yield f"chain {name} of the prediction has the sequence of no chain of the structure, and is left out"
            elif chain not in true_of:
                yield f"chain {name} of the prediction is one copy more than the structure has, and is left out"
            elif predicted.chains[chain].sequence != (true := truth.chains[true_of[chain]]).sequence:
                like = self.comparison.likeness(chain, true_of[chain])
                yield (
                    f"chain {name} of the prediction has another sequence than chain {truth.names[true_of[chain]]}: "
                    f"{len(like.pairs)} of its {len(true)} residues are paired by {like.by}, {like.identity:.0%} identical"
                )
        if self.clashes:
            yield clash_line(self.clashes, predicted.names)

    def confidence(self) -> Confidence | None:
        """Confidence of the residues with a CA in both structures; None without pLDDT."""
        if self.plddt is None:
            return None
        alphas, places = self.comparison.alphas(self.chosen), self.comparison.counterparts(self.chosen)
        seen = np.concatenate([chain.mask[:, CA] for chain in self.comparison.predicted.chains]) > 0.5
        both = (alphas[2].numpy() > 0.5) & (places >= 0) & seen[places]
        lddt = metrics.lddt_ca(*alphas, per_residue=True).numpy()
        return self.plddt[places[both]].astype(np.float64), 100 * lddt[both]

    def picture(self) -> Figure | None:
        """True against predicted distances, and pLDDT, 0 where nothing is predicted; None without pLDDT, or if too large."""
        scores, (predicted, true, mask) = self.scores, self.comparison.alphas(self.chosen)
        if self.plddt is None or len(mask) > _MOST_DRAWN:
            return None
        places = self.comparison.counterparts(self.chosen)
        fit = "" if scores.dockq is None else f", DockQ {scores.dockq:.2f}"
        return distance_figure(
            true.numpy(),
            predicted.numpy(),
            np.where(places < 0, 0, self.plddt[places]),
            title=f"{scores.name} ({scores.split}): lDDT-CA {scores.lddt_ca:.2f}"
            + (fit if scores.rmsd is None else f", RMSD {scores.rmsd:.1f} Å"),
            true_mask=mask.numpy() > 0.5,
            chains=self._spans() if len(self.chosen) > 1 else (),
        )

    def _spans(self) -> list[ChainSpan]:
        truth = self.comparison.truth
        places = spans_of([len(chain) for chain in truth.chains])
        return [ChainSpan(name, at.start, at.end) for name, at in zip(truth.names, places, strict=True)]


def score_structure(name: str, split: str, truth: Assembly, predicted: Predicted) -> ScoredStructure:
    """A structure beside its prediction; `truth.key`: of a single chain.

    Raises UserError if the prediction has none of the true chains or another sequence than the single one, or if no residue has
    a CA in both.
    """
    if alone := truth.key is not None:
        truth = _on_prediction(name, truth, predicted.assembly)
    comparison = ComplexComparison(truth, predicted.assembly)
    if not comparison.resolved:
        raise UserError(f"{name}: no residue has a CA in both structures, so there is nothing to compare")
    mapping = comparison.mapping()
    chosen, alphas = mapping.chains, comparison.alphas(mapping.chains)
    names = [
        (true, None if ours is None else predicted.assembly.names[ours])
        for true, ours in zip(truth.names, chosen, strict=True)
    ]
    interfaces = [comparison.score(pair, chosen) for pair in comparison.interfaces]
    clashes = clashes_of([(chain.positions, chain.mask) for chain in predicted.assembly.chains])
    scores = StructureScores(
        name=name,
        split=split,
        residues=len(truth),
        resolved=comparison.resolved,
        plddt=float(predicted.plddt.mean()) if alone and predicted.plddt is not None else predicted.mean_plddt,
        lddt_ca=comparison.lddt_ca(chosen),
        rmsd=float(metrics.rmsd(*alphas)) if alone else None,
        gdt_ts=float(metrics.gdt_ts(*alphas)) if alone else None,
        tm_score=float(metrics.tm_score(*alphas)) if alone else None,
        chains=len(truth.chains),
        interfaces=len(interfaces),
        dockq=comparison.dockq(chosen) if interfaces else None,
        fnat=sum(one.recovered for one in interfaces) / sum(one.contacts for one in interfaces) if interfaces else None,
        interface_lddt_ca=comparison.interface_lddt_ca(chosen),
        clashes=sum(clashes.values()),
        iptm=predicted.iptm,
        confidence=predicted.confidence,
        missing=" ".join(true for true, ours in names if ours is None),
        mapping=" ".join(f"{true}:{ours or '-'}" for true, ours in names),
        mapped_by=mapping.by,
    )
    return ScoredStructure(scores, comparison, chosen, clashes, predicted.plddt)


def _on_prediction(name: str, truth: Assembly, predicted: Assembly) -> Assembly:
    """A single chain with the residues of its prediction. Those without a CA there, of type X, do not count: masked."""
    (true,) = truth.chains
    if len(predicted.chains) > 1:
        raise UserError(
            f"{name}: its prediction has {len(predicted.chains)} chains; compare complexes with --complexes true"
        )
    (ours,) = predicted.chains
    if ours.sequence != true.sequence:
        true = with_missing_residues(true, encode(ours.sequence)) or true
    if ours.sequence != true.sequence:
        raise UserError(
            f"{name}: the prediction's sequence differs from the structure's ({_difference(ours.sequence, true.sequence)}); "
            "compare a prediction with a structure of the same chain"
        )
    return replace(truth, chains=(replace(true, mask=true.mask * (ours.mask[:, CA, None] > 0.5)),))


def _difference(predicted: str, true: str) -> str:
    if len(predicted) != len(true):
        return f"{len(predicted)} residues against {len(true)}"
    position = next(n for n, (a, b) in enumerate(zip(predicted, true, strict=True)) if a != b)
    return f"residue {position + 1} is {predicted[position]} against {true[position]}"
