"""Compare predictions with known structures: scores, a table with an explanation of each column, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64

from evodsp import metrics
from evodsp.data.formats.mmcif import read_chain
from evodsp.data.records import Chain
from evodsp.data.samples.selection import chain_list
from evodsp.data.similarity.nearest import Bar, Copy
from evodsp.data.sources.layout import chain_id_in
from evodsp.data.sources.missing_residues import with_missing_residues
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.geometry.alphabet import encode
from evodsp.geometry.residues import CA
from evodsp.inference.pages.figures import calibration_figure, distance_figure
from evodsp.inference.results import RANKING, plddt_of, read_result
from evodsp.inference.score.baseline import TrainingStructures, training_set
from evodsp.inference.score.calibration import Calibration
from evodsp.inference.score.complexes import write_complex_report
from evodsp.inference.score.config import ScoreConfig
from evodsp.inference.score.splits import predicted
from evodsp.printing import counted, show
from evodsp.score_tables import ChainScores, table, write_rows

_PREDICTED_CHAIN = "A"


@dataclass(frozen=True)
class ScoresBesideCopy(ChainScores):
    """Scores of a prediction, and of a copy of the nearest training chain."""

    nearest: str = ""
    """The training chain; '' if there is no copy."""
    nearest_identity: float | None = None
    """Identical residues, as a share of those that the alignment pairs, 0..1."""
    nearest_coverage: float | None = None
    """Share of the chain's residues that the alignment pairs, 0..1."""
    nearest_lddt_ca: float | None = None
    """lDDT-CA of the copy, 0..1."""
    better_by: float | None = None
    """By how much the lDDT-CA of the prediction is above that of the copy."""

    @classmethod
    def of(cls, scores: ChainScores, copy: Copy | None) -> ScoresBesideCopy:
        if copy is None:
            return cls(**vars(scores))
        return cls(
            **vars(scores),
            nearest=copy.nearest,
            nearest_identity=copy.identity,
            nearest_coverage=copy.coverage,
            nearest_lddt_ca=copy.lddt_ca,
            better_by=scores.lddt_ca - copy.lddt_ca,
        )


_COLUMNS = (
    ("chain", "chain", "", "name of the structure and its chain"),
    ("split", "split", "", "train: the model was trained on this chain; held-out: it was not"),
    ("residues", "residues", "d", "length of the chain"),
    ("plddt", "pLDDT", ".1f", "the model's confidence in its prediction, 0 to 100 (mean; above 70: confident)"),
    ("lddt_ca", "lDDT-CA", ".3f", "how well distances to residues within 15 Å are reproduced, 0 to 1"),
    ("rmsd", "RMSD Å", ".2f", "typical CA displacement after superposition, in Å (lower is better, below 3: close)"),
    ("gdt_ts", "GDT-TS", ".3f", "fraction of residues within 1, 2, 4 and 8 Å of their place, averaged, 0 to 1"),
    ("tm_score", "TM-score", ".3f", "similarity of the whole fold, 0 to 1 (above 0.5: same fold, 0.2: chance)"),
)  # fmt: skip
_OF_THE_COPY = (
    ("nearest", "nearest", "", "the training chain whose sequence has the highest alignment score with the chain's"),
    ("nearest_identity", "identity", ".3f", "share of the residues, paired by that alignment, that are identical, 0 to 1"),
    ("nearest_coverage", "coverage", ".3f", "share of the chain's residues that are paired, 0 to 1"),
    ("nearest_lddt_ca", "copy", ".3f", "lDDT-CA of a copy of that training chain: what a prediction must exceed"),
    ("better_by", "better by", "+.3f", "lDDT-CA of the prediction less that of the copy"),
)  # fmt: skip


@dataclass(frozen=True)
class _Pair:
    """A prediction and the experimental structure of the same chain, residue by residue."""

    predicted: Chain
    true: Chain
    plddt: np.ndarray

    @property
    def resolved(self) -> np.ndarray:
        """bool [L]: both have a CA."""
        return (self.true.mask[:, CA] > 0.5) & (self.predicted.mask[:, CA] > 0.5)


def run(settings: ScoreConfig, words: list[str]) -> int:
    """`evodsp score`: the exit code. `words`: the command line (not needed here)."""
    splits = {"train": _keys(settings.train), "held-out": _keys(settings.held_out)}
    places = settings.predictions, settings.structures, splits, settings.output
    training = None if settings.baseline is None else training_set(settings, splits["train"])
    if settings.complexes:
        write_complex_report(*places, assembly=settings.assembly, training=training)
    else:
        write_report(*places, training=training)
    return 0


def _keys(chains: str | None) -> list[str]:
    """Chain keys of a text file with one on each line, or of a comma-separated list."""
    if chains is None or Path(chains).is_file():
        return [] if chains is None else chain_list(chains)
    return [key for key in chains.split(",") if key]


