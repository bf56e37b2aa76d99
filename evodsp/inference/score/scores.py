"""Compare predictions with known structures, chains or complexes: scores, a table that explains its columns, pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import CHAINS, COMPLEXES, ONE_OF, Assembly, Kind
from evodsp.data.samples.selection import chain_list
from evodsp.data.sources.layout import entry_of, names_of, structure_file
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.files import write_rows, write_text
from evodsp.inference.pages.figures import Calibration, calibration_figure
from evodsp.inference.results import RANKING
from evodsp.inference.score.baseline import TrainingStructures, structures_in, training_set
from evodsp.inference.score.config import ScoreConfig
from evodsp.inference.score.structure_scores import (
    Confidence,
    InterfaceRow,
    Predicted,
    ScoredStructure,
    score_structure,
)
from evodsp.inference.score.table import StructureScores, columns_of, table, write_scores
from evodsp.printing import counted, show

BETTER: dict[Kind, tuple[str, str]] = {CHAINS: ("lddt_ca", "lDDT-CA"), COMPLEXES: ("interface_lddt_ca", "iLDDT-CA")}
"""The score by which a prediction is better than a copy, and its heading."""
Splits = Mapping[str, Sequence[str]]
"""The names of each set, such as {"train": [...], "held-out": [...]}: keys of chains, or names of complexes."""


def run(settings: ScoreConfig, words: list[str]) -> int:
    """`evodsp score`: the exit code. `words`: the command line (not needed here)."""
    assert settings.predictions is not None, "checked by the settings"
    structures = structures_in(settings, settings.structures)
    splits = {"train": _keys(settings.train), "held-out": _keys(settings.held_out)}
    training = None if settings.baseline is None else training_set(settings, splits["train"])
    if settings.train is None and settings.held_out is None:
        splits = {"predicted": _predicted(settings.predictions, structures)}
    write_report(settings.predictions, structures, splits, settings.output, training=training)
    return 0


def _keys(chains: str | None) -> list[str]:
    """Names of a text file with one on each line, or of a comma-separated list."""
    if chains is None or Path(chains).is_file():
        return [] if chains is None else chain_list(chains)
    return [key for key in chains.split(",") if key]


def _predicted(predictions: Path, structures: StructureFolder) -> list[str]:
    """The names of all finished predictions that have a structure. Raises UserError if there is none."""
    names = {path.name if path.is_dir() else entry_of(path) for path in predictions.glob("[!._]*")}
    found = [
        one for one in sorted(names) if _prediction(predictions, structures, one) and structures.has_structure(one)
    ]
    if not found:
        raise UserError(
            f"{predictions}: no finished prediction has the name of a structure in {structures.directory}; check both "
            f"folders, or name {structures.kind} with --held_out"
        )
    return found


def compare(prediction: Path, truth: Path, chain_id: str, split: str = "") -> StructureScores:
    """Score one predicted structure file, with its `seed_<k>_scores.json` beside it, against chain `chain_id` of `truth`.

    Raises UserError if the two sequences differ.
    """
    chain = read_chain(truth, chain_id)
    return score_structure(chain.key, split, Assembly.of_chain(chain.key, chain), Predicted.of_seed(prediction)).scores


def write_report(
    predictions: Path,
    structures: Path | StructureFolder,
    splits: Splits,
    output: Path,
    report: Callable[[str], None] = show,
    training: TrainingStructures | None = None,
) -> list[StructureScores]:
    """Score all chains or complexes, report the table and how far pLDDT can be trusted, and write into `output`: `scores.csv`,
    of complexes `interfaces.csv`, and of predictions with pLDDT `calibration.svg` and `distances_<name>.svg`.

    `predictions`: output of `evodsp predict`, or a folder of structure files, named as the chains or complexes. `structures`:
    folder of the true structures, `<pdbid>.cif[.gz]` or `.pdb`; of complexes an `AssemblyFolder`. `training`: also score copies
    of the nearest of these. What has no finished prediction is named and left out, unless nothing has one.
    """
    folder = _folder(structures)
    finished, lines = _finished(predictions, folder, splits)
    names = list(dict.fromkeys(name for some in finished.values() for name in some))
    copies = {} if training is None else training.copies_for(names, folder)
    output.mkdir(parents=True, exist_ok=True)
    scores: list[StructureScores] = []
    interfaces: list[InterfaceRow] = []
    confidence: dict[str, list[Confidence]] = {}
    pictures: list[Path] = []
    for found in _compared(predictions, folder, finished):
        row = found.scores
        scores.append(row if training is None else beside(row, copies[row.name], folder.kind))
        interfaces += found.interfaces()
        lines += (f"{row.name}: {line}" for line in found.remarks())
        if (of_residues := found.confidence()) is not None:
            confidence.setdefault(row.split, []).append(of_residues)
        if (picture := found.picture()) is not None:
            pictures.append(output / f"distances_{row.name}.svg")
            write_text(pictures[-1], picture)
    columns, unit = columns_of(folder.kind, beside_copy=training is not None), ONE_OF[folder.kind]
    tables = [output / "scores.csv"]
    write_scores(columns, scores, unit, tables[0])
    if folder.kind == COMPLEXES:
        tables.append(output / "interfaces.csv")
        write_rows([field.name for field in fields(InterfaceRow)], map(vars, interfaces), tables[-1])
    calibrations = {split: Calibration.of(of_split) for split, of_split in confidence.items()}
    if calibrations:
        tables.append(output / "calibration.svg")
        write_text(tables[-1], calibration_figure(calibrations))
    # After all files, because `evodsp score | head` ends with the tenth line.
    report(f"{table(columns, scores, unit)}\n")
    for split, some in finished.items():
        lines += _means(split, [row for row in scores if row.split == split], folder.kind)
        if training is not None:
            lines += without(split, some, copies, training, unit)
    if calibrations:
        lines += ["\nConfidence (both 0 to 100)", *(one.line(split) for split, one in calibrations.items())]
    for line in lines:
        report(line)
    drawn = f" and {counted(len(pictures), 'picture')}, e.g. {pictures[0]}" if pictures else ""
    report(f"\nwrote {', '.join(map(str, tables))}{drawn}")
    return scores


def _folder(structures: Path | StructureFolder) -> StructureFolder:
    return structures if isinstance(structures, StructureFolder) else StructureFolder(structures)


def _compared(predictions: Path, structures: StructureFolder, splits: Splits) -> Iterator[ScoredStructure]:
    for split, names in splits.items():
        for name in names:
            place = _prediction(predictions, structures, name) or predictions / name
            yield score_structure(name, split, structures.assembly_of(name), Predicted.read(place))


def _prediction(predictions: Path, structures: StructureFolder, name: str) -> Path | None:
    """The folder of a finished prediction, or a structure file: of this name, or of a chain's entry if the structure has this
    chain only. None if there is none."""
    for called in filter(None, (name, _entry(structures, name))):
        folder = predictions / called
        finished = folder if (folder / RANKING).is_file() else None
        place = finished if folder.is_dir() else structure_file(predictions, called)
        if place is not None and (called == name or structures.is_only_chain(name)):
            return place
    return None


def _entry(structures: StructureFolder, name: str) -> str:
    return name.rpartition("_")[0] if structures.kind == CHAINS else ""


def _looked_for(structures: StructureFolder, name: str) -> str:
    """The files of a finished prediction, for messages."""
    entry = _entry(structures, name)
    other = (
        f"; if the structure of {entry} has this chain only, also {entry}/{RANKING} and {entry}.cif" if entry else ""
    )
    return f"{name}/{RANKING} and {names_of(name)}{other}"


def _finished(predictions: Path, structures: StructureFolder, splits: Splits) -> tuple[Splits, list[str]]:
    """The names of each set that are predicted, and a line for each set of which some are not.

    Raises UserError if none is predicted, or none is given.
    """
    found = {
        split: [one for one in names if _prediction(predictions, structures, one)] for split, names in splits.items()
    }
    if (first := next((name for names in splits.values() for name in names), None)) is None:
        raise UserError(f"no {structures.kind} to compare: the list of names is empty")
    if not any(found.values()):
        raise UserError(
            f"{predictions}: no finished prediction of '{first}' or another one; looked for {_looked_for(structures, first)}; "
            "run evodsp predict, with --overwrite where files are missing"
        )
    lines = []
    for split, names in splits.items():
        if lacking := [name for name in names if name not in found[split]]:
            lines.append(
                f"{split}: {len(lacking)} of {counted(len(names), ONE_OF[structures.kind])} left out for want of a finished "
                f"prediction in {predictions}, such as {lacking[0]} (looked for {_looked_for(structures, lacking[0])}); "
                "predict them, or take them from the list"
            )
    return found, lines


def beside(row: StructureScores, copy: Mapping[str, Any] | str, kind: Kind) -> StructureScores:
    """The scores with those of a copy; without them if there is none, for the reason given."""
    if isinstance(copy, str):
        return row
    score = BETTER[kind][0]
    ours, copied = getattr(row, score), copy[f"nearest_{score}"]
    return replace(row, **copy, better_by=None if ours is None or copied is None else ours - copied)


def _means(split: str, rows: Sequence[StructureScores], kind: Kind) -> Iterator[str]:
    """The means of a set, and of the copies."""
    if rows:
        yield f"{split}: mean {_mean_scores(rows, '')} of {counted(len(rows), ONE_OF[kind])}"
    if beside := [row for row in rows if row.nearest]:
        better = [row.better_by > 0 for row in beside if row.better_by is not None]
        identity = math.fsum(row.nearest_identity or 0.0 for row in beside) / len(beside)
        yield (
            f"{split}: mean {_mean_scores(beside, 'nearest_')} of copies of the nearest training {kind}, {len(beside)} of "
            f"{len(rows)}, with {identity:.0%} identity on average, where predictions have {_mean_scores(beside, '')}; the "
            f"prediction is better ({BETTER[kind][1]}) on {sum(better)} of {len(better)}"
        )


def _mean_scores(rows: Sequence[StructureScores], prefix: str) -> str:
    """The means of the columns whose names begin with `prefix`, over the rows that have them."""
    means = []
    for heading, field in (("DockQ", "dockq"), ("iLDDT-CA", "interface_lddt_ca"), ("lDDT-CA", "lddt_ca")):
        values = [value for row in rows if (value := getattr(row, prefix + field)) is not None]
        means += [f"{heading} {math.fsum(values) / len(values):.3f}"] if values else []
    return ", ".join(means)


def without(
    split: str, names: Sequence[str], copies: Mapping[str, object], training: TrainingStructures, unit: str
) -> Iterator[str]:
    """Lines on what has no copy, and on what is trained on although the set says otherwise."""
    if reasons := {name: copies[name] for name in names if isinstance(copies[name], str)}:
        name, reason = next(iter(reasons.items()))
        yield f"{split}: no copy for {len(reasons)} of {counted(len(names), unit)}, such as {name}: {reason}"
    if (known := [name for name in names if name in training.known.sequences]) and split != "train":
        some = f"{len(known)} of {counted(len(names), unit)}, too, such as {known[0]}"
        yield f"{split}: training has {some}; no {unit} is copied from itself"
