"""Compare predicted complexes with known structures: DockQ of each interface, lDDT of interfaces, and tables of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evodsp.data.formats.mmcif import read_assembly
from evodsp.data.records import Assembly
from evodsp.data.similarity.nearest import PlacedCopy
from evodsp.data.sources.layout import names_of, structure_file
from evodsp.data.sources.structures import AssemblyFolder
from evodsp.errors import UserError
from evodsp.inference.clashes import clash_line, clashes_of
from evodsp.inference.results import RANKING, read_with_ranking
from evodsp.inference.score.baseline import TrainingStructures
from evodsp.inference.score.chain_mapping import ChainMapping, ComplexComparison
from evodsp.inference.score.splits import predicted
from evodsp.model.confidence import complex_ranking
from evodsp.printing import show
from evodsp.score_tables import table, write_rows


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
    """Those of them that the prediction has."""
    fnat: float
    """Their share, 0..1."""
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
class ComplexRow:
    """Scores of a predicted complex against the true one. Residues and chains that are not predicted count as wrong."""

    complex: str
    split: str
    """Name of the set that the complex belongs to, such as 'train' or 'held-out'."""
    chains: int
    """True chains."""
    residues: int
    """Residues of the true chains."""
    resolved: int
    """Those of them that have a CA in the experiment."""
    interfaces: int
    """Pairs of true chains in contact: with heavy atoms within 5 Å."""
    dockq: float | None
    """Mean of the interfaces' DockQ, 0..1; None without interfaces."""
    fnat: float | None
    """Share of the contacts of all interfaces that the prediction has, 0..1; None without interfaces."""
    interface_lddt_ca: float | None
    """lDDT-CA over the distances between chains, 0..1; None if none is below 15 Å."""
    lddt_ca: float
    """lDDT-CA of all residues, 0..1."""
    clashes: int
    """Pairs of heavy atoms of different predicted chains that are closer than 2 Å."""
    plddt: float | None
    """Mean pLDDT, 0..100; None for a structure file alone, as for the next two."""
    iptm: float | None
    """Predicted TM-score of the interfaces, 0..1; None if the model has none."""
    confidence: float | None
    """0.8 ipTM + 0.2 pTM, by which AlphaFold-Multimer ranks."""
    missing: str
    """True chains that are not predicted."""
    mapping: str
    """Each true chain and the predicted one that it is compared with, such as A:A B:C; - stands for none."""
    mapped_by: str
    """What decides the mapping: sequence if there is no choice, otherwise DockQ or RMSD."""


@dataclass(frozen=True)
class ComplexRowBesideCopy(ComplexRow):
    """Scores of a predicted complex, and of a copy of the nearest training complex."""

    nearest: str = ""
    """The training complex; '' if there is no copy."""
    nearest_identity: float | None = None
    """Identical residues, as a share of those that the alignments pair, 0..1."""
    nearest_coverage: float | None = None
    """Share of the residues that the alignments pair, 0..1."""
    nearest_dockq: float | None = None
    nearest_interface_lddt_ca: float | None = None
    nearest_lddt_ca: float | None = None
    better_by: float | None = None
    """By how much the lDDT-CA of the interfaces is above that of the copy."""

    @classmethod
    def of(cls, scores: ComplexRow, copy: PlacedCopy | None, of_copy: ComplexRow | None) -> ComplexRowBesideCopy:
        if copy is None or of_copy is None:
            return cls(**vars(scores))
        ours, copied = scores.interface_lddt_ca, of_copy.interface_lddt_ca
        return cls(
            **vars(scores),
            nearest=copy.nearest,
            nearest_identity=copy.identity,
            nearest_coverage=copy.coverage,
            nearest_dockq=of_copy.dockq,
            nearest_interface_lddt_ca=copied,
            nearest_lddt_ca=of_copy.lddt_ca,
            better_by=None if ours is None or copied is None else ours - copied,
        )