def compare(prediction: Path, truth: Path, chain_id: str, split: str = "") -> ChainScores:
    """Score one predicted structure file, with its `seed_<k>_scores.json` beside it, against chain `chain_id` of `truth`.

    Raises UserError if the two sequences differ.
    """
    return _score(_read_pair(prediction, truth, chain_id), split)


def compare_all(predictions: Path, structures: Path, splits: Mapping[str, Sequence[str]]) -> list[ChainScores]:
    """Score the best prediction of every chain.

    `predictions`: output of `evodsp predict`, with folders named as the chains. `structures`: folder of `<pdbid>.cif[.gz]` or
    `.pdb`. `splits`: the chain keys `<pdbid>_<chain>` of each set, such as {"train": [...], "held-out": [...]}.
    """
    return [_score(_read_key(predictions, structures, key), split) for split, keys in splits.items() for key in keys]


def write_report(
    predictions: Path,
    structures: Path,
    splits: Mapping[str, Sequence[str]],
    output: Path,
    report: Callable[[str], None] = show,
    training: TrainingStructures | None = None,
) -> Sequence[ChainScores]:
    """Score all chains as `compare_all`, report the table and how far pLDDT can be trusted, and write `<output>/scores.csv`,
    `<output>/calibration.svg` and `<output>/distances_<chain>.svg`. `training`: also score copies of these chains. Chains
    without a finished prediction are named and left out, unless no chain has one.

    Without matplotlib a UserError is raised for the pictures, after the table and the scores are written.
    """
    folder = StructureFolder(structures)
    splits, left_out = predicted(
        predictions, splits, lambda key: _prediction(predictions, folder, key) is not None, _looked_for, "chain"
    )
    scores: Sequence[ChainScores] = compare_all(predictions, structures, splits)
    if not scores:
        raise UserError("no chains to compare; name at least one as <pdbid>_<chain> (--held_out or --train)")
    lines: list[str] = []
    if training is not None:
        bars = training.bars(splits)
        copy_of = {(split, copy.chain): copy for split, one in bars.items() for copy in one.copies}
        beside = [ScoresBesideCopy.of(one, copy_of.get((one.split, one.chain))) for one in scores]
        scores, lines = beside, [line for split, one in bars.items() for line in _copy_lines(split, one, beside)]
    # First, because `evodsp score | head` ends with the tenth line.
    output.mkdir(parents=True, exist_ok=True)
    write_scores(scores, output / "scores.csv")
    report(comparison_table(scores))
    for line in left_out:
        report(line)
    if training is not None:
        report("\nCopying the nearest training chain (lDDT-CA)")
    for line in lines:
        report(line)
    found = calibrations(predictions, structures, splits)
    report("\nConfidence (both 0 to 100)")
    for split, calibration in found.items():
        report(calibration.line(split))
    pictures = draw(predictions, structures, splits, output)
    write_text(output / "calibration.svg", calibration_figure(found))
    report(
        f"\nwrote {output / 'scores.csv'}, {output / 'calibration.svg'} and {len(pictures)} pictures, e.g. {pictures[0]}"
    )
    return scores


def _prediction(predictions: Path, structures: StructureFolder, key: str) -> Path | None:
    """The folder of a chain's finished prediction: of its own name, or of its entry's if the structure has this chain only.
    None if there is none."""
    if (predictions / key / RANKING).is_file():
        return predictions / key
    folder = predictions / _entry(key)
    return folder if (folder / RANKING).is_file() and folder != predictions and structures.is_only_chain(key) else None


def _looked_for(key: str) -> str:
    """The files that say that the prediction of a chain is finished, for messages."""
    entry = _entry(key)
    other = f" and, if the structure of {entry} has this chain only, {entry}/{RANKING}" if entry else ""
    return f"{key}/{RANKING}{other}"


def _entry(key: str) -> str:
    return key.rpartition("_")[0]


def _copy_lines(split: str, bar: Bar, scores: Sequence[ScoresBesideCopy]) -> Iterator[str]:
    """Lines for a terminal about the copies of a set of chains."""
    beside = [(one.lddt_ca, one.nearest_lddt_ca) for one in scores if one.split == split]
    pairs = [(ours, copied) for ours, copied in beside if copied is not None]
    if pairs:
        mean, better = np.mean(pairs, axis=0), sum(ours > copied for ours, copied in pairs)
        yield (
            f"{split}: predictions {mean[0]:.3f}, copies {mean[1]:.3f}, with {bar.identity:.0%} identity on average; the "
            f"prediction is better than the copy on {better} of {counted(len(pairs), 'chain')}"
        )
    if bar.without:
        key, reason = next(iter(bar.without.items()))
        yield f"{split}: no copy for {len(bar.without)} of {counted(len(beside), 'chain')}, such as {key}: {reason}"
    if bar.trained_on and split != "train":
        some = f"{len(bar.trained_on)} of {counted(len(beside), 'chain')}, too, such as {bar.trained_on[0]}"
        yield f"{split}: training has {some}; no chain is copied from itself"


