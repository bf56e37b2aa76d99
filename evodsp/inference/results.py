"""The files in the folder of one target's predictions.

<output>/<name>/seed_<k>.cif|.pdb       structure; B-factor = pLDDT
                seed_<k>_scores.json    plddt per residue; with a PAE head also max_pae (Å) and ptm (0..1)
                seed_<k>_pae.json       with a PAE head: predicted aligned error, in AlphaFold DB's format
                ranking.json            seeds, best first, and the settings of the run
                timings.json            seconds per stage, peak memory
                report.html             all of this to look at (`evodsp.inference.target_page`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evodsp import __version__
from evodsp.errors import UserError
from evodsp.inference.writers import AlignedError, PredictedStructure, structure_text

RANKING, TIMINGS, REPORT = "ranking.json", "timings.json", "report.html"
OURS = re.compile(r"seed_\d+\.(cif|pdb)|seed_\d+_(scores|pae)\.json|ranking\.json|timings\.json|report\.html")
"""Names of the files that predict writes into a target's folder. All others are the user's."""

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


def read_result(folder: Path) -> PredictionResult:
    """The finished result in `folder`. Raises UserError if there is none, or it is incomplete."""
    return read_with_settings(folder)[0]


def read_with_settings(folder: Path) -> tuple[PredictionResult, Mapping[str, Any]]:
    """`read_result`, and the settings that the result was made with."""
    path = folder / RANKING
    if not path.is_file():
        raise UserError(f"{folder}: no {RANKING}, so there is no finished prediction; run evodsp predict --overwrite")
    try:
        ranking = json.loads(path.read_text(encoding="utf-8"))
        settings = ranking["settings"]
        mean_plddt = {int(entry["seed"]): float(entry["mean_plddt"]) for entry in ranking["ranking"]}
        file_format = Path(ranking["ranking"][0]["structure"]).suffix[1:]
        result = PredictionResult(ranking["name"], folder, file_format, mean_plddt, kept=True)  # type: ignore[arg-type]
        expected = [
            TIMINGS,
            *(name for seed in mean_plddt for name in (result.structure(seed).name, scores_name(seed))),
        ]
        expected += [pae_name(int(entry["seed"])) for entry in ranking["ranking"] if "ptm" in entry]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: not written by evodsp predict ({error!r}); predict again with --overwrite") from error
    if lost := [name for name in expected if not (folder / name).is_file()]:
        raise UserError(f"{folder}: '{lost[0]}' is missing from a finished run; predict again with --overwrite")
    return result, settings


def scores_name(seed: int) -> str:
    return f"seed_{seed}_scores.json"


def pae_name(seed: int) -> str:
    return f"seed_{seed}_pae.json"


def write_results(
    folder: Path,
    structures: Mapping[int, PredictedStructure],
    file_format: Format,
    settings: Mapping[str, Any],
    name: str,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> PredictionResult:
    """Write the structures (by seed), scores and ranking of the target `name` into the existing folder `folder`.

    `earlier`: the ranking's entries of other seeds, whose files are in the folder already.
    """
    for seed, structure in structures.items():
        text = structure_text(structure, file_format)
        (folder / f"seed_{seed}.{file_format}").write_text(text, encoding="utf-8")
        scores: dict[str, Any] = {"plddt": [round(float(p), 2) for p in structure.plddt]}
        if (error := structure.aligned_error) is not None:
            scores |= {"max_pae": round(float(error.pae.max()), 2), **_ptm(structure)}
            (folder / pae_name(seed)).write_text(pae_text(error), encoding="utf-8")
        write_json(folder / scores_name(seed), scores)
    entries = [{"seed": entry["seed"], **_confidences(entry)} for entry in earlier]
    entries += [
        {"seed": seed, "mean_plddt": round(structure.mean_plddt, 3), **_ptm(structure)}
        for seed, structure in structures.items()
    ]
    entries.sort(key=lambda entry: (-entry["mean_plddt"], entry["seed"]))
    write_json(
        folder / RANKING,
        {
            "name": name,
            "ranked_by": "mean pLDDT",
            "ranking": [{**entry, "structure": f"seed_{entry['seed']}.{file_format}"} for entry in entries],
            "settings": dict(settings),
            "evodsp_version": __version__,
        },
    )
    return PredictionResult(
        name, folder, file_format, {entry["seed"]: entry["mean_plddt"] for entry in entries}, kept=False
    )


def _confidences(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("mean_plddt", "ptm") if name in entry}


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