_COLUMNS = (
    ("complex", "complex", "", "name of the structure"),
    ("split", "split", "", "train: the model was trained on this complex; held-out: it was not"),
    ("chains", "chains", "d", "chains of the structure"),
    ("residues", "residues", "d", "their residues"),
    ("interfaces", "interfaces", "d", "pairs of chains in contact: with heavy atoms within 5 Å"),
    ("dockq", "DockQ", ".3f", "quality of an interface, mean over all, 0 to 1 (0.23: acceptable, 0.49: medium, 0.8: high)"),
    ("fnat", "fnat", ".3f", "share of the contacts that the prediction has, 0 to 1"),
    ("interface_lddt_ca", "iLDDT-CA", ".3f", "how well distances up to 15 Å between chains are reproduced, 0 to 1"),
    ("lddt_ca", "lDDT-CA", ".3f", "how well all distances up to 15 Å are reproduced, 0 to 1"),
    ("clashes", "clashes", "d", "pairs of heavy atoms of different predicted chains closer than 2 Å (real chains: none)"),
    ("plddt", "pLDDT", ".1f", "the model's confidence in its prediction, 0 to 100 (mean)"),
    ("iptm", "ipTM", ".3f", "its confidence in the interfaces, 0 to 1"),
    ("confidence", "confidence", ".3f", "0.8 ipTM + 0.2 pTM"),
    ("mapped_by", "mapped by", "", "what decides which chain is which: sequence, or between identical copies DockQ or RMSD"),
    ("mapping", "mapping", "", "chains of the structure and of the prediction; - is a missing one, which counts as wrong"),
)  # fmt: skip