def calibrations(predictions: Path, structures: Path, splits: Mapping[str, Sequence[str]]) -> dict[str, Calibration]:
    """pLDDT against lDDT-CA of the best prediction of every chain, for each set of chains that is not empty."""
    return {
        split: Calibration.of([_confidence(_read_key(predictions, structures, key)) for key in keys])
        for split, keys in splits.items()
        if keys
    }


def comparison_table(scores: Sequence[ChainScores]) -> str:
    """The scores as text: one line per chain, then one line of explanation per column."""
    return table((*_COLUMNS, *(_OF_THE_COPY if scores and isinstance(scores[0], ScoresBesideCopy) else ())), scores)


def write_scores(scores: Sequence[ChainScores], path: Path) -> None:
    """Write the scores, rounded to 4 decimals, as .csv or .json by the suffix of `path`."""
    write_rows(scores, path, type(scores[0]) if scores else ChainScores)


def draw(predictions: Path, structures: Path, splits: Mapping[str, Sequence[str]], output: Path) -> list[Path]:
    """One picture per chain, `<output>/distances_<chain>.svg`: true against predicted distances, and pLDDT."""
    paths = []
    for split, keys in splits.items():
        for key in keys:
            pair = _read_key(predictions, structures, key)
            scores = _score(pair, split)
            path = output / f"distances_{key}.svg"
            figure = distance_figure(
                pair.true.positions[:, CA],
                pair.predicted.positions[:, CA],
                pair.plddt,
                title=f"{key} ({split}): lDDT-CA {scores.lddt_ca:.2f}, RMSD {scores.rmsd:.1f} Å",
                true_mask=pair.true.mask[:, CA] > 0.5,
            )
            write_text(path, figure)
            paths.append(path)
    return paths


def _confidence(pair: _Pair) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """pLDDT and lDDT-CA, both 0..100, of the residues with a CA in both structures."""
    lddt = metrics.lddt_ca(*_ca_atoms(pair), per_residue=True).numpy()
    return pair.plddt[pair.resolved].astype(np.float64), 100 * lddt[pair.resolved]


def _ca_atoms(pair: _Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Predicted and true CA [R, 3] in Å, and the mask of residues that have both."""
    predicted, true = (torch.from_numpy(one.positions[:, CA]).double() for one in (pair.predicted, pair.true))
    return predicted, true, torch.from_numpy(pair.resolved).double()


def _score(pair: _Pair, split: str) -> ChainScores:
    predicted, true, mask = _ca_atoms(pair)
    if not pair.resolved.any():
        raise UserError(
            f"chain {pair.true.key}: no residue has a CA in both structures, so there is nothing to compare"
        )
    return ChainScores(
        chain=pair.true.key,
        split=split,
        residues=len(pair.predicted),
        resolved=int(pair.resolved.sum()),
        plddt=float(pair.plddt.mean()),
        lddt_ca=float(metrics.lddt_ca(predicted, true, mask)),
        rmsd=float(metrics.rmsd(predicted, true, mask)),
        gdt_ts=float(metrics.gdt_ts(predicted, true, mask)),
        tm_score=float(metrics.tm_score(predicted, true, mask)),
    )


def _read_key(predictions: Path, structures: Path, key: str) -> _Pair:
    folder = StructureFolder(structures)
    truth = folder.file_of(key)
    found = _prediction(predictions, folder, key) or predictions / key
    return _read_pair(read_result(found).structure(), truth, chain_id_in(truth, key))


def _read_pair(prediction: Path, truth: Path, chain_id: str) -> _Pair:
    predicted, true = read_chain(prediction, _PREDICTED_CHAIN), read_chain(truth, chain_id)
    if predicted.sequence != true.sequence:
        true = with_missing_residues(true, encode(predicted.sequence)) or true
    if predicted.sequence != true.sequence:
        raise UserError(
            f"{prediction}: its sequence differs from chain {chain_id} in {truth} "
            f"({_difference(predicted.sequence, true.sequence)}); compare a prediction with a structure of the same chain"
        )
    scores = prediction.with_name(f"{prediction.stem}_scores.json")
    if not scores.is_file():
        raise UserError(f"{scores}: missing beside {prediction.name}; predict again with --overwrite")
    plddt = plddt_of(scores)
    if len(plddt) != len(predicted):
        raise UserError(
            f"{scores}: {len(plddt)} values of pLDDT for {len(predicted)} residues; predict again with --overwrite"
        )
    return _Pair(predicted, true, plddt)


def _difference(predicted: str, true: str) -> str:
    if len(predicted) != len(true):
        return f"{len(predicted)} residues against {len(true)}"
    position = next(n for n, (a, b) in enumerate(zip(predicted, true, strict=True)) if a != b)
    return f"residue {position + 1} is {predicted[position]} against {true[position]}"
