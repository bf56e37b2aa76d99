"""The files in the folder of one target's predictions.

<output>/<name>/seed_<k>.cif|.pdb       structure; B-factor = pLDDT
                seed_<k>_scores.json    plddt per residue; with a PAE head also max_pae (Å) and ptm (0..1)
                seed_<k>_pae.json       with a PAE head: predicted aligned error, in AlphaFold DB's format
                ranking.json            seeds, best first, and the settings of the run
                timings.json            seconds per stage, peak memory
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evodsp import __version__
from evodsp.errors import UserError
from evodsp.inference.writers import AlignedError, PredictedStructure, structure_text

RANKING, TIMINGS = "ranking.json", "timings.json"
_OURS = re.compile(r"seed_\d+\.(cif|pdb)|seed_\d+_(scores|pae)\.json|ranking\.json|timings\.json")

Format = Literal["cif", "pdb"]


@dataclass(frozen=True)
class PredictionResult:
    """The predictions of one target."""

    name: str
    folder: Path
    format: Format
    mean_plddt: Mapping[int, float]
    """Mean pLDDT (0..100) of each seed, best first."""
    kept: bool
    """True if the files are an earlier run's with the same inputs and settings."""

    @property
    def best(self) -> int:
        """The seed with the highest mean pLDDT."""
        return next(iter(self.mean_plddt))

    def structure(self, seed: int | None = None) -> Path:
        """The structure file of a seed; by default the best seed's."""
        return self.folder / f"seed_{self.best if seed is None else seed}.{self.format}"


def finished(folder: Path, settings: Mapping[str, Any], overwrite: bool) -> PredictionResult | None:
    """The complete result that `folder` already holds, or None if it has to be predicted.

    Raises UserError if `folder` holds results of other settings (unless `overwrite`) or files that predict did not write.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, but the results need a folder of this name; move it or choose another --output"
        )
    names = sorted(path.name for path in folder.iterdir())
    if foreign := [name for name in names if not _OURS.fullmatch(name)]:
        raise UserError(
            f"{folder}: holds '{foreign[0]}', which evodsp predict did not write; move it or choose another --output"
        )
    if not names or overwrite:
        return None
    result, made_with = _read(folder)
    if differing := [key for key in settings if made_with.get(key) != settings[key]]:
        key = differing[0]
        raise UserError(
            f"{folder}: holds results of another run ({key}: {made_with.get(key)} there, {settings[key]} now); "
            "choose another --output, or replace them with --overwrite"
        )
    return result


def read_result(folder: Path) -> PredictionResult:
    """The finished result in `folder`. Raises UserError if there is none, or it is incomplete."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[PredictionResult, Mapping[str, Any]]:
    path = folder / RANKING
    if not path.is_file():
        raise UserError(f"{folder}: no {RANKING}, so there is no finished prediction; run evodsp predict --overwrite")
    try:
        ranking = json.loads(path.read_text(encoding="utf-8"))
        settings = ranking["settings"]
        mean_plddt = {int(entry["seed"]): float(entry["mean_plddt"]) for entry in ranking["ranking"]}
        result = PredictionResult(ranking["name"], folder, settings["format"], mean_plddt, kept=True)
        expected = [TIMINGS, *(name for seed in mean_plddt for name in (result.structure(seed).name, _scores(seed)))]
        expected += [_pae(int(entry["seed"])) for entry in ranking["ranking"] if "ptm" in entry]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not written by evodsp predict ({error!r}); predict again with --overwrite") from error
    if lost := [name for name in expected if not (folder / name).is_file()]:
        raise UserError(f"{folder}: '{lost[0]}' is missing from a finished run; predict again with --overwrite")
    return result, settings


def _scores(seed: int) -> str:
    return f"seed_{seed}_scores.json"


def _pae(seed: int) -> str:
    return f"seed_{seed}_pae.json"


def write_results(
    folder: Path,
    structures: Mapping[int, PredictedStructure],
    file_format: Format,
    settings: Mapping[str, Any],
) -> PredictionResult:
    """Write the structures (by seed), scores and ranking of one target into the existing empty folder `folder`."""
    ranked = sorted(structures, key=lambda seed: (-structures[seed].mean_plddt, seed))
    for seed, structure in structures.items():
        text = structure_text(structure, file_format)
        (folder / f"seed_{seed}.{file_format}").write_text(text, encoding="utf-8")
        scores: dict[str, Any] = {"plddt": [round(float(p), 2) for p in structure.plddt]}
        if (error := structure.aligned_error) is not None:
            scores |= {"max_pae": round(float(error.pae.max()), 2), **_ptm(structure)}
            (folder / _pae(seed)).write_text(pae_text(error), encoding="utf-8")
        write_json(folder / _scores(seed), scores)
    name = structures[ranked[0]].name
    mean_plddt = {seed: round(structures[seed].mean_plddt, 3) for seed in ranked}
    write_json(
        folder / RANKING,
        {
            "name": name,
            "ranked_by": "mean pLDDT",
            "ranking": [
                {"seed": seed, "mean_plddt": mean, **_ptm(structures[seed]), "structure": f"seed_{seed}.{file_format}"}
                for seed, mean in mean_plddt.items()
            ],
            "settings": dict(settings),
            "evodsp_version": __version__,
        },
    )
    return PredictionResult(name, folder, file_format, mean_plddt, kept=False)


def pae_text(error: AlignedError) -> str:
    """AlphaFold DB's JSON, a list of one entry. Errors in Å; row i holds the errors seen from residue i's frame.

    `max_predicted_aligned_error` is the end of the scale, not the matrix's maximum, which is `max_pae` in the scores.
    """
    matrix = np.round(error.pae.astype(np.float64), 2).tolist()
    entry = {"predicted_aligned_error": matrix, "max_predicted_aligned_error": round(error.highest, 2)}
    return json.dumps([entry], separators=(",", ":"), allow_nan=False) + "\n"


def _ptm(structure: PredictedStructure) -> dict[str, float]:
    """The entry of the JSON files; empty for models without a PAE head."""
    return {} if structure.aligned_error is None else {"ptm": round(structure.aligned_error.ptm, 3)}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented JSON, except that lists of numbers stay on one line."""
    text = json.dumps(value, indent=2, allow_nan=False)
    text = re.sub(r"\[\s*([\d\s.,eE+-]*?)\s*\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")