_OF_THE_COPY = (
    ("nearest", "nearest", "", "the training complex whose chains have the highest alignment scores with these chains"),
    ("nearest_identity", "identity", ".3f", "share of the residues, paired by those alignments, that are identical, 0 to 1"),
    ("nearest_dockq", "copy DockQ", ".3f", "DockQ of a copy of that training complex"),
    ("nearest_interface_lddt_ca", "copy iLDDT", ".3f", "iLDDT-CA of that copy: what a prediction must exceed"),
    ("better_by", "better by", "+.3f", "iLDDT-CA of the prediction less that of the copy"),
)  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A predicted complex, and its confidence where its files have it."""

    assembly: Assembly
    plddt: float | None = None
    iptm: float | None = None
    confidence: float | None = None


def read_predicted(predictions: Path, name: str) -> Predicted:
    """The best prediction of a complex in a folder of `evodsp predict`, or its structure file in a folder of files.

    Raises UserError if there is neither, or the folder's files are not those of a finished prediction.
    """
    folder = predictions / name
    if not folder.is_dir():
        if (file := structure_file(predictions, name)) is None:
            raise UserError(f"{predictions}: no folder {name} and no {names_of(name)}; predict it, or leave it out")
        return Predicted(read_assembly(file, None))
    result, ranking = read_with_ranking(folder)
    best: Mapping[str, Any] = ranking["ranking"][0]
    iptm = float(best["iptm"]) if "iptm" in best else None
    confidence = None if iptm is None or "ptm" not in best else complex_ranking(iptm, float(best["ptm"]))
    return Predicted(read_assembly(result.structure(), None), float(best["mean_plddt"]), iptm, confidence)


def _exists(predictions: Path, name: str) -> bool:
    folder = predictions / name
    return (folder / RANKING).is_file() if folder.is_dir() else structure_file(predictions, name) is not None


def _looked_for(name: str) -> str:
    return f"{name}/{RANKING} and {names_of(name)}"


def score_complex(
    name: str, split: str, truth: Assembly, predicted: Predicted
) -> tuple[ComplexRow, list[InterfaceRow], list[str]]:
    """The scores of a complex and of its interfaces, and lines on chains that do not correspond.

    Raises UserError if the prediction has none of the true chains, or if no true residue has a CA.
    """
    comparison = ComplexComparison(truth, predicted.assembly)
    if not comparison.resolved:
        raise UserError(f"{name}: no residue of the structure has a CA, so there is nothing to compare")
    mapping = comparison.mapping()
    names = [None if chain is None else predicted.assembly.names[chain] for chain in mapping.chains]
    clashes = clashes_of([(chain.positions, chain.mask) for chain in predicted.assembly.chains])
    interfaces = [_interface(name, split, comparison, mapping, names, clashes, pair) for pair in comparison.interfaces]
    contacts = sum(one.contacts for one in interfaces)
    scores = ComplexRow(
        complex=name,
        split=split,
        chains=len(truth.chains),
        residues=len(truth),
        resolved=comparison.resolved,
        interfaces=len(interfaces),
        dockq=comparison.dockq(mapping.chains) if interfaces else None,
        fnat=sum(one.recovered for one in interfaces) / contacts if contacts else None,
        interface_lddt_ca=comparison.interface_lddt_ca(mapping.chains),
        lddt_ca=comparison.lddt_ca(mapping.chains),
        clashes=sum(clashes.values()),
        plddt=predicted.plddt,
        iptm=predicted.iptm,
        confidence=predicted.confidence,
        missing=" ".join(true for true, ours in zip(truth.names, names, strict=True) if ours is None),
        mapping=" ".join(f"{true}:{ours or '-'}" for true, ours in zip(truth.names, names, strict=True)),
        mapped_by=mapping.by,
    )
    said = [*_remarks(comparison, mapping), *filter(None, [clash_line(clashes, predicted.assembly.names)])]
    return scores, interfaces, [f"{name}: {line}" for line in said]


def _interface(
    name: str,
    split: str,
    comparison: ComplexComparison,
    mapping: ChainMapping,
    names: Sequence[str | None],
    clashes: Mapping[tuple[int, int], int],
    pair: tuple[int, int],
) -> InterfaceRow:
    ours = sorted(chain for n in pair if (chain := mapping.chains[n]) is not None)
    score = comparison.score(pair, mapping.chains)
    first, second = (comparison.truth.names[n] for n in pair)
    return InterfaceRow(
        complex=name,
        split=split,
        first=first,
        second=second,
        predicted_first=names[pair[0]] or "",
        predicted_second=names[pair[1]] or "",
        contacts=score.contacts,
        recovered=score.recovered,
        fnat=score.fnat,
        interface_rmsd=score.interface_rmsd if math.isfinite(score.interface_rmsd) else None,
        ligand_rmsd=score.ligand_rmsd if math.isfinite(score.ligand_rmsd) else None,
        dockq=score.dockq,
        clashes=clashes.get((ours[0], ours[-1]), 0) if ours else 0,
        lddt_ca=comparison.interface_lddt_ca(mapping.chains, pair),
    )


def _remarks(comparison: ComplexComparison, mapping: ChainMapping) -> Iterator[str]:
    """Lines on chains that are missing, of another sequence, or not compared."""
    truth, predicted = comparison.truth, comparison.predicted
    for name, chain in zip(truth.names, mapping.chains, strict=True):
        if chain is None:
            yield f"chain {name} is missing in the prediction, and counts as wrong"
    true_of = {chain: n for n, chain in enumerate(mapping.chains) if chain is not None}
    for chain, (name, copies) in enumerate(zip(predicted.names, comparison.copies_of, strict=True)):
        if copies is None:
            yield f"chain {name} of the prediction has the sequence of no chain of the structure, and is left out"
        elif chain not in true_of:
            yield f"chain {name} of the prediction is one copy more than the structure has, and is left out"
        elif predicted.chains[chain].sequence != (true := truth.chains[true_of[chain]]).sequence:
            like = comparison.likeness(chain, true_of[chain])
            yield (
                f"chain {name} of the prediction has another sequence than chain {truth.names[true_of[chain]]}: "
                f"{len(like.pairs)} of its {len(true)} residues are paired by {like.by}, {like.identity:.0%} identical"
            )


def write_complex_report(
    predictions: Path,
    structures: Path,
    splits: Mapping[str, Sequence[str]],
    output: Path,
    assembly: str | None = "1",
    training: TrainingStructures | None = None,
    report: Callable[[str], None] = show,
) -> list[ComplexRow]:
    """Score all complexes, report the table, and write `<output>/scores.csv` and `<output>/interfaces.csv`.

    `predictions`: output of `evodsp predict`, or a folder of structure files, named as the complexes. `structures`: folder of
    the true structures. `splits`: the names of the complexes of each set. `assembly`: which biological assembly is the truth;
    None: the asymmetric unit. `training`: also score a copy of the nearest of these complexes. Complexes without a prediction
    are named and left out. Raises UserError if none has one.
    """
    folder = AssemblyFolder(structures, assembly)
    scores: list[ComplexRow] = []
    interfaces: list[InterfaceRow] = []
    splits, remarks = predicted(predictions, splits, partial(_exists, predictions), _looked_for, "complex")
    for split, names in splits.items():
        for name in names:
            best, truth = read_predicted(predictions, name), folder.assembly_of(name)
            one, of_it, said = score_complex(name, split, truth, best)
            if training is not None:
                one, reasons = _beside_copy(one, truth, training)
                said += reasons
            scores.append(one)
            interfaces += of_it
            remarks += said
    if not scores:
        raise UserError("no complexes to compare; name at least one (--held_out or --train)")
    columns = _COLUMNS if training is None else (*_COLUMNS, *_OF_THE_COPY)
    report(table([column for column in columns if any(getattr(one, column[0]) is not None for one in scores)], scores))
    report("")
    for line in [*remarks, *_means(splits, scores)]:
        report(line)
    output.mkdir(parents=True, exist_ok=True)
    write_rows(scores, output / "scores.csv", type(scores[0]))
    write_rows(interfaces, output / "interfaces.csv", InterfaceRow)
    report(f"\nwrote {output / 'scores.csv'} and {output / 'interfaces.csv'}, {len(interfaces)} interfaces")
    return scores


def _beside_copy(
    scores: ComplexRow, truth: Assembly, training: TrainingStructures
) -> tuple[ComplexRowBesideCopy, list[str]]:
    """The scores beside those of the copy, and a line if there is none or the complex is a training complex."""
    name, said = scores.complex, []
    if name in training.sequences and scores.split != "train":
        said = [f"{name}: is a training complex, too; it is not copied from itself"]
    copy = training.placed_for(name, truth)
    if isinstance(copy, str):
        return ComplexRowBesideCopy.of(scores, None, None), [*said, f"{name}: no copy: {copy}"]
    of_copy, *_ = score_complex(name, scores.split, truth, Predicted(copy.assembly))
    return ComplexRowBesideCopy.of(scores, copy, of_copy), said


def _means(splits: Mapping[str, Sequence[str]], scores: Sequence[ComplexRow]) -> Iterator[str]:
    """Lines for each set: the means over its complexes, and over those of its copies."""
    for split in splits:
        of_split = [one for one in scores if one.split == split]
        if not of_split:
            continue
        many = f"{len(of_split)} complexes" if len(of_split) > 1 else "1 complex"
        yield f"{split}: mean {_mean_scores(of_split, '')} of {many}"
        beside = [one for one in of_split if isinstance(one, ComplexRowBesideCopy) and one.nearest]
        if beside:
            better = [one.better_by > 0 for one in beside if one.better_by is not None]
            yield (
                f"{split}: mean {_mean_scores(beside, 'nearest_')} of copies of the nearest training complexes, "
                f"{len(beside)} of {len(of_split)}; the prediction is better (iLDDT-CA) on {sum(better)} of {len(better)}"
            )


def _mean_scores(scores: Sequence[ComplexRow], prefix: str) -> str:
    """The means of three columns whose names begin with `prefix`, over the complexes that have them."""
    means = []
    for heading, field in (("DockQ", "dockq"), ("iLDDT-CA", "interface_lddt_ca"), ("lDDT-CA", "lddt_ca")):
        values = [value for one in scores if (value := getattr(one, prefix + field)) is not None]
        means += [f"{heading} {math.fsum(values) / len(values):.3f}"] if values else []
    return ", ".join(means)
